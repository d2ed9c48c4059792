//! The engine Pods of the cluster, by name, by Deployment, and by InferenceModel and variant.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{model::VariantName, units::Tick};

use crate::{crd::ledger::ObjectName, engine_pod::EnginePod};

/// The labels that all Pods of a Deployment share, and their namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::platform) struct PodLabels {
    pub(in crate::platform) namespace: String,
    /// Label value of the model's name.
    pub(in crate::platform) model: String,
    pub(in crate::platform) variant: VariantName,
    pub(in crate::platform) template_hash: String,
}

impl PodLabels {
    pub(in crate::platform) fn of(pod: &EnginePod) -> Self {
        Self {
            namespace: pod.name.namespace.clone(),
            model: pod.model.clone(),
            variant: pod.variant.clone(),
            template_hash: pod.template_hash.clone(),
        }
    }
}

/// Pods, and which of them a Deployment or a variant of a model has.
#[derive(Debug, Default)]
pub(in crate::platform) struct PodIndex {
    pods: BTreeMap<ObjectName, Arc<EnginePod>>,
    deployments: BTreeMap<PodLabels, DeploymentPods>,
    /// Number of Pods, by the InferenceModel that owns them and by variant.
    variants: BTreeMap<(ObjectName, VariantName), usize>,
    /// Pods that no engine needed and that were already given up.
    surplus: BTreeSet<ObjectName>,
}

/// The Pods of one Deployment.
#[derive(Debug, Default)]
struct DeploymentPods {
    count: usize,
    /// Pods that no engine has bound, the oldest first.
    free: BTreeSet<(Tick, ObjectName)>,
}

impl PodIndex {
    pub(in crate::platform) fn get(&self, name: &ObjectName) -> Option<&Arc<EnginePod>> {
        self.pods.get(name)
    }

    pub(in crate::platform) fn values(&self) -> impl Iterator<Item = &Arc<EnginePod>> {
        self.pods.values()
    }

    /// Adds the Pod, in place of its former state.
    pub(in crate::platform) fn insert(&mut self, pod: Arc<EnginePod>) {
        if let Some(known) = self.pods.get(&pod.name).cloned() {
            self.unlink(&known);
            if known.uid != pod.uid {
                self.surplus.remove(&pod.name);
            }
        }
        let labelled = self.deployments.entry(PodLabels::of(&pod)).or_default();
        labelled.count += 1;
        if pod.is_free() {
            labelled.free.insert((pod.created, pod.name.clone()));
        }
        if let Some(model) = &pod.object {
            *self.variants.entry((model.clone(), pod.variant.clone())).or_default() += 1;
        }
        self.pods.insert(pod.name.clone(), pod);
    }

    pub(in crate::platform) fn remove(&mut self, name: &ObjectName) -> Option<Arc<EnginePod>> {
        let pod = self.pods.remove(name)?;
        self.unlink(&pod);
        self.surplus.remove(name);
        Some(pod)
    }

    /// Returns the Pods with these labels that no engine has bound, the oldest first.
    pub(in crate::platform) fn free(&self, labels: &PodLabels) -> impl Iterator<Item = &Arc<EnginePod>> {
        let free = self.deployments.get(labels).into_iter().flat_map(|labelled| &labelled.free);
        free.filter_map(move |(_, name)| self.pods.get(name))
    }

    /// Returns the labels of all Pods.
    pub(in crate::platform) fn labels(&self) -> impl Iterator<Item = &PodLabels> {
        self.deployments.keys()
    }

    /// Returns the labels of all Pods that no engine has bound.
    pub(in crate::platform) fn free_labels(&self) -> impl Iterator<Item = &PodLabels> {
        self.deployments.iter().filter(|(_, labelled)| !labelled.free.is_empty()).map(|(labels, _)| labels)
    }

    pub(in crate::platform) fn free_count(&self, labels: &PodLabels) -> usize {
        self.deployments.get(labels).map_or(0, |labelled| labelled.free.len())
    }

    /// Whether any Pod has these labels.
    pub(in crate::platform) fn has_labelled(&self, labels: &PodLabels) -> bool {
        self.deployments.contains_key(labels)
    }

    /// Whether any Pod belongs to this variant of this InferenceModel.
    pub(in crate::platform) fn has_pods_of(&self, model: &ObjectName, variant: &VariantName) -> bool {
        self.variants.contains_key(&(model.clone(), variant.clone()))
    }

    /// Marks the Pod as given up. Returns false if it was before.
    pub(in crate::platform) fn give_up(&mut self, pod: &ObjectName) -> bool {
        self.surplus.insert(pod.clone())
    }

    pub(in crate::platform) fn is_given_up(&self, pod: &ObjectName) -> bool {
        self.surplus.contains(pod)
    }

    /// Removes the Pod from the indexes.
    fn unlink(&mut self, pod: &EnginePod) {
        let labels = PodLabels::of(pod);
        if let Some(labelled) = self.deployments.get_mut(&labels) {
            labelled.count -= 1;
            labelled.free.remove(&(pod.created, pod.name.clone()));
            if labelled.count == 0 {
                self.deployments.remove(&labels);
            }
        }
        let Some(model) = &pod.object else { return };
        let variant = (model.clone(), pod.variant.clone());
        if let Some(count) = self.variants.get_mut(&variant) {
            *count -= 1;
            if *count == 0 {
                self.variants.remove(&variant);
            }
        }
    }
}
