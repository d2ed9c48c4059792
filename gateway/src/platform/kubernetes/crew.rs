//! One Deployment, kept at so many replicas.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::apps::v1::Deployment;
use kube::{Api, ResourceExt as _};
use rouse::wire::Epoch;
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    time,
};

use super::{Place, Shared, steward::Request};
use crate::controllers::{crd::ledger::ObjectName, workload::EPOCH, writer::Error};

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// What was refused is tried again so much later: rights and admission are others' to mend.
const REFUSED: Duration = Duration::from_secs(10);

/// How the Deployment should be.
#[derive(Clone, Debug)]
pub(super) struct Desired {
    /// Grows with every change.
    pub(super) version: u64,
    pub(super) replicas: u32,
    pub(super) place: Arc<Place>,
}

/// The object's version, as it is known before it is written; `None`: it is looked up first. Nothing is written over what a
/// leader before this one has put there, or puts there late.
type Known = Option<Option<String>>;

/// Writes what is desired until nobody desires anything. `applied`: the newest version that was written.
pub(super) async fn keep(
    shared: Arc<Shared>,
    name: ObjectName,
    mut desired: watch::Receiver<Desired>,
    applied: watch::Sender<u64>,
    requests: mpsc::UnboundedSender<Request>,
) {
    let api: Api<Deployment> = Api::namespaced(shared.client.clone(), &name.namespace);
    let mut known: Known = None;
    let mut said = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let wanted = desired.borrow_and_update().clone();
        match write(&shared, &api, &name, &wanted, known.take()).await {
            Ok(now) => {
                (known, said, pause) = (now, None, FIRST_PAUSE);
                applied.send_replace(wanted.version);
                drop(requests.send(Request::Applied));
            }
            // Somebody else wrote it meanwhile: what it is now is looked up, and ours put over it.
            Err(Error::Conflict) => {
                time::sleep(FIRST_PAUSE).await;
                continue;
            }
            Err(Error::Invalid(why)) => {
                // Whoever waits for Pods of it is told. Where there is no such Deployment, it has no Pods either.
                if matches!(shared.writer.look(&api, &name.name).await, Ok(None)) {
                    applied.send_replace(wanted.version);
                }
                if said.as_ref() != Some(&(wanted.version, why.clone())) {
                    said = Some((wanted.version, why.clone()));
                    drop(requests.send(Request::Refused { deployment: name.clone(), why }));
                }
                drop(requests.send(Request::Applied));
                if matches!(time::timeout(REFUSED, desired.changed()).await, Ok(Err(_))) {
                    return;
                }
                continue;
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

/// What is known of the object afterwards.
async fn write(
    shared: &Shared,
    api: &Api<Deployment>,
    name: &ObjectName,
    wanted: &Desired,
    known: Known,
) -> Result<Known, Error> {
    let epoch = shared.writer.claim()?.epoch;
    let version = match known {
        Some(version) => Some(version),
        None => shared.writer.look(api, &name.name).await?.map(|object| object.resource_version()),
    };
    let Some(version) = version else {
        // What is not there has no Pods.
        if *name != wanted.place.deployment() || wanted.replicas == 0 {
            return Ok(None);
        }
        let object = wanted.place.workload(&shared.sidecar, wanted.replicas, epoch).deployment();
        return Ok(Some(shared.writer.create(api, &object).await?.resource_version()));
    };
    let written = update(shared, api, name, wanted, epoch, version).await;
    match written {
        Ok(written) => Ok(Some(written.resource_version())),
        Err(Error::Gone) => Err(Error::Conflict),
        Err(error) => Err(error),
    }
}

async fn update(
    shared: &Shared,
    api: &Api<Deployment>,
    name: &ObjectName,
    wanted: &Desired,
    epoch: Epoch,
    version: Option<String>,
) -> Result<Deployment, Error> {
    let whole = *name == wanted.place.deployment();
    let mut object = if whole {
        wanted.place.workload(&shared.sidecar, wanted.replicas, epoch).deployment()
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
    if whole {
        shared.writer.apply(api, &name.name, &object).await
    } else {
        shared.writer.merge(api, &name.name, &object).await
    }
}
