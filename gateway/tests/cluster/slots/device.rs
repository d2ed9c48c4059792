//! One device as its object shows it: the slots, who has them, and which nodes see the device.

use std::collections::BTreeMap;

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use rouse::{
    pairing::ids::NodeName,
    slots::{ConfigurationName, InstanceName, instance_name, instance_resource, slot_name},
};
use rouse_cluster::wait;
use rouse_controllers::crd::{DeviceInstance, DeviceInstanceStatus};
use serde_json::{Value, json};

pub(super) struct SharedDevice {
    pub(super) name: InstanceName,
    api: Api<DeviceInstance>,
}

impl SharedDevice {
    /// The device with this id, of this node alone or of all nodes.
    pub(super) fn new(admin: &Client, configuration: &str, id: &str, node: Option<&str>) -> Self {
        let node = node.map(NodeName::from);
        let name = instance_name(&ConfigurationName::from(configuration), id, node.as_ref());
        Self { name, api: Api::all(admin.clone()) }
    }

    /// The resource that a container requests for one of its slots.
    pub(super) fn resource(&self) -> String {
        instance_resource(&self.name)
    }

    pub(super) fn slot(&self, number: usize) -> String {
        slot_name(&self.name, number.try_into().unwrap()).to_string()
    }

    pub(super) fn slots<const N: usize>(&self, numbers: [usize; N]) -> [String; N] {
        numbers.map(|number| self.slot(number))
    }

    pub(super) async fn object(&self) -> DeviceInstance {
        self.api.get(self.name.as_str()).await.unwrap()
    }

    pub(super) async fn usage(&self) -> BTreeMap<String, String> {
        self.object().await.status.unwrap_or_default().device_usage
    }

    /// The map of slots, in their order.
    pub(super) fn map<const N: usize>(&self, usage: [&str; N]) -> BTreeMap<String, String> {
        usage.iter().enumerate().map(|(n, usage)| (self.slot(n), (*usage).to_owned())).collect()
    }

    /// Waits until the status fits.
    pub(super) async fn until(
        &self,
        what: &str,
        fits: impl Fn(&DeviceInstanceStatus) -> bool,
    ) -> DeviceInstance {
        let fits = |object: &Option<DeviceInstance>| {
            object.as_ref().and_then(|object| object.status.as_ref()).is_some_and(&fits)
        };
        wait::until(&self.api, self.name.as_str(), what, fits).await.unwrap().unwrap()
    }

    /// Waits until the map of slots is this one.
    pub(super) async fn until_usage<const N: usize>(&self, usage: [&str; N]) {
        let expected = self.map(usage);
        self.until(&format!("{expected:?}"), |status| status.device_usage == expected).await;
    }

    pub(super) async fn until_gone(&self) {
        wait::until(&self.api, self.name.as_str(), "its end", Option::is_none).await.unwrap();
    }

    /// Changes the use of a slot, as the agent of another node would.
    pub(super) async fn set(&self, slot: &str, from: &str, to: &str) {
        let path = format!("/status/deviceUsage/{slot}");
        let operations = json!([
            {"op": "test", "path": path, "value": from},
            {"op": "replace", "path": path, "value": to},
        ]);
        let patch: Patch<Value> = Patch::Json(serde_json::from_value(operations).unwrap());
        self.api.patch_status(self.name.as_str(), &PatchParams::default(), &patch).await.unwrap();
    }
}
