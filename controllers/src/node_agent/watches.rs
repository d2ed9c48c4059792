//! Watches what the agent needs of the cluster: configurations, instances, its Node and its AcceleratorNode.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::{Client, ResourceExt as _};
use rouse::slots::ConfigurationName;

use super::agent_view::{AgentState, AgentView, KnownConfiguration, OwnNode};
use crate::{
    convert::device_configuration::accept,
    crd::{AcceleratorNode, DeviceConfiguration, DeviceInstance},
    watch::{Delta, InitialLists, WatchTarget, WatchedObject, drop_managed_fields, watch},
};

/// Watches until it is dropped.
pub(super) async fn run(state: Arc<AgentState>, client: Client, awaited: InitialLists) {
    let own = format!("metadata.name={}", state.me);
    let configurations = WatchTarget::cluster_wide(&client, drop_managed_fields::<DeviceConfiguration>);
    let instances = WatchTarget::cluster_wide(&client, drop_managed_fields::<DeviceInstance>);
    let nodes = WatchTarget::cluster_wide(&client, keep_labels).fields(own.clone());
    let accelerators = WatchTarget::cluster_wide(&client, drop_managed_fields::<AcceleratorNode>).fields(own);
    let watch_configurations = watch(configurations, awaited.clone(), |delta| {
        state.update(|view| apply_configurations(view, &delta));
    });
    let watch_instances = watch(instances, awaited.clone(), |delta| {
        state.update(|view| apply_instances(view, &delta));
    });
    let watch_nodes = watch(nodes, awaited.clone(), |delta| apply_own_node(&state, delta));
    let watch_accelerators = watch(accelerators, awaited, |delta| {
        let found = newest(delta);
        state.update(|view| view.accelerator_node = found);
    });
    tokio::join!(watch_configurations, watch_instances, watch_nodes, watch_accelerators);
}

/// Keeps the labels alone: the rest of a Node changes every few minutes.
fn keep_labels(node: &mut Node) {
    drop_managed_fields(node);
    (node.spec, node.status, node.metadata.annotations) = (None, None, None);
}

fn apply_configurations(view: &mut AgentView, delta: &Delta<DeviceConfiguration>) {
    let (gone, found) = delta.diff(view.configurations.keys());
    gone.iter().for_each(|name| drop(view.configurations.remove(name)));
    found.iter().for_each(|found| apply_configuration(view, found));
    view.configurations_listed |= delta.is_list();
}

/// Takes over a configuration. While an object is refused, its last valid version stays in effect: containers hold
/// slots of it.
fn apply_configuration(view: &mut AgentView, found: &WatchedObject<DeviceConfiguration>) {
    let name = found.name().name;
    let WatchedObject::Readable(object) = found else {
        tracing::warn!(configuration = name, "unreadable DeviceConfiguration ignored");
        return;
    };
    let uid = object.uid().unwrap_or_default();
    match accept(object) {
        Ok(accepted) => {
            let known = KnownConfiguration { uid, accepted: Arc::new(accepted) };
            view.configurations.insert(ConfigurationName::from(name), known);
        }
        Err(rejections) => {
            if view.configurations.get(name.as_str()).is_some_and(|known| known.uid != uid) {
                view.configurations.remove(name.as_str());
            }
            tracing::warn!(configuration = name, %rejections, "DeviceConfiguration refused");
        }
    }
}

fn apply_instances(view: &mut AgentView, delta: &Delta<DeviceInstance>) {
    let (gone, found) = delta.diff(view.instances.keys());
    gone.iter().for_each(|name| drop(view.instances.remove(name)));
    for found in found {
        match found {
            WatchedObject::Readable(object) => view.apply_instance(Arc::clone(object)),
            WatchedObject::Unreadable { .. } => {
                tracing::warn!(instance = found.name().name, "unreadable DeviceInstance ignored");
            }
        }
    }
    view.instances_listed |= delta.is_list();
}

fn apply_own_node(state: &AgentState, delta: Delta<Node>) {
    let found = newest(delta)
        .map(|node| OwnNode { uid: node.uid(), labels: node.metadata.labels.clone().unwrap_or_default() });
    if state.read(|view| view.own_node != found) {
        state.update(|view| view.own_node = found);
    }
}

/// Returns the present state of the one object that a watch selects.
fn newest<K>(delta: Delta<K>) -> Option<Arc<K>> {
    match delta {
        Delta::All { objects, .. } => objects.into_iter().find_map(WatchedObject::readable),
        Delta::Applied(found) => found.readable(),
        Delta::Deleted(_) => None,
    }
}
