//! Counting and logging what the driver does: launches, wakes, sleeps, stops, with cause, outcome and duration.
//!
//! Each of them is one line of the log, and what ends by itself is a warning, written once the process is gone: by then
//! its last words are known.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    engine::{
        Engine,
        past::{Ending, see_logs},
    },
    fault::Cause as EngineCause,
    fleet::{
        Fleet,
        command::{Command, Then, Why},
        event::{Event, Verdict},
    },
    model::{AcceleratorId, EngineId},
    units::{Generation, Tick, count},
};

use crate::metrics::{Cause, Metrics, Outcome, Transition};

pub(super) struct Recorder {
    metrics: Arc<Metrics>,
    /// What each engine is in the middle of.
    under_way: BTreeMap<EngineId, (Transition, Cause, Tick)>,
    /// Why each engine's gate closed.
    closed: BTreeMap<EngineId, Cause>,
}

impl Recorder {
    pub(super) const fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, under_way: BTreeMap::new(), closed: BTreeMap::new() }
    }

    /// `fleet`: as it is once these commands are recorded.
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
            Event::Canary { engine, verdict: Verdict::Passed, .. } => {
                if let Some((transition, began)) = self.end(engine, Outcome::Done, now) {
                    let how = if transition == Transition::Wake { "woken" } else { "started" };
                    tracing::info!(%engine, how, took = %now.since(began), "ready");
                }
            }
            Event::Slept { engine, level, .. } => {
                if let Some((_, began)) = self.end(engine, Outcome::Done, now) {
                    let (level, why) = (level.number(), past(fleet, engine));
                    tracing::info!(%engine, level, why, took = %now.since(began), "asleep");
                }
            }
            Event::Shows { engine, generation, symptoms } if symptoms.probe.is_some() => {
                let starts = |e: &Engine| e.generation == *generation && e.state.is_starting();
                if fleet.engine(engine).is_some_and(starts) {
                    tracing::info!(%engine, "not ready yet{}", symptoms.for_clients());
                }
            }
            Event::Canary { engine, verdict: Verdict::Failed(_), .. }
            | Event::SleepFailed { engine, .. }
            | Event::WakeFailed { engine, .. }
            | Event::StartFailed { engine, .. } => {
                self.end(engine, Outcome::Failed, now);
                if let Event::SleepFailed { cause: cause @ EngineCause::StaysAwake, .. } = event {
                    let why = cause.words();
                    tracing::warn!(%engine, why, "not asleep: it serves those who wait for it, or is stopped");
                }
            }
            Event::Gone { engine, generation, .. } => {
                let stopped = matches!(self.under_way.get(engine), Some((Transition::Stop, ..)));
                let ended = self.end(engine, if stopped { Outcome::Done } else { Outcome::Failed }, now);
                self.closed.remove(engine);
                if !warned(fleet, engine, *generation)
                    && let Some((_, began)) = ended
                {
                    let why = past(fleet, engine);
                    tracing::info!(%engine, why, took = %now.since(began), "stopped");
                }
            }
            _ => {}
        }
    }

    fn command(&mut self, fleet: &Fleet, command: &Command, now: Tick) {
        match command {
            Command::Launch { engine, accelerators, bytes, .. } => {
                let on: Vec<&str> = accelerators.iter().map(AcceleratorId::as_str).collect();
                let why = wanted(fleet, engine);
                tracing::info!(%engine, on = on.join(","), memory = %bytes, why, "launching");
                self.begin(engine, Transition::Launch, Cause::Demand, now);
            }
            Command::Wake { engine, level, .. } => {
                let (level, why) = (level.number(), wanted(fleet, engine));
                tracing::info!(%engine, level, why, "waking");
                self.begin(engine, Transition::Wake, Cause::Demand, now);
            }
            Command::Sleep { engine, .. } => {
                let cause = self.closed.get(engine).copied().unwrap_or(Cause::Idle);
                self.begin(engine, Transition::Sleep, cause, now);
            }
            Command::Stop { engine, to, .. } => {
                if let Some(to) = to {
                    tracing::info!(%engine, %to, "evicted: it is stopped for another");
                }
                let cause = self.closed.get(engine).copied().unwrap_or(Cause::Idle);
                if !matches!(self.under_way.get(engine), Some((Transition::Stop, ..))) {
                    self.end(engine, Outcome::Failed, now);
                    self.begin(engine, Transition::Stop, cause, now);
                }
            }
            Command::OpenGate { engine, .. } => {
                self.closed.remove(engine);
            }
            Command::CloseGate { engine, why, then, to, .. } => {
                if let Some(to) = to {
                    let leases = fleet.engine(engine).map_or(0, |e| e.leases);
                    tracing::info!(%engine, %to, leases, "evicted: it makes room for another");
                }
                if let Some(cause) = cause(*why) {
                    self.closed.insert(engine.clone(), cause);
                }
                if *why == Why::Turn {
                    let how = if *then == Then::Stop { Transition::Stop } else { Transition::Sleep };
                    self.metrics.model(&engine.model).evicted(how);
                    self.metrics.swapped();
                }
            }
            _ => {}
        }
    }

    fn begin(&mut self, engine: &EngineId, transition: Transition, cause: Cause, now: Tick) {
        self.under_way.insert(engine.clone(), (transition, cause, now));
    }

    /// The transition that the engine was in, and since when.
    fn end(&mut self, engine: &EngineId, outcome: Outcome, now: Tick) -> Option<(Transition, Tick)> {
        let (transition, cause, began) = self.under_way.remove(engine)?;
        self.metrics.model(&engine.model).transition(transition, cause, outcome, now.since(began));
        Some((transition, began))
    }
}

/// Why an engine is started or woken, in words. Who waits at another gateway is that one's to tell.
fn wanted(fleet: &Fleet, engine: &EngineId) -> String {
    match fleet.waiting(&engine.model) {
        0 if fleet.spec(&engine.model).is_some_and(|spec| spec.pinned) => "it is pinned".to_owned(),
        0 => "it is to be ready, and no request waits here".to_owned(),
        waiting => format!("{} waiting for it", count(waiting, "request")),
    }
}

/// Why an engine was put away, in words.
fn past(fleet: &Fleet, engine: &EngineId) -> String {
    let past = fleet.engine(engine).and_then(|e| e.past.as_ref());
    past.map_or_else(|| "it is not wanted any more".to_owned(), |past| past.words())
}

/// Whether this life failed; if so, that is in the log, with all that is known of why.
fn warned(fleet: &Fleet, engine: &EngineId, generation: Generation) -> bool {
    let past =
        fleet.engine(engine).and_then(|e| e.past.as_ref()).filter(|past| past.generation == generation);
    let Some((past, Ending::Failed(failure))) = past.map(|past| (past, &past.what)) else { return false };
    let logs = fleet.spec(&engine.model).map(see_logs).unwrap_or_default();
    let (cause, failures) = (failure.cause.class(), failure.count);
    tracing::warn!(%engine, %generation, cause, failures, "{}{}{logs}", past.words(), past.symptoms());
    true
}

/// `None`: another gateway puts it away, and counts that.
const fn cause(why: Why) -> Option<Cause> {
    Some(match why {
        Why::Idle => Cause::Idle,
        Why::Turn => Cause::Swap,
        Why::Order => Cause::Operator,
        Why::Outdated => Cause::Reload,
        Why::Fault | Why::StaysAwake => Cause::Fault,
        Why::Shutdown => Cause::Shutdown,
        Why::Published => return None,
    })
}
