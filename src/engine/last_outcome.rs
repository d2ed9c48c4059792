//! The last outcome of an engine, kept until it serves again.
//!
//! Without it, an engine that crashed, one that was evicted, and one that no request has asked for would all look the
//! same: cold.
//!
//! An engine's own output ([`EngineDiagnostics`]) is for the admin alone. Clients see the class of a cause and how the
//! last probe was answered. They never see the engine's output, which may contain requests of other clients.

use serde::{Deserialize, Serialize};

use super::{Engine, state::LifecycleState};
use crate::{
    fault::FailureCause,
    fleet::command::CloseReason,
    model::{AcceleratorRequirement, ModelName, ModelSpec},
    units::{Generation, Tick},
};

/// Maximum length of each diagnostic text, in characters.
const MAX_DIAGNOSTIC_CHARS: usize = 300;

/// The last failure of an engine, or how it was last evicted, put to sleep or stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastOutcome {
    pub at: Tick,
    pub generation: Generation,
    #[serde(flatten)]
    pub outcome: EngineOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EngineOutcome {
    Failed(FailureRecord),
    Deactivated {
        /// Why its gate closed; for a sleeper, whose gate was closed already, why it was stopped.
        reason: Option<CloseReason>,
        /// The model that got the memory next.
        successor: Option<ModelName>,
    },
}

/// A failed start, wake, sleep or generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureRecord {
    pub stage: FailureStage,
    pub cause: FailureCause,
    /// Failures in a row, this one included.
    pub count: u32,
    #[serde(default, skip_serializing_if = "EngineDiagnostics::is_empty")]
    pub diagnostics: EngineDiagnostics,
}

/// The part of a failure that clients see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastFailure {
    pub at: Tick,
    pub cause: FailureCause,
    /// Failures in a row, this one included.
    pub count: u32,
}

/// The engine's activity when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FailureStage {
    Starting,
    Waking,
    Serving,
    FallingAsleep,
    Sleeping,
}

/// Diagnostics of an engine that does not serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineDiagnostics {
    /// The last line that the engine wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_line: Option<String>,
    /// How the engine answered the last health request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<String>,
    /// Report of the kernel or the cluster that was to run the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
}

impl FailureStage {
    const fn of(state: &LifecycleState) -> Option<Self> {
        Some(match state {
            LifecycleState::Launching | LifecycleState::Loading => Self::Starting,
            LifecycleState::Waking { .. } => Self::Waking,
            LifecycleState::Awake | LifecycleState::Draining { .. } => Self::Serving,
            LifecycleState::FallingAsleep { .. } => Self::FallingAsleep,
            LifecycleState::Asleep { .. } => Self::Sleeping,
            LifecycleState::Cold
            | LifecycleState::Failing { .. }
            | LifecycleState::Stopping { .. }
            | LifecycleState::Backoff { .. } => {
                return None;
            }
        })
    }
}

impl EngineDiagnostics {
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.last_line.is_none() && self.probe.is_none() && self.system.is_none()
    }

    #[must_use]
    pub fn from_system(words: &str) -> Self {
        Self { system: Some(words.to_owned()), ..Self::default() }
    }

    /// Merges newer diagnostics, cut to the maximum length. Control characters are replaced, so that an engine's output
    /// cannot steer a terminal.
    pub fn merge(&mut self, more: &Self) {
        let cut = |text: &String| {
            text.trim()
                .chars()
                .take(MAX_DIAGNOSTIC_CHARS)
                .map(|c| if c.is_control() { '\u{fffd}' } else { c })
                .collect()
        };
        self.last_line = more.last_line.as_ref().map(cut).or_else(|| self.last_line.take());
        self.probe = more.probe.as_ref().map(cut).or_else(|| self.probe.take());
        self.system = more.system.as_ref().map(cut).or_else(|| self.system.take());
    }

    /// Text for the admin, to append to what happened.
    #[must_use]
    pub fn describe(&self) -> String {
        self.for_clients() + &self.for_admin()
    }

    /// The part that clients may read: how a probe was answered, in the gateway's own words.
    #[must_use]
    pub fn for_clients(&self) -> String {
        self.probe.as_ref().map(|probe| format!("; last probe: {probe}")).unwrap_or_default()
    }

    /// The part for the admin only.
    #[must_use]
    pub fn for_admin(&self) -> String {
        let line = self.last_line.as_ref().map(|line| format!("; last output: {line}"));
        let system = self.system.as_ref().map(|system| format!("; {system}"));
        system.into_iter().chain(line).collect()
    }
}

impl FailureRecord {
    /// Text on what failed and why: "last start failed at 02:42:05.000: exit status 1 (exited:1), 3 failures in a row".
    #[must_use]
    pub fn describe(&self, at: Tick) -> String {
        let event = match self.stage {
            FailureStage::Starting => "last start failed",
            FailureStage::Waking => "last wake failed",
            FailureStage::Serving => "failed while serving",
            FailureStage::FallingAsleep => "failed to fall asleep",
            FailureStage::Sleeping => "failed while asleep",
        };
        let row = if self.count > 1 { format!(", {} failures in a row", self.count) } else { String::new() };
        format!("{event} at {at}: {}{row}", self.cause.describe())
    }
}

impl LastOutcome {
    /// A failed start as the leader publishes it. `count`: failures in a row.
    #[must_use]
    pub fn failed_start(at: Tick, generation: Generation, cause: FailureCause, count: u32) -> Self {
        let (stage, diagnostics) = (FailureStage::Starting, EngineDiagnostics::default());
        Self {
            at,
            generation,
            outcome: EngineOutcome::Failed(FailureRecord { stage, cause, count, diagnostics }),
        }
    }

    /// A failure from an earlier run of the gateway.
    ///
    /// Its generation is 0, which no start of this run has: diagnostics of a later start do not belong to it.
    #[must_use]
    pub const fn restored_failure(at: Tick, failure: FailureRecord) -> Self {
        Self { at, generation: Generation(0), outcome: EngineOutcome::Failed(failure) }
    }

    /// Failures in a row; 0 if the engine was deactivated.
    #[must_use]
    pub const fn consecutive_failures(&self) -> u32 {
        match &self.outcome {
            EngineOutcome::Failed(failure) => failure.count,
            EngineOutcome::Deactivated { .. } => 0,
        }
    }

    /// Text on what the engine showed when it failed, for the admin.
    #[must_use]
    pub fn diagnostics(&self) -> String {
        match &self.outcome {
            EngineOutcome::Failed(failure) => failure.diagnostics.describe(),
            EngineOutcome::Deactivated { .. } => String::new(),
        }
    }

    /// Text on the outcome: "evicted at 02:42:05.000 for gamma".
    #[must_use]
    pub fn describe(&self) -> String {
        let at = self.at;
        match &self.outcome {
            EngineOutcome::Failed(failure) => failure.describe(at),
            EngineOutcome::Deactivated { successor: Some(to), .. } => format!("evicted at {at} for {to}"),
            EngineOutcome::Deactivated { reason: why, .. } => match why {
                Some(CloseReason::Idle) => format!("deactivated at {at}, idle"),
                Some(CloseReason::Turn) => format!("evicted at {at}"),
                Some(CloseReason::ScaledDown) => {
                    format!("deactivated at {at}: its model needs fewer engines")
                }
                Some(CloseReason::Operator) => format!("deactivated at {at} by an operator"),
                Some(CloseReason::Outdated) => format!("stopped at {at}: its configuration changed"),
                Some(CloseReason::Shutdown) => format!("stopped at {at}: the gateway shut down"),
                // Any other fault is recorded as a failure, not as a deactivation.
                Some(CloseReason::Fault | CloseReason::SleepDenied) => {
                    format!("stopped at {at}: the engine did not fall asleep")
                }
                Some(CloseReason::Rehearsal) => format!("put to sleep at {at} for a rehearsal"),
                Some(CloseReason::PublishedNotAwake) | None => format!("stopped at {at}"),
            },
        }
    }
}

/// Text on where to find an engine's output; empty for a pool, where another system keeps it (a Pod's log).
#[must_use]
pub fn logs_hint(spec: &ModelSpec) -> String {
    match spec.accelerators {
        AcceleratorRequirement::InPool { .. } | AcceleratorRequirement::Slots { .. } => String::new(),
        AcceleratorRequirement::Count(_) | AcceleratorRequirement::Ids(_) => {
            format!("; see 'rouse-gateway logs {}'", spec.name)
        }
    }
}

impl Engine {
    /// Records how the present state ends, before the engine enters `next`.
    pub(super) fn record_outcome(&mut self, next: &LifecycleState, now: Tick) {
        let (LifecycleState::Failing { cause, .. }
        | LifecycleState::Stopping { cause }
        | LifecycleState::Backoff { cause, .. }) = next
        else {
            return self.record_deactivation(next, now);
        };
        let Some(stage) = FailureStage::of(&self.state) else { return };
        if *cause == FailureCause::Stopped {
            return self.record_deactivation(next, now);
        }
        let count = 1 + self.failure().map_or(0, |failure| failure.count);
        let diagnostics = std::mem::take(&mut self.diagnostics);
        let outcome =
            EngineOutcome::Failed(FailureRecord { stage, cause: cause.clone(), count, diagnostics });
        self.last_outcome = Some(LastOutcome { at: now, generation: self.generation, outcome });
    }

    fn record_deactivation(&mut self, next: &LifecycleState, now: Tick) {
        let (LifecycleState::FallingAsleep { .. } | LifecycleState::Stopping { .. }) = next else { return };
        let reason = match &self.state {
            LifecycleState::Draining { reason: why, .. } => Some(*why),
            LifecycleState::Asleep { .. } => None,
            // A start that was given up leaves the outcome before it in place.
            _ => return,
        };
        let successor =
            self.yielded_to.as_ref().filter(|_| reason == Some(CloseReason::Turn)).map(|to| to.model.clone());
        self.last_outcome = Some(LastOutcome {
            at: now,
            generation: self.generation,
            outcome: EngineOutcome::Deactivated { reason, successor },
        });
    }

    /// Records why the engine was stopped in its sleep.
    pub fn set_stop_reason(&mut self, reason: CloseReason) {
        match &mut self.last_outcome {
            Some(LastOutcome { at, outcome: EngineOutcome::Deactivated { reason: why, .. }, .. })
                if *at == self.since =>
            {
                *why = Some(reason);
            }
            _ => {}
        }
    }

    /// Records the model for which the engine was stopped.
    pub fn set_successor(&mut self, model: &ModelName) {
        match &mut self.last_outcome {
            Some(LastOutcome { at, outcome: EngineOutcome::Deactivated { successor: to, .. }, .. })
                if *at == self.since =>
            {
                *to = Some(model.clone());
            }
            _ => {}
        }
    }

    /// Whether the engine was evicted for another model's turn, and has not served since.
    pub(crate) fn is_evicted(&self) -> bool {
        self.last_deactivation() == Some(CloseReason::Turn)
    }

    /// Why the engine was last put to sleep or stopped, if it has not served or failed since.
    pub(crate) fn last_deactivation(&self) -> Option<CloseReason> {
        match &self.last_outcome.as_ref()?.outcome {
            EngineOutcome::Deactivated { reason, .. } => *reason,
            EngineOutcome::Failed(_) => None,
        }
    }

    /// The last failure, if the engine has not served since.
    #[must_use]
    pub fn failure(&self) -> Option<&FailureRecord> {
        match &self.last_outcome.as_ref()?.outcome {
            EngineOutcome::Failed(failure) => Some(failure),
            EngineOutcome::Deactivated { .. } => None,
        }
    }

    /// The part of [`Self::failure`] for clients.
    #[must_use]
    pub fn last_failure(&self) -> Option<LastFailure> {
        let (past, failure) = (self.last_outcome.as_ref()?, self.failure()?);
        Some(LastFailure { at: past.at, cause: failure.cause.clone(), count: failure.count })
    }

    /// Whether the last start failed and nothing runs: the next request may meet the same failure.
    #[must_use]
    pub fn failed_to_start(&self) -> bool {
        !self.state.has_process()
            && self.failure().is_some_and(|failure| failure.stage == FailureStage::Starting)
    }

    /// Records diagnostics of an engine that does not serve.
    ///
    /// If its generation has just failed, they belong to that failure.
    pub fn record_diagnostics(&mut self, diagnostics: &EngineDiagnostics) {
        let generation = self.generation;
        match &mut self.last_outcome {
            Some(LastOutcome { generation: of, outcome: EngineOutcome::Failed(failure), .. })
                if *of == generation =>
            {
                failure.diagnostics.merge(diagnostics);
            }
            _ => self.diagnostics.merge(diagnostics),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::command::AfterDrain,
        model::{EngineId, SleepLevel},
    };

    fn engine(state: LifecycleState) -> Engine {
        Engine { state, generation: Generation(1), ..Engine::new(EngineId::new("m".into(), 0), Tick(0)) }
    }

    fn described(engine: &Engine) -> String {
        engine.last_outcome.as_ref().map(LastOutcome::describe).unwrap_or_default()
    }

    #[test]
    fn failures_in_a_row_are_counted_and_keep_what_the_engine_said() {
        let mut engine = engine(LifecycleState::Loading);
        let diagnostics = |line: &str| EngineDiagnostics {
            last_line: Some(line.to_owned()),
            ..EngineDiagnostics::default()
        };
        engine.record_diagnostics(&diagnostics("No module named\t'llama_cpp'\n"));
        let backoff = LifecycleState::Backoff { until: Tick(0), cause: FailureCause::Exited(1) };
        engine.transition_to(backoff.clone(), Tick(1000));
        assert_eq!(described(&engine), "last start failed at 00:00:01.000: exit status 1 (exited:1)");
        let line =
            |engine: &Engine| engine.failure().and_then(|failure| failure.diagnostics.last_line.clone());
        assert_eq!(line(&engine).as_deref(), Some("No module named\u{fffd}'llama_cpp'"));
        assert!(engine.failed_to_start());
        (engine.state, engine.generation) = (LifecycleState::Launching, Generation(2));
        engine.record_diagnostics(&EngineDiagnostics {
            probe: Some("status 503".to_owned()),
            ..EngineDiagnostics::default()
        });
        assert_eq!(
            line(&engine).as_deref(),
            Some("No module named\u{fffd}'llama_cpp'"),
            "of the life before"
        );
        engine.transition_to(LifecycleState::Stopping { cause: FailureCause::Timeout }, Tick(2000));
        engine.record_diagnostics(&diagnostics("Loading"));
        engine.transition_to(backoff, Tick(3000));
        let failure = engine.failure().unwrap();
        assert_eq!((failure.count, &failure.cause), (2, &FailureCause::Timeout));
        assert_eq!(failure.diagnostics.describe(), "; last probe: status 503; last output: Loading");
    }

    #[test]
    fn who_had_the_memory_next_is_remembered() {
        let draining = |reason| LifecycleState::Draining {
            reason,
            after_drain: AfterDrain::Stop,
            revoked: false,
            drained: true,
        };
        let stopped = LifecycleState::Stopping { cause: FailureCause::Stopped };
        let mut evicted = engine(draining(CloseReason::Turn));
        evicted.yielded_to = Some(EngineId::new("gamma".into(), 0));
        evicted.transition_to(stopped.clone(), Tick(5000));
        evicted.transition_to(LifecycleState::Cold, Tick(6000));
        assert_eq!(described(&evicted), "evicted at 00:00:05.000 for gamma");
        assert!(!evicted.failed_to_start());
        let mut idle = engine(draining(CloseReason::Idle));
        idle.transition_to(stopped.clone(), Tick(5000));
        assert_eq!(described(&idle), "deactivated at 00:00:05.000, idle");
        let mut sleeper = engine(LifecycleState::Asleep { level: SleepLevel::One });
        sleeper.transition_to(stopped.clone(), Tick(5000));
        assert_eq!(described(&sleeper), "stopped at 00:00:05.000");
        sleeper.set_stop_reason(CloseReason::Idle);
        assert_eq!(described(&sleeper), "deactivated at 00:00:05.000, idle");
        sleeper.set_successor(&"gamma".into());
        assert_eq!(described(&sleeper), "evicted at 00:00:05.000 for gamma");
        let mut abandoned = engine(LifecycleState::Loading);
        abandoned.transition_to(stopped, Tick(5000));
        assert_eq!(described(&abandoned), "");
    }
}
