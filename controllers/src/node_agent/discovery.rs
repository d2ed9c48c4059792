//! Finds the devices of each configuration that takes part on this node: one task for each.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rouse::{pairing::ids::NodeName, slots::ConfigurationName};
use tokio::{
    task::{AbortHandle, JoinSet},
    time::{self, MissedTickBehavior},
};

use super::{
    accelerators::AcceleratorInventory,
    agent_view::{AgentState, AgentView, SeenDevice},
    http_probe::HttpProbe,
};
use crate::{
    convert::device_configuration::{AcceptedDiscovery, INDEX_PROPERTY},
    crd::{DeviceInstanceSpec, device_configuration::StaticDevice},
};

/// How often the accelerators are listed.
const ACCELERATORS_INTERVAL: Duration = Duration::from_secs(10);

/// The searches that run.
pub(super) struct DeviceDiscovery {
    state: Arc<AgentState>,
    source: Arc<AcceleratorInventory>,
    running: BTreeMap<ConfigurationName, RunningSearch>,
    tasks: JoinSet<()>,
}

/// The search for the devices of one configuration.
struct RunningSearch {
    discovery: AcceptedDiscovery,
    task: AbortHandle,
}

impl DeviceDiscovery {
    pub(super) fn new(state: Arc<AgentState>, source: AcceleratorInventory) -> Self {
        Self { state, source: Arc::new(source), running: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Starts and ends searches as configurations change, until it is dropped. Returns if a search panicked.
    pub(super) async fn run(mut self) {
        let mut changed = self.state.subscribe();
        loop {
            changed.mark_unchanged();
            self.reconcile();
            tokio::select! {
                // The state holds the sender, so this cannot fail.
                _ = changed.changed() => {}
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended && error.is_panic() {
                        tracing::error!(%error, "a search for devices panicked");
                        return;
                    }
                }
            }
        }
    }

    fn reconcile(&mut self) {
        let wanted: BTreeMap<ConfigurationName, AcceptedDiscovery> = self.state.read(|view| {
            let active = view.active();
            active.map(|(name, known)| (name.clone(), known.accepted.discovery.clone())).collect()
        });
        let obsolete: Vec<ConfigurationName> = self
            .running
            .iter()
            .filter(|(name, search)| wanted.get(*name) != Some(&search.discovery))
            .map(|(name, _)| name.clone())
            .collect();
        for name in obsolete {
            if let Some(search) = self.running.remove(&name) {
                search.task.abort();
            }
            // Another search of the same configuration keeps what was found, until it finds something else.
            if !wanted.contains_key(&name) {
                self.state.update(|view| view.devices.remove(&name));
            }
        }
        for (name, discovery) in wanted {
            if !self.running.contains_key(&name) {
                let search = search(
                    Arc::clone(&self.state),
                    Arc::clone(&self.source),
                    name.clone(),
                    discovery.clone(),
                );
                let task = self.tasks.spawn(search);
                self.running.insert(name, RunningSearch { discovery, task });
            }
        }
    }
}

/// Searches until it is aborted.
async fn search(
    state: Arc<AgentState>,
    source: Arc<AcceleratorInventory>,
    name: ConfigurationName,
    discovery: AcceptedDiscovery,
) {
    match discovery {
        AcceptedDiscovery::Accelerators => search_accelerators(&state, &source, &name).await,
        AcceptedDiscovery::Static { devices } => {
            state.set_devices(&name, static_devices_of(&state.me, devices));
            std::future::pending::<()>().await;
        }
        AcceptedDiscovery::Http { endpoints, interval, timeout } => {
            let mut probe = HttpProbe::new(&endpoints, timeout);
            let mut ticks = time::interval(interval.duration());
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let found = probe.run().await;
                state.set_devices(&name, found);
            }
        }
    }
}

async fn search_accelerators(state: &AgentState, source: &AcceleratorInventory, name: &ConfigurationName) {
    let mut ticks = time::interval(ACCELERATORS_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failure = None;
    loop {
        ticks.tick().await;
        let known = state.read(|view| known_accelerators(view, &state.me, name));
        match source.list(&known).await {
            Ok(found) => {
                if failure.take().is_some() {
                    tracing::info!(configuration = %name, "the accelerators are listed again");
                }
                state.set_devices(name, found);
            }
            Err(error) => {
                let error = error.to_string();
                if failure.as_ref() != Some(&error) {
                    tracing::warn!(configuration = %name, error, "cannot list the accelerators, retrying");
                    failure = Some(error);
                }
            }
        }
    }
}

/// Returns the accelerators that this agent has found, or else those of this node's instances.
///
/// The driver's list fails if one accelerator is lost. An agent that has just started can then ask for the others.
fn known_accelerators(
    view: &AgentView,
    me: &NodeName,
    name: &ConfigurationName,
) -> BTreeMap<String, SeenDevice> {
    if let Some(found) = view.devices.get(name) {
        return found.clone();
    }
    let instances = view.instances_of(me, name).into_values().map(|known| known.object);
    let device = |spec: &DeviceInstanceSpec| SeenDevice {
        properties: spec.properties.clone(),
        healthy: false,
        index: spec.properties.get(INDEX_PROPERTY).and_then(|index| index.parse().ok()),
        memory: None,
    };
    let own = instances.filter(|object| !object.spec.shared);
    own.map(|object| (object.spec.device_id.clone(), device(&object.spec))).collect()
}

/// Returns the listed devices that this node sees.
fn static_devices_of(me: &NodeName, devices: Vec<StaticDevice>) -> BTreeMap<String, SeenDevice> {
    let is_here = |device: &StaticDevice| {
        device.nodes.is_empty() || device.nodes.iter().any(|node| node == me.as_str())
    };
    let seen = |device: StaticDevice| {
        let seen = SeenDevice { properties: device.properties, healthy: true, ..SeenDevice::default() };
        (device.id, seen)
    };
    devices.into_iter().filter(is_here).map(seen).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node_agent::testing::{instance, view_of};

    #[test]
    fn an_agent_that_starts_knows_its_nodes_accelerators_from_their_instances_until_it_has_found_some() {
        let mut view = view_of("gpus", &json!({"discovery": {"accelerators": {}}}));
        let (status, elsewhere) = (json!({"nodes": ["a"]}), json!({"nodes": ["b"]}));
        let mut own = instance("gpus", "GPU-a", false, &status);
        own.spec.properties = BTreeMap::from([(INDEX_PROPERTY.to_owned(), "3".to_owned())]);
        view.apply_instance(Arc::new(own));
        view.apply_instance(Arc::new(instance("gpus", "GPU-b", false, &elsewhere)));
        let known = known_accelerators(&view, &"a".into(), &"gpus".into());
        assert_eq!(known.keys().collect::<Vec<_>>(), ["GPU-a"]);
        assert_eq!((known["GPU-a"].index, known["GPU-a"].memory), (Some(3), None));
        view.devices.insert("gpus".into(), BTreeMap::new());
        assert_eq!(known_accelerators(&view, &"a".into(), &"gpus".into()), BTreeMap::new());
    }

    #[test]
    fn a_listed_device_is_seen_by_its_nodes_and_by_all_if_it_names_none() {
        let device = |id: &str, nodes: &[&str]| StaticDevice {
            id: id.to_owned(),
            nodes: nodes.iter().map(|node| (*node).to_owned()).collect(),
            ..StaticDevice::default()
        };
        let devices = vec![device("all", &[]), device("mine", &["b", "a"]), device("other", &["b"])];
        let seen = static_devices_of(&"a".into(), devices);
        assert_eq!(seen.keys().collect::<Vec<_>>(), ["all", "mine"]);
        assert!(seen.values().all(|device| device.healthy));
    }
}
