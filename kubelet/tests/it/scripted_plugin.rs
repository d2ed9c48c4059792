//! A plugin whose list and whose answers the test sets.

use std::sync::{Arc, Mutex};

use rouse_kubelet::{
    AllocateError, AllocatedDevice, AllocatedMount, ContainerAllocation, DevicePlugin, PluginDevice,
};
use tokio::sync::watch;

pub(crate) struct ScriptedPlugin {
    devices: watch::Sender<Arc<Vec<PluginDevice>>>,
    /// The sentence with which it refuses every container.
    refusal: Mutex<Option<String>>,
}

impl ScriptedPlugin {
    /// A plugin with these devices, all healthy.
    pub(crate) fn new(ids: &[&str]) -> Arc<Self> {
        let plugin = Self { devices: watch::Sender::default(), refusal: Mutex::default() };
        plugin.list(ids.iter().map(|id| (*id, true)));
        Arc::new(plugin)
    }

    /// Changes the list.
    pub(crate) fn list<'a>(&self, devices: impl IntoIterator<Item = (&'a str, bool)>) {
        let device = |(id, healthy): (&str, bool)| PluginDevice { id: id.to_owned(), healthy };
        self.devices.send_replace(Arc::new(devices.into_iter().map(device).collect()));
    }

    pub(crate) fn refuse(&self, sentence: &str) {
        *self.refusal.lock().unwrap() = Some(sentence.to_owned());
    }

    /// What a container gets with these devices.
    pub(crate) fn granted(ids: &[&str]) -> ContainerAllocation {
        let text = |text: &str| text.to_owned();
        ContainerAllocation {
            env: [(text("DEVICES"), ids.join(","))].into(),
            mounts: vec![AllocatedMount {
                host_path: text("/srv/weights"),
                container_path: text("/weights"),
                read_only: true,
            }],
            devices: vec![AllocatedDevice {
                host_path: text("/dev/host0"),
                container_path: text("/dev/device0"),
                permissions: text("rw"),
            }],
            annotations: ids
                .iter()
                .map(|id| (format!("slot.rouse.dev/{id}"), text("device node-a")))
                .collect(),
        }
    }
}

impl DevicePlugin for ScriptedPlugin {
    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
        self.devices.subscribe()
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<ContainerAllocation, AllocateError> {
        match self.refusal.lock().unwrap().clone() {
            Some(sentence) => Err(AllocateError(sentence)),
            None => Ok(Self::granted(&ids.iter().map(String::as_str).collect::<Vec<_>>())),
        }
    }
}
