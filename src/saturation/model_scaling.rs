//! Decides one model from one reading to the next: what it should run by its load, and what the fleet is told.
//!
//! Usually both are the same. If another autoscaler sets the number, the decision by the load is what that autoscaler
//! reads from the metrics.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Autoscaler, Decision, FleetLoad, LastDecision, MetricsAvailability, ModelLoad, RefusalCause,
    SaturationPolicy, Target, TargetReason, external_replicas::distribute, refused_variants::RefusedVariants,
};
use crate::{model::VariantName, units::Tick};

/// Everything that a step of one model depends on.
pub struct ScalingInput<'a> {
    pub policy: SaturationPolicy,
    /// The load without refused variants and external numbers, which the step adds.
    pub load: ModelLoad,
    pub fleet: &'a FleetLoad,
    pub availability: &'a MetricsAvailability,
    /// Number of engines that another autoscaler asks for, if one sets the number.
    pub external: Option<u32>,
}

/// A target for the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaOrder {
    pub variant: VariantName,
    pub replicas: u32,
    pub reason: String,
}

/// Whether a target grew or shrank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingDirection {
    Up,
    Down,
}

/// The target of one variant by the load, with the reason and the time of its last change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedTarget {
    pub variant: VariantName,
    pub replicas: u32,
    pub reason: String,
    pub decided: Option<Tick>,
}

/// Whether a model needs more engines, by its last decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaturationVerdict {
    pub needs_more: bool,
    pub why: String,
}

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingStep {
    /// Targets that the fleet does not have yet.
    pub orders: Vec<ReplicaOrder>,
    /// Variants whose target by the load grew or shrank.
    pub scaled: Vec<(VariantName, ScalingDirection)>,
    /// Variants whose next engine gets no memory.
    pub refused: BTreeSet<VariantName>,
}

/// What was decided about one model by this gateway.
#[derive(Debug, Default)]
pub struct ModelScaling {
    /// Decides by the load.
    by_load: Autoscaler,
    /// Carries out the numbers of another autoscaler.
    external: Autoscaler,
    refused: RefusedVariants,
    /// Targets by the load.
    targets: Vec<RecordedTarget>,
    /// Variants whose recorded reason holds for a moment only.
    provisional: BTreeSet<VariantName>,
    /// Targets that the fleet has.
    sent: BTreeMap<VariantName, u32>,
    verdict: Option<SaturationVerdict>,
    /// When the model was last decided by its load.
    decided_at: Option<Tick>,
    /// The targets are those of an earlier process, and no step has been made since.
    is_restored: bool,
}

impl ModelScaling {
    /// Continues from targets that an earlier process decided.
    ///
    /// That process may have ended after an engine was started, and before the higher target was stored. So the first
    /// step begins with what runs if that is more.
    #[must_use]
    pub fn restored(targets: Vec<RecordedTarget>) -> Self {
        let mut scaling = Self { is_restored: !targets.is_empty(), targets, ..Self::default() };
        if !scaling.targets.is_empty() {
            let changed_at = scaling.targets.iter().filter_map(|target| target.decided).max();
            let number = |target: &RecordedTarget| (target.variant.clone(), target.replicas);
            let replicas = scaling.targets.iter().map(number).collect();
            let changed_at = changed_at.unwrap_or_default();
            scaling.by_load.restore(LastDecision { changed_at, replicas });
        }
        scaling
    }

    /// Returns the targets by the load.
    #[must_use]
    pub fn targets(&self) -> &[RecordedTarget] {
        &self.targets
    }

    /// Returns the targets that the fleet has: those by the load, or the numbers of another autoscaler.
    #[must_use]
    pub const fn sent_targets(&self) -> &BTreeMap<VariantName, u32> {
        &self.sent
    }

    /// Returns what the last decision by the load said; `None` before it.
    #[must_use]
    pub const fn verdict(&self) -> Option<&SaturationVerdict> {
        self.verdict.as_ref()
    }

    /// Returns when the model was last decided by its load.
    #[must_use]
    pub const fn decided_at(&self) -> Option<Tick> {
        self.decided_at
    }

    /// Decides, if the load is known, and returns what changes. Without a decision every target stays.
    pub fn step(&mut self, input: ScalingInput<'_>, now: Tick) -> ScalingStep {
        let ScalingInput { policy, mut load, fleet, availability, external } = input;
        self.by_load.set_policy(policy);
        self.external.set_policy(policy);
        self.raise_restored(fleet, now);
        self.adopt_changes_of_fleet(fleet, external.is_some(), now);
        load.refused = self.refused.update(&fleet.variants);
        let mut scaled = Vec::new();
        if availability.allows_decision() {
            scaled = self.decide(&load, external.is_some(), now);
        }
        let by_memory = load.refused.iter().filter(|(_, cause)| **cause == RefusalCause::Memory);
        let refused = by_memory.map(|(variant, _)| variant.clone()).collect();
        let wanted = match external {
            Some(total) => self.follow(total, load, now),
            None => self.targets.iter().map(ReplicaOrder::of_record).collect(),
        };
        let orders = self.unsent(wanted);
        ScalingStep { orders, scaled, refused }
    }

    fn decide(
        &mut self,
        load: &ModelLoad,
        is_external: bool,
        now: Tick,
    ) -> Vec<(VariantName, ScalingDirection)> {
        if is_external {
            // The other autoscaler may never do what this decision says, which would then never change.
            let replicas = load.states.iter().map(|state| (state.variant.clone(), state.current)).collect();
            self.by_load.restore(LastDecision { changed_at: now, replicas });
        }
        let decision = self.by_load.decide(load, now);
        (self.verdict, self.decided_at) = (Some(SaturationVerdict::of(&decision)), Some(now));
        self.record_targets(&decision, now)
    }

    /// Records the targets of a decision, and returns which of them grew or shrank.
    ///
    /// A target keeps its reason and its time until its number changes, so that what shows them changes as rarely. Only
    /// a reason that holds for a moment, such as a start, gives way to the first one that lasts.
    fn record_targets(&mut self, decision: &Decision, now: Tick) -> Vec<(VariantName, ScalingDirection)> {
        let (mut scaled, mut provisional, mut replaced) = (Vec::new(), BTreeSet::new(), Vec::new());
        let recorded = decision.targets.iter().map(|target| {
            let known = self.targets.iter().find(|known| known.variant == target.variant);
            if let Some(same) = known.filter(|known| known.replicas == target.replicas) {
                if !self.provisional.contains(&target.variant) {
                    return same.clone();
                }
                if is_provisional(&target.reason) {
                    provisional.insert(target.variant.clone());
                    return same.clone();
                }
                replaced.push(target.variant.clone());
                return RecordedTarget { reason: target.reason.to_string(), ..same.clone() };
            }
            if is_provisional(&target.reason) {
                provisional.insert(target.variant.clone());
            }
            if let Some(known) = known {
                let is_more = target.replicas > known.replicas;
                let direction = if is_more { ScalingDirection::Up } else { ScalingDirection::Down };
                scaled.push((target.variant.clone(), direction));
            }
            RecordedTarget {
                variant: target.variant.clone(),
                replicas: target.replicas,
                reason: target.reason.to_string(),
                decided: Some(now),
            }
        });
        let recorded: Vec<RecordedTarget> = recorded.collect();
        (self.targets, self.provisional) = (recorded, provisional);
        // The fleet shows the reason, so it gets the target again.
        self.sent.retain(|variant, _| !replaced.contains(variant));
        scaled
    }

    /// Returns the targets for the number that another autoscaler asks for.
    fn follow(&mut self, total: u32, load: ModelLoad, now: Tick) -> Vec<ReplicaOrder> {
        let before = self.external.last().map(|last| last.replicas.clone()).unwrap_or_default();
        let numbers = distribute(total, &load.states, &before);
        let decision = self.external.decide(&ModelLoad { external: Some(numbers), ..load }, now);
        decision.targets.iter().map(ReplicaOrder::of_target).collect()
    }

    /// Raises restored targets to what runs, in the first step.
    fn raise_restored(&mut self, fleet: &FleetLoad, now: Tick) {
        if !std::mem::take(&mut self.is_restored) {
            return;
        }
        for target in &mut self.targets {
            let current = fleet.variants.get(&target.variant).map_or(0, |engines| engines.current);
            if current > target.replicas {
                let reason = "more engines run than the last stored target says".to_owned();
                (target.replicas, target.reason, target.decided) = (current, reason, Some(now));
                self.provisional.insert(target.variant.clone());
            }
        }
        let replicas = self.targets.iter().map(|target| (target.variant.clone(), target.replicas)).collect();
        let changed_at = self.targets.iter().filter_map(|target| target.decided).max().unwrap_or_default();
        self.by_load.restore(LastDecision { changed_at, replicas });
    }

    /// Takes over what the fleet has changed itself: it starts the first engine for a request, and ends idle ones.
    ///
    /// Otherwise a decision would wait for engines that the fleet does not start, or for the end of one that serves.
    fn adopt_changes_of_fleet(&mut self, fleet: &FleetLoad, is_external: bool, now: Tick) {
        let autoscaler = if is_external { &mut self.external } else { &mut self.by_load };
        let Some(last) = autoscaler.last().cloned() else { return };
        let mut replicas = last.replicas.clone();
        for (variant, engines) in &fleet.variants {
            match (self.sent.get(variant).copied(), engines.target) {
                (Some(sent), Some(target)) if sent != target => {
                    replicas.insert(variant.clone(), target);
                    self.sent.insert(variant.clone(), target);
                }
                // The fleet did not know the variant yet, or has forgotten its target.
                (Some(_), None) => {
                    self.sent.remove(variant);
                }
                _ => {}
            }
        }
        if replicas.values().all(|number| *number == 0) && fleet.current() > 0 {
            let current = fleet.variants.iter().map(|(variant, engines)| (variant.clone(), engines.current));
            replicas = current.collect();
        }
        if replicas != last.replicas {
            autoscaler.restore(LastDecision { changed_at: now, replicas });
        }
    }

    /// Returns the targets that the fleet does not have, and notes that it gets them.
    fn unsent(&mut self, wanted: Vec<ReplicaOrder>) -> Vec<ReplicaOrder> {
        let is_new = |order: &ReplicaOrder| {
            self.sent.insert(order.variant.clone(), order.replicas) != Some(order.replicas)
        };
        wanted.into_iter().filter(is_new).collect()
    }
}

/// Whether this is why a number stays for the moment, and not why it is right.
const fn is_provisional(reason: &TargetReason) -> bool {
    matches!(
        reason,
        TargetReason::NoMetrics
            | TargetReason::Unknown { .. }
            | TargetReason::Transition(_)
            | TargetReason::FromZero { .. }
            | TargetReason::Stabilizing { .. }
    )
}

impl ReplicaOrder {
    fn of_record(target: &RecordedTarget) -> Self {
        let RecordedTarget { variant, replicas, reason, .. } = target;
        Self { variant: variant.clone(), replicas: *replicas, reason: reason.clone() }
    }

    fn of_target(target: &Target) -> Self {
        let Target { variant, replicas, reason, .. } = target;
        Self { variant: variant.clone(), replicas: *replicas, reason: reason.to_string() }
    }
}

impl SaturationVerdict {
    fn of(decision: &Decision) -> Self {
        match decision.analyses.values().find(|analysis| analysis.scale_up) {
            Some(analysis) => Self { needs_more: true, why: analysis.cause.to_string() },
            None => Self { needs_more: false, why: "no further engine is needed".to_owned() },
        }
    }
}
