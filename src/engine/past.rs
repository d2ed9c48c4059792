//! What befell an engine last, kept until it serves again. Without this, an engine that crashed, one that was put away and one
//! that nobody has asked for would all look the same: cold.
//!
//! An engine's own words ([`Symptoms`]) are for the admin alone. Clients are told the class of a cause, how the last probe was
//! answered, and never what an engine wrote, which may be what others asked it.

use serde::{Deserialize, Serialize};

use super::{Engine, state::State};
use crate::{
    fault::Cause,
    fleet::command::Why,
    model::{Accelerators, ModelName, ModelSpec},
    units::{Generation, Tick},
};

/// So much of an engine's own words is kept, in characters.
const LONGEST: usize = 300;

/// The last failure of an engine, or how it was last put away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Past {
    pub at: Tick,
    pub generation: Generation,
    #[serde(flatten)]
    pub what: Ending,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ending {
    Failed(Failure),
    PutAway {
        /// Why its gate closed; of one that slept, whose gate was closed already, why it was stopped.
        why: Option<Why>,
        /// The model that had the memory next.
        to: Option<ModelName>,
    },
}

/// A start, a wake, a sleep or a life that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    pub doing: Doing,
    pub cause: Cause,
    /// Failures in a row, this one included.
    pub count: u32,
    #[serde(default, skip_serializing_if = "Symptoms::is_empty")]
    pub symptoms: Symptoms,
}

/// As much of a failure as clients are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastFailure {
    pub at: Tick,
    pub cause: Cause,
    /// Failures in a row, this one included.
    pub count: u32,
}

/// What an engine was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Doing {
    Starting,
    Waking,
    Serving,
    FallingAsleep,
    Sleeping,
}

/// What an engine itself shows of why it does not serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Symptoms {
    /// The last line that it wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_line: Option<String>,
    /// How it answered the last request for its health.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<String>,
    /// What the system said that was to run it: the kernel, or the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
}

impl Doing {
    const fn of(state: &State) -> Option<Self> {
        Some(match state {
            State::Launching | State::Loading => Self::Starting,
            State::Waking { .. } => Self::Waking,
            State::Awake | State::Draining { .. } => Self::Serving,
            State::FallingAsleep { .. } => Self::FallingAsleep,
            State::Asleep { .. } => Self::Sleeping,
            State::Cold | State::Failing { .. } | State::Stopping { .. } | State::Backoff { .. } => {
                return None;
            }
        })
    }
}

impl Symptoms {
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.last_line.is_none() && self.probe.is_none() && self.system.is_none()
    }

    #[must_use]
    pub fn of_system(words: &str) -> Self {
        Self { system: Some(words.to_owned()), ..Self::default() }
    }

    /// Takes what is known anew, and only so much of it. What an engine writes must not steer a terminal.
    pub fn add(&mut self, more: &Self) {
        let cut = |text: &String| {
            text.trim().chars().take(LONGEST).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
        };
        self.last_line = more.last_line.as_ref().map(cut).or_else(|| self.last_line.take());
        self.probe = more.probe.as_ref().map(cut).or_else(|| self.probe.take());
        self.system = more.system.as_ref().map(cut).or_else(|| self.system.take());
    }

    /// For the admin: to stand behind what happened.
    #[must_use]
    pub fn words(&self) -> String {
        self.for_clients() + &self.for_admin()
    }

    /// What anybody may read of them: how a probe was answered is told in the gateway's own words.
    #[must_use]
    pub fn for_clients(&self) -> String {
        self.probe.as_ref().map(|probe| format!("; its last probe: {probe}")).unwrap_or_default()
    }

    /// The rest.
    #[must_use]
    pub fn for_admin(&self) -> String {
        let line = self.last_line.as_ref().map(|line| format!("; it wrote last: {line}"));
        let system = self.system.as_ref().map(|system| format!("; {system}"));
        system.into_iter().chain(line).collect()
    }
}

impl Failure {
    /// What failed and why: "last start failed at 02:42:05.000: exit status 1 (exited:1), 3 in a row".
    #[must_use]
    pub fn words(&self, at: Tick) -> String {
        let what = match self.doing {
            Doing::Starting => "last start failed",
            Doing::Waking => "last wake failed",
            Doing::Serving => "failed while it served",
            Doing::FallingAsleep => "failed to fall asleep",
            Doing::Sleeping => "failed in its sleep",
        };
        let row = if self.count > 1 { format!(", {} failures in a row", self.count) } else { String::new() };
        format!("{what} at {at}: {}{row}", self.cause.words())
    }
}

impl Past {
    /// A start that failed, as the gateway that leads tells of it: `count` in a row.
    #[must_use]
    pub fn of_start(at: Tick, generation: Generation, cause: Cause, count: u32) -> Self {
        let (doing, symptoms) = (Doing::Starting, Symptoms::default());
        Self { at, generation, what: Ending::Failed(Failure { doing, cause, count, symptoms }) }
    }

    /// In a row; none of one that was put away.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        match &self.what {
            Ending::Failed(failure) => failure.count,
            Ending::PutAway { .. } => 0,
        }
    }

    /// What the engine showed when it failed, for the admin.
    #[must_use]
    pub fn symptoms(&self) -> String {
        match &self.what {
            Ending::Failed(failure) => failure.symptoms.words(),
            Ending::PutAway { .. } => String::new(),
        }
    }

    /// For texts: "evicted at 02:42:05.000 for gamma".
    #[must_use]
    pub fn words(&self) -> String {
        let at = self.at;
        match &self.what {
            Ending::Failed(failure) => failure.words(at),
            Ending::PutAway { to: Some(to), .. } => format!("evicted at {at} for {to}"),
            Ending::PutAway { why, .. } => match why {
                Some(Why::Idle) => format!("put away at {at}, unused"),
                Some(Why::Turn) => format!("evicted at {at}"),
                Some(Why::Order) => format!("put away at {at} by order"),
                Some(Why::Outdated) => format!("stopped at {at}: its configuration changed"),
                Some(Why::Shutdown) => format!("stopped at {at} with the gateway"),
                // What fails otherwise has failed, and is not put away.
                Some(Why::Fault | Why::StaysAwake) => format!("stopped at {at}: it did not fall asleep"),
                Some(Why::Published) | None => format!("stopped at {at}"),
            },
        }
    }
}

/// Where people find what an engine wrote; nothing, where another system keeps that (a Pod's log).
#[must_use]
pub fn see_logs(spec: &ModelSpec) -> String {
    match spec.accelerators {
        Accelerators::Of { .. } => String::new(),
        Accelerators::Count(_) | Accelerators::Ids(_) => {
            format!("; 'rouse-gateway logs {}' shows what it wrote", spec.name)
        }
    }
}

impl Engine {
    /// Takes note of how a life ends, before `next` is entered.
    pub(super) fn remember(&mut self, next: &State, now: Tick) {
        let (State::Failing { cause, .. } | State::Stopping { cause } | State::Backoff { cause, .. }) = next
        else {
            return self.remember_put_away(next, now);
        };
        let Some(doing) = Doing::of(&self.state) else { return };
        if *cause == Cause::Stopped {
            return self.remember_put_away(next, now);
        }
        let count = 1 + self.failure().map_or(0, |failure| failure.count);
        let symptoms = std::mem::take(&mut self.symptoms);
        let what = Ending::Failed(Failure { doing, cause: cause.clone(), count, symptoms });
        self.past = Some(Past { at: now, generation: self.generation, what });
    }

    fn remember_put_away(&mut self, next: &State, now: Tick) {
        let (State::FallingAsleep { .. } | State::Stopping { .. }) = next else { return };
        let why = match &self.state {
            State::Draining { why, .. } => Some(*why),
            State::Asleep { .. } => None,
            // A start that is given up is no ending worth a word: what was before it is.
            _ => return,
        };
        let to = self.yielded_to.as_ref().filter(|_| why == Some(Why::Turn)).map(|to| to.model.clone());
        self.past = Some(Past { at: now, generation: self.generation, what: Ending::PutAway { why, to } });
    }

    /// It is stopped in its sleep, and this is why.
    pub fn stops_for(&mut self, reason: Why) {
        match &mut self.past {
            Some(Past { at, what: Ending::PutAway { why, .. }, .. }) if *at == self.since => {
                *why = Some(reason);
            }
            _ => {}
        }
    }

    /// It is stopped, for this model's sake.
    pub fn gives_way_to(&mut self, model: &ModelName) {
        match &mut self.past {
            Some(Past { at, what: Ending::PutAway { to, .. }, .. }) if *at == self.since => {
                *to = Some(model.clone());
            }
            _ => {}
        }
    }

    /// It was put away for another model's turn, and has not served since.
    pub(crate) fn is_evicted(&self) -> bool {
        let past = self.past.as_ref().map(|past| &past.what);
        matches!(past, Some(Ending::PutAway { why: Some(Why::Turn), .. }))
    }

    /// The last failure, where the engine has not served since.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match &self.past.as_ref()?.what {
            Ending::Failed(failure) => Some(failure),
            Ending::PutAway { .. } => None,
        }
    }

    /// As [`Self::failure`], for clients.
    #[must_use]
    pub fn last_failure(&self) -> Option<LastFailure> {
        let (past, failure) = (self.past.as_ref()?, self.failure()?);
        Some(LastFailure { at: past.at, cause: failure.cause.clone(), count: failure.count })
    }

    /// Its last start failed, and nothing runs: whoever asks next may meet the same.
    #[must_use]
    pub fn failed_to_start(&self) -> bool {
        !self.state.has_process() && self.failure().is_some_and(|failure| failure.doing == Doing::Starting)
    }

    /// It shows why it does not serve: now, or before it ended.
    pub fn shows(&mut self, symptoms: &Symptoms) {
        let generation = self.generation;
        match &mut self.past {
            Some(Past { generation: of, what: Ending::Failed(failure), .. }) if *of == generation => {
                failure.symptoms.add(symptoms);
            }
            _ => self.symptoms.add(symptoms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::command::Then,
        model::{EngineId, Level},
    };

    fn engine(state: State) -> Engine {
        Engine { state, generation: Generation(1), ..Engine::new(EngineId::new("m".into(), 0), Tick(0)) }
    }

    fn words(engine: &Engine) -> String {
        engine.past.as_ref().map(Past::words).unwrap_or_default()
    }

    #[test]
    fn failures_in_a_row_are_counted_and_keep_what_the_engine_said() {
        let mut engine = engine(State::Loading);
        let said = |line: &str| Symptoms { last_line: Some(line.to_owned()), ..Symptoms::default() };
        engine.shows(&said("No module named\t'llama_cpp'\n"));
        let gone = State::Backoff { until: Tick(0), cause: Cause::Exited(1) };
        engine.become_state(gone.clone(), Tick(1000));
        assert_eq!(words(&engine), "last start failed at 00:00:01.000: exit status 1 (exited:1)");
        let line = |engine: &Engine| engine.failure().and_then(|failure| failure.symptoms.last_line.clone());
        assert_eq!(line(&engine).as_deref(), Some("No module named\u{fffd}'llama_cpp'"));
        assert!(engine.failed_to_start());
        (engine.state, engine.generation) = (State::Launching, Generation(2));
        engine.shows(&Symptoms { probe: Some("status 503".to_owned()), ..Symptoms::default() });
        assert_eq!(
            line(&engine).as_deref(),
            Some("No module named\u{fffd}'llama_cpp'"),
            "of the life before"
        );
        engine.become_state(State::Stopping { cause: Cause::Timeout }, Tick(2000));
        engine.shows(&said("Loading"));
        engine.become_state(gone, Tick(3000));
        let failure = engine.failure().unwrap();
        assert_eq!((failure.count, &failure.cause), (2, &Cause::Timeout));
        assert_eq!(failure.symptoms.words(), "; its last probe: status 503; it wrote last: Loading");
    }

    #[test]
    fn who_had_the_memory_next_is_remembered() {
        let draining = |why| State::Draining { why, then: Then::Stop, revoked: false, drained: true };
        let stopped = State::Stopping { cause: Cause::Stopped };
        let mut evicted = engine(draining(Why::Turn));
        evicted.yielded_to = Some(EngineId::new("gamma".into(), 0));
        evicted.become_state(stopped.clone(), Tick(5000));
        evicted.become_state(State::Cold, Tick(6000));
        assert_eq!(words(&evicted), "evicted at 00:00:05.000 for gamma");
        assert!(!evicted.failed_to_start());
        let mut idle = engine(draining(Why::Idle));
        idle.become_state(stopped.clone(), Tick(5000));
        assert_eq!(words(&idle), "put away at 00:00:05.000, unused");
        let mut sleeper = engine(State::Asleep { level: Level::One });
        sleeper.become_state(stopped.clone(), Tick(5000));
        assert_eq!(words(&sleeper), "stopped at 00:00:05.000");
        sleeper.stops_for(Why::Idle);
        assert_eq!(words(&sleeper), "put away at 00:00:05.000, unused");
        sleeper.gives_way_to(&"gamma".into());
        assert_eq!(words(&sleeper), "evicted at 00:00:05.000 for gamma");
        let mut abandoned = engine(State::Loading);
        abandoned.become_state(stopped, Tick(5000));
        assert_eq!(words(&abandoned), "");
    }
}
