//! Zero: when a model gives all its replicas up, and which variant starts again.

use serde::{Deserialize, Serialize};

use super::{AcceleratorPool, StepLimits, Target, TargetReason, VariantState, step::speed_of_start};
use crate::{model::compare_by_cost, units::Millis};

/// Rule that takes a model without requests to zero replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ZeroRule {
    /// The fleet, which puts idle engines to sleep. A model that sleeps is not started again without a request.
    #[default]
    Fleet,
    /// No one: at least one replica runs, of the cheapest variant.
    KeepOne,
    /// All variants go to 0 once nothing was requested for this long. A floor of any variant prevents it.
    After(Millis),
}

/// What the zero rule asks of a model.
pub(super) struct ZeroDemand {
    /// Requests that wait at the gateways.
    pub(super) parked: u32,
    /// How long nothing was requested; `None`: unknown.
    pub(super) idle_for: Option<Millis>,
}

/// Cost that the minimum reads for a variant that states none.
fn cost_or_default(state: &VariantState) -> f64 {
    if state.cost > 0.0 { state.cost } else { VariantState::DEFAULT_COST }
}

impl ZeroRule {
    /// Changes the targets of one role for this rule. `model` has all states of the model.
    pub(super) fn apply(
        self,
        targets: &mut [Target],
        role: &[VariantState],
        model: &[VariantState],
        demand: &ZeroDemand,
    ) {
        match (self, demand.idle_for) {
            (Self::KeepOne, _) if targets.iter().all(|target| target.replicas == 0) => {
                let cheapest = role.iter().min_by(|state, other| {
                    let cost = (cost_or_default(state), &state.variant);
                    compare_by_cost(cost, (cost_or_default(other), &other.variant))
                });
                let cheapest = cheapest.map(|state| &state.variant);
                for target in targets.iter_mut().filter(|target| Some(&target.variant) == cheapest) {
                    target.replicas = 1;
                    target.reason = TargetReason::KeepOne;
                }
            }
            (Self::After(span), Some(idle_for))
                if idle_for >= span && demand.parked == 0 && model.iter().all(|state| state.min == 0) =>
            {
                for target in targets {
                    target.replicas = 0;
                    target.reason = TargetReason::IdleToZero { idle_for };
                }
            }
            _ => {}
        }
    }
}

/// Starts a role that sleeps: exactly one variant, and only for requests that wait. Otherwise it goes on sleeping.
///
/// Of the variants that fit, the cheapest is chosen among the warm ones; among all, if none is warm.
pub(super) fn wake(targets: &mut [Target], role: &[VariantState], parked: u32, limits: &StepLimits) {
    if role.iter().any(|state| state.current > 0) {
        return;
    }
    // What was started a moment ago does not count as current yet, and no other variant starts beside it.
    let started = role.iter().any(|state| state.desired.is_some_and(|desired| desired > 0));
    let chosen = if parked == 0 || started { None } else { cheapest_fitting(role, limits) };
    for target in targets {
        let Some(state) = role.iter().find(|state| state.variant == target.variant) else {
            continue;
        };
        let (replicas, reason) = match chosen {
            _ if parked == 0 => (0, TargetReason::Asleep),
            _ if started => (state.held(), TargetReason::FromZero { parked }),
            Some(chosen) if chosen.variant == state.variant => (1, TargetReason::FromZero { parked }),
            Some(_) => (0, TargetReason::Asleep),
            None => (0, TargetReason::NoneFits { parked }),
        };
        *target = Target::bounded(state, replicas, reason);
    }
}

fn cheapest_fitting<'a>(role: &'a [VariantState], limits: &StepLimits) -> Option<&'a VariantState> {
    let fits = |pool: &AcceleratorPool, state: &VariantState| pool.replicas_of(state) > 0;
    let is_cold = |state: &VariantState| !state.warm && state.asleep == 0;
    let fitting = role.iter().filter(|state| {
        let is_refused = limits.refused.contains_key(&state.variant);
        !is_refused && limits.pool.as_ref().is_none_or(|pool| fits(pool, state))
    });
    fitting.min_by(|state, other| {
        let by_cost = is_cold(state).cmp(&is_cold(other)).then(state.cost.total_cmp(&other.cost));
        by_cost
            .then_with(|| speed_of_start(state).cmp(&speed_of_start(other)))
            .then_with(|| state.variant.cmp(&other.variant))
    })
}
