//! Stops the engines of models and variants that are not served, and releases their reservations.
//!
//! A model can become invalid, lose a variant, or move to where no pool is, while its engine runs. The leader at that
//! time stops the engine. A later leader finds Pods that its fleet does not know.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::apps::v1::Deployment;
use kube::{Api, ResourceExt as _};
use rouse_net::stub_api::Epoch;
use serde_json::json;

use super::EngineManager;
use crate::{
    crd::ledger::ObjectName,
    engine_pod::EnginePod,
    platform::{
        KubernetesContext, engine_task::RetryBackoff, ledger_writer::LedgerChange,
        takeover::EngineReservation,
    },
    workload::EPOCH,
    writer::Error,
};

impl EngineManager {
    /// Scales down the Deployments of Pods that belong to no variant of a served model.
    pub(in crate::platform) fn scale_down_orphans(&mut self) {
        let placements = self.shared.placements();
        let orphans = self.pods.values().filter(|pod| placements.of_pod(pod).is_none());
        let of_deployment = |pod: &Arc<EnginePod>| Some((pod.deployment.clone()?, Arc::clone(pod)));
        let deployments: BTreeMap<ObjectName, Arc<EnginePod>> = orphans.filter_map(of_deployment).collect();
        for (deployment, pod) in deployments {
            tracing::info!(%deployment, "scaling the Deployment to zero: its model or variant is not served");
            self.tasks.spawn(scale_to_zero(Arc::clone(&self.shared), deployment, pod, self.epoch()));
        }
    }

    /// Keeps this reservation until no Pod of its variant is left.
    pub(in crate::platform) fn keep_orphan(&mut self, reservation: EngineReservation) {
        self.orphans.entry(reservation.engine.model.clone()).or_default().push(reservation);
    }

    /// Releases the reservations of unserved models and variants that have no Pods left.
    pub(in crate::platform) fn release_orphans(&mut self) {
        let models: Vec<ObjectName> = self.orphans.keys().cloned().collect();
        models.iter().for_each(|model| self.release_orphans_of(model));
    }

    /// Releases this model's reservations of unserved variants that have no Pods left.
    pub(super) fn release_orphans_of(&mut self, model: &ObjectName) {
        let Some(entries) = self.orphans.remove(model) else { return };
        let has_pods = |entry: &EngineReservation| self.pods.has_pods_of(model, &entry.engine.variant);
        let (kept, released): (Vec<_>, Vec<_>) = entries.into_iter().partition(has_pods);
        if !kept.is_empty() {
            self.orphans.insert(model.clone(), kept);
        }
        for EngineReservation { pool, engine, .. } in released {
            self.change_pool_ledger(&pool, LedgerChange::Release { engine, done: None });
        }
    }
}

/// Retries until the Deployment of this Pod has no replicas, is gone, or is that of a served model again.
async fn scale_to_zero(shared: Arc<KubernetesContext>, name: ObjectName, pod: Arc<EnginePod>, epoch: Epoch) {
    let api: Api<Deployment> = Api::namespaced(shared.client.clone(), &name.namespace);
    let mut pauses = RetryBackoff::new();
    loop {
        let ended = async {
            shared.writer.leadership_in(epoch)?;
            let Some(found) = shared.writer.get_for_write(&api, &name.name, epoch).await? else {
                return Ok(());
            };
            // After the read: a scaler that has written since then makes this version stale.
            if shared.placements().of_pod(&pod).is_some() {
                return Ok(());
            }
            let none = json!({
                "metadata": {
                    "resourceVersion": found.resource_version(),
                    "annotations": {EPOCH: epoch.to_string()},
                },
                "spec": {"replicas": 0},
            });
            shared.writer.patch_merge(&api, &name.name, &none).await.map(drop)
        };
        match ended.await {
            Ok(()) | Err(Error::Gone) => return,
            Err(error) => {
                tracing::debug!(deployment = %name, %error, "cannot scale the Deployment to zero, retrying")
            }
        }
        pauses.pause().await;
    }
}
