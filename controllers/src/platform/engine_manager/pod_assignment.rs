//! Assigns Pods to engines and releases them.

use std::sync::Arc;

use rouse::{model::EngineId, units::Generation};
use tokio::sync::oneshot;

use super::{EngineManager, pod_index::PodLabels};
use crate::{crd::ledger::ObjectName, engine_pod::EnginePod};

impl EngineManager {
    /// Assigns free Pods to engines without a Pod: the oldest Pod, which is the closest to being ready, to the lowest
    /// engine id.
    pub(super) fn assign(&mut self, deployment: &ObjectName) {
        let waiting = self.engines.waiting(deployment);
        let Some(scaler) = self.scalers.get(deployment).filter(|_| !waiting.is_empty()) else { return };
        let free = self.unassigned(&scaler.labels);
        for (engine, pod) in waiting.into_iter().zip(free) {
            self.engines.change(&engine, |task| {
                task.pod = Some(pod.name.clone());
                task.pod_sender.send_replace(Some(pod));
            });
        }
    }

    /// Returns the Pods with these labels that no engine has, the oldest first.
    fn unassigned(&self, labels: &PodLabels) -> Vec<Arc<EnginePod>> {
        self.pods.free(labels).filter(|pod| !self.engines.has_pod(&pod.name)).cloned().collect()
    }

    /// Releases the Pod of this engine generation: see [`super::ManagerRequest::ReleasePod`].
    pub(super) fn release_pod(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        done: oneshot::Sender<()>,
    ) {
        self.change_engine(engine, generation, |task| task.release = Some((u64::MAX, Some(done))));
        let Some(deployment) = self.engine(engine, generation).and_then(|task| task.deployment.clone())
        else {
            return;
        };
        let version = self.update_replicas(&deployment, None);
        self.change_engine(engine, generation, |task| {
            if let Some((from, _)) = &mut task.release {
                *from = version;
            }
        });
        self.complete_releases(&deployment);
    }

    /// Notifies leaving engines of this Deployment once no Pod is kept for them.
    ///
    /// They also wait until no surplus Pod is left: one that was made for an engine which never got it, or that replaces
    /// a vanished Pod. It is about to be deleted, and the next engine must not get it.
    pub(super) fn complete_releases(&mut self, deployment: &ObjectName) {
        let Some(scaler) = self.scalers.get(deployment) else { return };
        let applied = *scaler.applied.borrow();
        let surplus = self.pods.free_count(&scaler.labels) > self.engines.seeking(deployment);
        for engine in self.engines.leaving(deployment) {
            self.engines.change(&engine, |task| {
                let Some((from, done)) = &mut task.release else { return };
                if *from <= applied
                    && !surplus
                    && let Some(done) = done.take()
                {
                    // The waiting task may have been dropped.
                    done.send(()).unwrap_or_default();
                }
            });
        }
    }

    /// Gives up the Pods with these labels that no engine needs, by writing their Deployment's replica count.
    ///
    /// Such Pods appear when a user scales a Deployment, or when a write of a replaced leader arrives late. Each is
    /// given up once: its deletion takes a moment.
    pub(super) fn release_surplus_pods(&mut self, labels: &PodLabels) {
        let mut idle = self.unassigned(labels);
        idle.retain(|pod| !self.pods.is_given_up(&pod.name));
        if idle.is_empty() {
            return;
        }
        let placements = self.shared.placements();
        let Some(placement) = placements.of_labels(&labels.namespace, &labels.model, &labels.variant) else {
            return;
        };
        let deployment = placement.deployment_of(&labels.template_hash);
        for pod in idle {
            tracing::info!(pod = %pod.name, %deployment, "releasing surplus Pod: no engine needs it");
            self.pods.give_up(&pod.name);
        }
        self.update_replicas(&deployment, Some(Arc::clone(placement)));
    }
}
