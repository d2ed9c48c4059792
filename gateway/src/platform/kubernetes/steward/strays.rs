//! What belongs to models that are not served: their engines end, and what was booked for them is given back.
//!
//! A model that was spoiled, or sent where no pool is, while its engine ran is ended by the decisions of whoever leads then. Whoever
//! comes to lead afterwards finds Pods that no decision knows of.

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::apps::v1::Deployment;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::Steward;
use crate::{
    controllers::{crd::ledger::ObjectName, workload::EPOCH, writer::Error},
    platform::kubernetes::{Shared, clerk::Entry, life::Pauses, takeover::Booked},
};

impl Steward {
    /// Ends the Deployments of Pods that no served model owns.
    pub(in crate::platform::kubernetes) fn end_strays(&mut self) {
        let places = self.shared.places();
        let stray = self.pods.values().filter(|pod| !places.values().any(|place| place.owns(pod)));
        let deployments: BTreeSet<ObjectName> = stray.filter_map(|pod| pod.deployment.clone()).collect();
        for deployment in deployments {
            tracing::info!(%deployment, "its model is not served: its engines end");
            self.tasks.spawn(end(Arc::clone(&self.shared), deployment));
        }
    }

    /// Gives back what was booked for models that are not served and have no Pods any more.
    pub(in crate::platform::kubernetes) fn release_orphans(&mut self) {
        if self.orphans.is_empty() {
            return;
        }
        let runs: BTreeSet<&ObjectName> = self.pods.values().filter_map(|pod| pod.object.as_ref()).collect();
        let (kept, over): (Vec<Booked>, Vec<Booked>) =
            self.orphans.iter().cloned().partition(|entry| runs.contains(&entry.model));
        self.orphans = kept;
        for entry in over {
            let release = Entry::Release { model: entry.model, replica: entry.replica, done: None };
            self.clerk(&entry.pool).send(release).unwrap_or_default();
        }
    }
}

/// Until it is at none, or gone.
async fn end(shared: Arc<Shared>, name: ObjectName) {
    let api: Api<Deployment> = Api::namespaced(shared.client.clone(), &name.namespace);
    let mut pauses = Pauses::new();
    loop {
        let ended = async {
            let epoch = shared.writer.claim()?.epoch;
            let Some(found) = shared.writer.look(&api, &name.name).await? else { return Ok(()) };
            let none = json!({
                "metadata": {
                    "resourceVersion": found.resource_version(),
                    "annotations": {EPOCH: epoch.to_string()},
                },
                "spec": {"replicas": 0},
            });
            shared.writer.merge(&api, &name.name, &none).await.map(drop)
        };
        match ended.await {
            Ok(()) | Err(Error::Gone) => return,
            Err(error) => tracing::debug!(deployment = %name, %error, "not scaled down; it is tried again"),
        }
        pauses.pause().await;
    }
}
