//! The order in which requesters get engines, and bound sleepers their memory back.
//!
//! Requesters are served in the order of their creation, or of the want that makes them wait. A requester that waits
//! for memory keeps later ones from its accelerators, so a large engine is not passed over for ever. A requester that
//! waits for a launcher keeps later ones from that launcher alone, and one that memory cannot help keeps them from
//! nothing: with slots, the other models of the accelerator go on.

use std::collections::BTreeSet;

use super::{
    command::{EngineStep, EngineStopReason},
    fit::{FitResult, IncomingEngine},
    ids::{PairingEngineId, ProviderId, RequesterId},
    node::{PairingEngineState, PairingRequester},
    node_plan::NodePlanBuilder,
};
use crate::model::{AcceleratorId, SleepLevelPolicy};

/// Why a requester gets no engine now, and what it keeps from later requesters until it does.
pub(super) struct AssignmentWait {
    pub(super) reason: String,
    pub(super) claim: WaitClaim,
}

pub(super) enum WaitClaim {
    Nothing,
    /// A launcher that must be created, replaced or become ready.
    Provider(ProviderId),
    /// The accelerators of this engine.
    Memory(PairingEngineId),
}

/// What waiting requesters keep from later ones.
#[derive(Default)]
struct QueueClaims {
    accelerators: BTreeSet<AcceleratorId>,
    providers: BTreeSet<ProviderId>,
}

impl AssignmentWait {
    fn without_claim(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), claim: WaitClaim::Nothing }
    }
}

impl QueueClaims {
    /// Why an engine on these accelerators, in this provider, must wait for an earlier requester.
    fn conflict(&self, engine: &PairingEngineId, provider: &ProviderId) -> Option<AssignmentWait> {
        let taken = engine.accelerators.iter().find(|a| self.accelerators.contains(*a));
        let reason = match taken {
            Some(a) => format!("an older requester waits for {a}"),
            None if self.providers.contains(provider) => format!("an older requester waits for {provider}"),
            None => return None,
        };
        Some(AssignmentWait::without_claim(reason))
    }

    fn add(&mut self, claim: WaitClaim) {
        match claim {
            WaitClaim::Nothing => {}
            WaitClaim::Provider(provider) => {
                self.providers.insert(provider);
            }
            WaitClaim::Memory(engine) => self.accelerators.extend(engine.accelerators.iter().cloned()),
        }
    }
}

impl NodePlanBuilder<'_> {
    /// Assigns engines to requesters without one, and wakes bound sleepers, in the order of the queue.
    pub(super) fn assign_engines(&mut self) {
        let mut waiting: Vec<_> =
            self.node.requesters.iter().filter(|(_, requester)| requester.stays()).collect();
        waiting.sort_by_key(|(id, requester)| (self.node.waiting_since(id, requester), (*id).clone()));
        let waiting: Vec<RequesterId> = waiting.into_iter().map(|(id, _)| id.clone()).collect();
        let mut claims = QueueClaims::default();
        for id in waiting {
            let Some(requester) = self.node.requesters.get(&id).cloned() else { continue };
            let engine = self.node.engine_of(&id).map(|e| (e.id.clone(), e.state, e.awaits_want));
            let wait = match engine {
                Some((engine, _, true)) => self.wake_bound_sleeper(&id, &requester, &engine, &claims),
                Some((_, state, false)) => (state != PairingEngineState::Awake)
                    .then(|| AssignmentWait::without_claim(format!("the engine is {state}"))),
                None => self.assign_engine(&id, &requester, &claims),
            };
            if let Some(AssignmentWait { reason, claim }) = wait {
                claims.add(claim);
                self.reasons.insert(id, reason);
            }
        }
    }

    /// Assigns an engine to a requester without one, if the gateway wants one. Returns why it must wait.
    fn assign_engine(
        &mut self,
        id: &RequesterId,
        requester: &PairingRequester,
        claims: &QueueClaims,
    ) -> Option<AssignmentWait> {
        if !self.node.may_take_memory(id, requester) {
            return None;
        }
        let reason = if requester.accelerators.is_empty() {
            "the stub has not reported its accelerators yet".to_owned()
        } else if !self.node.exists || self.node.facts.cordoned {
            "the node is cordoned or gone".to_owned()
        } else if requester.not_before > self.now() {
            let last_failure =
                requester.last_failure.map(|reason| format!(", the last: {reason}")).unwrap_or_default();
            let starts = match requester.failures {
                1 => "1 start".to_owned(),
                n => format!("{n} starts"),
            };
            format!("{starts} failed{last_failure}; the next start is at {}", requester.not_before)
        } else {
            return self.wake_or_start(id, requester, claims);
        };
        Some(AssignmentWait::without_claim(reason))
    }

    /// Wakes or launches the requested engine. Returns why that must wait.
    fn wake_or_start(
        &mut self,
        id: &RequesterId,
        requester: &PairingRequester,
        claims: &QueueClaims,
    ) -> Option<AssignmentWait> {
        let engine = self.node.requested_engine_id(requester);
        let existing_provider = self.node.engines.get(&engine).map(|sleeper| sleeper.provider.clone());
        let starts = existing_provider.is_none();
        let provider = existing_provider.unwrap_or_else(|| self.node.provider_for(&engine));
        if let Some(conflict) = claims.conflict(&engine, &provider) {
            return Some(conflict);
        }
        if let Some(wait) = self.replace_other_build(&provider, requester.observed.requested.build) {
            return Some(wait);
        }
        if let Some(sleeper) = self.node.engines.get(&engine) {
            if !sleeper.is_evictable() {
                let stop_reason = if let PairingEngineState::Stopping { reason, .. } = sleeper.state {
                    Some(reason)
                } else {
                    None
                };
                let suffix = stop_reason.map(|reason| format!(": {reason}")).unwrap_or_default();
                let reason = format!("the requested engine is {}{suffix}", sleeper.state);
                return Some(AssignmentWait::without_claim(reason));
            }
            if requester.observed.requested.level == SleepLevelPolicy::OneOrStop && sleeper.is_at_level_2() {
                let reason = EngineStopReason::LoraAdapters;
                self.push_engine_step(&engine, EngineStep::Stop { reason });
                let reason = format!("the requested engine is being stopped: {reason}");
                return Some(AssignmentWait::without_claim(reason));
            }
        } else if let Some(reason) = self.ensure_provider(&provider, id) {
            return Some(AssignmentWait { reason, claim: WaitClaim::Provider(provider) });
        }
        if !requester.is_stub_reachable() {
            return Some(AssignmentWait::without_claim("the stub is not running"));
        }
        let requested = &requester.observed.requested;
        let sizes = self.node.engines.get(&engine).map_or(requested.sizes, |sleeper| sleeper.sizes);
        let new = IncomingEngine { engine: &engine, sizes };
        let fit_check = self.fit_check();
        let fit = if starts { fit_check.start_fit(&new, &provider) } else { fit_check.memory_fit(&new) };
        match self.wait_for_fit(&engine, fit) {
            None if !requester.is_gated() => {
                Some(AssignmentWait::without_claim("the stub's gate is not confirmed closed"))
            }
            None => {
                self.bind_engine(id, requester, engine);
                None
            }
            wait => wait,
        }
    }

    /// Wakes a bound sleeper that is wanted awake once its memory is free. Returns why that must wait.
    fn wake_bound_sleeper(
        &mut self,
        id: &RequesterId,
        requester: &PairingRequester,
        sleeper: &PairingEngineId,
        claims: &QueueClaims,
    ) -> Option<AssignmentWait> {
        let engine = self.node.engines.get(sleeper).filter(|_| self.node.may_take_memory(id, requester))?;
        let PairingEngineState::Asleep { level } = engine.state else { return None };
        let written = engine.binding.as_ref().is_some_and(|binding| binding.written);
        if !written || engine.pending.is_some() {
            return Some(AssignmentWait::without_claim("the engine's binding is not written yet"));
        }
        if !requester.is_stub_reachable() {
            return Some(AssignmentWait::without_claim("the stub is not running"));
        }
        if !requester.is_gated() {
            return Some(AssignmentWait::without_claim("the stub's gate is not confirmed closed"));
        }
        if let Some(conflict) = claims.conflict(sleeper, &engine.provider) {
            return Some(conflict);
        }
        let fit = self.fit_check().memory_fit(&IncomingEngine { engine: sleeper, sizes: engine.sizes });
        let wait = self.wait_for_fit(sleeper, fit);
        if wait.is_none() {
            self.push_engine_step(sleeper, EngineStep::Wake { level, via: id.clone() });
        }
        wait
    }

    /// Stops the sleepers that must make room for this engine. Returns why the engine must wait; `None` if it fits.
    fn wait_for_fit(&mut self, engine: &PairingEngineId, fit: FitResult) -> Option<AssignmentWait> {
        let reason = match fit {
            FitResult::Fits => return None,
            FitResult::Unfit(reason) => return Some(AssignmentWait::without_claim(reason)),
            FitResult::Wait(reason) => reason,
            FitResult::Evict(sleepers) => {
                let names: Vec<String> = sleepers.iter().map(|(sleeper, _)| sleeper.to_string()).collect();
                for (sleeper, reason) in sleepers {
                    self.push_engine_step(&sleeper, EngineStep::Stop { reason });
                }
                format!("making room by stopping {}", names.join(" and "))
            }
        };
        Some(AssignmentWait { reason, claim: WaitClaim::Memory(engine.clone()) })
    }
}
