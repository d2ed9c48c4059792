//! The gateway's fleet, as far as pairing sees it: it wants engines awake and asleep while their requesters stay.
//!
//! During faults wants come at random, for any requester and whether the memory allows them or not. Once the cluster is
//! calm, the gateway wants one engine of each accelerator awake, and the others asleep.

use std::collections::BTreeSet;

use super::{ClusterEvent, SimulatedCluster, pods::SimulatedRequester};
use crate::{
    model::{AcceleratorId, SleepLevel},
    pairing::{
        PairingPlan,
        command::{EngineStep, EngineStopReason, PairingAction, RequesterStep},
        event::{PairingEvent, WantedState},
        ids::{EngineFingerprint, NodeName, RequesterId},
        node::PairingEngine,
    },
    units::{Bytes, Millis},
};

impl SimulatedCluster {
    /// Whether accelerators have several slots, so that the gateway decides whose engine is awake.
    pub(super) const fn is_shared(&self) -> bool {
        self.scenario.slots > 1
    }

    pub(super) fn random_want(&mut self) {
        let Some(every) = self.scenario.want_interval.filter(|_| !self.quiescing) else { return };
        let ids: Vec<_> =
            self.requesters.iter().filter(|(_, r)| !r.terminated).map(|(id, _)| id.clone()).collect();
        if let Some(id) = self.random.pick(&ids).cloned() {
            if self.random.chance(0.1) {
                self.withdraw_want(&id);
            } else {
                let wanted = self.random_state();
                self.send_want(&id, wanted);
            }
        }
        let after = Millis(self.random.exponential(every.0));
        self.schedule(after, ClusterEvent::RandomWant);
    }

    /// Wants something of a new requester's engine, which may be known before the requester is observed.
    pub(super) fn first_want(&mut self, id: &RequesterId) {
        if self.quiescing {
            self.settle_wants();
        } else if self.is_shared() && self.random.chance(0.3) {
            let wanted = self.random_state();
            self.send_want(id, wanted);
        }
    }

    fn random_state(&mut self) -> WantedState {
        let level = if self.random.chance(0.7) { SleepLevel::One } else { SleepLevel::Two };
        if self.random.chance(0.5) { WantedState::Awake } else { WantedState::Asleep { level } }
    }

    fn send_want(&mut self, id: &RequesterId, wanted: WantedState) {
        let Some(requester) = self.requesters.get_mut(id) else { return };
        requester.wanted = Some(wanted);
        let node = requester.node.clone();
        self.count("wants");
        self.emit(PairingEvent::Want { node, requester: id.clone(), wanted });
    }

    fn withdraw_want(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get_mut(id) else { return };
        requester.wanted = None;
        let node = requester.node.clone();
        self.count("wants withdrawn");
        self.emit(PairingEvent::WantWithdrawn { node, requester: id.clone() });
    }

    /// Repeats every want to a new leader, each after a while of its own.
    pub(super) fn repeat_wants(&mut self) {
        let wanted = self.requesters.iter().filter(|(_, requester)| requester.wanted.is_some());
        let ids: Vec<RequesterId> = wanted.map(|(id, _)| id.clone()).collect();
        for id in ids {
            let after = self.random_duration((0, 3000));
            self.schedule(after, ClusterEvent::RepeatWant(id));
        }
    }

    pub(super) fn repeat_want(&mut self, id: &RequesterId) {
        let wanted = self.requesters.get(id).and_then(|requester| requester.wanted);
        wanted.into_iter().for_each(|wanted| self.send_want(id, wanted));
    }

    /// Passes on what the present leader was sent for a requester when it observes that requester, as the controller
    /// does: pairing forgets the wants of requesters that it has not observed when their node goes.
    pub(super) fn pass_on_want(&mut self, event: &PairingEvent) {
        if let PairingEvent::RequesterObserved { node, requester, observed } = event
            && observed.actuated
            && let Some(wanted) = self.audit.wants.get(requester).copied()
        {
            let (node, requester) = (node.clone(), requester.clone());
            self.pairing.on(&PairingEvent::Want { node, requester, wanted }, self.now);
        }
    }

    /// In a calm cluster, wants one engine of each accelerator awake: one that is wanted awake already, if any.
    pub(super) fn settle_wants(&mut self) {
        if !self.quiescing || !self.is_shared() {
            return;
        }
        let stays = |r: &SimulatedRequester| r.deleting_since.is_none() && !r.terminated;
        let mut staying: Vec<_> = self.requesters.iter().filter(|(_, r)| stays(r)).collect();
        staying.sort_by_key(|(id, r)| (r.wanted != Some(WantedState::Awake), (*id).clone()));
        let mut taken: BTreeSet<(&NodeName, &AcceleratorId)> = BTreeSet::new();
        let mut changes = Vec::new();
        for (id, requester) in staying {
            let needed: Vec<_> = requester.accelerators.iter().map(|a| (&requester.node, a)).collect();
            let wanted = if needed.iter().any(|accelerator| taken.contains(accelerator)) {
                WantedState::Asleep { level: SleepLevel::One }
            } else {
                taken.extend(needed);
                WantedState::Awake
            };
            if requester.wanted != Some(wanted) {
                changes.push((id.clone(), wanted));
            }
        }
        for (id, wanted) in changes {
            self.send_want(&id, wanted);
        }
    }

    /// Checks that the plan does nothing against the gateway's wants. Call it before the plan is recorded.
    pub(super) fn check_wants(&mut self, plan: &PairingPlan) {
        for command in &plan.commands {
            let PairingAction::Engine { engine, step, .. } = &command.action else { continue };
            let node = self.pairing.node(&command.node);
            let known = node.and_then(|node| node.engines.get(engine));
            let requester = known.and_then(PairingEngine::requester);
            let is_bound_sleeper = known.is_some_and(|known| known.awaits_want);
            let stays = node.zip(known).is_some_and(|(node, known)| node.staying_requester(known).is_some())
                && requester.is_none_or(|id| !deletes(plan, id));
            let want_of = |id: &RequesterId| self.audit.wants.get(id).copied();
            let is_awake_wanted = |id: Option<&RequesterId>| id.and_then(want_of) == Some(WantedState::Awake);
            let contradiction = match step {
                EngineStep::Wake { via, .. } => (!is_awake_wanted(Some(via))).then_some("woken"),
                EngineStep::Create { record } | EngineStep::Bind { record } if requester.is_none() => {
                    (!is_awake_wanted(record.requester.as_ref())).then_some("bound")
                }
                EngineStep::Sleep { .. } if stays => {
                    let is_wanted = matches!(requester.and_then(want_of), Some(WantedState::Asleep { .. }));
                    (!is_wanted).then_some("put to sleep")
                }
                EngineStep::Stop { reason } if requester.is_some() && is_for_room(*reason) => {
                    Some("stopped to make room")
                }
                _ => None,
            };
            let counter = match step {
                EngineStep::Wake { .. } if is_bound_sleeper => Some("bound sleepers woken"),
                EngineStep::Sleep { .. } if stays => Some("bound sleepers"),
                _ => None,
            };
            if let Some(what) = contradiction.filter(|_| self.is_shared()) {
                self.record_violation(format!("{engine} is {what} against the want of the gateway"));
            }
            counter.into_iter().for_each(|counter| self.count(counter));
        }
    }

    /// Memory that other engines keep of this accelerator because their requesters stay.
    pub(super) fn bound_sleepers_on(
        &self,
        node: &NodeName,
        accelerator: &AcceleratorId,
        except: EngineFingerprint,
    ) -> Bytes {
        let Some(node) = self.pairing.node(node) else { return Bytes::ZERO };
        let bound = node.engines_on(accelerator).filter(|e| e.awaits_want && e.id.fingerprint != except);
        bound.map(|engine| engine.reserved).sum()
    }
}

/// Whether the plan deletes this requester.
fn deletes(plan: &PairingPlan, id: &RequesterId) -> bool {
    plan.commands.iter().any(|command| {
        let action = &command.action;
        matches!(action, PairingAction::Requester { requester, step: RequesterStep::Delete { .. } } if requester == id)
    })
}

/// Whether this reason may stop unbound sleepers only.
const fn is_for_room(reason: EngineStopReason) -> bool {
    matches!(reason, EngineStopReason::Evicted | EngineStopReason::Displaced | EngineStopReason::Idle)
}
