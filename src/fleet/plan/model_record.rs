//! What the planner keeps of one model: its configuration, an operator's overrides, and its measurements.
//!
//! Apart from the planner, because placement and adoption ask a record for an engine's sizes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::{event::LearnedMeasurements, state::ledger::amount::ResourceAmount},
    model::{ModelName, ModelSpec},
    units::{Bytes, Millis, Tick},
};

/// A model's configuration, operator overrides and measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::fleet) struct ModelRecord {
    /// `None`: the model is no longer configured and on its way out.
    pub(in crate::fleet) spec: Option<Arc<ModelSpec>>,
    /// An operator's pin or unpin.
    pub(in crate::fleet) pin_override: Option<bool>,
    pub(in crate::fleet) learned: LearnedMeasurements,
    /// The usual pause between two uses, learned from the model's own requests.
    pub(in crate::fleet) usual_gap: Option<Millis>,
    /// When the model was configured or pinned. It queues from here if it is wanted without waiters.
    pub(in crate::fleet) wanted_since: Tick,
}

impl ModelRecord {
    pub(in crate::fleet) fn pinned(&self) -> bool {
        self.pin_override.unwrap_or_else(|| self.spec.as_ref().is_some_and(|s| s.pinned))
    }

    /// How many of its engines run without demand. An operator's unpin lifts this too.
    pub(in crate::fleet) fn min_running(&self) -> u32 {
        if self.pin_override == Some(false) { 0 } else { self.spec.as_ref().map_or(0, |s| s.min_replicas) }
    }

    /// Whether this replica is kept awake without demand, and never evicted.
    pub(in crate::fleet) fn keeps_awake(&self, replica: u32) -> bool {
        self.pinned() || replica < self.min_running()
    }

    /// Amount that one awake engine takes on each of its accelerators, or of its pool.
    pub(in crate::fleet) fn needed_amount(&self, spec: &ModelSpec, largest: Bytes) -> ResourceAmount {
        let declared = spec.accelerators.bytes_per_account(spec.memory.awake);
        let bytes = match self.learned.peak.map(|peak| spec.accelerators.bytes_per_account(peak)) {
            // A peak beyond every accelerator is a misreading (another program's memory); it must not bar the model.
            Some(peak) if peak <= largest => declared.max(peak),
            _ => declared,
        };
        ResourceAmount { bytes, units: spec.accelerators.units().unwrap_or(1) }
    }

    /// Memory that an asleep engine keeps on each of its accelerators.
    pub(in crate::fleet) fn residue(&self, spec: &ModelSpec) -> Bytes {
        spec.memory.asleep.max(self.learned.residue.unwrap_or_default()).min(spec.memory.awake)
    }
}

/// The models with an engine that is kept awake without demand, so that a plan need not look for them among all.
///
/// Derived from the models, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct KeptAwakeModels(Arc<BTreeSet<ModelName>>);

impl KeptAwakeModels {
    pub(in crate::fleet) fn from_models(models: &BTreeMap<ModelName, ModelRecord>) -> Self {
        let kept_awake = models.iter().filter(|(_, model)| model.keeps_awake(0));
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
