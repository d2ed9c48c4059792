//! Who decides, where several gateways of a cluster have the same fleet.
//!
//! One of them leads. The others follow: they know engines as that one publishes them (`mirror`), give leases on those
//! that are awake to their own waiters, and order nothing of an engine's life. What they would decide they find out all
//! the same, since a waiter is to be told what it waits for, and then throw it away.
//!
//! A follower knows less than the leader: nothing of memory that is booked and not used yet, of leases at other
//! gateways that did not say. So it refuses only what no such knowledge could change; when in doubt somebody waits, and
//! the leader's next word decides. Of a start that failed that word is published: those who wait here are refused as
//! those who wait at the leader are, or their demand would have it started again and again.
//!
//! Who comes to lead adopts what runs before it decides anything, as after a restart. Requests do not notice: what was
//! awake goes on serving meanwhile.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    command::{Command, Then, Why},
    plan::{Draft, Planner},
};
use crate::{
    engine::{Door, Engine, Proof, state::State},
    fault::Fault,
    model::EngineId,
    units::{Generation, Millis, Tick},
};

/// What this gateway is to the cluster; a gateway alone always leads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Role {
    #[default]
    Leads,
    /// Another gateway does, or none at this moment.
    Follows,
    /// It leads from now on, and what runs is not known yet but for what it saw while it followed.
    TakesOver,
}

/// What a gateway that does not decide does to an engine's gate.
enum Turn {
    Open,
    Close,
    Hold,
    /// Whoever is inside is told why: this gateway ends, or the engine has failed.
    End(Why),
}

/// So long after this gateway leads, or hears of the cluster again, every other that there is has said what it has in use:
/// each tries to say it every few seconds.
const HEARD: Millis = Millis::secs(15);

pub(super) const ANOTHER_LEADS: &str = "another gateway leads: give the order there";

impl Role {
    /// It orders engines about.
    pub(super) const fn decides(&self) -> bool {
        matches!(self, Self::Leads)
    }
}

impl Planner {
    pub(super) fn led(&mut self, leads: bool, now: Tick) {
        match (self.role, leads) {
            (Role::Follows, true) => {
                self.role = Role::TakesOver;
                let running = self.engines.values().filter(|e| e.state.has_process());
                self.unfound = running.map(|e| e.id.clone()).collect();
            }
            (Role::Leads | Role::TakesOver, false) => self.step_down(now),
            _ => return,
        }
        self.calm.forget();
    }

    /// Engines stay as they are until the one that leads now says otherwise. What was reserved and not used is given up:
    /// who leads finds that out by itself.
    fn step_down(&mut self, now: Tick) {
        self.role = Role::Follows;
        self.unfound.clear();
        for model in Arc::make_mut(&mut self.models).values_mut() {
            // Only the one who gave the order could take it back, and would do so where it is known.
            model.pin = None;
        }
        let all: Vec<EngineId> = self.engines.values().map(|e| e.id.clone()).collect();
        for id in &all {
            let begun = |e: &Engine| e.placing.is_some() || e.shrinking.is_some();
            if self.engines.get(id).is_some_and(begun) {
                self.engines.change(id, |e| (e.placing, e.shrinking) = (None, None));
                self.book_as_seen(id, now);
            }
        }
    }

    /// Engines that have no life begin their next one above this; of which that is true is not known before all is found
    /// that runs.
    pub(super) fn lives_from(&mut self, generation: Generation) {
        self.last_life = self.last_life.max(generation);
        if self.role != Role::TakesOver {
            self.begin_lives_from(self.last_life);
        }
    }

    fn begin_lives_from(&mut self, generation: Generation) {
        let between = self.engines.values().filter(|e| {
            !e.state.has_process() && e.placing.is_none() && e.orphan.is_none() && e.generation < generation
        });
        let between: Vec<EngineId> = between.map(|e| e.id.clone()).collect();
        for id in &between {
            self.engines.change(id, |e| e.generation = generation);
        }
    }

    /// Everything that already ran is known. Whatever was only believed to run does not.
    pub(super) fn adoption_done(&mut self, now: Tick) {
        self.adopted = true;
        if self.role != Role::TakesOver {
            return;
        }
        self.role = Role::Leads;
        for id in std::mem::take(&mut self.unfound) {
            self.vanish(&id, now);
        }
        self.begin_lives_from(self.last_life);
        self.heard_by = Some(now + HEARD);
        self.calm.forget();
    }

    /// Whether the cluster's API does.
    pub(super) fn answers(&mut self, answers: bool, now: Tick) {
        if answers && self.cut_off.take().is_some() {
            self.heard_by = Some(now + HEARD);
        } else if !answers {
            self.cut_off.get_or_insert(now);
        }
        self.calm.forget();
    }

    /// When an engine that nobody is known to use has been idle for so long. Never while others cannot say that they use it,
    /// and, of one that they may have used before they could, not before they have had the time to.
    pub(super) fn idle_at(&self, e: &Engine, after: Millis) -> Option<Tick> {
        let unheard = self.heard_by.filter(|by| !self.alone && e.turn + HEARD <= *by).unwrap_or_default();
        self.cut_off.is_none().then(|| (e.idle_since() + after).max(unheard))
    }

    /// What its gate needs of a gateway that does not decide: it follows what is published, and nothing else does.
    fn turn_of_gate(&self, e: &Engine) -> Option<Turn> {
        let open = e.door != Door::Closed;
        if self.shutdown.is_some() {
            return open.then_some(Turn::End(Why::Shutdown));
        }
        // Its first request was sent while this gateway led, and is not over.
        let proves = e.state.is_starting() && e.door != Door::Public && matches!(e.proof, Proof::Out(_));
        match &e.state {
            State::Awake if e.is_to_be_held() => Some(Turn::Hold),
            _ if proves => e.is_to_be_held().then_some(Turn::Hold),
            State::Awake if e.gated || e.door == Door::Public => None,
            State::Awake => (self.role == Role::Follows && e.address.is_some()).then_some(Turn::Open),
            State::Failing { .. } if open => Some(Turn::End(Why::Fault)),
            _ => open.then_some(Turn::Close),
        }
    }

    /// It needs nothing until something befalls it.
    pub(super) fn is_followed(&self, e: &Engine) -> bool {
        e.orphan.is_none() && self.turn_of_gate(e).is_none()
    }

    /// It can be said what a model waits for.
    pub(super) const fn knows(&self) -> bool {
        match self.role {
            Role::Leads => self.adopted,
            Role::Follows => true,
            Role::TakesOver => false,
        }
    }
}

impl Draft<'_> {
    /// What a gateway decides that does not lead, or not yet.
    pub(super) fn follow(&mut self) {
        self.attend();
        if self.planner.role != Role::Follows {
            return;
        }
        for operation in self.planner.operations.keys().copied().collect::<Vec<_>>() {
            self.emit(Command::Finish { operation, outcome: Err(ANOTHER_LEADS.to_owned()) });
        }
        if self.planner.shutdown.is_none() && !self.demand.is_empty() {
            self.foresee();
        }
    }

    pub(super) fn follow_gate(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let (engine, generation) = (id.clone(), e.generation);
        match self.planner.turn_of_gate(e) {
            None => {}
            Some(Turn::Open) => self.emit(Command::OpenGate { engine, generation, public: true }),
            Some(Turn::Hold) => self.emit(Command::Hold { engine, generation }),
            Some(Turn::Close) => self.close(id, Why::Published, Then::Stop),
            Some(Turn::End(why)) => {
                let fault = match &e.state {
                    State::Failing { cause, .. } if why == Why::Fault => {
                        let (model, cause) = (id.model.clone(), cause.clone());
                        Fault::EngineFailed { model, cause, wait: None }
                    }
                    _ => Fault::ShuttingDown,
                };
                self.close(id, why, Then::Stop);
                self.emit(Command::Revoke { engine, generation, fault });
            }
        }
    }

    /// What the leader would say to those who wait here, did it know no more.
    fn foresee(&mut self) {
        let mut ahead = Draft::new(self.planner.clone(), self.demand, self.clients, self.now);
        ahead.planner.role = Role::Leads;
        ahead.admit();
        // Where anything is to be decided, the leader may have decided otherwise, and this gateway has not heard yet.
        let reads = |command: &Command| matches!(command, Command::Meter { .. });
        let settled = ahead.claims.is_empty() && ahead.take_commands().iter().all(reads);
        let mut reasons = ahead.into_reasons();
        for (model, reason) in Arc::make_mut(&mut reasons) {
            let runs = self.planner.engines_of(model).any(|e| e.state.has_process());
            *reason = std::mem::take(reason).foreseen(settled, runs, self.now);
        }
        self.reasons = reasons;
    }
}
