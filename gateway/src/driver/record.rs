//! Counting what the driver does: launches, wakes, sleeps, stops, with cause, outcome and duration.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    fleet::{
        command::{Command, Then, Why},
        event::{Event, Verdict},
    },
    model::EngineId,
    units::Tick,
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

    pub(super) fn turn(&mut self, events: &[Event], commands: &[Command], now: Tick) {
        for event in events {
            self.event(event, now);
        }
        for command in commands {
            self.command(command, now);
        }
    }

    fn event(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Configured { configuration } => {
                self.metrics.configure(configuration.models.iter().map(|m| &m.name));
            }
            Event::Canary { engine, verdict: Verdict::Passed, .. } | Event::Slept { engine, .. } => {
                self.end(engine, Outcome::Done, now);
            }
            Event::Canary { engine, verdict: Verdict::Failed(_), .. }
            | Event::SleepFailed { engine, .. }
            | Event::WakeFailed { engine, .. }
            | Event::StartFailed { engine, .. } => self.end(engine, Outcome::Failed, now),
            Event::Gone { engine, .. } => {
                let stopped = matches!(self.under_way.get(engine), Some((Transition::Stop, ..)));
                self.end(engine, if stopped { Outcome::Done } else { Outcome::Failed }, now);
                self.closed.remove(engine);
            }
            _ => {}
        }
    }

    fn command(&mut self, command: &Command, now: Tick) {
        match command {
            Command::Launch { engine, .. } => self.begin(engine, Transition::Launch, Cause::Demand, now),
            Command::Wake { engine, .. } => self.begin(engine, Transition::Wake, Cause::Demand, now),
            Command::Sleep { engine, .. } => {
                let cause = self.closed.get(engine).copied().unwrap_or(Cause::Idle);
                self.begin(engine, Transition::Sleep, cause, now);
            }
            Command::Stop { engine, .. } => {
                let cause = self.closed.get(engine).copied().unwrap_or(Cause::Idle);
                if !matches!(self.under_way.get(engine), Some((Transition::Stop, ..))) {
                    self.end(engine, Outcome::Failed, now);
                    self.begin(engine, Transition::Stop, cause, now);
                }
            }
            Command::OpenGate { engine, .. } => {
                self.closed.remove(engine);
            }
            Command::CloseGate { engine, why, then, .. } => {
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

    fn end(&mut self, engine: &EngineId, outcome: Outcome, now: Tick) {
        if let Some((transition, cause, began)) = self.under_way.remove(engine) {
            self.metrics.model(&engine.model).transition(transition, cause, outcome, now.since(began));
        }
    }
}

/// `None`: another gateway puts it away, and counts that.
const fn cause(why: Why) -> Option<Cause> {
    Some(match why {
        Why::Idle => Cause::Idle,
        Why::Turn => Cause::Swap,
        Why::Order => Cause::Operator,
        Why::Outdated => Cause::Reload,
        Why::Fault => Cause::Fault,
        Why::Shutdown => Cause::Shutdown,
        Why::Published => return None,
    })
}
