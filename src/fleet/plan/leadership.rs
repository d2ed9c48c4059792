//! Leadership: which of several gateways of a cluster decides about the fleet.
//!
//! One gateway leads. The others follow: they know engines as the leader publishes them (`apply_published`), grant
//! leases on awake engines to their own waiters, and command nothing about an engine's lifecycle. While requests wait
//! here, they still compute what they would decide (`forecast`), because waiters want to know what they wait for, and
//! then discard it.
//!
//! A follower knows less than the leader: neither reservations that are not in use yet, nor leases at gateways that
//! have not reported them. So it refuses only what no such knowledge could change; when in doubt, the request waits for
//! the leader's next publication. The leader publishes a failed start: followers refuse their waiters as the leader
//! refuses its own, or their demand would start the engine again and again.
//!
//! A new leader adopts what runs before it decides anything, as after a restart. Requests do not notice: awake engines
//! continue serving meanwhile.

mod forecast;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    engine::{Admission, Engine, ProbeState, state::LifecycleState},
    fault::Fault,
    fleet::{
        command::{AfterDrain, CloseReason, Command},
        plan::{KeptAwakeModels, PlanBuilder, Planner},
    },
    model::EngineId,
    units::{Generation, Millis, Tick},
};

/// This gateway's role in the cluster; a gateway alone always leads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::fleet) enum LeadershipRole {
    #[default]
    Leader,
    /// Another gateway leads, or none at this moment.
    Follower,
    /// This gateway leads from now on, and knows running engines only from its time as a follower.
    TakingOver,
}

/// Gate action of a gateway that does not decide.
enum FollowerGateAction {
    Open,
    Close,
    AwaitStub,
    /// Exchanges end with the reason: this gateway shuts down, or the engine has failed.
    CloseAndRevoke(CloseReason),
}

/// Time within which every other gateway reports its use.
///
/// It starts when this gateway leads or reaches the API server again. Each gateway tries to report every few seconds.
const PEER_REPORT_TIMEOUT: Millis = Millis::secs(15);

pub(in crate::fleet) const NOT_LEADER_MESSAGE: &str = "another gateway leads: send the order to the leader";

impl LeadershipRole {
    /// Whether this gateway commands engines.
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

    /// Becomes a follower. Engines keep their state until the new leader publishes another one.
    ///
    /// Reservations that are not in use yet are dropped: the new leader computes its own.
    fn step_down(&mut self, now: Tick) {
        self.role = LeadershipRole::Follower;
        self.unconfirmed_engines.clear();
        for model in Arc::make_mut(&mut self.models).values_mut() {
            // Only the operator who gave the order could withdraw it, and would do that at the leader.
            model.pin_override = None;
        }
        self.remove_all_targets();
        self.kept_awake = KeptAwakeModels::from_models(&self.models);
        let all: Vec<EngineId> = self.engines.values().map(|e| e.id.clone()).collect();
        for id in &all {
            let is_starting_or_releasing =
                |e: &Engine| e.pending_reservation.is_some() || e.releasing_since.is_some();
            if self.engines.get(id).is_some_and(is_starting_or_releasing) {
                self.engines.change(id, |e| (e.pending_reservation, e.releasing_since) = (None, None));
                self.book_as_observed(id, now);
            }
        }
    }

    /// Makes engines without a process start their next generation above this one.
    ///
    /// While taking over this waits for the end of adoption, because running engines are not known before.
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

    /// Ends adoption: all engines that already ran are known, so unconfirmed ones do not run.
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

    /// Records whether the cluster's API server answers.
    pub(in crate::fleet) fn set_api_answers(&mut self, answers: bool, now: Tick) {
        if answers && self.api_unreachable_since.take().is_some() {
            self.remote_use_unknown_until = Some(now + PEER_REPORT_TIMEOUT);
        } else if !answers {
            self.api_unreachable_since.get_or_insert(now);
        }
        self.due_index.invalidate();
    }

    /// When an unused engine has been idle for `after`.
    ///
    /// `None` while the API server does not answer, because other gateways cannot report that they use the engine. If
    /// they may have used it before they could report that, the moment is not before they have had time to report.
    pub(in crate::fleet) fn idle_at(&self, e: &Engine, after: Millis) -> Option<Tick> {
        let unheard = self
            .remote_use_unknown_until
            .filter(|by| !self.has_no_peers && e.turn_start + PEER_REPORT_TIMEOUT <= *by)
            .unwrap_or_default();
        self.api_unreachable_since.is_none().then(|| (e.idle_since() + after).max(unheard))
    }

    /// Gate action that an engine needs at a gateway that does not decide.
    ///
    /// The gate follows what the leader publishes, and nothing else.
    fn follower_gate_action(&self, e: &Engine) -> Option<FollowerGateAction> {
        let open = e.admission != Admission::Closed;
        if self.shutdown.is_some() {
            return open.then_some(FollowerGateAction::CloseAndRevoke(CloseReason::Shutdown));
        }
        // The engine's first request was sent while this gateway led, and is still in flight.
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

    /// Whether the gate needs nothing until the next event of the engine.
    pub(in crate::fleet) fn is_gate_in_sync(&self, e: &Engine) -> bool {
        e.unclosed_gate.is_none() && self.follower_gate_action(e).is_none()
    }

    /// Whether this gateway can explain what a model waits for.
    pub(in crate::fleet) const fn can_explain(&self) -> bool {
        match self.role {
            LeadershipRole::Leader => self.adopted,
            LeadershipRole::Follower => true,
            LeadershipRole::TakingOver => false,
        }
    }
}

impl PlanBuilder<'_> {
    /// Plans for a gateway that does not lead, or not yet.
    pub(in crate::fleet) fn plan_as_follower(&mut self) {
        self.advance_due();
        if self.planner.role != LeadershipRole::Follower {
            return;
        }
        for operation in self.planner.operations.keys().copied().collect::<Vec<_>>() {
            self.emit(Command::FinishOperation { operation, outcome: Err(NOT_LEADER_MESSAGE.to_owned()) });
        }
        if self.planner.shutdown.is_none() && forecast::waits_here(self.demand) {
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
}
