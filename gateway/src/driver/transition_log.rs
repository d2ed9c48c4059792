//! Counts and logs transitions (launch, wake, sleep, stop) with cause, outcome and duration.
//!
//! Each transition is one log line. An engine that ends by itself causes a warning, once its process is gone: by then
//! its last output is known.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    engine::{
        Engine,
        last_outcome::{EngineOutcome, logs_hint},
    },
    fault::FailureCause as EngineCause,
    fleet::{
        Fleet,
        command::{AfterDrain, CloseReason, Command},
        event::{CanaryVerdict, Event},
    },
    model::{AcceleratorId, EngineId},
    units::{Generation, Tick, pluralize},
};

use crate::metrics::{Metrics, OutcomeLabel, TransitionCause, TransitionKind};

pub(super) struct TransitionRecorder {
    metrics: Arc<Metrics>,
    /// Each engine's transition in progress.
    in_progress: BTreeMap<EngineId, (TransitionKind, TransitionCause, Tick)>,
    /// Why each engine's gate closed.
    close_causes: BTreeMap<EngineId, TransitionCause>,
}

impl TransitionRecorder {
    pub(super) const fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, in_progress: BTreeMap::new(), close_causes: BTreeMap::new() }
    }

    /// `fleet` has already recorded these commands.
    pub(super) fn turn(&mut self, fleet: &Fleet, events: &[Event], commands: &[Command], now: Tick) {
        for event in events {
            self.event(fleet, event, now);
        }
        for command in commands {
            self.command(fleet, command, now);
        }
    }

    fn event(&mut self, fleet: &Fleet, event: &Event, now: Tick) {
        match event {
            Event::Configured { configuration } => {
                self.metrics.configure(configuration.models.iter().map(|m| &m.name));
            }
            Event::Canary { engine, verdict: CanaryVerdict::Passed, .. } => {
                if let Some((transition, began)) = self.end(engine, OutcomeLabel::Done, now) {
                    let how = if transition == TransitionKind::Wake { "wake" } else { "launch" };
                    tracing::info!(%engine, transition = how, duration = %now.since(began), "engine ready");
                }
            }
            Event::Slept { engine, level, .. } => {
                if let Some((_, began)) = self.end(engine, OutcomeLabel::Done, now) {
                    let (level, why) = (level.number(), stop_reason(fleet, engine));
                    tracing::info!(%engine, level, reason = why, duration = %now.since(began), "engine asleep");
                }
            }
            Event::Diagnostics { engine, generation, diagnostics } if diagnostics.probe.is_some() => {
                let starts = |e: &Engine| e.generation == *generation && e.state.is_starting();
                if fleet.engine(engine).is_some_and(starts) {
                    tracing::info!(%engine, "engine not ready yet{}", diagnostics.for_clients());
                }
            }
            Event::Canary { engine, verdict: CanaryVerdict::Failed(_), .. }
            | Event::SleepFailed { engine, .. }
            | Event::WakeFailed { engine, .. }
            | Event::StartFailed { engine, .. } => {
                self.end(engine, OutcomeLabel::Failed, now);
                if let Event::SleepFailed { cause: cause @ EngineCause::SleepDenied, .. } = event {
                    let why = cause.describe();
                    tracing::warn!(%engine, reason = why, "sleep denied: the engine serves its waiting requests, or is stopped");
                }
            }
            Event::Gone { engine, generation, .. } => {
                let stopped = matches!(self.in_progress.get(engine), Some((TransitionKind::Stop, ..)));
                let ended =
                    self.end(engine, if stopped { OutcomeLabel::Done } else { OutcomeLabel::Failed }, now);
                self.close_causes.remove(engine);
                if !log_if_failed(fleet, engine, *generation)
                    && let Some((_, began)) = ended
                {
                    let why = stop_reason(fleet, engine);
                    tracing::info!(%engine, reason = why, duration = %now.since(began), "engine stopped");
                }
            }
            _ => {}
        }
    }

    fn command(&mut self, fleet: &Fleet, command: &Command, now: Tick) {
        match command {
            Command::Launch { engine, accelerators, bytes, .. } => {
                let on: Vec<&str> = accelerators.iter().map(AcceleratorId::as_str).collect();
                let why = start_reason(fleet, engine);
                tracing::info!(%engine, accelerators = on.join(","), memory = %bytes, reason = why, "launching engine");
                self.begin(engine, TransitionKind::Launch, TransitionCause::Demand, now);
            }
            Command::Wake { engine, level, .. } => {
                let (level, why) = (level.number(), start_reason(fleet, engine));
                tracing::info!(%engine, level, reason = why, "waking engine");
                self.begin(engine, TransitionKind::Wake, TransitionCause::Demand, now);
            }
            Command::Sleep { engine, .. } => {
                let cause = self.close_causes.get(engine).copied().unwrap_or(TransitionCause::Idle);
                self.begin(engine, TransitionKind::Sleep, cause, now);
            }
            Command::Stop { engine, successor: to, .. } => {
                if let Some(to) = to {
                    tracing::info!(%engine, successor = %to, "engine evicted, stopping");
                }
                let cause = self.close_causes.get(engine).copied().unwrap_or(TransitionCause::Idle);
                if !matches!(self.in_progress.get(engine), Some((TransitionKind::Stop, ..))) {
                    self.end(engine, OutcomeLabel::Failed, now);
                    self.begin(engine, TransitionKind::Stop, cause, now);
                }
            }
            Command::OpenGate { engine, .. } => {
                self.close_causes.remove(engine);
            }
            Command::CloseGate { engine, reason, after_drain, successor: to, .. } => {
                if let Some(to) = to {
                    let leases = fleet.engine(engine).map_or(0, |e| e.leases);
                    tracing::info!(%engine, successor = %to, leases, "engine evicted, draining");
                }
                if let Some(cause) = transition_cause(*reason) {
                    self.close_causes.insert(engine.clone(), cause);
                }
                if *reason == CloseReason::Turn {
                    let how = if *after_drain == AfterDrain::Stop {
                        TransitionKind::Stop
                    } else {
                        TransitionKind::Sleep
                    };
                    self.metrics.model(&engine.model).evicted(how);
                    self.metrics.swapped();
                }
            }
            _ => {}
        }
    }

    fn begin(&mut self, engine: &EngineId, transition: TransitionKind, cause: TransitionCause, now: Tick) {
        self.in_progress.insert(engine.clone(), (transition, cause, now));
    }

    /// Ends the engine's transition, and returns it with its start.
    fn end(&mut self, engine: &EngineId, outcome: OutcomeLabel, now: Tick) -> Option<(TransitionKind, Tick)> {
        let (transition, cause, began) = self.in_progress.remove(engine)?;
        self.metrics.model(&engine.model).record_transition(transition, cause, outcome, now.since(began));
        Some((transition, began))
    }
}

/// Describes why an engine starts or wakes. Requests that wait at other gateways are logged there.
fn start_reason(fleet: &Fleet, engine: &EngineId) -> String {
    match fleet.waiting(&engine.model) {
        0 if fleet.spec(&engine.model).is_some_and(|spec| spec.pinned) => "the model is pinned".to_owned(),
        0 if fleet.is_scaled(&engine.model) => "the model's target asks for it".to_owned(),
        0 => "the model needs a ready engine, and no request waits at this gateway".to_owned(),
        waiting => format!("{} waiting for the model", pluralize(waiting, "request")),
    }
}

/// Describes why an engine was put to sleep or stopped.
fn stop_reason(fleet: &Fleet, engine: &EngineId) -> String {
    let past = fleet.engine(engine).and_then(|e| e.last_outcome.as_ref());
    past.map_or_else(|| "the engine is no longer needed".to_owned(), |past| past.describe())
}

/// Logs with all known causes that this generation failed; returns whether it did.
fn log_if_failed(fleet: &Fleet, engine: &EngineId, generation: Generation) -> bool {
    let past = fleet
        .engine(engine)
        .and_then(|e| e.last_outcome.as_ref())
        .filter(|past| past.generation == generation);
    let Some((past, EngineOutcome::Failed(failure))) = past.map(|past| (past, &past.outcome)) else {
        return false;
    };
    let logs = fleet.engine_spec(engine).map(logs_hint).unwrap_or_default();
    let (cause, failures) = (failure.cause.class(), failure.count);
    tracing::warn!(%engine, %generation, cause, failures, "{}{}{logs}", past.describe(), past.diagnostics());
    true
}

/// `None` if another gateway ends the engine, and counts that.
const fn transition_cause(reason: CloseReason) -> Option<TransitionCause> {
    Some(match reason {
        CloseReason::Idle => TransitionCause::Idle,
        CloseReason::Turn => TransitionCause::Swap,
        CloseReason::ScaledDown => TransitionCause::Scale,
        CloseReason::Operator => TransitionCause::Operator,
        CloseReason::Outdated => TransitionCause::Reload,
        CloseReason::Fault | CloseReason::SleepDenied => TransitionCause::Fault,
        CloseReason::Shutdown => TransitionCause::Shutdown,
        CloseReason::PublishedNotAwake => return None,
    })
}
