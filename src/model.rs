//! Configuration: models, accelerators, policy. Plain data, the same on one machine and in a cluster.

use std::{borrow::Borrow, collections::BTreeMap, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Millis};

/// The name of a configured model, as the configuration spells it. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelName(Arc<str>);

/// One accelerator, by its UUID (`GPU-…`) or the name a configuration gave it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AcceleratorId(Arc<str>);

macro_rules! impl_string_id {
    ($($name:ident)*) => {$(
        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }
        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

impl_string_id!(ModelName AcceleratorId);

/// One engine of a model: `name#replica`, in texts and as a map key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct EngineId {
    pub model: ModelName,
    pub replica: u32,
}

impl EngineId {
    #[must_use]
    pub const fn new(model: ModelName, replica: u32) -> Self {
        Self { model, replica }
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.model, self.replica)
    }
}

impl From<EngineId> for String {
    fn from(id: EngineId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for EngineId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (model, replica) =
            text.rsplit_once('#').ok_or_else(|| format!("'{text}' is not an engine name (MODEL#REPLICA)"))?;
        let replica =
            replica.parse().map_err(|_| format!("'{text}' is not an engine name (MODEL#REPLICA)"))?;
        Ok(Self { model: model.into(), replica })
    }
}

/// A configured model, as the decisions see it. The command line, probes and paths belong to the platform.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    pub name: ModelName,
    #[serde(default)]
    pub aliases: Vec<String>,
    pub accelerators: AcceleratorRequirement,
    pub memory: EngineMemory,
    pub idle: IdlePolicy,
    /// How many engines serve the model at once.
    pub replicas: u32,
    /// The model is never evicted, and kept awake without demand.
    pub pinned: bool,
    /// Number of engines that are never evicted and kept awake without demand: the lowest replica numbers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_replicas: u32,
    /// Direct dependencies: models that serve before an engine of this one starts or wakes, and while it is more than
    /// asleep.
    ///
    /// Their own dependencies are included implicitly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<ModelName>,
    /// Higher goes first; 0 is usual.
    pub priority: i32,
    /// Requests one engine takes at a time; `None` leaves it to the engine.
    pub max_concurrency: Option<u32>,
    /// Limit on the time from the launch until the engine answers.
    pub start_timeout: Millis,
    /// Whether the engine does not measure free memory at its start and may start beside others.
    ///
    /// Either its KV-cache bytes are set, or it is in a pool whose engines have accelerators to themselves, where no
    /// neighbour disturbs its measurement.
    pub explicit_memory: bool,
    /// Whether this kind of engine supports sleep and wake.
    pub can_sleep: bool,
    /// Changes with the command, environment or kind: an engine with another fingerprint is outdated.
    pub fingerprint: u64,
    /// When its engines may be evicted; `None` uses [`FleetSettings::eviction`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionPolicy>,
    #[serde(default, skip_serializing_if = "QueueOverrides::is_empty")]
    pub queue: QueueOverrides,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
const fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Queue settings of one model. `None` uses [`FleetSettings::queue`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueOverrides {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<QueuePolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_wait: Option<Millis>,
    /// Requests parked at once for this model. The limit for all models together applies as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_waiting: Option<u32>,
}

impl QueueOverrides {
    /// Whether the model has no queue settings of its own.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

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
}

impl AcceleratorRequirement {
    /// Whether the engine needs no accelerator.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        matches!(self, Self::Count(0) | Self::InPool { count: 0, .. })
    }

    /// Number of accelerators that one engine takes.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            Self::Count(count) | Self::InPool { count, .. } => *count,
            Self::Ids(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
        }
    }

    /// The pool of the accelerators, if they are in one.
    #[must_use]
    pub const fn pool(&self) -> Option<&AcceleratorId> {
        match self {
            Self::InPool { pool, .. } => Some(pool),
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
            _ => self.clone(),
        }
    }

    /// Units that the engine takes of its pool; `None` without a pool.
    #[must_use]
    pub const fn units(&self) -> Option<u32> {
        match self {
            Self::InPool { count, .. } => Some(*count),
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

impl ModelSpec {
    /// Whether its engines measure free memory at their start, which must not change meanwhile.
    #[must_use]
    pub const fn profiles_memory(&self) -> bool {
        !self.explicit_memory
    }
}

/// Memory of one engine, per accelerator it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineMemory {
    pub awake: Bytes,
    /// Memory that an asleep engine keeps: its residue.
    pub asleep: Bytes,
    /// Host RAM for the weights of a level-1 sleeper.
    pub host: Bytes,
}

/// When an unused model is put to sleep or stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    /// `None`: idleness never puts the model to sleep.
    pub sleep_after: Option<Millis>,
    pub stop_after: Option<Millis>,
    pub level: SleepLevelPolicy,
}

/// How deep an engine sleeps. Level 1 keeps the weights in host RAM; level 2 drops them and reads them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SleepLevelPolicy {
    One,
    Two,
    /// Level 1 while the host RAM budget has room, else level 2.
    Auto,
    /// Level 1 while the host RAM budget has room, else stopped: a wake from level 2 would not restore all that it has.
    #[serde(rename = "onlyOne")]
    OneOrStop,
    /// Stopped, never asleep.
    Never,
}

impl SleepLevelPolicy {
    /// Returns the policy for an engine that a wake from level 2 would not restore completely.
    ///
    /// [`Self::Two`] stays as it is: to configure it for such an engine is an error that the configuration reports.
    #[must_use]
    pub const fn without_level_two_fallback(self) -> Self {
        match self {
            Self::One | Self::Auto => Self::OneOrStop,
            Self::Two | Self::OneOrStop | Self::Never => self,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SleepLevel {
    One,
    Two,
}

impl SleepLevel {
    /// The number in the engine's `/sleep?level=`.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// Returns `None` if there is no such level.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            _ => None,
        }
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
    /// Number of accelerators in a pool, which limits the units that engines take; `None` if they are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
}

/// Settings for all models; a model may override some of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetSettings {
    /// Host RAM that level-1 sleepers may hold together.
    pub host_memory: Bytes,
    pub queue: QueueSettings,
    pub turns: TurnSettings,
    pub eviction: EvictionPolicy,
    pub timeouts: EngineTimeouts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSettings {
    pub policy: QueuePolicy,
    /// Requests parked at once, over all models.
    pub max_waiting: u32,
    pub max_wait: Millis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum QueuePolicy {
    Wait,
    /// Refuse requests that would have to wait for memory that others hold.
    Reject,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSettings {
    /// Which idle models are protected after their last use although others want their place.
    #[serde(default)]
    pub protection: ProtectionPolicy,
    /// The longest such protection.
    pub residency: Millis,
    /// The longest turn while others wait.
    pub max_turn: Millis,
    pub drain_deadline: Millis,
    pub on_deadline: DrainDeadlinePolicy,
}

/// Which idle models are protected although others want their place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProtectionPolicy {
    /// Protects a model whose clients usually return sooner than it could be restored.
    ///
    /// The protection lasts as long as restoring the model takes. It does not apply if all clients that used the model
    /// in this turn wait for other models.
    #[default]
    Expected,
    /// Protects every idle model.
    Always,
    Never,
}

/// Policy for streams that outlast the drain deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DrainDeadlinePolicy {
    /// The streams are reported and counted; they finish.
    Wait,
    /// The streams end with an in-stream error.
    Cut,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EvictionPolicy {
    /// Any idle model, unless its turn protects it ([`ProtectionPolicy`]).
    Residency,
    /// Only models idle for longer than their own `sleepAfter`.
    Cooldown,
    Never,
}

/// Deadlines of an engine's transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineTimeouts {
    /// An engine without progress for this long *and* with a failing health probe is hung.
    pub progress: Millis,
    /// Limit for `/sleep`, plus one second per reserved GiB.
    pub sleep: Millis,
    /// Limit for a wake, plus one second per reserved GiB.
    pub wake: Millis,
    /// From SIGTERM to SIGKILL.
    pub stop_grace: Millis,
    /// How long the meter may lag behind a confirmed sleep. After that, what it shows counts as the residue.
    pub meter_lag: Millis,
    /// From the request to the first byte of an answer.
    #[serde(default = "default_first_byte")]
    pub first_byte: Millis,
}

/// Journals from before this field lack it.
const fn default_first_byte() -> Millis {
    Millis::secs(300)
}

/// The whole configuration: what a journal starts with and what a reload replaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetConfig {
    pub settings: FleetSettings,
    pub accelerators: Vec<Accelerator>,
    pub models: Vec<ModelSpec>,
}

/// Finds a model by its name or an alias. Immutable; a reload creates another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelNameIndex {
    names: BTreeMap<String, ModelName>,
}

impl ModelNameIndex {
    #[must_use]
    pub fn new<'a>(models: impl IntoIterator<Item = &'a ModelSpec>) -> Self {
        let mut names = BTreeMap::new();
        for spec in models {
            for alias in &spec.aliases {
                names.insert(alias.clone(), spec.name.clone());
            }
            names.insert(spec.name.to_string(), spec.name.clone());
        }
        Self { names }
    }

    #[must_use]
    pub fn find(&self, name: &str) -> Option<&ModelName> {
        self.names.get(name)
    }

    /// Returns every name and alias with its model, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ModelName)> {
        self.names.iter().map(|(name, model)| (name.as_str(), model))
    }
}

impl FleetSettings {
    /// When engines of this model may be evicted.
    #[must_use]
    pub fn eviction_of(&self, spec: &ModelSpec) -> EvictionPolicy {
        spec.eviction.unwrap_or(self.eviction)
    }

    /// Whether requests for this model wait for memory that others hold.
    #[must_use]
    pub fn policy_of(&self, spec: &ModelSpec) -> QueuePolicy {
        spec.queue.policy.unwrap_or(self.queue.policy)
    }

    /// The longest a request waits for this model.
    #[must_use]
    pub fn max_wait_of(&self, spec: &ModelSpec) -> Millis {
        spec.queue.max_wait.unwrap_or(self.queue.max_wait)
    }
}

impl Default for FleetSettings {
    fn default() -> Self {
        Self {
            host_memory: Bytes::gib(16),
            queue: QueueSettings {
                policy: QueuePolicy::Wait,
                max_waiting: 1000,
                max_wait: Millis::secs(540),
            },
            turns: TurnSettings {
                protection: ProtectionPolicy::Expected,
                residency: Millis::secs(30),
                max_turn: Millis::secs(120),
                drain_deadline: Millis::secs(120),
                on_deadline: DrainDeadlinePolicy::Wait,
            },
            eviction: EvictionPolicy::Residency,
            timeouts: EngineTimeouts {
                progress: Millis::secs(10),
                sleep: Millis::secs(30),
                wake: Millis::secs(30),
                stop_grace: Millis::secs(10),
                meter_lag: Millis::secs(2),
                first_byte: default_first_byte(),
            },
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
}
