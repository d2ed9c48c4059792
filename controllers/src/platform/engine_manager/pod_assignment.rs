//! Assigns Pods to engines and counts the replicas of each Deployment.

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use rouse::{fault::FailureCause, fleet::event::Event, model::EngineId, units::Generation};
use tokio::sync::watch;

use super::{DeploymentScaler, EngineManager};
use crate::{
    crd::ledger::ObjectName,
    engine_pod::EnginePod,
    label,
    platform::{
        ModelPlacement,
        deployment_scaler::{self, DesiredDeployment},
    },
    watch::Delta,
};

impl EngineManager {
    /// Sets the Deployment's replicas to the number of its engines that keep a Pod; returns the desired version.
    pub(in crate::platform) fn update_replicas(
        &mut self,
        deployment: &ObjectName,
        placement: Option<Arc<ModelPlacement>>,
    ) -> u64 {
        let members =
            self.engines.values().filter(|task| task.deployment == *deployment && task.release.is_none());
        let replicas = u32::try_from(members.count()).unwrap_or(u32::MAX);
        if !self.leading {
            // During the takeover, the count is not known yet.
            self.pending.extend(placement.map(|placement| (deployment.clone(), placement)));
            return 0;
        }
        if let Some(scaler) = self.scalers.get(deployment) {
            scaler.desired.send_modify(|desired| {
                desired.version += 1;
                desired.replicas = replicas;
                if let Some(placement) = placement {
                    desired.placement = placement;
                }
            });
            return scaler.desired.borrow().version;
        }
        let Some(placement) = placement else { return 0 };
        let model = label::value(placement.engine.name.as_str());
        let template = deployment.name.rsplit('-').next().unwrap_or_default().to_owned();
        let (desired, desired_rx) = watch::channel(DesiredDeployment { version: 1, replicas, placement });
        let (applied_tx, applied) = watch::channel(0);
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(deployment_scaler::run(
            shared,
            deployment.clone(),
            desired_rx,
            applied_tx,
            self.requests.clone(),
        ));
        self.scalers.insert(
            deployment.clone(),
            DeploymentScaler { model, template_hash: template, desired, applied },
        );
        1
    }

    /// Assigns free Pods to engines without a Pod, the lowest engine id first.
    pub(super) fn assign(&mut self, deployment: &ObjectName) {
        let assigned: BTreeSet<ObjectName> =
            self.engines.values().filter_map(|task| task.pod.clone()).collect();
        let mut free = self.free(deployment);
        free.retain(|pod| !assigned.contains(&pod.name));
        // `pop` takes the oldest Pod, which is the closest to being ready.
        free.sort_by(|a, b| (b.created, &b.name).cmp(&(a.created, &a.name)));
        for task in self.engines.values_mut() {
            if task.deployment != *deployment || task.pod.is_some() || task.bound || task.release.is_some() {
                continue;
            }
            let Some(pod) = free.pop() else { return };
            task.pod = Some(pod.name.clone());
            task.pod_sender.send_replace(Some(pod));
        }
    }

    /// Returns the Pods of this Deployment that no engine has bound yet.
    pub(super) fn free(&self, deployment: &ObjectName) -> Vec<Arc<EnginePod>> {
        let Some(scaler) = self.scalers.get(deployment) else { return Vec::new() };
        let of = |pod: &&Arc<EnginePod>| {
            pod.is_free()
                && pod.name.namespace == deployment.namespace
                && (&pod.model, &pod.template_hash) == (&scaler.model, &scaler.template_hash)
        };
        self.pods.values().filter(of).cloned().collect()
    }

    /// Notifies leaving engines once no Pod is kept for them.
    ///
    /// An engine that never had a Pod also waits until no surplus Pod is left that was made for it.
    pub(super) fn complete_releases(&mut self) {
        let names: Vec<ObjectName> = self.scalers.keys().cloned().collect();
        for deployment in names {
            let applied = self.scalers.get(&deployment).map_or(0, |scaler| *scaler.applied.borrow());
            let spare = self.free(&deployment).len();
            let seeking = self
                .engines
                .values()
                .filter(|task| task.deployment == deployment && !task.bound && task.release.is_none());
            let surplus = spare > seeking.count();
            for task in self.engines.values_mut().filter(|task| task.deployment == deployment) {
                let Some((from, done)) = &mut task.release else { continue };
                // A replacement of a vanished Pod is surplus and has to go, too.
                if *from <= applied
                    && (task.pod.is_some() || !surplus)
                    && let Some(done) = done.take()
                {
                    // The waiting task may have been dropped.
                    done.send(()).unwrap_or_default();
                }
            }
        }
    }

    pub(super) async fn deployment_refused(&mut self, deployment: &ObjectName, reason: &str) {
        tracing::error!(%deployment, reason, "the API server rejected the Deployment");
        let starts: Vec<(EngineId, Generation)> = self
            .engines
            .iter()
            .filter(|(_, task)| task.deployment == *deployment && !task.bound)
            .map(|(id, task)| (id.clone(), task.generation))
            .collect();
        for (engine, generation) in starts {
            let cause = FailureCause::PodNotRunnable;
            let message = format!("the API server rejected the engine's Deployment: {reason}");
            self.shared.report_failure(&engine, generation, &message).await;
            self.shared.common.send_event(Event::StartFailed { engine, generation, cause }).await;
        }
    }

    pub(super) fn apply(&mut self, change: Delta<Pod>) {
        let moved = match change {
            Delta::All { namespace, objects } => {
                let listed: Vec<Arc<EnginePod>> = objects
                    .into_iter()
                    .filter_map(|found| EnginePod::of(&found.readable()?))
                    .map(Arc::new)
                    .collect();
                let names: BTreeSet<&ObjectName> = listed.iter().map(|pod| &pod.name).collect();
                let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let removed: Vec<ObjectName> = self
                    .pods
                    .keys()
                    .filter(|name| in_scope(name) && !names.contains(name))
                    .cloned()
                    .collect();
                removed.iter().for_each(|name| self.pod_deleted(name));
                listed.into_iter().for_each(|pod| self.pod_applied(pod));
                self.listed_namespaces.insert(namespace);
                true
            }
            Delta::Applied(found) => match found.readable().as_ref().and_then(EnginePod::of) {
                Some(pod) => {
                    self.pod_applied(Arc::new(pod));
                    true
                }
                None => false,
            },
            Delta::Deleted(name) => {
                self.pod_deleted(&name);
                true
            }
        };
        if moved && self.leading {
            let names: Vec<ObjectName> = self.scalers.keys().cloned().collect();
            names.iter().for_each(|name| self.assign(name));
            self.complete_releases();
            self.release_surplus_pods();
            self.release_orphans();
        }
    }

    /// Gives up Pods that no engine needs, by writing their Deployment's replica count.
    ///
    /// Such Pods appear when a user scales a Deployment, or when a write of a replaced leader arrives late. Each is
    /// given up once: its deletion takes a moment.
    fn release_surplus_pods(&mut self) {
        let assigned: BTreeSet<&ObjectName> =
            self.engines.values().filter_map(|task| task.pod.as_ref()).collect();
        let idle = self.pods.values().filter(|pod| pod.is_free() && !assigned.contains(&pod.name));
        let idle: Vec<Arc<EnginePod>> =
            idle.filter(|pod| !self.surplus_pods.contains(&pod.uid)).cloned().collect();
        for pod in idle {
            let Some(placement) =
                self.shared.placements().values().find(|placement| placement.owns(&pod)).cloned()
            else {
                continue;
            };
            let deployment = placement.deployment_of(&pod.template_hash);
            tracing::info!(pod = %pod.name, %deployment, "releasing surplus Pod: no engine needs it");
            self.surplus_pods.insert(pod.uid.clone());
            self.update_replicas(&deployment, Some(placement));
        }
        let pods: BTreeSet<&String> = self.pods.values().map(|pod| &pod.uid).collect();
        self.surplus_pods.retain(|uid| pods.contains(uid));
    }

    pub(super) fn pod_applied(&mut self, pod: Arc<EnginePod>) {
        // The same name with another UID is another Pod.
        if self.pods.get(&pod.name).is_some_and(|known| known.uid != pod.uid) {
            self.pod_deleted(&pod.name.clone());
        }
        for task in self.engines.values_mut().filter(|task| task.pod.as_ref() == Some(&pod.name)) {
            // A Pod that ends before the engine bound it is replaced by another.
            let lost = (pod.finished || pod.terminating) && !task.bound && task.release.is_none();
            if lost {
                task.pod = None;
            }
            task.pod_sender.send_replace((!lost).then(|| Arc::clone(&pod)));
        }
        self.pods.insert(pod.name.clone(), pod);
    }

    pub(super) fn pod_deleted(&mut self, name: &ObjectName) {
        self.pods.remove(name);
        for task in self.engines.values_mut().filter(|task| task.pod.as_ref() == Some(name)) {
            task.pod = None;
            task.pod_sender.send_replace(None);
        }
    }
}
