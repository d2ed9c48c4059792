//! Keeps one Deployment at its desired number of replicas.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::apps::v1::Deployment;
use kube::{Api, ResourceExt as _};
use rouse_net::stub_api::Epoch;
use serde_json::json;
use tokio::{sync::watch, time};

use super::{KubernetesContext, ModelPlacement, engine_manager::ManagerRequest, engine_task::RetryBackoff};
use crate::{
    crd::ledger::ObjectName,
    workload::EPOCH,
    writer::{Error, fence::SeenObject},
};

const MIN_RETRY_DELAY: Duration = Duration::from_millis(200);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Retry delay after a refusal: only an operator can fix missing rights or admission rules.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Desired state of a Deployment.
#[derive(Clone, Debug)]
pub(super) struct DesiredDeployment {
    /// Increases with every change.
    pub(super) version: u64,
    pub(super) replicas: u32,
    pub(super) placement: Arc<ModelPlacement>,
}

/// When a scaler writes its Deployment for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstWrite {
    AtOnce,
    /// In turn with the other Deployments of a takeover, or at the first change. Until then the Deployment is as the
    /// former leader left it.
    InTurn,
}

/// Maximum number of tries to delete an unused Deployment, with pauses of up to a second. One that stays does no harm.
const MAX_DELETION_TRIES: u32 = 10;

/// Maximum number of Deployments of a takeover that are written at once.
///
/// A new leader writes each Deployment again, so that late writes of former leaders fail. Decisions must not wait for
/// a thousand of these writes, nor share the API server with many of them.
pub(super) const MAX_CONCURRENT_REASSERTIONS: usize = 4;

/// The object's version before a write; `None` means that the scaler must look it up first.
///
/// The version keeps a write from overwriting a former leader's write, even a late one.
type KnownVersion = Option<Option<String>>;

/// Writes the desired state until its sender is dropped, in the term of this epoch. `applied`: the newest version
/// written.
pub(super) async fn run(
    shared: Arc<KubernetesContext>,
    name: ObjectName,
    epoch: Epoch,
    mut desired: watch::Receiver<DesiredDeployment>,
    applied: watch::Sender<u64>,
    first: FirstWrite,
) {
    let api: Api<Deployment> = Api::namespaced(shared.client.clone(), &name.namespace);
    let mut turn = None;
    if first == FirstWrite::InTurn {
        tokio::select! {
            // Nothing closes the semaphore.
            permit = shared.reassertions.acquire() => turn = permit.ok(),
            changed = desired.changed() => if changed.is_err() { return },
        }
    }
    let mut known: KnownVersion = None;
    let mut reported = None;
    let mut pause = MIN_RETRY_DELAY;
    loop {
        let wanted = desired.borrow_and_update().clone();
        let written = write(&shared, &api, &name, &wanted, epoch, known.take()).await;
        // A Deployment that cannot be written holds up no other.
        drop(turn.take());
        match written {
            Ok(now) => {
                (known, reported, pause) = (now, None, MIN_RETRY_DELAY);
                applied.send_replace(wanted.version);
                shared.request(ManagerRequest::DeploymentApplied { deployment: name.clone() }).await;
            }
            // Another client wrote the Deployment meanwhile. Look up its version and write ours over it.
            Err(Error::Conflict) => {
                time::sleep(MIN_RETRY_DELAY).await;
                continue;
            }
            Err(Error::Invalid(why)) => {
                // Releases wait for `applied`. A Deployment that does not exist has no Pods, so there is nothing left
                // to wait for.
                if matches!(shared.writer.get(&api, &name.name).await, Ok(None)) {
                    applied.send_replace(wanted.version);
                }
                if reported.as_ref() != Some(&(wanted.version, why.clone())) {
                    reported = Some((wanted.version, why.clone()));
                    shared.request(ManagerRequest::DeploymentRefused { deployment: name.clone(), why }).await;
                }
                shared.request(ManagerRequest::DeploymentApplied { deployment: name.clone() }).await;
                if matches!(time::timeout(REFUSED_RETRY_DELAY, desired.changed()).await, Ok(Err(_))) {
                    return;
                }
                continue;
            }
            Err(error) => {
                tracing::warn!(deployment = %name, %error, "cannot write the Deployment, retrying");
                let changed = time::timeout(pause, desired.changed()).await;
                pause = (pause * 2).min(MAX_RETRY_DELAY);
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

/// Deletes a Deployment without replicas. One that gets replicas meanwhile stays.
pub(super) async fn delete_unused(shared: Arc<KubernetesContext>, name: ObjectName, epoch: Epoch) {
    let api: Api<Deployment> = Api::namespaced(shared.client.clone(), &name.namespace);
    let mut pauses = RetryBackoff::new();
    for _ in 0..MAX_DELETION_TRIES {
        let deleted = async {
            shared.writer.leadership_in(epoch)?;
            let Some(found) = shared.writer.get_for_write(&api, &name.name, epoch).await? else {
                return Ok(());
            };
            if found.spec.as_ref().and_then(|spec| spec.replicas) != Some(0) {
                return Ok(());
            }
            let seen = SeenObject::of(&found.metadata);
            Box::pin(shared.writer.delete_exact(&api, &name.name, &seen)).await
        };
        match deleted.await {
            Ok(()) => return,
            // Its controller writes the Deployment's status after each change.
            Err(error) => {
                tracing::debug!(deployment = %name, %error, "cannot delete the unused Deployment, retrying")
            }
        }
        pauses.pause().await;
    }
}

/// Writes the Deployment and returns the object's new version.
async fn write(
    shared: &KubernetesContext,
    api: &Api<Deployment>,
    name: &ObjectName,
    desired: &DesiredDeployment,
    epoch: Epoch,
    known: KnownVersion,
) -> Result<KnownVersion, Error> {
    shared.writer.leadership_in(epoch)?;
    let version = match known {
        Some(version) => Some(version),
        None => {
            let found = shared.writer.get_for_write(api, &name.name, epoch).await?;
            found.map(|object| object.resource_version())
        }
    };
    let Some(version) = version else {
        // A Deployment that does not exist has no Pods to scale down.
        if *name != desired.placement.deployment() || desired.replicas == 0 {
            return Ok(None);
        }
        let object = desired.placement.workload(&shared.sidecar, desired.replicas, epoch).deployment();
        return Ok(Some(shared.writer.create(api, &object).await?.resource_version()));
    };
    let written = update(shared, api, name, desired, epoch, version).await;
    match written {
        Ok(written) => Ok(Some(written.resource_version())),
        Err(Error::Gone) => Err(Error::Conflict),
        Err(error) => Err(error),
    }
}

async fn update(
    shared: &KubernetesContext,
    api: &Api<Deployment>,
    name: &ObjectName,
    desired: &DesiredDeployment,
    epoch: Epoch,
    version: Option<String>,
) -> Result<Deployment, Error> {
    let whole = *name == desired.placement.deployment();
    let mut object = if whole {
        desired.placement.workload(&shared.sidecar, desired.replicas, epoch).deployment()
    } else {
        // Of a former template's Deployment, change only the epoch and the replica count.
        json!({
            "metadata": {"annotations": {EPOCH: epoch.to_string()}},
            "spec": {"replicas": desired.replicas},
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
        shared.writer.patch_merge(api, &name.name, &object).await
    }
}
