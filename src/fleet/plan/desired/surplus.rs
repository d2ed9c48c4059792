//! Ends the engines beyond their variants' targets, and says what a further replica may take.
//!
//! Apart from the targets, because these are decisions and those are state.

use std::cmp::Reverse;

use super::{is_awake, is_replica_up};
use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fleet::{
        command::{AfterDrain, CloseReason},
        plan::PlanBuilder,
    },
    model::{EngineId, ModelName, ScaleUpEviction},
};

impl PlanBuilder<'_> {
    /// Drains the engines beyond their variants' targets, and stops those that still start.
    pub(in crate::fleet) fn drain_surplus(&mut self) {
        if self.planner.api_unreachable_since.is_some() {
            // Other gateways would not learn that the engine no longer takes requests.
            return;
        }
        let unmet: Vec<ModelName> = self.planner.scaling.unmet().cloned().collect();
        for id in unmet.iter().flat_map(|model| self.surplus_of(model)).collect::<Vec<_>>() {
            if self.engine(&id).is_some_and(is_awake) {
                self.close_gate(&id, CloseReason::ScaledDown, AfterDrain::Sleep(None));
            } else {
                self.stop(&id);
            }
        }
    }

    fn surplus_of(&self, model: &ModelName) -> Vec<EngineId> {
        let planner = &self.planner;
        let up: Vec<&Engine> = planner.engines_of(model).filter(|e| is_replica_up(e)).collect();
        let mut serving = up.iter().filter(|e| e.serves()).count();
        let mut remaining = up.len();
        let mut surplus = Vec::new();
        for (variant, desired) in planner.targeted_variants(model) {
            let desired = desired as usize;
            let mut engines: Vec<&Engine> = up.iter().copied().filter(|e| e.id.variant == *variant).collect();
            engines.sort_by_key(|e| (is_awake(e), planner.in_use_count(e) > 0, Reverse(e.id.replica)));
            let mut count = engines.len();
            let mut awake = engines.iter().filter(|e| is_awake(e)).count();
            for e in engines {
                // An awake engine goes only once those that stay are awake, and never the last that serves.
                let stays = is_awake(e) && (awake <= desired || serving <= usize::from(e.serves()));
                if count <= desired || remaining <= 1 || stays || !self.may_scale_down(e) {
                    continue;
                }
                surplus.push(e.id.clone());
                (count, remaining) = (count - 1, remaining - 1);
                awake -= usize::from(is_awake(e));
                serving -= usize::from(e.serves());
            }
        }
        surplus
    }

    /// Whether a lower target may end this engine: nothing else keeps it, and its start can be broken off.
    fn may_scale_down(&self, e: &Engine) -> bool {
        let planner = &self.planner;
        if planner.is_kept_awake(&e.id) || planner.keeping_dependent(e).is_some() {
            return false;
        }
        match &e.state {
            LifecycleState::Awake => true,
            LifecycleState::Launching | LifecycleState::Loading => {
                e.admission == Admission::Closed && !self.has_profiling_neighbour(&e.id)
            }
            _ => false,
        }
    }

    /// Whether an engine that a lower target drains is needed again before it is put to sleep.
    pub(in crate::fleet) fn is_wanted_again(&self, id: &EngineId) -> bool {
        let needed = self.waiting(&id.model) > 0 && !self.planner.serves(&id.model);
        needed || self.planner.is_within_target(id)
    }

    /// Whether idle engines of other models may be put away for a further replica of this model.
    ///
    /// Not while no request uses the model: of two such models neither gains by the other's loss.
    pub(in crate::fleet) fn may_put_away_idle(&self, model: &ModelName) -> bool {
        let planner = &self.planner;
        planner.spec(model).is_some_and(|spec| spec.may_evict == ScaleUpEviction::Idle)
            && (self.waiting(model) > 0 || planner.engines_of(model).any(|e| planner.in_use_count(e) > 0))
    }
}
