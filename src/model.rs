//! Configuration: models, accelerators, policy. Plain data, the same on one machine and in a cluster.
//!
//! This file has the model itself and the whole configuration. `names` has the names of models, engines and
//! accelerators, `accelerators` what a model takes of the accelerators, `variants` the ways to run one model side by
//! side, and `settings` what holds for all models.

mod accelerators;
mod names;
mod settings;
mod variants;

use serde::{Deserialize, Serialize};

pub use self::{
    accelerators::{Accelerator, AcceleratorRequirement},
    names::{AcceleratorId, EngineId, ModelName, ModelNameIndex, VariantName},
    settings::{
        DrainDeadlinePolicy, EngineTimeouts, EvictionPolicy, FleetSettings, ProtectionPolicy, QueuePolicy,
        QueueSettings, TurnSettings,
    },
    variants::{EngineVariant, ScaleUpEviction, compare_by_cost},
};
use crate::{
    saturation::Thresholds,
    units::{Bytes, Millis},
};

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
    /// Changes with all that an engine gets at its start (command, environment, kind, sizes in the command): an engine
    /// with another fingerprint is outdated.
    pub fingerprint: u64,
    /// When its engines may be evicted; `None` uses [`FleetSettings::eviction`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionPolicy>,
    #[serde(default, skip_serializing_if = "QueueOverrides::is_empty")]
    pub queue: QueueOverrides,
    /// Ways to run the model side by side. Empty: one variant, `default`, with the values above.
    ///
    /// If there are any, these are all, and every engine has the values of its variant. The values above are then those
    /// of the cheapest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub variants: Vec<EngineVariant>,
    /// What may be put away for a replica that [`crate::fleet::event::Event::Desired`] asks for.
    #[serde(default, skip_serializing_if = "ScaleUpEviction::is_default")]
    pub may_evict: ScaleUpEviction,
    /// Saturation sets how many engines run: there are no spares, even before the first target.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scaled: bool,
    /// The load from which an engine counts as saturated, and gets no further request from a gateway.
    #[serde(default, skip_serializing_if = "Thresholds::is_default")]
    pub saturation_thresholds: Thresholds,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
const fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl ModelSpec {
    /// Whether its engines measure free memory at their start, which must not change meanwhile.
    #[must_use]
    pub const fn profiles_memory(&self) -> bool {
        !self.explicit_memory
    }
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
    /// When a new process sleeps and wakes once without need.
    #[serde(default, skip_serializing_if = "RehearsalPolicy::is_never")]
    pub rehearse: RehearsalPolicy,
}

/// When an engine rehearses its sleep at level 1: it sleeps and wakes once, so that its next sleep is fast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RehearsalPolicy {
    /// Before the first request gets the engine. Where other models wait for memory then, as [`Self::Idle`].
    Start,
    /// Once the engine has been idle for `turns.residency`.
    Idle,
    /// The first sleep in use is also the first of the process.
    #[default]
    Never,
}

impl RehearsalPolicy {
    const fn is_never(&self) -> bool {
        matches!(self, Self::Never)
    }
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

/// The whole configuration: what a journal starts with and what a reload replaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetConfig {
    pub settings: FleetSettings,
    pub accelerators: Vec<Accelerator>,
    pub models: Vec<ModelSpec>,
}
