//! Applies changes of Pods: each concerns its Deployment, its model and the engine that has the Pod.

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::core::v1::Pod;

use super::{EngineManager, pod_index::PodLabels};
use crate::{crd::ledger::ObjectName, engine_pod::EnginePod, watch::Delta};

/// What changed Pods belong to.
#[derive(Debug, Default)]
struct AffectedObjects {
    labels: BTreeSet<PodLabels>,
    /// Deployments of the engines that have the Pods.
    deployments: BTreeSet<ObjectName>,
    /// InferenceModels.
    models: BTreeSet<ObjectName>,
}

impl AffectedObjects {
    fn add(&mut self, pod: &EnginePod) {
        self.labels.insert(PodLabels::of(pod));
        self.models.extend(pod.object.clone());
    }
}

impl EngineManager {
    pub(super) fn apply(&mut self, change: Delta<Pod>) {
        let mut touched = AffectedObjects::default();
        match change {
            Delta::All { namespace, objects } => {
                let listed: Vec<Arc<EnginePod>> = objects
                    .into_iter()
                    .filter_map(|found| EnginePod::of(&*found.readable()?))
                    .map(Arc::new)
                    .collect();
                let names: BTreeSet<&ObjectName> = listed.iter().map(|pod| &pod.name).collect();
                let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let removed: Vec<ObjectName> = self
                    .pods
                    .values()
                    .map(|pod| &pod.name)
                    .filter(|name| in_scope(name) && !names.contains(name))
                    .cloned()
                    .collect();
                removed.iter().for_each(|name| self.pod_deleted(name, &mut touched));
                listed.into_iter().for_each(|pod| self.pod_applied(pod, &mut touched));
                self.listed_namespaces.insert(namespace);
                // A list is rare, and changes may have been missed before it.
                touched.deployments.extend(self.scalers.names().cloned());
                touched.models.extend(self.orphans.keys().cloned());
            }
            Delta::Applied(found) => {
                if let Some(pod) = found.readable().as_deref().and_then(EnginePod::of) {
                    self.pod_applied(Arc::new(pod), &mut touched);
                }
            }
            Delta::Deleted(name) => self.pod_deleted(&name, &mut touched),
        }
        if self.leading {
            self.update_touched(touched);
        }
    }

    fn update_touched(&mut self, touched: AffectedObjects) {
        let AffectedObjects { labels, mut deployments, models } = touched;
        for labels in &labels {
            deployments.extend(self.scalers.of_labels(labels).cloned());
        }
        for deployment in &deployments {
            self.assign(deployment);
            self.complete_releases(deployment);
        }
        labels.iter().for_each(|labels| self.release_surplus_pods(labels));
        models.iter().for_each(|model| self.release_orphans_of(model));
        deployments.iter().for_each(|deployment| self.end_unused_scaler(deployment));
    }

    /// Handles a change of the placements of models: Pods that no engine needs may belong to a served model again, and
    /// scalers may have lost theirs. Objects change rarely.
    pub(super) fn placements_changed_while_leading(&mut self) {
        let labels: BTreeSet<PodLabels> = self.pods.free_labels().cloned().collect();
        labels.iter().for_each(|labels| self.release_surplus_pods(labels));
        let deployments: Vec<ObjectName> = self.scalers.names().cloned().collect();
        deployments.iter().for_each(|deployment| self.end_unused_scaler(deployment));
    }

    fn pod_applied(&mut self, pod: Arc<EnginePod>, touched: &mut AffectedObjects) {
        if let Some(known) = self.pods.get(&pod.name).cloned() {
            touched.add(&known);
            // The same name with another UID is another Pod.
            if known.uid != pod.uid {
                self.pod_deleted(&pod.name, touched);
            }
        }
        touched.add(&pod);
        for engine in self.engines.of_pod(&pod.name) {
            self.engines.change(&engine, |task| {
                // A Pod that ends before the engine bound it is replaced by another.
                let lost = (pod.finished || pod.terminating) && !task.bound && task.release.is_none();
                if lost {
                    task.pod = None;
                }
                task.pod_sender.send_replace((!lost).then(|| Arc::clone(&pod)));
                touched.deployments.extend(task.deployment.clone());
            });
        }
        self.pods.insert(pod);
    }

    fn pod_deleted(&mut self, name: &ObjectName, touched: &mut AffectedObjects) {
        if let Some(pod) = self.pods.remove(name) {
            touched.add(&pod);
        }
        for engine in self.engines.of_pod(name) {
            self.engines.change(&engine, |task| {
                task.pod = None;
                task.pod_sender.send_replace(None);
                touched.deployments.extend(task.deployment.clone());
            });
        }
    }
}
