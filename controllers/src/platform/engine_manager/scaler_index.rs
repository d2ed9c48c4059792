//! The scalers of Deployments, by Deployment and by the labels of its Pods.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;

use super::pod_index::PodLabels;
use crate::{crd::ledger::ObjectName, platform::deployment_scaler::DesiredDeployment};

/// The manager's record of one Deployment. The scaler's task ends when this record is dropped.
pub(super) struct DeploymentScaler {
    pub(super) labels: PodLabels,
    pub(super) desired: watch::Sender<DesiredDeployment>,
    pub(super) applied: watch::Receiver<u64>,
}

impl DeploymentScaler {
    /// Whether the Deployment has no replicas, as far as was written.
    pub(super) fn is_scaled_to_zero(&self) -> bool {
        let desired = self.desired.borrow();
        desired.replicas == 0 && desired.version <= *self.applied.borrow()
    }
}

/// Scalers by Deployment. A model that is deleted and created under another name can have two with the same labels.
#[derive(Default)]
pub(super) struct ScalerIndex {
    scalers: BTreeMap<ObjectName, DeploymentScaler>,
    labelled: BTreeMap<PodLabels, BTreeSet<ObjectName>>,
}

impl ScalerIndex {
    pub(super) fn get(&self, deployment: &ObjectName) -> Option<&DeploymentScaler> {
        self.scalers.get(deployment)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.scalers.keys()
    }

    /// Returns the Deployments whose Pods have these labels.
    pub(super) fn of_labels(&self, labels: &PodLabels) -> impl Iterator<Item = &ObjectName> {
        self.labelled.get(labels).into_iter().flatten()
    }

    pub(super) fn insert(&mut self, deployment: ObjectName, scaler: DeploymentScaler) {
        self.remove(&deployment);
        self.labelled.entry(scaler.labels.clone()).or_default().insert(deployment.clone());
        self.scalers.insert(deployment, scaler);
    }

    pub(super) fn remove(&mut self, deployment: &ObjectName) {
        let Some(scaler) = self.scalers.remove(deployment) else { return };
        if let Some(deployments) = self.labelled.get_mut(&scaler.labels) {
            deployments.remove(deployment);
            if deployments.is_empty() {
                self.labelled.remove(&scaler.labels);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use rouse::model::VariantName;

    use super::*;
    use crate::platform::{ModelPlacement, testing};

    fn labels(number: u32) -> PodLabels {
        PodLabels {
            namespace: "chat".to_owned(),
            model: format!("m{number}"),
            variant: VariantName::default(),
            template_hash: "t".to_owned(),
        }
    }

    fn scaler(
        labels: PodLabels,
        placement: &Arc<ModelPlacement>,
    ) -> (DeploymentScaler, watch::Receiver<DesiredDeployment>, watch::Sender<u64>) {
        let placement = Arc::clone(placement);
        let (desired, seen) = watch::channel(DesiredDeployment { version: 1, replicas: 0, placement });
        let (written, applied) = watch::channel(0);
        (DeploymentScaler { labels, desired, applied }, seen, written)
    }

    #[test]
    fn a_deployment_is_scaled_to_zero_once_that_is_written_and_its_task_ends_with_its_record() {
        let placement = Arc::new(testing::placement("m", "chat"));
        let (scaler, seen, written) = scaler(labels(0), &placement);
        assert!(!scaler.is_scaled_to_zero(), "nothing was written yet");
        written.send_replace(1);
        assert!(scaler.is_scaled_to_zero());
        scaler.desired.send_modify(|desired| (desired.version, desired.replicas) = (2, 1));
        written.send_replace(2);
        assert!(!scaler.is_scaled_to_zero());
        scaler.desired.send_modify(|desired| (desired.version, desired.replicas) = (3, 0));
        assert!(!scaler.is_scaled_to_zero(), "the Deployment still has a replica");
        written.send_replace(3);
        assert!(scaler.is_scaled_to_zero());
        let mut scalers = ScalerIndex::default();
        let deployment = ObjectName::new("chat", "d");
        scalers.insert(deployment.clone(), scaler);
        assert!(seen.has_changed().is_ok());
        scalers.remove(&deployment);
        assert!(seen.has_changed().is_err(), "the sender is dropped");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_lookup_finds_what_a_scan_finds(
            changes in prop::collection::vec((0..4_u32, prop::option::of(0..3_u32)), 1..30),
        ) {
            let placement = Arc::new(testing::placement("m", "chat"));
            let mut index = ScalerIndex::default();
            let mut known: BTreeMap<ObjectName, PodLabels> = BTreeMap::new();
            for (deployment, labelled) in changes {
                let deployment = ObjectName::new("chat", format!("d{deployment}"));
                match labelled.map(labels) {
                    Some(labels) => {
                        index.insert(deployment.clone(), scaler(labels.clone(), &placement).0);
                        known.insert(deployment, labels);
                    }
                    None => {
                        index.remove(&deployment);
                        known.remove(&deployment);
                    }
                }
                prop_assert!(index.names().eq(known.keys()));
                for labels in (0..3).map(labels) {
                    let scanned = known.iter().filter(|(_, of)| **of == labels).map(|(name, _)| name);
                    prop_assert!(index.of_labels(&labels).eq(scanned));
                }
            }
            index.clear();
            prop_assert_eq!(index.names().count() + index.of_labels(&labels(0)).count(), 0);
        }
    }
}
