//! One Deployment, kept at so many replicas.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::apps::v1::Deployment;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    time,
};

use super::{Place, Shared, steward::Request};
use crate::controllers::{crd::ledger::ObjectName, workload::EPOCH, writer::Error};

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// How the Deployment should be.
#[derive(Clone, Debug)]
pub(super) struct Desired {
    /// Grows with every change.
    pub(super) version: u64,
    pub(super) replicas: u32,
    pub(super) place: Arc<Place>,
}

/// Writes what is desired until nobody desires anything. `applied`: the newest version that was written.
pub(super) async fn keep(
    shared: Arc<Shared>,
    name: ObjectName,
    mut desired: watch::Receiver<Desired>,
    applied: watch::Sender<u64>,
    requests: mpsc::UnboundedSender<Request>,
) {
    let api: Api<Deployment> = Api::namespaced(shared.client.clone(), &name.namespace);
    let mut version = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let wanted = desired.borrow_and_update().clone();
        match write(&shared, &api, &name, &wanted, version.take()).await {
            Ok(now) => {
                (version, pause) = (now, FIRST_PAUSE);
                applied.send_replace(wanted.version);
                drop(requests.send(Request::Applied));
            }
            // Somebody else wrote it meanwhile: what it is now is looked up, and ours put over it.
            Err(Error::Conflict) => {
                version = api.get_opt(&name.name).await.ok().flatten().and_then(|now| now.resource_version());
                time::sleep(FIRST_PAUSE).await;
                continue;
            }
            Err(Error::Invalid(why)) => {
                // Whoever waits for Pods of it is told. Where there is no such Deployment, it has no Pods either.
                if matches!(api.get_opt(&name.name).await, Ok(None)) {
                    applied.send_replace(wanted.version);
                }
                drop(requests.send(Request::Refused { deployment: name.clone(), why }));
                drop(requests.send(Request::Applied));
            }
            Err(error) => {
                tracing::warn!(deployment = %name, %error, "the Deployment was not written; it is tried again");
                let changed = time::timeout(pause, desired.changed()).await;
                pause = (pause * 2).min(LAST_PAUSE);
                if matches!(changed, Ok(Err(_))) {
                    return;
                }
                continue;
            }
        }
        if desired.changed().await.is_err() {
            return;
        }
    }
}

/// The object's version afterwards.
async fn write(
    shared: &Shared,
    api: &Api<Deployment>,
    name: &ObjectName,
    wanted: &Desired,
    version: Option<String>,
) -> Result<Option<String>, Error> {
    let epoch = shared.writer.claim()?.epoch;
    let place = &wanted.place;
    let mut object = if *name == place.deployment() {
        place.workload(&shared.sidecar, wanted.replicas, epoch).deployment()
    } else {
        // Of a former template nothing is changed but how many run by it.
        json!({
            "metadata": {"annotations": {EPOCH: epoch.to_string()}},
            "spec": {"replicas": wanted.replicas},
        })
    };
    if let (Some(version), Some(metadata)) =
        (version, object.get_mut("metadata").and_then(|m| m.as_object_mut()))
    {
        metadata.insert("resourceVersion".to_owned(), json!(version));
    }
    let written = if *name == place.deployment() {
        shared.writer.apply(api, &name.name, &object).await
    } else {
        shared.writer.merge(api, &name.name, &object).await
    };
    match written {
        Ok(written) => Ok(written.resource_version()),
        // A former one that is gone has no Pods.
        Err(Error::Gone) => Ok(None),
        Err(error) => Err(error),
    }
}
