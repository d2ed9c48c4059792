//! What a device manager knows: plugins, their devices, and the Pods that have them.

use std::collections::BTreeMap;

use tokio::task::AbortHandle;
use tonic::transport::Channel;

use super::{DeviceCounts, DeviceHealth};

#[derive(Default)]
pub(super) struct DeviceManagerState {
    plugins: BTreeMap<String, KnownPlugin>,
    /// By resource.
    registrations: BTreeMap<String, u32>,
    allocations: Vec<PodAllocation>,
}

/// The newest registration of a resource.
struct KnownPlugin {
    /// `None` after its stream has ended.
    channel: Option<Channel>,
    /// The last list, of this registration if `listed`.
    list: DeviceHealth,
    listed: bool,
    follower: AbortHandle,
}

/// Devices of a Pod.
struct PodAllocation {
    pod: String,
    resource: String,
    ids: Vec<String>,
    /// Whether the plugin has answered. The list of Pods' devices has it only then.
    recorded: bool,
}

impl DeviceManagerState {
    /// A plugin has registered. Its devices are unhealthy until it sends a list.
    pub(super) fn connected(&mut self, resource: &str, channel: Channel, follower: AbortHandle) {
        *self.registrations.entry(resource.to_owned()).or_default() += 1;
        let list = self.last_list(resource);
        let plugin = KnownPlugin { channel: Some(channel), list, listed: false, follower };
        self.plugins.insert(resource.to_owned(), plugin);
    }

    pub(super) fn listed(&mut self, resource: &str, list: DeviceHealth) {
        if let Some(plugin) = self.plugins.get_mut(resource) {
            plugin.list = list;
            plugin.listed = true;
        }
    }

    /// A stream of this resource has ended.
    pub(super) fn disconnected(&mut self, resource: &str) {
        if let Some(plugin) = self.plugins.get_mut(resource) {
            plugin.channel = None;
            plugin.follower.abort();
        }
    }

    pub(super) fn forget_plugins(&mut self) {
        for plugin in self.plugins.values() {
            plugin.follower.abort();
        }
        self.plugins.clear();
    }

    pub(super) fn devices(&self, resource: &str) -> DeviceHealth {
        let known = self.plugins.get(resource);
        let connected = known.is_some_and(|plugin| plugin.listed && plugin.channel.is_some());
        let list = self.last_list(resource).into_iter();
        list.map(|(id, healthy)| (id, healthy && connected)).collect()
    }

    pub(super) fn last_list(&self, resource: &str) -> DeviceHealth {
        self.plugins.get(resource).map(|plugin| plugin.list.clone()).unwrap_or_default()
    }

    /// The devices of all resources that were ever registered: a node keeps a resource without devices.
    pub(super) fn counts(&self) -> DeviceCounts {
        let count = |resource: &String| {
            let devices = self.devices(resource);
            let healthy = devices.values().filter(|healthy| **healthy).count();
            (resource.clone(), (devices.len(), healthy))
        };
        self.registrations.keys().map(count).collect()
    }

    pub(super) fn registrations(&self, resource: &str) -> u32 {
        self.registrations.get(resource).copied().unwrap_or_default()
    }

    /// Chooses free and healthy devices for a Pod, in the order of their ids.
    pub(super) fn reserve(
        &mut self,
        pod: &str,
        resource: &str,
        count: usize,
    ) -> Result<(Channel, Vec<String>), String> {
        let plugin =
            self.plugins.get(resource).ok_or_else(|| format!("no plugin has registered {resource}"))?;
        let healthy = self.devices(resource).into_iter().filter(|(_, healthy)| *healthy).map(|(id, _)| id);
        let mut free: Vec<String> = healthy.filter(|id| !self.is_held(resource, id)).collect();
        let channel = match &plugin.channel {
            Some(channel) if free.len() >= count => channel.clone(),
            _ => return Err(format!("{resource}: {count} devices requested, {} available", free.len())),
        };
        free.truncate(count);
        self.hold(pod, resource, &free);
        Ok((channel, free))
    }

    /// Takes these devices for a Pod, whether they are healthy or not.
    pub(super) fn reserve_ids(
        &mut self,
        pod: &str,
        resource: &str,
        ids: &[String],
    ) -> Result<Channel, String> {
        if let Some(id) = ids.iter().find(|id| self.is_held(resource, id)) {
            return Err(format!("{resource}: another Pod has {id}"));
        }
        let channel = self.plugins.get(resource).and_then(|plugin| plugin.channel.clone());
        let channel = channel.ok_or_else(|| format!("no plugin of {resource} is connected"))?;
        self.hold(pod, resource, ids);
        Ok(channel)
    }

    fn is_held(&self, resource: &str, id: &str) -> bool {
        let mut held = self.allocations.iter().filter(|held| held.resource == resource);
        held.any(|held| held.ids.iter().any(|own| own == id))
    }

    fn hold(&mut self, pod: &str, resource: &str, ids: &[String]) {
        self.allocations.push(PodAllocation {
            pod: pod.to_owned(),
            resource: resource.to_owned(),
            ids: ids.to_vec(),
            recorded: false,
        });
    }

    pub(super) fn set_listed(&mut self, pod: &str, listed: bool) {
        self.allocations.iter_mut().filter(|held| held.pod == pod).for_each(|held| held.recorded = listed);
    }

    pub(super) fn record(&mut self, pod: &str, resource: &str) {
        let this = |held: &&mut PodAllocation| held.pod == pod && held.resource == resource;
        self.allocations.iter_mut().filter(this).for_each(|held| held.recorded = true);
    }

    pub(super) fn release(&mut self, pod: &str, resource: &str, ids: &[String]) {
        self.allocations.retain(|held| held.pod != pod || held.resource != resource || held.ids != ids);
    }

    pub(super) fn release_pod(&mut self, pod: &str) {
        self.allocations.retain(|held| held.pod != pod);
    }

    /// The recorded devices: Pod, resource, ids.
    pub(super) fn recorded(&self) -> impl Iterator<Item = (&str, &str, &[String])> {
        let recorded = self.allocations.iter().filter(|held| held.recorded);
        recorded.map(|held| (held.pod.as_str(), held.resource.as_str(), held.ids.as_slice()))
    }
}
