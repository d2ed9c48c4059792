//! The decisions about a fleet of engines. See [`event`] for what comes in and [`command`] for what goes out.

pub mod command;
pub mod event;
pub mod report;

use command::Command;
use event::Event;
use report::{Report, View};

use crate::units::Tick;

/// Everything that is decided about engines and requests. Pure: the same events at the same moments give the same
/// commands.
#[derive(Clone, Debug, Default)]
pub struct Fleet {}

/// What to do now, and for every model why.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub commands: Vec<Command>,
    pub report: Report,
}

impl Fleet {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes note of an observation. Decides nothing.
    pub fn on(&mut self, event: &Event, now: Tick) {
        let _ = (event, now);
    }

    /// What should be done at this moment. Changes nothing: call [`Self::issued`] with what will really be submitted.
    #[must_use]
    pub fn plan(&self, now: Tick) -> Plan {
        let _ = now;
        Plan::default()
    }

    /// Records commands as given, before they are submitted. Planning again at the same moment yields none.
    pub fn issued(&mut self, commands: &[Command], now: Tick) {
        let _ = (commands, now);
    }

    /// The next moment at which planning may give something without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        None
    }

    /// The state, for people.
    #[must_use]
    pub fn view(&self, now: Tick) -> View {
        let _ = now;
        View::default()
    }

    /// Every broken invariant, in words; empty when all is well.
    #[must_use]
    pub fn check(&self) -> Vec<String> {
        Vec::new()
    }
}
