//! What the planner keeps of one model: its configuration, an operator's overrides, and its measurements.
//!
//! Apart from the planner, because placement and adoption ask a record for an engine's sizes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::{
        event::LearnedMeasurements, plan::desired::ReplicaTarget, state::ledger::amount::ResourceAmount,
    },
    model::{EngineId, ModelName, ModelSpec, VariantName},
    units::{Bytes, Millis, Tick},
};

/// A model's configuration, operator overrides and measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::fleet) struct ModelRecord {
    /// `None`: the model is no longer configured and on its way out, or the first configuration is not here yet.
    pub(in crate::fleet) spec: Option<Arc<ModelSpec>>,
    /// An operator's pin or unpin.
    pub(in crate::fleet) pin_override: Option<bool>,
    /// Measurements of the variant `default`.
    pub(in crate::fleet) learned: LearnedMeasurements,
    /// Measurements of the other variants, whose hardware and memory differ.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(in crate::fleet) learned_of_variants: BTreeMap<VariantName, LearnedMeasurements>,
    /// The usual pause between two uses, learned from the model's own requests.
    pub(in crate::fleet) usual_gap: Option<Millis>,
    /// When the model was configured or pinned. It queues from here if it is wanted without waiters.
    pub(in crate::fleet) wanted_since: Tick,
    /// How many engines each variant should have. Empty until the first target.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(in crate::fleet) targets: BTreeMap<VariantName, ReplicaTarget>,
}

impl ModelRecord {
    /// A model that is not configured yet.
    pub(in crate::fleet) fn new(now: Tick) -> Self {
        Self {
            spec: None,
            pin_override: None,
            learned: LearnedMeasurements::default(),
            learned_of_variants: BTreeMap::new(),
            usual_gap: None,
            wanted_since: now,
            targets: BTreeMap::new(),
        }
    }

    /// Whether saturation sets how many engines run.
    pub(in crate::fleet) fn is_scaled(&self) -> bool {
        self.spec.as_ref().is_some_and(|spec| spec.scaled)
    }

    pub(in crate::fleet) fn pinned(&self) -> bool {
        self.pin_override.unwrap_or_else(|| self.spec.as_ref().is_some_and(|s| s.pinned))
    }

    /// How many engines of this variant run without demand. An operator's unpin lifts this too.
    pub(in crate::fleet) fn min_running_of(&self, variant: &VariantName) -> u32 {
        if self.pin_override == Some(false) {
            return 0;
        }
        self.spec.as_ref().map_or(0, |spec| spec.min_replicas_of(variant))
    }

    /// How many of its engines run without demand, over all variants.
    pub(in crate::fleet) fn min_running(&self) -> u32 {
        let variants = self.spec.iter().flat_map(|spec| spec.variant_names());
        variants.fold(0, |total, variant| total.saturating_add(self.min_running_of(&variant)))
    }

    /// Whether this engine is kept awake without demand, and never evicted.
    pub(in crate::fleet) fn keeps_awake(&self, id: &EngineId) -> bool {
        self.pins(id) || id.replica < self.min_running_of(&id.variant)
    }

    /// Whether the model's pin holds for this engine.
    ///
    /// It holds for all engines; of several variants for those of the cheapest; and in a scaled model for one engine.
    fn pins(&self, id: &EngineId) -> bool {
        self.pinned()
            && (!self.is_scaled() || id.replica == 0)
            && self.spec.as_ref().is_none_or(|spec| {
                spec.variants.is_empty() || spec.variant_names().first() == Some(&id.variant)
            })
    }

    /// How many engines of this variant a target cannot take away.
    pub(in crate::fleet) fn replica_floor(&self, variant: &VariantName) -> u32 {
        let pinned = self
            .spec
            .as_ref()
            .is_some_and(|spec| self.pins(&EngineId::of_variant(spec.name.clone(), variant.clone(), 0)));
        self.min_running_of(variant).max(u32::from(pinned))
    }

    /// Whether any engine is kept awake without demand.
    pub(in crate::fleet) fn keeps_any_awake(&self) -> bool {
        self.pinned() || self.min_running() > 0
    }

    pub(in crate::fleet) fn learned_of(&self, variant: &VariantName) -> LearnedMeasurements {
        if variant.is_default() {
            return self.learned;
        }
        self.learned_of_variants.get(variant).copied().unwrap_or_default()
    }

    pub(in crate::fleet) fn set_learned(&mut self, variant: &VariantName, learned: LearnedMeasurements) {
        if variant.is_default() {
            self.learned = learned;
        } else {
            self.learned_of_variants.insert(variant.clone(), learned);
        }
    }

    /// Amount that one awake engine takes on each of its accelerators, or of its pool.
    ///
    /// `spec`: that of the engine's variant.
    pub(in crate::fleet) fn needed_amount(
        &self,
        variant: &VariantName,
        spec: &ModelSpec,
        largest: Bytes,
    ) -> ResourceAmount {
        let declared = spec.accelerators.bytes_per_account(spec.memory.awake);
        let bytes = match self.learned_of(variant).peak.map(|peak| spec.accelerators.bytes_per_account(peak))
        {
            // A peak beyond every accelerator is a misreading (another program's memory); it must not bar the model.
            Some(peak) if peak <= largest => declared.max(peak),
            _ => declared,
        };
        ResourceAmount { bytes, units: spec.accelerators.units().unwrap_or(1) }
    }

    /// Memory that an asleep engine of this variant keeps on each of its accelerators.
    pub(in crate::fleet) fn residue(&self, variant: &VariantName, spec: &ModelSpec) -> Bytes {
        let learned = self.learned_of(variant).residue.unwrap_or_default();
        spec.memory.asleep.max(learned).min(spec.memory.awake)
    }
}

/// The models with an engine that is kept awake without demand, so that a plan need not look for them among all.
///
/// Derived from the models, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct KeptAwakeModels(Arc<BTreeSet<ModelName>>);

impl KeptAwakeModels {
    pub(in crate::fleet) fn from_models(models: &BTreeMap<ModelName, ModelRecord>) -> Self {
        let kept_awake = models.iter().filter(|(_, model)| model.keeps_any_awake());
        Self(Arc::new(kept_awake.map(|(name, _)| name.clone()).collect()))
    }

    pub(in crate::fleet) fn iter(&self) -> impl Iterator<Item = &ModelName> {
        self.0.iter()
    }

    pub(in crate::fleet) fn remove(&mut self, model: &ModelName) {
        if self.0.contains(model) {
            Arc::make_mut(&mut self.0).remove(model);
        }
    }

    /// Whether the index equals a newly built one.
    pub(in crate::fleet) fn is_consistent_with(&self, models: &BTreeMap<ModelName, ModelRecord>) -> bool {
        self.0 == Self::from_models(models).0
    }
}

impl PartialEq for KeptAwakeModels {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
