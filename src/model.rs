//! What is configured: models, accelerators, policy. Plain data, the same on one machine and in a cluster.

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
        let (model, replica) = text.rsplit_once('#').ok_or_else(|| format!("'{text}' names no engine"))?;
        let replica = replica.parse().map_err(|_| format!("'{text}' names no engine"))?;
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
    /// Never put away, and kept awake without demand.
    pub pinned: bool,
    /// The same of so many of its engines, those with the lowest numbers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_replicas: u32,
    /// Models that serve before an engine of this one starts or wakes, and for as long as it is more than asleep. Directly;
    /// what these need comes with them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<ModelName>,
    /// Higher goes first; 0 is usual.
    pub priority: i32,
    /// Requests one engine takes at a time; `None` leaves it to the engine.
    pub max_concurrency: Option<u32>,
    /// From the launch until the engine answers.
    pub start_timeout: Millis,
    /// The engine was told its KV-cache bytes, so it does not measure free memory at its start and may start beside others; or
    /// it is of a pool whose engines have accelerators to themselves, where nobody disturbs what another one measures.
    pub explicit_memory: bool,
    /// The kind of engine knows sleep and wake.
    pub can_sleep: bool,
    /// Changes when the command, environment or kind changes: an engine with another fingerprint is outdated.
    pub fingerprint: u64,
    /// When its engines may be put away for other models; `None`: as [`FleetSettings::eviction`] says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionPolicy>,
    #[serde(default, skip_serializing_if = "QueueOverrides::is_empty")]
    pub queue: QueueOverrides,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
const fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// How requests wait for one model, where that is its own. `None`: as [`FleetSettings::queue`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueOverrides {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<QueuePolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_wait: Option<Millis>,
    /// Requests parked at once for this model. What holds for all models together holds beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_waiting: Option<u32>,
}

impl QueueOverrides {
    /// Nothing of it is the model's own.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Which accelerators an engine of the model takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AcceleratorRequirement {
    /// Any so many. With 0 it runs elsewhere: it is placed at once, on none, and takes no memory from anybody.
    Count(u32),
    /// Exactly these.
    Ids(Vec<AcceleratorId>),
    /// So many of a pool. Somebody else picks which (in a cluster the kubelet does, once the engine is on its way), so
    /// that to the decisions the pool is one accelerator, with `count` times the memory booked on it and `count` of its
    /// units taken. Where an engine is placed, launched or found, the pool stands for its accelerators.
    InPool { pool: AcceleratorId, count: u32 },
}

impl AcceleratorRequirement {
    /// It needs none.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        matches!(self, Self::Count(0) | Self::InPool { count: 0, .. })
    }

    /// How many one engine takes.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            Self::Count(count) | Self::InPool { count, .. } => *count,
            Self::Ids(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
        }
    }

    /// The pool that they are of.
    #[must_use]
    pub const fn pool(&self) -> Option<&AcceleratorId> {
        match self {
            Self::InPool { pool, .. } => Some(pool),
            Self::Count(_) | Self::Ids(_) => None,
        }
    }

    /// The same number, of this pool: for whoever knows which one a model that only counts them belongs to. Named ones
    /// stay as they are, and so does a model that needs none.
    #[must_use]
    pub fn in_pool(&self, pool: &AcceleratorId) -> Self {
        match self {
            Self::Count(count) | Self::InPool { count, .. } if *count > 0 => {
                Self::InPool { pool: pool.clone(), count: *count }
            }
            _ => self.clone(),
        }
    }

    /// How many units of its pool it takes; `None`: it names no pool.
    #[must_use]
    pub const fn units(&self) -> Option<u32> {
        match self {
            Self::InPool { count, .. } => Some(*count),
            Self::Count(_) | Self::Ids(_) => None,
        }
    }

    /// What is booked in one place for an engine with so much on each of its accelerators.
    #[must_use]
    pub fn bytes_per_account(&self, each: Bytes) -> Bytes {
        Bytes(each.0.saturating_mul(u64::from(self.units().unwrap_or(1))))
    }

    /// What an engine has on each of its accelerators, that has so much booked in one place; rounded up.
    #[must_use]
    pub fn bytes_per_accelerator(&self, in_one_place: Bytes) -> Bytes {
        Bytes(in_one_place.0.div_ceil(u64::from(self.units().unwrap_or(1).max(1))))
    }
}

impl ModelSpec {
    /// Its engines measure free memory at their start, which must not change meanwhile.
    #[must_use]
    pub const fn profiles_memory(&self) -> bool {
        !self.explicit_memory
    }
}

/// Memory of one engine, per accelerator it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineMemory {
    pub awake: Bytes,
    /// What an asleep engine keeps: its residue.
    pub asleep: Bytes,
    /// Host RAM a level-1 sleeper keeps its weights in.
    pub host: Bytes,
}

/// When an unused model is put away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    /// `None`: never by idleness.
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
    /// Level 1 while the host's budget has room, else level 2.
    Auto,
    /// Level 1 while the host's budget has room, else stopped: what it would read again is not all that it has.
    OneOrStop,
    /// Stopped instead.
    Never,
}

impl SleepLevelPolicy {
    /// The same for an engine that would lose more than it reads again when it wakes from level 2. To say level 2 for such a one is
    /// an error of its own.
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
    /// As engines spell it in `/sleep?level=`.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// `None`: there is no such level.
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
    /// What may be granted: the total, less what the driver keeps, less the configured headroom.
    pub capacity: Bytes,
    /// The platform can read how much is in use.
    pub metered: bool,
    /// Of a pool: how many accelerators are in it. No more than that are taken; `None`: they are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub units: Option<u32>,
}

/// Policy that is not a model's own, or is unless the model says otherwise.
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
    /// Refuse what would have to wait for memory that others hold.
    Reject,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSettings {
    /// Which idle models that others want are left alone for a while after their last use.
    #[serde(default)]
    pub protection: ProtectionPolicy,
    /// The longest such while.
    pub residency: Millis,
    /// How long it may stay at most while others wait.
    pub max_turn: Millis,
    pub drain_deadline: Millis,
    pub on_deadline: DrainDeadlinePolicy,
}

/// Which idle models are left alone although others want their place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProtectionPolicy {
    /// One whose clients usually return sooner than it could be brought back, unless all who used it in this turn wait for
    /// others: for as long as bringing it back takes.
    #[default]
    Expected,
    /// Each of them.
    Always,
    Never,
}

/// What happens to streams that outlast a drain's deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DrainDeadlinePolicy {
    /// Reported and counted; they finish.
    Wait,
    /// Ended with an in-stream error.
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
    /// No progress for so long *and* a failing health probe: hung.
    pub progress: Millis,
    /// For `/sleep`; one second more per GiB to be freed.
    pub sleep: Millis,
    /// For a wake; one second more per GiB to be taken.
    pub wake: Millis,
    /// From SIGTERM to SIGKILL.
    pub stop_grace: Millis,
    /// How long the memory meter may lag behind a confirmed sleep before what it shows is taken as the residue.
    pub meter_lag: Millis,
    /// From the request to the first byte of an answer.
    #[serde(default = "default_first_byte")]
    pub first_byte: Millis,
}

/// Journals from before it was recorded do without.
const fn default_first_byte() -> Millis {
    Millis::secs(300)
}

/// Everything configured, in one piece: what a journal starts with and what a reload replaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetConfig {
    pub settings: FleetSettings,
    pub accelerators: Vec<Accelerator>,
    pub models: Vec<ModelSpec>,
}

/// Finds a model by its name or an alias. Immutable; a reload makes another.
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

    /// Every name and alias with the model it means, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ModelName)> {
        self.names.iter().map(|(name, model)| (name.as_str(), model))
    }
}

impl FleetSettings {
    /// When engines of this model may be put away for others.
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
