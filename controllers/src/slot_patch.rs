//! Reads the slots of a DeviceInstance, and builds JSON Patches of its status.
//!
//! The node agents and the leader change the same map, so no write rests on a read alone. A change of a slot tests the
//! value of that slot and touches no other one: two claims of different slots never disturb each other. Every other
//! change, such as a new key or another list of nodes, tests the version of the object that was read. If a test fails,
//! the API server changes nothing, and the writer gets [`Error::Conflict`].

use std::collections::BTreeSet;

use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse::{
    pairing::ids::NodeName,
    slots::{InstanceUsage, LayoutChange, SlotChange, SlotName, SlotUsage, UnusedChange},
    units::Tick,
};
use serde_json::{Map, Value, json};

use crate::{
    condition::{tick, time},
    crd::DeviceInstance,
    failpoint,
    writer::{Error, json_patch_error},
};

const STATUS: &str = "/status";
const NODES: &str = "/status/nodes";
const DEVICE_USAGE: &str = "/status/deviceUsage";
const UNUSED_SINCE: &str = "/status/unusedSince";

/// Returns the slots of an instance, as its object has them.
///
/// A usage that is no usage, which only a person can have written, counts as that of a node of this name. No node has
/// it, so the slot is free for no agent, and the leader frees it as that of a lost node.
#[must_use]
pub(crate) fn instance_usage(object: &DeviceInstance) -> InstanceUsage {
    let usage =
        |text: &str| text.parse().unwrap_or_else(|_| SlotUsage::Instance { node: NodeName::from(text) });
    let status = object.status.as_ref();
    let slots = status.into_iter().flat_map(|status| &status.device_usage);
    let unused_since = status.into_iter().flat_map(|status| &status.unused_since);
    let nodes = status.into_iter().flat_map(|status| &status.nodes);
    InstanceUsage {
        capacity: object.spec.capacity,
        slots: slots.map(|(slot, text)| (SlotName::from(slot.as_str()), usage(text))).collect(),
        unused_since: unused_since.map(|(slot, at)| (SlotName::from(slot.as_str()), tick(at))).collect(),
        nodes: nodes.map(|node| NodeName::from(node.as_str())).collect(),
    }
}

/// Builds the patch that changes these slots, all or none.
#[must_use]
pub(crate) fn slot_patch(object: &DeviceInstance, changes: &[SlotChange]) -> Value {
    Value::Array(slot_operations(object, changes))
}

/// Builds the patch that adds and removes slots, in exactly the version of this object.
#[must_use]
pub(crate) fn layout_patch(object: &DeviceInstance, changes: &[LayoutChange]) -> Value {
    let mut operations = in_this_version(object);
    if object.status.as_ref().is_none_or(|status| status.device_usage.is_empty()) {
        operations.push(add(DEVICE_USAGE, json!({})));
    }
    for change in changes {
        match change {
            LayoutChange::Add(slots) => {
                operations.extend(slots.iter().map(|slot| add(&key(DEVICE_USAGE, slot), free())));
            }
            LayoutChange::Remove(slots) => operations.extend(slots.iter().flat_map(|slot| {
                let path = key(DEVICE_USAGE, slot);
                [test(&path, free()), remove(&path)]
            })),
        }
    }
    Value::Array(operations)
}

/// Builds the patch that replaces the list of nodes, in exactly the version of this object.
#[must_use]
pub(crate) fn nodes_patch(object: &DeviceInstance, nodes: &BTreeSet<NodeName>) -> Value {
    let mut operations = in_this_version(object);
    // In the order that the object has: a policy compares the other nodes before and after.
    let stored = object.status.iter().flat_map(|status| &status.nodes).map(String::as_str);
    let mut names: Vec<&str> = stored.filter(|name| nodes.contains(*name)).collect();
    let added: Vec<&str> = nodes.iter().map(NodeName::as_str).filter(|name| !names.contains(name)).collect();
    names.extend(added);
    operations.push(add(NODES, json!(names)));
    Value::Array(operations)
}

/// Builds the patch that removes a lost node and frees its slots, in exactly the version of this object.
#[must_use]
pub(crate) fn lost_node_patch(object: &DeviceInstance, node: &NodeName, changes: &[SlotChange]) -> Value {
    let mut operations = in_this_version(object);
    let nodes = object.status.iter().flat_map(|status| &status.nodes);
    let others: Vec<&str> = nodes.map(String::as_str).filter(|name| *name != node.as_str()).collect();
    operations.push(add(NODES, json!(others)));
    operations.extend(slot_operations(object, changes));
    Value::Array(operations)
}

/// Sends a patch on behalf of a node agent. The leader sends through its writer instead.
///
/// # Errors
/// [`Error::Conflict`] if a test in the patch fails. See [`Error`].
pub(crate) async fn send(
    api: &Api<DeviceInstance>,
    name: &str,
    manager: &str,
    operations: &Value,
) -> Result<DeviceInstance, Error> {
    let patch = json_patch(operations)?;
    let parameters = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
    failpoint::hit();
    api.patch_status(name, &parameters, &patch).await.map_err(json_patch_error)
}

/// Reads operations as a JSON Patch.
///
/// # Errors
/// [`Error::Invalid`] if they are none.
pub(crate) fn json_patch(operations: &Value) -> Result<Patch<Value>, Error> {
    let read = serde_json::from_value(operations.clone());
    read.map(Patch::Json).map_err(|error| Error::Invalid(error.to_string()))
}

fn slot_operations(object: &DeviceInstance, changes: &[SlotChange]) -> Vec<Value> {
    let has_marks = object.status.as_ref().is_some_and(|status| !status.unused_since.is_empty());
    let mut operations = Vec::new();
    let (mut first_marks, mut needs_version) = (Map::new(), false);
    for SlotChange { slot, from, to, unused_since } in changes {
        let usage = key(DEVICE_USAGE, slot);
        operations.push(test(&usage, json!(from.to_string())));
        if from != to {
            operations.push(json!({"op": "replace", "path": usage, "value": to.to_string()}));
        }
        let mark = key(UNUSED_SINCE, slot);
        match unused_since {
            Some(UnusedChange::Set { at }) if has_marks => operations.push(add(&mark, since(*at))),
            Some(UnusedChange::Set { at }) => {
                first_marks.insert(slot.to_string(), since(*at));
            }
            Some(UnusedChange::Clear { was }) => {
                if has_other_text(object, slot, *was) {
                    needs_version = true;
                } else {
                    operations.push(test(&mark, since(*was)));
                }
                operations.push(remove(&mark));
            }
            None => {}
        }
    }
    if !first_marks.is_empty() {
        // There may be no map yet, and none that another agent has made meanwhile is replaced.
        needs_version = true;
        operations.push(add(UNUSED_SINCE, Value::Object(first_marks)));
    }
    if needs_version {
        operations.insert(0, version_test(object));
    }
    operations
}

/// Whether the object has this mark with a fraction of a second, which no agent writes. The test of its text would fail
/// for ever.
fn has_other_text(object: &DeviceInstance, slot: &SlotName, was: Tick) -> bool {
    let stored = object.status.as_ref().and_then(|status| status.unused_since.get(slot.as_str()));
    stored.is_some_and(|stored| tick(stored) == was && *stored != time(was))
}

/// Begins a patch that needs the version that was read. Adds a missing status.
fn in_this_version(object: &DeviceInstance) -> Vec<Value> {
    let mut operations = vec![version_test(object)];
    if object.status.is_none() {
        operations.push(add(STATUS, json!({})));
    }
    operations
}

fn version_test(object: &DeviceInstance) -> Value {
    // No object has an empty version.
    let version = object.metadata.resource_version.as_deref().unwrap_or_default();
    test("/metadata/resourceVersion", json!(version))
}

fn free() -> Value {
    json!(SlotUsage::Free.to_string())
}

/// Writes a moment as objects have it, to the second.
fn since(at: Tick) -> Value {
    json!(time(at))
}

/// Returns the path of a slot in one of the maps (RFC 6901).
fn key(map: &str, slot: &SlotName) -> String {
    format!("{map}/{}", slot.as_str().replace('~', "~0").replace('/', "~1"))
}

fn test(path: &str, value: Value) -> Value {
    json!({"op": "test", "path": path, "value": value})
}

fn add(path: &str, value: Value) -> Value {
    json!({"op": "add", "path": path, "value": value})
}

fn remove(path: &str) -> Value {
    json!({"op": "remove", "path": path})
}

#[cfg(test)]
mod tests;
