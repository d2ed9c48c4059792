//! Bounds what repeats until nothing changes, and reports what did not come to rest.

use std::{collections::BTreeSet, fmt};

use crate::{
    fleet::{MAX_REPLANS, command::Command, event::Event},
    model::ModelName,
};

/// Limit on turns that follow from each other with nothing from outside. A driver that takes more spins.
pub const MAX_CHAINED_TURNS: u32 = 500;
/// Events and commands that a report names at most.
const MAX_NAMED: usize = 12;

/// Counts the turns that only follow from the turn before them, and reports each defect of theirs once.
#[derive(Clone, Debug, Default)]
pub struct TurnChain {
    length: u32,
    /// A plan of this chain gave up.
    plan_gave_up: bool,
    /// A plan that gave up has been reported. Reset after a chain in which no plan gave up: on a busy gateway each turn
    /// begins a chain.
    plan_reported: bool,
}

/// Work that was repeated until its limit and still did not come to rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsettledWork {
    work: &'static str,
    limit: u32,
    models: BTreeSet<ModelName>,
    causes: Vec<String>,
}

impl TurnChain {
    /// Begins a new chain: time has passed, or an event came from outside.
    pub const fn begin(&mut self) {
        self.length = 0;
        self.plan_reported &= self.plan_gave_up;
        self.plan_gave_up = false;
    }

    /// Counts a turn with these events. Returns a report when the chain gets longer than its limit, once a chain.
    pub fn extend(&mut self, events: &[Event]) -> Option<UnsettledWork> {
        self.length = self.length.saturating_add(1);
        (self.length == MAX_CHAINED_TURNS + 1).then(|| {
            UnsettledWork::new(
                "turns of the driver with nothing from outside",
                MAX_CHAINED_TURNS,
                events,
                &[],
            )
        })
    }

    /// Records that the plan of a turn gave up. Returns a report, but none in the chains that follow while their plans
    /// give up too.
    pub(super) fn record_given_up_plan(
        &mut self,
        events: &[Event],
        commands: &[Command],
    ) -> Option<UnsettledWork> {
        self.plan_gave_up = true;
        let is_reported = std::mem::replace(&mut self.plan_reported, true);
        (!is_reported).then(|| {
            let passes = u32::try_from(MAX_REPLANS).unwrap_or(u32::MAX);
            UnsettledWork::new("passes of one plan that each added a command", passes, events, commands)
        })
    }

    /// Whether the next turn has to wait for something from outside.
    #[must_use]
    pub const fn is_exhausted(&self) -> bool {
        self.length > MAX_CHAINED_TURNS
    }
}

impl UnsettledWork {
    /// Names the models, events and commands of the last round.
    #[must_use]
    pub fn new(work: &'static str, limit: u32, events: &[Event], commands: &[Command]) -> Self {
        let models = events.iter().filter_map(model_of_event);
        let models = models.chain(commands.iter().filter_map(model_of_command)).cloned().collect();
        let causes = events.iter().map(ToString::to_string);
        let causes = causes.chain(commands.iter().map(|command| format!("> {command}")));
        Self { work, limit, models, causes: causes.take(MAX_NAMED).collect() }
    }
}

impl fmt::Display for UnsettledWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let models: Vec<&str> = self.models.iter().map(ModelName::as_str).collect();
        let models = if models.is_empty() { "none".to_owned() } else { models.join(", ") };
        let Self { work, limit, causes, .. } = self;
        write!(f, "gave up after {limit} {work}; models: {models}; last: ")?;
        f.write_str(&causes.join("; "))
    }
}

fn model_of_event(event: &Event) -> Option<&ModelName> {
    Some(match event {
        Event::Arrived { waiter } => &waiter.model,
        Event::MeasurementsRestored { model, .. }
        | Event::Served { model, .. }
        | Event::FairnessRestored { model, .. }
        | Event::OperatorRequest { model, .. }
        | Event::Desired { model, .. } => model,
        Event::FailureRestored { engine, .. }
        | Event::GateSampled { engine, .. }
        | Event::EjectionChanged { engine, .. }
        | Event::SaturationChanged { engine, .. }
        | Event::StubGateClosed { engine, .. }
        | Event::StubGateOpened { engine, .. }
        | Event::Published { engine, .. }
        | Event::Drained { engine, .. }
        | Event::Canary { engine, .. }
        | Event::Placed { engine, .. }
        | Event::Conflict { engine, .. }
        | Event::Started { engine, .. }
        | Event::Profiled { engine, .. }
        | Event::Ready { engine, .. }
        | Event::Slept { engine, .. }
        | Event::SleepFailed { engine, .. }
        | Event::WakeFailed { engine, .. }
        | Event::StartFailed { engine, .. }
        | Event::Gone { engine, .. }
        | Event::Diagnostics { engine, .. }
        | Event::Health { engine, .. }
        | Event::UsageObserved { engine, .. }
        | Event::ResidueMeasured { engine, .. }
        | Event::UsageAfterSleep { engine, .. }
        | Event::Adopted { engine, .. } => &engine.model,
        _ => return None,
    })
}

const fn model_of_command(command: &Command) -> Option<&ModelName> {
    match command {
        Command::Reserve { engine, .. }
        | Command::Shrink { engine, .. }
        | Command::Launch { engine, .. }
        | Command::Probe { engine, .. }
        | Command::Sleep { engine, .. }
        | Command::Wake { engine, .. }
        | Command::Stop { engine, .. }
        | Command::AwaitStub { engine, .. }
        | Command::OpenGate { engine, .. }
        | Command::CloseGate { engine, .. }
        | Command::RevokeLeases { engine, .. }
        | Command::Grant { engine, .. } => Some(&engine.model),
        Command::ReadMeter { .. } | Command::Refuse { .. } | Command::FinishOperation { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::EngineId, units::Generation};

    #[test]
    fn a_chain_of_turns_is_reported_once_with_its_models_and_events() {
        let events = [Event::Drained { engine: EngineId::new("chat".into(), 0), generation: Generation(1) }];
        let mut chain = TurnChain::default();
        for _ in 0..MAX_CHAINED_TURNS {
            assert_eq!(chain.extend(&events), None);
            assert!(!chain.is_exhausted());
        }
        let report = chain.extend(&events).expect("the limit is passed").to_string();
        assert_eq!(
            report,
            "gave up after 500 turns of the driver with nothing from outside; models: chat; last: chat#0 is drained"
        );
        assert!(chain.is_exhausted() && chain.extend(&events).is_none());
        chain.begin();
        assert!(!chain.is_exhausted());
    }

    #[test]
    fn a_plan_that_gives_up_turn_after_turn_is_reported_once() {
        let engine = EngineId::new("chat".into(), 0);
        let events = [Event::Drained { engine: engine.clone(), generation: Generation(1) }];
        let commands = [Command::AwaitStub { engine, generation: Generation(1) }];
        let mut chain = TurnChain::default();
        chain.begin();
        let report = chain.record_given_up_plan(&events, &commands).expect("the first one").to_string();
        let start = "gave up after 8 passes of one plan that each added a command; models: chat; \
                     last: chat#0 is drained; > ";
        assert!(report.starts_with(start), "{report}");
        for _ in 0..10 {
            assert_eq!(chain.record_given_up_plan(&events, &commands), None, "in the same chain");
        }
        for _ in 0..10 {
            chain.begin();
            assert_eq!(chain.record_given_up_plan(&events, &commands), None, "in a chain that follows");
        }
        // The plans of one chain come to rest.
        chain.begin();
        chain.begin();
        assert!(chain.record_given_up_plan(&events, &commands).is_some());
    }
}
