//! Who decides, where several gateways of a cluster have the same fleet.
//!
//! One of them leads. The others follow: they know engines as that one publishes them (`apply_published`), give leases on those
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

use crate::{
    engine::{Admission, Engine, ProbeState, state::LifecycleState},
    fault::Fault,
    fleet::{
        command::{AfterDrain, CloseReason, Command},
        plan::{PlanBuilder, Planner},
    },
    model::EngineId,
    units::{Generation, Millis, Tick},
};

/// What this gateway is to the cluster; a gateway alone always leads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::fleet) enum LeadershipRole {
    #[default]
    Leader,
    /// Another gateway does, or none at this moment.
    Follower,
    /// It leads from now on, and what runs is not known yet but for what it saw while it followed.
    TakingOver,
}

/// What a gateway that does not decide does to an engine's gate.
enum FollowerGateAction {
    Open,
    Close,
    AwaitStub,
    /// Whoever is inside is told why: this gateway ends, or the engine has failed.
    CloseAndRevoke(CloseReason),
}

/// So long after this gateway leads, or hears of the cluster again, every other that there is has said what it has in use:
/// each tries to say it every few seconds.
const PEER_REPORT_TIMEOUT: Millis = Millis::secs(15);

pub(in crate::fleet) const NOT_LEADER_MESSAGE: &str = "another gateway leads: give the order there";

impl LeadershipRole {
    /// It orders engines about.
    pub(in crate::fleet) const fn decides(&self) -> bool {
        matches!(self, Self::Leader)
    }
}

impl Planner {
    pub(in crate::fleet) fn set_leadership(&mut self, leads: bool, now: Tick) {
        match (self.role, leads) {
            (LeadershipRole::Follower, true) => {
                self.role = LeadershipRole::TakingOver;
                let running = self.engines.values().filter(|e| e.state.has_process());
                self.unconfirmed_engines = running.map(|e| e.id.clone()).collect();
            }
            (LeadershipRole::Leader | LeadershipRole::TakingOver, false) => self.step_down(now),
            _ => return,
        }
        self.due_index.invalidate();
    }

    /// Engines stay as they are until the one that leads now says otherwise. What was reserved and not used is given up:
    /// who leads finds that out by itself.
    fn step_down(&mut self, now: Tick) {
        self.role = LeadershipRole::Follower;
        self.unconfirmed_engines.clear();
        for model in Arc::make_mut(&mut self.models).values_mut() {
            // Only the one who gave the order could take it back, and would do so where it is known.
            model.pin_override = None;
        }
        let all: Vec<EngineId> = self.engines.values().map(|e| e.id.clone()).collect();
        for id in &all {
            let begun = |e: &Engine| e.pending_reservation.is_some() || e.releasing_since.is_some();
            if self.engines.get(id).is_some_and(begun) {
                self.engines.change(id, |e| (e.pending_reservation, e.releasing_since) = (None, None));
                self.book_as_observed(id, now);
            }
        }
    }

    /// Engines that have no life begin their next one above this; of which that is true is not known before all is found
    /// that runs.
    pub(in crate::fleet) fn raise_generation_floor(&mut self, generation: Generation) {
        self.last_generation = self.last_generation.max(generation);
        if self.role != LeadershipRole::TakingOver {
            self.apply_generation_floor(self.last_generation);
        }
    }

    fn apply_generation_floor(&mut self, generation: Generation) {
        let between = self.engines.values().filter(|e| {
            !e.state.has_process()
                && e.pending_reservation.is_none()
                && e.unclosed_gate.is_none()
                && e.generation < generation
        });
        let between: Vec<EngineId> = between.map(|e| e.id.clone()).collect();
        for id in &between {
            self.engines.change(id, |e| e.generation = generation);
        }
    }

    /// Everything that already ran is known. Whatever was only believed to run does not.
    pub(in crate::fleet) fn adoption_done(&mut self, now: Tick) {
        self.adopted = true;
        if self.role != LeadershipRole::TakingOver {
            return;
        }
        self.role = LeadershipRole::Leader;
        for id in std::mem::take(&mut self.unconfirmed_engines) {
            self.record_vanished(&id, now);
        }
        self.apply_generation_floor(self.last_generation);
        self.remote_use_unknown_until = Some(now + PEER_REPORT_TIMEOUT);
        self.due_index.invalidate();
    }

    /// Whether the cluster's API does.
    pub(in crate::fleet) fn set_api_answers(&mut self, answers: bool, now: Tick) {
        if answers && self.api_unreachable_since.take().is_some() {
            self.remote_use_unknown_until = Some(now + PEER_REPORT_TIMEOUT);
        } else if !answers {
            self.api_unreachable_since.get_or_insert(now);
        }
        self.due_index.invalidate();
    }

    /// When an engine that nobody is known to use has been idle for so long. Never while others cannot say that they use it,
    /// and, of one that they may have used before they could, not before they have had the time to.
    pub(in crate::fleet) fn idle_at(&self, e: &Engine, after: Millis) -> Option<Tick> {
        let unheard = self
            .remote_use_unknown_until
            .filter(|by| !self.has_no_peers && e.turn_start + PEER_REPORT_TIMEOUT <= *by)
            .unwrap_or_default();
        self.api_unreachable_since.is_none().then(|| (e.idle_since() + after).max(unheard))
    }

    /// What its gate needs of a gateway that does not decide: it follows what is published, and nothing else does.
    fn follower_gate_action(&self, e: &Engine) -> Option<FollowerGateAction> {
        let open = e.admission != Admission::Closed;
        if self.shutdown.is_some() {
            return open.then_some(FollowerGateAction::CloseAndRevoke(CloseReason::Shutdown));
        }
        // Its first request was sent while this gateway led, and is not over.
        let proves = e.state.is_starting()
            && e.admission != Admission::Public
            && matches!(e.probe_state, ProbeState::InFlight(_));
        match &e.state {
            LifecycleState::Awake if e.must_await_stub() => Some(FollowerGateAction::AwaitStub),
            _ if proves => e.must_await_stub().then_some(FollowerGateAction::AwaitStub),
            LifecycleState::Awake if e.stub_gate_closed || e.admission == Admission::Public => None,
            LifecycleState::Awake => (self.role == LeadershipRole::Follower && e.address.is_some())
                .then_some(FollowerGateAction::Open),
            LifecycleState::Failing { .. } if open => {
                Some(FollowerGateAction::CloseAndRevoke(CloseReason::Fault))
            }
            _ => open.then_some(FollowerGateAction::Close),
        }
    }

    /// It needs nothing until something befalls it.
    pub(in crate::fleet) fn is_gate_in_sync(&self, e: &Engine) -> bool {
        e.unclosed_gate.is_none() && self.follower_gate_action(e).is_none()
    }

    /// It can be said what a model waits for.
    pub(in crate::fleet) const fn can_explain(&self) -> bool {
        match self.role {
            LeadershipRole::Leader => self.adopted,
            LeadershipRole::Follower => true,
            LeadershipRole::TakingOver => false,
        }
    }
}

impl PlanBuilder<'_> {
    /// What a gateway decides that does not lead, or not yet.
    pub(in crate::fleet) fn plan_as_follower(&mut self) {
        self.advance_due();
        if self.planner.role != LeadershipRole::Follower {
            return;
        }
        for operation in self.planner.operations.keys().copied().collect::<Vec<_>>() {
            self.emit(Command::FinishOperation { operation, outcome: Err(NOT_LEADER_MESSAGE.to_owned()) });
        }
        if self.planner.shutdown.is_none() && !self.demand.is_empty() {
            self.forecast_reasons();
        }
    }

    pub(in crate::fleet) fn sync_gate(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        let (engine, generation) = (id.clone(), e.generation);
        match self.planner.follower_gate_action(e) {
            None => {}
            Some(FollowerGateAction::Open) => {
                self.emit(Command::OpenGate { engine, generation, public: true })
            }
            Some(FollowerGateAction::AwaitStub) => self.emit(Command::AwaitStub { engine, generation }),
            Some(FollowerGateAction::Close) => {
                self.close_gate(id, CloseReason::PublishedNotAwake, AfterDrain::Stop)
            }
            Some(FollowerGateAction::CloseAndRevoke(why)) => {
                let fault = match &e.state {
                    LifecycleState::Failing { cause, .. } if why == CloseReason::Fault => {
                        let (model, cause) = (id.model.clone(), cause.clone());
                        Fault::EngineFailed { model, cause, wait: None }
                    }
                    _ => Fault::ShuttingDown,
                };
                self.close_gate(id, why, AfterDrain::Stop);
                self.emit(Command::RevokeLeases { engine, generation, fault });
            }
        }
    }

    /// What the leader would say to those who wait here, did it know no more.
    fn forecast_reasons(&mut self) {
        let mut ahead = PlanBuilder::new(self.planner.clone(), self.demand, self.waiting_clients, self.now);
        ahead.planner.role = LeadershipRole::Leader;
        ahead.admit();
        // Where anything is to be decided, the leader may have decided otherwise, and this gateway has not heard yet.
        let reads = |command: &Command| matches!(command, Command::ReadMeter { .. });
        let settled = ahead.claims.is_empty() && ahead.take_commands().iter().all(reads);
        let mut reasons = ahead.into_reasons();
        for (model, reason) in Arc::make_mut(&mut reasons) {
            let runs = self.planner.engines_of(model).any(|e| e.state.has_process());
            *reason = std::mem::take(reason).into_follower_forecast(settled, runs, self.now);
        }
        self.reasons = reasons;
    }
}
