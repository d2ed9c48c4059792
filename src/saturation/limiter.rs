//! The limiter: hands out free accelerators where the targets want more than there are.

use std::collections::BTreeMap;

use super::{AcceleratorPool, Allocation, Target, TargetReason, VariantState};
use crate::model::VariantName;

/// Lowers targets to what the pool has, in whole replicas.
///
/// The variant with the least spare KV cache is served first, then the cheaper one. A floor holds even without free
/// accelerators, because it is an order and not a wish.
pub(super) fn limit(
    targets: &mut [Target],
    states: &BTreeMap<&VariantName, &VariantState>,
    spare_kv: &BTreeMap<VariantName, f64>,
    pool: &mut AcceleratorPool,
) -> Vec<Allocation> {
    let spare_of = |variant: &VariantName| spare_kv.get(variant).copied().unwrap_or_default();
    let mut raised: Vec<(&mut Target, &VariantState)> = targets
        .iter_mut()
        .filter_map(|target| {
            let state = *states.get(&target.variant)?;
            (target.replicas > state.current).then_some((target, state))
        })
        .collect();
    raised.sort_by(|(target, state), (other, other_state)| {
        spare_of(&target.variant)
            .total_cmp(&spare_of(&other.variant))
            .then(state.cost.total_cmp(&other_state.cost))
            .then(target.variant.cmp(&other.variant))
    });
    raised.into_iter().map(|(target, state)| serve(target, state, pool)).collect()
}

fn serve(target: &mut Target, state: &VariantState, pool: &mut AcceleratorPool) -> Allocation {
    let wanted = target.replicas;
    let granted = pool.take(state, wanted - state.current);
    let limited = granted < wanted - state.current;
    if limited {
        let to = (state.current + granted).max(state.min.min(wanted));
        let accelerator = state.accelerator.clone();
        target.reason = TargetReason::Limited { wanted, to, accelerator };
        target.replicas = to;
    }
    let accelerators = granted.saturating_mul(state.gpus_per_replica());
    Allocation { variant: target.variant.clone(), accelerators, limited }
}
