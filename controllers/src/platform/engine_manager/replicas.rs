//! Counts the replicas of each Deployment, and starts and ends the scalers that write them.

use std::sync::Arc;

use rouse::{fault::FailureCause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::sync::watch;

use super::{EngineManager, pod_index::PodLabels, scaler_index::DeploymentScaler};
use crate::{
    crd::ledger::ObjectName,
    platform::{
        ModelPlacement,
        deployment_scaler::{self, DesiredDeployment, FirstWrite},
    },
};

impl EngineManager {
    /// Sets the Deployment's replicas to the number of its engines that keep a Pod; returns the desired version.
    pub(in crate::platform) fn update_replicas(
        &mut self,
        deployment: &ObjectName,
        placement: Option<Arc<ModelPlacement>>,
    ) -> u64 {
        self.set_replicas(deployment, placement, FirstWrite::AtOnce)
    }

    /// Does the same for a Deployment that the takeover found. It is written in its turn.
    pub(super) fn reassert_replicas(&mut self, deployment: &ObjectName, placement: Arc<ModelPlacement>) {
        self.set_replicas(deployment, Some(placement), FirstWrite::InTurn);
    }

    fn set_replicas(
        &mut self,
        deployment: &ObjectName,
        placement: Option<Arc<ModelPlacement>>,
        first: FirstWrite,
    ) -> u64 {
        // A variant's own placement describes only one of the Deployments that its engines can have.
        let describes = |placement: &ModelPlacement| placement.deployment() == *deployment;
        if !self.leading {
            // During the takeover, the count is not known yet.
            if let Some(placement) = placement
                && (describes(&placement)
                    || !self.pending.get(deployment).is_some_and(|pending| describes(pending)))
            {
                self.pending.insert(deployment.clone(), placement);
            }
            return 0;
        }
        let replicas = u32::try_from(self.engines.keeping(deployment)).unwrap_or(u32::MAX);
        if let Some(scaler) = self.scalers.get(deployment) {
            scaler.desired.send_modify(|desired| {
                desired.version += 1;
                desired.replicas = replicas;
                if let Some(placement) = placement
                    && (describes(&placement) || !describes(&desired.placement))
                {
                    desired.placement = placement;
                }
            });
            return scaler.desired.borrow().version;
        }
        let Some(placement) = placement else { return 0 };
        self.start_scaler(deployment, DesiredDeployment { version: 1, replicas, placement }, first);
        1
    }

    fn start_scaler(&mut self, deployment: &ObjectName, desired: DesiredDeployment, first: FirstWrite) {
        let labels = PodLabels {
            namespace: deployment.namespace.clone(),
            model: desired.placement.label.clone(),
            variant: desired.placement.variant.name.clone(),
            template_hash: deployment.name.rsplit('-').next().unwrap_or_default().to_owned(),
        };
        let (desired, desired_rx) = watch::channel(desired);
        let (applied_tx, applied) = watch::channel(0);
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(deployment_scaler::run(
            shared,
            deployment.clone(),
            self.epoch(),
            desired_rx,
            applied_tx,
            first,
        ));
        self.scalers.insert(deployment.clone(), DeploymentScaler { labels, desired, applied });
    }

    /// Ends the scaler of a Deployment of which nothing is left and that gets no new engines.
    ///
    /// The current Deployment of a served variant keeps its scaler. In a pool of slots there is a Deployment for each
    /// choice of accelerators. It is deleted, because over time a model may be on every accelerator.
    pub(super) fn end_unused_scaler(&mut self, deployment: &ObjectName) {
        let Some(scaler) = self.scalers.get(deployment) else { return };
        let labels = &scaler.labels;
        if self.engines.has_members(deployment)
            || self.pods.has_labelled(labels)
            || !scaler.is_scaled_to_zero()
        {
            return;
        }
        let placements = self.shared.placements();
        let variant = placements.of_labels(&labels.namespace, &labels.model, &labels.variant);
        if variant.is_none_or(|placement| placement.deployment() != *deployment) {
            tracing::debug!(%deployment, "the Deployment is no longer used: its scaler ends");
            let is_on_slots = scaler.desired.borrow().placement.slots.is_some();
            self.scalers.remove(deployment);
            if is_on_slots {
                let (shared, epoch) = (Arc::clone(&self.shared), self.epoch());
                self.tasks.spawn(deployment_scaler::delete_unused(shared, deployment.clone(), epoch));
            }
        }
    }

    pub(super) async fn deployment_refused(&mut self, deployment: &ObjectName, reason: &str) {
        tracing::error!(%deployment, reason, "the API server rejected the Deployment");
        let starts: Vec<(EngineId, Generation)> = self
            .engines
            .members(deployment)
            .filter(|(_, task)| !task.bound)
            .map(|(id, task)| (id.clone(), task.generation))
            .collect();
        for (engine, generation) in starts {
            let cause = FailureCause::PodNotRunnable;
            let message = format!("the API server rejected the engine's Deployment: {reason}");
            self.shared.report_failure(&engine, generation, &message).await;
            self.shared.common.send_event(Event::StartFailed { engine, generation, cause }).await;
        }
    }
}
