//! Inputs of the dual-pods controller.

use std::{collections::BTreeSet, fmt::Debug, time::Duration};

use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{Node, NodeSpec, NodeStatus, Pod},
};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::{sync::mpsc, task::JoinSet, time};

use crate::{
    crd::fma::GROUP,
    dual_pods::{
        GPU_MAP, NODE_READY_CONDITION, PairingControllerSettings, PairingWatches, provider::ProviderSettings,
    },
    model_controller,
    stub_key::StubKey,
    watch::{Delta, InitialLists, WatchTarget, watch as follow},
};

/// Capacity of each watch's queue; further changes wait at the API server.
const WATCH_QUEUE_CAPACITY: usize = 1024;
/// How often to check for launcher kinds that the API server lacks: an operator may install them at any time.
const KIND_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Starts the controller's watches.
pub(super) fn watch(
    client: &Client,
    namespaces: &[Option<String>],
    own_namespace: &str,
    awaited: &InitialLists,
    tasks: &mut JoinSet<()>,
) -> PairingWatches {
    let (tx, pods) = mpsc::channel(WATCH_QUEUE_CAPACITY);
    for watched in pod_watches(client, namespaces) {
        tasks.spawn(follow(watched, tx.clone(), awaited.clone(), |change| change));
    }
    let (tx, nodes) = mpsc::channel(WATCH_QUEUE_CAPACITY);
    let all = WatchTarget {
        api: Api::all(client.clone()),
        namespace: None,
        labels: None,
        fields: None,
        slim: slim_node,
    };
    tasks.spawn(follow(all, tx, InitialLists::default(), |change: Delta<Node>| change));
    let (tx, map) = mpsc::channel(1);
    let maps = WatchTarget {
        api: model_controller::namespaced(client, Some(own_namespace)),
        namespace: Some(own_namespace.to_owned()),
        labels: None,
        fields: Some(format!("metadata.name={GPU_MAP}")),
        slim: |_| {},
    };
    tasks.spawn(follow(maps, tx, InitialLists::default(), |change| change));
    let engines = watch_fma_objects(client, namespaces, awaited, tasks);
    let launchers = watch_fma_objects(client, namespaces, awaited, tasks);
    let policies = watch_fma_objects(client, namespaces, awaited, tasks);
    let listed = pod_watches(client, namespaces).collect();
    PairingWatches {
        pods,
        pod_lists: listed,
        awaited: awaited.clone(),
        nodes,
        gpu_map: map,
        server_configs: engines,
        launcher_configs: launchers,
        policies,
    }
}

/// Watches objects of one of the public project's kinds, once the API server has that kind.
fn watch_fma_objects<K>(
    client: &Client,
    namespaces: &[Option<String>],
    awaited: &InitialLists,
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<Delta<K>>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static,
{
    let (tx, changes) = mpsc::channel(WATCH_QUEUE_CAPACITY);
    for namespace in namespaces.iter().collect::<BTreeSet<_>>() {
        let watched = WatchTarget {
            api: model_controller::namespaced(client, namespace.as_deref()),
            namespace: namespace.clone(),
            labels: None,
            fields: None,
            slim: |object: &mut K| object.meta_mut().managed_fields = None,
        };
        let (client, tx, awaited) = (client.clone(), tx.clone(), awaited.clone());
        tasks.spawn(async move {
            wait_for_kind(&client, &K::plural(&())).await;
            follow(watched, tx, awaited, |change| change).await;
        });
    }
    changes
}

/// Waits until the API server has the kind.
async fn wait_for_kind(client: &Client, plural: &str) {
    loop {
        match client.list_api_group_resources(&format!("{GROUP}/v1alpha1")).await {
            Ok(kinds) if kinds.resources.iter().any(|kind| kind.name == plural) => return,
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                tracing::debug!(%error, "cannot check whether the API server has {plural}, retrying")
            }
        }
        time::sleep(KIND_RETRY_INTERVAL).await;
    }
}

fn pod_watches<'a>(
    client: &'a Client,
    namespaces: &'a [Option<String>],
) -> impl Iterator<Item = WatchTarget<Pod>> + 'a {
    namespaces.iter().map(|namespace| WatchTarget {
        api: model_controller::namespaced(client, namespace.as_deref()),
        namespace: namespace.clone(),
        labels: None,
        fields: None,
        slim: |pod: &mut Pod| pod.metadata.managed_fields = None,
    })
}

/// Drops everything of a node that the controller does not read.
///
/// Kept are metadata without annotations and managed fields, schedulability, taints, the readiness condition, and
/// allocatable resources.
fn slim_node(node: &mut Node) {
    let metadata = node.meta_mut();
    (metadata.managed_fields, metadata.annotations) = (None, None);
    let NodeSpec { unschedulable, taints, .. } = node.spec.take().unwrap_or_default();
    node.spec = Some(NodeSpec { unschedulable, taints, ..NodeSpec::default() });
    let NodeStatus { mut conditions, allocatable, .. } = node.status.take().unwrap_or_default();
    conditions.iter_mut().for_each(|all| all.retain(|condition| condition.type_ == NODE_READY_CONDITION));
    node.status = Some(NodeStatus { conditions, allocatable, ..NodeStatus::default() });
}

pub(super) fn settings(dual: &rouse_config::DualPodsConfig, key: StubKey) -> PairingControllerSettings {
    PairingControllerSettings { core: dual.timing, mode: dual.mode, make: ProviderSettings::default(), key }
}
