//! Settings for all models: queue, turns, eviction and timeouts.
//!
//! Apart from the models, because a reload replaces the settings as one value and a model overrides only some of them.

use serde::{Deserialize, Serialize};

use super::ModelSpec;
use crate::units::{Bytes, Millis};

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
