//! The configuration that follows from the cluster's objects, and where each model runs.

use std::{collections::BTreeMap, sync::Arc};

use rouse::model::ModelName;
use rouse_config::Config;

use super::ClusterRuntime;
use crate::{
    compose,
    convert::ModelHosting,
    crd::ledger::ObjectName,
    index::{Resolved, ServedModel, ServedVariant},
    platform::{ExternalBackend, ExternalBackends, ModelPlacement, ModelPlacements},
};

impl ClusterRuntime {
    /// Combines the file's configuration with the current objects, and updates the platform's placements.
    ///
    /// Returns the namespaces of the models, too.
    pub fn compose(&mut self, base: &Config) -> (Config, BTreeMap<ModelName, String>) {
        let resolved = self.resolved.borrow_and_update().clone().unwrap_or_default();
        let (served, refused, pools) = (resolved.served.len(), resolved.rejected.len(), resolved.pools.len());
        tracing::debug!(served, refused, pools, "cluster objects resolved");
        let namespace = |(object, served): (&ObjectName, &ServedModel)| {
            (served.spec.name.clone(), object.namespace.clone())
        };
        let namespaces = resolved.served.iter().map(namespace).collect();
        let placements = Arc::new(self.model_placements(&resolved));
        let externals = Arc::new(external_backends(&resolved));
        self.platform.set_placements(Arc::clone(&placements), externals, Arc::clone(&resolved.nodes));
        let composed = compose::compose(base, &resolved);
        self.last_composed = (resolved, placements);
        (composed, namespaces)
    }

    /// Returns where each variant of each served model runs. External models have no placement.
    ///
    /// A placement contains the hash of a whole Pod, so unchanged placements are reused.
    fn model_placements(&self, now: &Resolved) -> ModelPlacements {
        let (before, placements) = &self.last_composed;
        let of_model = |(object, served): (&ObjectName, &ServedModel)| {
            let is_same_model = before.served.get(object) == Some(served);
            let of_variant = |variant: &ServedVariant| {
                let same = is_same_model && before.terms(variant) == now.terms(variant);
                let known = placements.get(&served.spec.name, &variant.name).filter(|_| same);
                let make = || ModelPlacement::of(object, served, variant, now, &self.sidecar).map(Arc::new);
                known.cloned().or_else(make)
            };
            served.variants.iter().filter_map(of_variant).collect::<Vec<_>>()
        };
        now.served.iter().flat_map(of_model).collect()
    }
}

/// Returns the backends of external models.
fn external_backends(resolved: &Resolved) -> ExternalBackends {
    let external = |served: &ServedModel| match &served.model.hosting {
        ModelHosting::External(backend) => {
            let engine = Arc::clone(&served.cheapest()?.engine);
            let external = ExternalBackend { engine, backend: backend.clone() };
            Some((served.spec.name.clone(), Arc::new(external)))
        }
        ModelHosting::Deployment(_) | ModelHosting::DualPods(_) => None,
    };
    resolved.served.values().filter_map(external).collect()
}
