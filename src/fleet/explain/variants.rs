//! Numbers of engines by variant: what runs, what should run, and what the next engine waits for.
//!
//! Apart from the reasons, because the saturation controller reads these numbers for every model in turn.

use std::collections::BTreeMap;

use super::ModelReason;
use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        plan::{Planner, ReplicaReasons, desired::is_replica_up},
        report::{ReplicaWait, VariantReport},
    },
    model::{ModelName, VariantName},
};

impl ModelReason {
    /// Whether an engine waits because its memory is not granted: others hold it, or a limit forbids it.
    const fn is_refused_memory(&self) -> bool {
        self.is_memory_shortage() || self.is_reservation_refused
    }
}

fn failure_text(engine: &Engine) -> String {
    let failure = engine.failure().zip(engine.last_outcome.as_ref());
    failure.map_or_else(|| "its starts keep failing".to_owned(), |(failure, last)| failure.describe(last.at))
}

impl Planner {
    /// Returns a report for each configured variant of the model, and for any other that still has an engine.
    pub(in crate::fleet) fn variant_reports(
        &self,
        model: &ModelName,
        waits: &ReplicaReasons,
    ) -> BTreeMap<VariantName, VariantReport> {
        let configured = self.spec(model).into_iter().flat_map(crate::model::ModelSpec::variant_names);
        let mut reports: BTreeMap<VariantName, VariantReport> =
            configured.map(|variant| (variant, VariantReport::default())).collect();
        for e in self.engines_of(model) {
            let is_asleep =
                matches!(e.state, LifecycleState::Asleep { .. } | LifecycleState::FallingAsleep { .. });
            if is_replica_up(e) {
                reports.entry(e.id.variant.clone()).or_default().current += 1;
            } else if is_asleep {
                reports.entry(e.id.variant.clone()).or_default().asleep += 1;
            }
        }
        for (variant, report) in &mut reports {
            let target = self.models.get(model).and_then(|record| record.targets.get(variant));
            report.target = self.desired_replicas(model, variant);
            report.target_reason = target.map(|target| target.reason.clone());
            let wait = waits.get(&(model.clone(), variant.clone()));
            let failing = self.failing_replica(model, variant);
            report.wait = match (wait, failing) {
                (Some(reason), _) => Some(ReplicaWait {
                    reason: reason.text.clone(),
                    insufficient_memory: reason.is_refused_memory(),
                    failed: failing.is_some(),
                }),
                (None, Some(engine)) => Some(ReplicaWait {
                    reason: failure_text(engine),
                    insufficient_memory: false,
                    failed: true,
                }),
                (None, None) => None,
            };
        }
        reports
    }

    /// The same for a model whose variants a reader cannot tell from its other numbers: it lists some, or has targets.
    pub(in crate::fleet) fn reported_variants(
        &self,
        model: &ModelName,
        waits: &ReplicaReasons,
    ) -> BTreeMap<VariantName, VariantReport> {
        if self.is_scaled(model) || self.spec(model).is_some_and(|spec| !spec.variants.is_empty()) {
            self.variant_reports(model, waits)
        } else {
            BTreeMap::new()
        }
    }

    /// How many engines the model should have when all is well, for texts.
    pub(in crate::fleet) fn expected_replicas(&self, model: &ModelName) -> u32 {
        let Some(spec) = self.spec(model) else { return 1 };
        if self.is_scaled(model) {
            // A variant without a target keeps what it has.
            let up = |name: &VariantName| {
                self.engines_of(model).filter(|e| e.id.variant == *name && is_replica_up(e)).count()
            };
            let expected = spec.variant_names().into_iter().map(|name| {
                let desired = self.desired_replicas(model, &name);
                desired.unwrap_or_else(|| u32::try_from(up(&name)).unwrap_or(u32::MAX))
            });
            return expected.fold(0, u32::saturating_add).max(1);
        }
        if spec.variants.is_empty() {
            return spec.replicas;
        }
        // Without targets only one variant runs.
        self.primary_engine(model).map_or(spec.replicas, |e| spec.replicas_of(&e.id.variant))
    }
}
