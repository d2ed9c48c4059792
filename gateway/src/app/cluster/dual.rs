//! What the controller of dual pods is started with.

use k8s_openapi::api::core::v1::{Node, NodeSpec, Pod};
use kube::{Api, Client, Resource};
use tokio::{sync::mpsc, task::JoinSet};

use crate::{
    config,
    controllers::{
        dual::provider::Make,
        objects,
        watch::{Awaited, Change, Watched, watch as follow},
    },
    pairing::{GPU_MAP, Seen, Settings},
};

/// Changes that may wait; more of them wait at the API server.
const WAITING: usize = 1024;

/// Watches what the controller wants to see.
pub(super) fn watch(
    client: &Client,
    namespaces: &[Option<String>],
    own: &str,
    tasks: &mut JoinSet<()>,
) -> Seen {
    let (told, pods) = mpsc::channel(WAITING);
    for watched in pods_of(client, namespaces) {
        tasks.spawn(follow(watched, told.clone(), Awaited::default(), |change| change));
    }
    let (told, nodes) = mpsc::channel(WAITING);
    let all = Watched {
        api: Api::all(client.clone()),
        namespace: None,
        labels: None,
        fields: None,
        slim: slim_node,
    };
    tasks.spawn(follow(all, told, Awaited::default(), |change: Change<Node>| change));
    let (told, map) = mpsc::channel(1);
    let maps = Watched {
        api: objects::namespaced(client, Some(own)),
        namespace: Some(own.to_owned()),
        labels: None,
        fields: Some(format!("metadata.name={GPU_MAP}")),
        slim: |_| {},
    };
    tasks.spawn(follow(maps, told, Awaited::default(), |change| change));
    Seen { pods, listed: pods_of(client, namespaces).collect(), nodes, map }
}

fn pods_of<'a>(
    client: &'a Client,
    namespaces: &'a [Option<String>],
) -> impl Iterator<Item = Watched<Pod>> + 'a {
    namespaces.iter().map(|namespace| Watched {
        api: objects::namespaced(client, namespace.as_deref()),
        namespace: namespace.clone(),
        labels: None,
        fields: None,
        slim: |pod: &mut Pod| pod.metadata.managed_fields = None,
    })
}

/// Whether it is there, and takes something new.
fn slim_node(node: &mut Node) {
    let metadata = node.meta_mut();
    (metadata.managed_fields, metadata.annotations, metadata.labels) = (None, None, None);
    let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable);
    node.spec = Some(NodeSpec { unschedulable, ..NodeSpec::default() });
    node.status = None;
}

pub(super) fn settings(dual: &config::DualPods) -> Settings {
    Settings { core: dual.timing, mode: dual.mode, make: Make::default() }
}
