//! The step: from the analysis of a model to a target for each variant.

use std::{
    cmp::{Ordering, Reverse},
    collections::BTreeMap,
};

use super::{
    AcceleratorPool, ModelAnalysis, Profile, RefusalCause, Target, TargetReason, Transition, VariantState,
};
use crate::{model::VariantName, units::Millis};

/// What limits a step, beyond the bounds of the variants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepLimits {
    /// The most replicas that [`Profile::Rouse`] adds at once; 0 counts as 1. The other profiles add one.
    pub max_step: u32,
    /// Variants that get no further replica for now.
    pub refused: BTreeMap<VariantName, RefusalCause>,
    /// Free accelerators. [`Profile::Rouse`] adds no replica for which none are free.
    pub pool: Option<AcceleratorPool>,
    /// How long a step down still has to wait.
    pub scale_down_after: Option<Millis>,
}

/// Decides how many replicas each variant of a model, or of one role of it, should have.
///
/// [`Profile::Rouse`] returns a target for each state. The other profiles return one for each variant that reports,
/// even without a state; if none reports, for each state.
#[must_use]
pub fn targets(
    profile: Profile,
    analysis: &ModelAnalysis,
    states: &[VariantState],
    limits: &StepLimits,
) -> Vec<Target> {
    let by_name: BTreeMap<&VariantName, &VariantState> =
        states.iter().map(|state| (&state.variant, state)).collect();
    if analysis.total == 0 {
        return by_name.values().map(|state| without_metrics(profile, state)).collect();
    }
    // A variant that reports and has no state has no replicas, no bounds and no cost.
    let stateless: Vec<VariantState> = analysis
        .variants
        .keys()
        .filter(|variant| profile != Profile::Rouse && !by_name.contains_key(*variant))
        .map(|variant| VariantState { variant: variant.clone(), cost: 0.0, ..VariantState::default() })
        .collect();
    let rows: Vec<&VariantState> = by_name
        .values()
        .copied()
        .filter(|state| profile == Profile::Rouse || analysis.variants.contains_key(&state.variant))
        .chain(&stateless)
        .collect();
    let builder = TargetBuilder { profile, analysis, limits, rows };
    let mut targets = match Transition::find(profile, analysis, &by_name, &limits.refused) {
        Some(transition) => builder.hold(&transition),
        None if analysis.scale_up => builder.raise(),
        None if analysis.scale_down_safe => builder.lower(),
        None => builder.keep(|_| builder.steady()),
    };
    targets.sort_by(|target, other| target.variant.cmp(&other.variant));
    targets
}

/// Without metrics [`Profile::Rouse`] keeps the last decision; the other profiles keep what runs, whatever the bounds.
fn without_metrics(profile: Profile, state: &VariantState) -> Target {
    if profile == Profile::Rouse {
        return Target::held(state, TargetReason::NoMetrics);
    }
    Target::new(state, state.current, TargetReason::NoMetrics)
}

struct TargetBuilder<'a> {
    profile: Profile,
    analysis: &'a ModelAnalysis,
    limits: &'a StepLimits,
    rows: Vec<&'a VariantState>,
}

impl TargetBuilder<'_> {
    /// The number of replicas that a target starts from.
    fn base(&self, state: &VariantState) -> u32 {
        if self.profile == Profile::Doc {
            return self.analysis.variants.get(&state.variant).map_or(0, |variant| variant.replicas);
        }
        state.current
    }

    fn keep(&self, reason: impl Fn(&VariantState) -> TargetReason) -> Vec<Target> {
        let target = |state| Target::bounded(state, self.base(state), reason(state));
        self.rows.iter().copied().map(target).collect()
    }

    fn steady(&self) -> TargetReason {
        let (unknown, total) = (self.analysis.unknown, self.analysis.total);
        if unknown > 0 {
            return TargetReason::Unknown { unknown, replicas: total + unknown };
        }
        TargetReason::steady(self.analysis)
    }

    /// Keeps the last decisions while they take effect.
    fn hold(&self, transition: &Transition) -> Vec<Target> {
        let hold = |state: &VariantState| {
            let reason = TargetReason::Transition(transition.clone());
            if self.profile != Profile::Rouse {
                return Target::new(state, state.held(), reason);
            }
            if self.analysis.scale_up && state.held() < state.current {
                let desired = state.held();
                return Target::bounded(state, state.current, TargetReason::ScaleDownCancelled { desired });
            }
            Target::held(state, reason)
        };
        self.rows.iter().copied().map(hold).collect()
    }

    /// Adds replicas of the cheapest variant. In [`Profile::Rouse`] what it has no room for goes to the next.
    fn raise(&self) -> Vec<Target> {
        let mut candidates = self.rows.clone();
        candidates.retain(|state| state.pending == 0 && !self.limits.refused.contains_key(&state.variant));
        candidates.sort_by(|state, other| self.compare_for_raise(state, other));
        let added = if self.profile == Profile::Rouse {
            self.spread(&candidates)
        } else {
            candidates.first().map(|state| (&state.variant, 1)).into_iter().collect()
        };
        let cause = self.analysis.cause;
        if added.is_empty() {
            return self.keep(|_| TargetReason::NoneToRaise { cause });
        }
        let target = |state: &VariantState| match added.get(&state.variant) {
            Some(more) => {
                let from = self.base(state);
                let to = state.clamp(from.saturating_add(*more));
                let (spare_kv, spare_queue) = (self.analysis.avg_spare_kv, self.analysis.avg_spare_queue);
                let shortage = self.analysis.shortage.max(1);
                let reason = TargetReason::ScaleUp { cause, spare_kv, spare_queue, from, to, shortage };
                Target::new(state, to, reason)
            }
            None => Target::bounded(state, self.base(state), self.unraised(state)),
        };
        self.rows.iter().copied().map(target).collect()
    }

    fn unraised(&self, state: &VariantState) -> TargetReason {
        match self.limits.refused.get(&state.variant) {
            Some(cause) => TargetReason::Refused { cause: *cause },
            None => TargetReason::steady(self.analysis),
        }
    }

    /// How many replicas each candidate gets of what is short.
    fn spread<'s>(&self, candidates: &[&'s VariantState]) -> BTreeMap<&'s VariantName, u32> {
        let mut pool = self.limits.pool.clone();
        let mut short = self.analysis.shortage.clamp(1, self.limits.max_step.max(1));
        let mut added = BTreeMap::new();
        for state in candidates {
            let room = short.min(state.room_above(self.base(state)));
            let granted = pool.as_mut().map_or(room, |pool| pool.take(state, room));
            if granted > 0 {
                added.insert(&state.variant, granted);
                short -= granted;
            }
        }
        added
    }

    /// Cheapest first. Of equal ones, [`Profile::Rouse`] prefers one that starts faster.
    fn compare_for_raise(&self, state: &VariantState, other: &VariantState) -> Ordering {
        let speed = |state: &VariantState| (self.profile == Profile::Rouse).then(|| speed_of_start(state));
        let by_cost = state.cost.total_cmp(&other.cost);
        by_cost.then_with(|| speed(state).cmp(&speed(other))).then_with(|| state.variant.cmp(&other.variant))
    }

    /// Takes one replica of the dearest variant away.
    fn lower(&self) -> Vec<Target> {
        if let Some(remaining) = self.limits.scale_down_after {
            return self.keep(|_| TargetReason::Stabilizing { remaining });
        }
        let mut candidates = self.rows.clone();
        candidates.retain(|state| self.may_lower(state));
        let dearest = candidates.into_iter().max_by(|state, other| state.compare_by_cost(other));
        let Some(dearest) = dearest else {
            return self.keep(|_| TargetReason::NoneToLower);
        };
        let analysis = self.analysis;
        let target = |state: &VariantState| {
            if state.variant != dearest.variant {
                return Target::bounded(state, self.base(state), TargetReason::steady(analysis));
            }
            let from = self.base(state);
            let to = state.clamp(from.saturating_sub(1));
            let remaining_spare_kv = analysis.remaining_spare_kv.unwrap_or_default();
            let remaining_spare_queue = analysis.remaining_spare_queue.unwrap_or_default();
            let reason = TargetReason::ScaleDown { remaining_spare_kv, remaining_spare_queue, from, to };
            Target::new(state, to, reason)
        };
        self.rows.iter().copied().map(target).collect()
    }

    /// Whether a variant may lose a replica.
    ///
    /// The document keeps the last replica of every variant. As [`Profile::Rouse`] also starts variants that had none,
    /// it takes the last replica of a variant without a floor too, while other replicas remain.
    fn may_lower(&self, state: &VariantState) -> bool {
        let base = self.base(state);
        if self.profile != Profile::Rouse {
            return base > 1;
        }
        let all = self.rows.iter().fold(0_u32, |sum, row| sum.saturating_add(row.current));
        base > state.min && all > 1
    }
}

/// Orders variants by how fast another replica starts: a sleeper wakes, and a warm node has the files.
pub(super) const fn speed_of_start(state: &VariantState) -> (Reverse<bool>, Reverse<bool>) {
    (Reverse(state.asleep > 0), Reverse(state.warm))
}
