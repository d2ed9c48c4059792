//! Counts and logs transitions (launch, wake, sleep, stop) with cause, outcome and duration, and adds them to the
//! timeline.
//!
//! Each transition is one log line. An engine that ends by itself causes a warning, once its process is gone: by then
//! its last output is known.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    due_times::DueTimes,
    engine::{
        Engine,
        last_outcome::{EngineOutcome, logs_hint},
        state::LifecycleState,
    },
    fault::{FailureCause as EngineCause, Fault},
    fleet::{
        Fleet,
        command::{AfterDrain, CloseReason, Command},
        event::{CanaryVerdict, Event},
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::{Bytes, Generation, Millis, Tick, pluralize},
};

use super::timeline::{Timeline, TimelineKind};
use crate::metrics::{Metrics, OutcomeLabel, TransitionCause, TransitionKind};

mod entries;

use entries::TimelineWriter;

pub(super) struct TransitionRecorder {
    metrics: Arc<Metrics>,
    timeline: TimelineWriter,
    /// Each engine's transition in progress.
    in_progress: BTreeMap<EngineId, TransitionInProgress>,
    /// Why each engine's gate closed.
    close_causes: BTreeMap<EngineId, TransitionCause>,
    /// How long requests may continue after their engine's gate has closed.
    drain_deadline: Millis,
    /// When the drain of each engine passes its deadline.
    drain_deadlines: DueTimes<EngineId>,
}

/// A transition that was ordered and has not ended.
struct TransitionInProgress {
    transition: TransitionKind,
    cause: TransitionCause,
    began: Tick,
    /// Why the engine starts or wakes, in words. Empty for the others, whose reason is known at their end.
    reason: String,
    /// The memory that a sleep or stop frees.
    frees: Bytes,
    /// Another model gets the memory.
    is_eviction: bool,
}

impl TransitionRecorder {
    pub(super) fn new(metrics: Arc<Metrics>, timeline: Arc<Timeline>) -> Self {
        let timeline = TimelineWriter::new(timeline);
        Self {
            metrics,
            timeline,
            in_progress: BTreeMap::new(),
            close_causes: BTreeMap::new(),
            drain_deadline: Millis::ZERO,
            drain_deadlines: DueTimes::default(),
        }
    }

    /// `fleet` has already recorded these commands.
    pub(super) fn turn(&mut self, fleet: &Fleet, events: &[Event], commands: &[Command], now: Tick) {
        if fleet.leads() {
            self.timeline.forget_published();
        }
        for event in events {
            self.event(fleet, event, now);
        }
        for command in commands {
            self.command(fleet, command, now);
        }
        self.report_late_drains(fleet, now);
    }

    /// Reports drains that have passed their deadline, whether their requests may finish or are cut.
    fn report_late_drains(&mut self, fleet: &Fleet, now: Tick) {
        let late: Vec<EngineId> = self.drain_deadlines.due_by(now).cloned().collect();
        for engine in late {
            self.drain_deadlines.set(&engine, None);
            let Some(e) = fleet.engine(&engine) else { continue };
            if matches!(e.state, LifecycleState::Draining { drained: false, .. }) {
                let (leases, deadline) = (e.leases, self.drain_deadline);
                tracing::warn!(%engine, leases, %deadline, "the drain has passed its deadline");
                self.metrics.model(&engine.model).drain_deadline_passed();
            }
        }
    }

    fn event(&mut self, fleet: &Fleet, event: &Event, now: Tick) {
        match event {
            Event::Configured { configuration } => {
                self.metrics.configure(configuration.models.iter().map(|m| &m.name));
                self.drain_deadline = configuration.settings.turns.drain_deadline;
            }
            Event::Canary { engine, verdict: CanaryVerdict::Passed, .. } => {
                if let Some(ended) = self.end(engine, OutcomeLabel::Done, now) {
                    let (how, what) = match ended.transition {
                        TransitionKind::Wake => ("wake", TimelineKind::Woke),
                        _ => ("launch", TimelineKind::Launched),
                    };
                    let took = now.since(ended.began);
                    tracing::info!(%engine, transition = how, duration = %took, "engine ready");
                    self.timeline.ended(engine, what, ended, String::new(), now);
                }
            }
            Event::Slept { engine, level, .. } => {
                if let Some(ended) = self.end(engine, OutcomeLabel::Done, now) {
                    let (level, why, took) =
                        (level.number(), stop_reason(fleet, engine), now.since(ended.began));
                    tracing::info!(%engine, level, reason = why, duration = %took, "engine asleep");
                    self.timeline.ended(engine, TimelineKind::Slept, ended, why, now);
                }
                // A later stop is not for the same model.
                if self.close_causes.get(engine) == Some(&TransitionCause::Swap) {
                    self.close_causes.remove(engine);
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
                    self.timeline.warned(engine, why, now);
                }
            }
            Event::Gone { engine, generation, .. } => {
                let stopped = self.is_stopping(engine);
                let ended =
                    self.end(engine, if stopped { OutcomeLabel::Done } else { OutcomeLabel::Failed }, now);
                self.close_causes.remove(engine);
                self.drain_deadlines.set(engine, None);
                if let Some(failure) = log_if_failed(fleet, engine, *generation) {
                    self.timeline.failed(engine, ended.filter(|_| !stopped), failure, now);
                } else if let Some(ended) = ended {
                    let why = stop_reason(fleet, engine);
                    tracing::info!(%engine, reason = why, duration = %now.since(ended.began), "engine stopped");
                    self.timeline.ended(engine, TimelineKind::Stopped, ended, why, now);
                }
            }
            Event::Published { engine, published, .. } if !fleet.leads() => {
                self.timeline.published(engine, published.as_ref(), now);
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
                let launch = TransitionInProgress::new(TransitionKind::Launch, TransitionCause::Demand, now);
                self.begin(engine, TransitionInProgress { reason: why, ..launch });
            }
            Command::Wake { engine, level, .. } => {
                let (level, why) = (level.number(), start_reason(fleet, engine));
                tracing::info!(%engine, level, reason = why, "waking engine");
                let rehearses = fleet.engine(engine).is_some_and(Engine::is_rehearsing);
                let cause = if rehearses { TransitionCause::Rehearsal } else { TransitionCause::Demand };
                let wake = TransitionInProgress::new(TransitionKind::Wake, cause, now);
                self.begin(engine, TransitionInProgress { reason: why, ..wake });
            }
            Command::Sleep { engine, .. } => {
                let cause = self.close_causes.get(engine).copied().unwrap_or(TransitionCause::Idle);
                let sleep = TransitionInProgress::new(TransitionKind::Sleep, cause, now);
                self.begin(engine, TransitionInProgress { frees: fleet.freed_by_sleep(engine), ..sleep });
            }
            Command::Stop { engine, successor: to, .. } => {
                if let Some(to) = to {
                    tracing::info!(%engine, successor = %to, "engine evicted, stopping");
                }
                if !self.is_stopping(engine) {
                    // A sleeper has no gate to close.
                    if to.is_some() && self.close_causes.get(engine) != Some(&TransitionCause::Swap) {
                        self.close_causes.insert(engine.clone(), TransitionCause::Swap);
                        self.metrics.model(&engine.model).evicted(TransitionKind::Stop);
                        self.metrics.swapped();
                    }
                    let cause = self.close_causes.get(engine).copied().unwrap_or(TransitionCause::Idle);
                    self.end(engine, OutcomeLabel::Failed, now);
                    let stop = TransitionInProgress::new(TransitionKind::Stop, cause, now);
                    let is_eviction = stop.is_eviction || to.is_some();
                    let frees = fleet.reserved_bytes(engine);
                    self.begin(engine, TransitionInProgress { frees, is_eviction, ..stop });
                }
            }
            Command::OpenGate { engine, .. } => {
                self.close_causes.remove(engine);
                self.drain_deadlines.set(engine, None);
            }
            Command::CloseGate { engine, reason, after_drain, successor: to, .. } => {
                if let Some(to) = to {
                    let leases = fleet.engine(engine).map_or(0, |e| e.leases);
                    tracing::info!(%engine, successor = %to, leases, "engine evicted, draining");
                }
                if let Some(cause) = transition_cause(*reason) {
                    self.close_causes.insert(engine.clone(), cause);
                }
                if matches!(reason, CloseReason::Turn | CloseReason::Outdated | CloseReason::Operator) {
                    self.drain_deadlines.set(engine, Some(now + self.drain_deadline));
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

    /// Adds the refusal of a request that waited for the model to the timeline.
    pub(super) fn refused(&mut self, model: &ModelName, fault: &Fault, now: Tick) {
        self.timeline.refused(model, fault, now);
    }

    fn begin(&mut self, engine: &EngineId, transition: TransitionInProgress) {
        self.drain_deadlines.set(engine, None);
        self.in_progress.insert(engine.clone(), transition);
    }

    fn is_stopping(&self, engine: &EngineId) -> bool {
        self.in_progress.get(engine).is_some_and(|current| current.transition == TransitionKind::Stop)
    }

    /// Ends the engine's transition, and returns it.
    fn end(&mut self, engine: &EngineId, outcome: OutcomeLabel, now: Tick) -> Option<TransitionInProgress> {
        let ended = self.in_progress.remove(engine)?;
        let took = now.since(ended.began);
        self.metrics.model(&engine.model).record_transition(ended.transition, ended.cause, outcome, took);
        Some(ended)
    }
}

impl TransitionInProgress {
    const fn new(transition: TransitionKind, cause: TransitionCause, began: Tick) -> Self {
        let is_eviction = matches!(cause, TransitionCause::Swap);
        Self { transition, cause, began, reason: String::new(), frees: Bytes::ZERO, is_eviction }
    }
}

/// Describes why an engine starts or wakes. Requests that wait at other gateways are logged there.
fn start_reason(fleet: &Fleet, engine: &EngineId) -> String {
    match fleet.waiting(&engine.model) {
        _ if fleet.engine(engine).is_some_and(Engine::is_rehearsing) => {
            "the engine rehearsed its sleep".to_owned()
        }
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

/// Logs with all known causes that this generation failed. Returns these in words; `None`: it did not fail.
fn log_if_failed(fleet: &Fleet, engine: &EngineId, generation: Generation) -> Option<String> {
    let past = fleet
        .engine(engine)
        .and_then(|e| e.last_outcome.as_ref())
        .filter(|past| past.generation == generation);
    let Some((past, EngineOutcome::Failed(failure))) = past.map(|past| (past, &past.outcome)) else {
        return None;
    };
    let logs = fleet.engine_spec(engine).map(logs_hint).unwrap_or_default();
    let (cause, failures) = (failure.cause.class(), failure.count);
    let text = format!("{}{}{logs}", past.describe(), past.diagnostics());
    tracing::warn!(%engine, %generation, cause, failures, "{text}");
    Some(text)
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
        CloseReason::Rehearsal => TransitionCause::Rehearsal,
        CloseReason::Shutdown => TransitionCause::Shutdown,
        CloseReason::PublishedNotAwake => return None,
    })
}
