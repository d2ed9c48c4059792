//! Views for tests.

use rouse::{pairing::ids::NodeName, slots::instance_name};
use serde_json::{Value, json};

use super::agent_view::{AgentView, KnownConfiguration, OwnNode};
use crate::{
    convert::device_configuration::accept,
    crd::{DeviceConfiguration, DeviceInstance},
};

/// A complete view of a node without labels, with one configuration whose uid is `u`.
pub(super) fn view_of(name: &str, spec: &Value) -> AgentView {
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "DeviceConfiguration",
        "metadata": {"name": name, "uid": "u"},
        "spec": spec,
    });
    let object: DeviceConfiguration = serde_json::from_value(object).unwrap();
    let known = KnownConfiguration { uid: "u".to_owned(), accepted: accept(&object).unwrap().into() };
    let mut view = AgentView::default();
    view.own_node = Some(OwnNode::default());
    (view.configurations_listed, view.instances_listed) = (true, true);
    view.configurations.insert(name.into(), known);
    view
}

/// The instance of a device on node `a`, in version 1.
pub(super) fn instance(configuration: &str, device_id: &str, shared: bool, status: &Value) -> DeviceInstance {
    let node = NodeName::from("a");
    let name = instance_name(&configuration.into(), device_id, (!shared).then_some(&node));
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "DeviceInstance",
        "metadata": {"name": name.as_str(), "uid": "i", "resourceVersion": "1"},
        "spec": {"configuration": configuration, "shared": shared, "capacity": 2, "deviceId": device_id},
        "status": status,
    });
    serde_json::from_value(object).unwrap()
}
