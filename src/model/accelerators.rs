//! Accelerators: what a model requires of them, and what one can hold.
//!
//! Apart, because a requirement converts between bytes on each accelerator and bytes on one account of the ledger.

use serde::{Deserialize, Serialize};

use super::AcceleratorId;
use crate::units::Bytes;

/// The accelerators that an engine of the model takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AcceleratorRequirement {
    /// Any accelerators, this many. With 0 the engine runs elsewhere: its placement is immediate, on no accelerator and
    /// without memory.
    Count(u32),
    /// Exactly these accelerators.
    Ids(Vec<AcceleratorId>),
    /// This many accelerators of a pool.
    ///
    /// Another party picks them (in a cluster the kubelet, once the engine is starting). So the decisions treat the
    /// pool as one accelerator, with `count` times the memory reserved on it and `count` of its units taken. The pool
    /// stands for the engine's accelerators wherever the engine is placed, launched or found.
    InPool { pool: AcceleratorId, count: u32 },
    /// This many accelerators of one node of a pool whose accelerators have slots.
    ///
    /// The decisions pick them, because each has an account of its own ([`Accelerator::pool`]). The engine takes its
    /// memory and one unit of each. A unit is a slot there: the right of one engine to be on the accelerator, awake or
    /// asleep.
    Slots { pool: AcceleratorId, count: u32 },
}

impl AcceleratorRequirement {
    /// Whether the engine needs no accelerator.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        matches!(self, Self::Count(0) | Self::InPool { count: 0, .. } | Self::Slots { count: 0, .. })
    }

    /// Number of accelerators that one engine takes.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            Self::Count(count) | Self::InPool { count, .. } | Self::Slots { count, .. } => *count,
            Self::Ids(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
        }
    }

    /// The pool of the accelerators, if they are in one.
    #[must_use]
    pub const fn pool(&self) -> Option<&AcceleratorId> {
        match self {
            Self::InPool { pool, .. } | Self::Slots { pool, .. } => Some(pool),
            Self::Count(_) | Self::Ids(_) => None,
        }
    }

    /// Returns the same number of accelerators from this pool.
    ///
    /// For a caller that knows the pool of a model that only counts its accelerators. Named accelerators stay as they
    /// are, as does a model that needs none.
    #[must_use]
    pub fn in_pool(&self, pool: &AcceleratorId) -> Self {
        match self {
            Self::Count(count) | Self::InPool { count, .. } if *count > 0 => {
                Self::InPool { pool: pool.clone(), count: *count }
            }
            Self::Slots { count, .. } if *count > 0 => Self::Slots { pool: pool.clone(), count: *count },
            _ => self.clone(),
        }
    }

    /// Units that the engine takes on each of its accounts; `None` without a pool.
    ///
    /// A pool is one account, whose units are accelerators. An accelerator with slots is one, whose units are the slots.
    #[must_use]
    pub const fn units(&self) -> Option<u32> {
        match self {
            Self::InPool { count, .. } => Some(*count),
            Self::Slots { .. } => Some(1),
            Self::Count(_) | Self::Ids(_) => None,
        }
    }

    /// Returns the bytes to reserve on one account for an engine with `each` on every accelerator.
    #[must_use]
    pub fn bytes_per_account(&self, each: Bytes) -> Bytes {
        Bytes(each.0.saturating_mul(u64::from(self.units().unwrap_or(1))))
    }

    /// Returns an engine's bytes on each accelerator from its reservation on one account, rounded up.
    #[must_use]
    pub fn bytes_per_accelerator(&self, in_one_place: Bytes) -> Bytes {
        Bytes(in_one_place.0.div_ceil(u64::from(self.units().unwrap_or(1).max(1))))
    }
}

/// One accelerator, or a pool of them, and what it can hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    pub id: AcceleratorId,
    /// Bytes that may be granted: the total, less what the GPU driver keeps, less the configured headroom.
    pub capacity: Bytes,
    /// Whether the platform can read the usage.
    pub metered: bool,
    /// Limit on the units that engines take; `None` if they are not counted. Of a pool, its number of accelerators; of an
    /// accelerator in a pool, its number of slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
    /// The pool of an accelerator with slots. Only models that require [`AcceleratorRequirement::Slots`] of it run there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<AcceleratorId>,
    /// The node of an accelerator in a pool: an engine takes accelerators of one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// RAM of the node that all engines asleep there at level 1 may hold together. `None`: only the sum over all nodes
    /// ([`FleetSettings::host_memory`](super::FleetSettings::host_memory)) is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<Bytes>,
    /// The node takes no new Pods at present, so no engine starts here. Those that sleep here may wake.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
}

impl Accelerator {
    /// An accelerator in no pool, without a meter.
    #[must_use]
    pub const fn new(id: AcceleratorId, capacity: Bytes) -> Self {
        Self {
            id,
            capacity,
            metered: false,
            units: None,
            pool: None,
            node: None,
            host_memory: None,
            cordoned: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_pool_is_in_one_place_and_anything_else_on_each() {
        let pool = AcceleratorId::from("pool-a");
        let of = |count| AcceleratorRequirement::InPool { pool: pool.clone(), count };
        let ids = AcceleratorRequirement::Ids(vec!["gpu-0".into(), "gpu-1".into()]);
        assert_eq!(AcceleratorRequirement::Count(3).in_pool(&pool), of(3));
        assert_eq!(AcceleratorRequirement::InPool { pool: "other".into(), count: 2 }.in_pool(&pool), of(2));
        assert_eq!(AcceleratorRequirement::Count(0).in_pool(&pool), AcceleratorRequirement::Count(0));
        assert_eq!(ids.in_pool(&pool), ids);

        assert_eq!(
            (of(3).bytes_per_account(Bytes(5)), of(3).bytes_per_accelerator(Bytes(15))),
            (Bytes(15), Bytes(5))
        );
        assert_eq!(of(3).bytes_per_accelerator(Bytes(16)), Bytes(6), "never less than there is");
        assert_eq!(
            (ids.bytes_per_account(Bytes(5)), ids.bytes_per_accelerator(Bytes(5))),
            (Bytes(5), Bytes(5))
        );
        assert_eq!(of(2).bytes_per_account(Bytes(u64::MAX)), Bytes(u64::MAX));
    }

    #[test]
    fn each_accelerator_with_slots_is_an_account_of_which_an_engine_takes_one_unit() {
        let slots = |pool: &str, count| AcceleratorRequirement::Slots { pool: pool.into(), count };
        let two = slots("a", 2);
        assert_eq!((two.count(), two.units(), two.pool()), (2, Some(1), Some(&"a".into())));
        assert_eq!(two.bytes_per_account(Bytes(5)), Bytes(5));
        assert_eq!(two.bytes_per_accelerator(Bytes(5)), Bytes(5));
        assert_eq!(two.in_pool(&"b".into()), slots("b", 2));
        assert!(slots("a", 0).is_none() && !two.is_none());
    }

    #[test]
    fn an_accelerator_of_an_earlier_journal_is_in_no_pool() {
        let written = r#"{"id":"gpu-0","capacity":1,"metered":true}"#;
        let read: Accelerator = serde_json::from_str(written).unwrap();
        assert_eq!((&read.pool, &read.node, read.units), (&None, &None, None));
        assert_eq!(serde_json::to_string(&read).unwrap(), written, "and is written as before");
    }
}
