//! How long the engines of a journal took to start, wake, fall asleep and stop.

use std::collections::BTreeMap;

use super::median;
use crate::{
    fleet::{
        command::Command,
        event::{Event, LearnedMeasurements},
    },
    model::{EngineId, ModelName},
    units::{Millis, Tick},
};

/// Measures transitions from their command to their outcome.
#[derive(Debug, Default)]
pub(super) struct TransitionTimer {
    /// Ordered and not completed.
    pending: BTreeMap<EngineId, (TimedTransition, Tick)>,
    durations: BTreeMap<(ModelName, TimedTransition), Vec<Millis>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TimedTransition {
    Start,
    Wake,
    Sleep,
    Stop,
}

impl TransitionTimer {
    /// Drops what is under way: the next turn belongs to another run of the gateway, or follows a gap.
    pub(super) fn interrupt(&mut self) {
        self.pending.clear();
    }

    pub(super) fn observe_command(&mut self, command: &Command, at: Tick) {
        let (engine, transition) = match command {
            Command::Launch { engine, .. } => (engine, TimedTransition::Start),
            Command::Wake { engine, .. } => (engine, TimedTransition::Wake),
            Command::Sleep { engine, .. } => (engine, TimedTransition::Sleep),
            Command::Stop { engine, .. } => (engine, TimedTransition::Stop),
            _ => return,
        };
        self.pending.insert(engine.clone(), (transition, at));
    }

    pub(super) fn observe_event(&mut self, event: &Event, at: Tick) {
        let (engine, completed): (_, &[TimedTransition]) = match event {
            Event::Ready { engine, .. } => (engine, &[TimedTransition::Start, TimedTransition::Wake]),
            Event::Slept { engine, .. } => (engine, &[TimedTransition::Sleep]),
            Event::Gone { engine, .. } => (engine, &[TimedTransition::Stop]),
            Event::StartFailed { engine, .. }
            | Event::WakeFailed { engine, .. }
            | Event::SleepFailed { engine, .. } => (engine, &[]),
            _ => return,
        };
        if let Some((transition, since)) = self.pending.remove(engine)
            && completed.contains(&transition)
        {
            let durations = self.durations.entry((engine.model.clone(), transition)).or_default();
            durations.push(at.since(since));
        }
    }

    /// Replaces the learned times of each model by the medians of its transitions.
    pub(super) fn write_medians(&self, measured: &mut BTreeMap<ModelName, LearnedMeasurements>) {
        for ((model, transition), durations) in &self.durations {
            let times = measured.entry(model.clone()).or_default();
            let time = match transition {
                TimedTransition::Start => &mut times.start,
                TimedTransition::Wake => &mut times.wake,
                TimedTransition::Sleep => &mut times.sleep,
                TimedTransition::Stop => continue,
            };
            *time = median(durations.clone());
        }
    }

    /// The median over the stops of all models.
    pub(super) fn stop_time(&self) -> Option<Millis> {
        let stops = self.durations.iter().filter(|((_, transition), _)| *transition == TimedTransition::Stop);
        median(stops.flat_map(|(_, durations)| durations).copied().collect())
    }
}
