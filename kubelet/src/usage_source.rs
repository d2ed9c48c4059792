//! Which slots the containers of this node use.

use std::collections::{BTreeMap, BTreeSet};

use rouse::slots::{RESOURCE_DOMAIN, SLOT_ANNOTATION, SlotUsage};

use crate::{ContainerAnnotations, ContainerRuntimeClient, Error, PodDevices, PodResourcesClient};

/// The devices that containers of this node use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotsInUse {
    /// Devices of Rouse's resources: names of slots, and ids of virtual devices.
    pub ids: BTreeSet<String>,
    /// Devices of other plugins, for example `GPU-<uuid>`, each with its resource. `None` without the kubelet's list:
    /// the container runtime does not know them.
    pub foreign: Option<BTreeMap<String, String>>,
}

impl SlotsInUse {
    fn of_pods(pods: Vec<PodDevices>) -> Self {
        let (mut own, mut foreign) = (BTreeSet::new(), BTreeMap::new());
        for PodDevices { resource, ids, .. } in pods {
            if resource.strip_prefix(RESOURCE_DOMAIN).is_some_and(|name| name.starts_with('/')) {
                own.extend(ids);
            } else {
                foreign.extend(ids.iter().map(|id| (physical(id).to_owned(), resource.clone())));
            }
        }
        Self { ids: own, foreign: Some(foreign) }
    }

    fn of_containers(containers: &[ContainerAnnotations]) -> Self {
        let annotations = containers.iter().flat_map(|container| &container.annotations);
        let ids = annotations.filter_map(|(key, value)| slot_id(key, value)).collect();
        Self { ids, foreign: None }
    }
}

/// Removes the number of a replica: NVIDIA's plugin offers a time-sliced accelerator as `GPU-<uuid>::<n>`.
fn physical(id: &str) -> &str {
    id.split_once("::").map_or(id, |(device, _)| device)
}

/// The device's id at the kubelet, from the annotation `slot.rouse.dev/<slot>` with the value `<instance> <usage>`.
///
/// A value that cannot be read counts as a use of the slot, so that no slot in use is freed.
fn slot_id(key: &str, value: &str) -> Option<String> {
    let slot = key.strip_prefix(SLOT_ANNOTATION)?;
    match value.split_once(' ').map(|(_, usage)| usage.parse::<SlotUsage>()) {
        Some(Ok(SlotUsage::Configuration { virtual_id, .. })) => Some(virtual_id.as_str().to_owned()),
        _ => Some(slot.to_owned()),
    }
}

/// Lists the devices in use: asks the kubelet, or the container runtime if the kubelet has no list of Pods' devices.
#[derive(Clone, Debug)]
pub struct KubeletUsage {
    kubelet: PodResourcesClient,
    runtime: Option<ContainerRuntimeClient>,
}

impl KubeletUsage {
    /// Without `runtime`, a missing socket of the kubelet is an error.
    #[must_use]
    pub const fn new(kubelet: PodResourcesClient, runtime: Option<ContainerRuntimeClient>) -> Self {
        Self { kubelet, runtime }
    }

    /// Returns the devices in use.
    ///
    /// # Errors
    /// The list cannot be read. Then no device counts as unused.
    pub async fn in_use(&self) -> Result<SlotsInUse, Error> {
        // A kubelet that restarts leaves its socket in place. The runtime does not stand in for it meanwhile, because
        // it does not know the devices of containers that are about to start.
        let missing = match self.kubelet.list().await {
            Ok(pods) => return Ok(SlotsInUse::of_pods(pods)),
            Err(error @ Error::NoSocket(_)) => error,
            Err(error) => return Err(error),
        };
        let Some(runtime) = &self.runtime else { return Err(missing) };
        match runtime.list().await {
            Ok(containers) => Ok(SlotsInUse::of_containers(&containers)),
            Err(error) => Err(Error::NoUsage { kubelet: Box::new(missing), runtime: Box::new(error) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(resource: &str, ids: &[&str]) -> PodDevices {
        PodDevices {
            namespace: "default".to_owned(),
            pod: "engine".to_owned(),
            container: "main".to_owned(),
            resource: resource.to_owned(),
            ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        }
    }

    #[test]
    fn only_devices_of_our_domain_are_slots() {
        let found = SlotsInUse::of_pods(vec![
            pod("rouse.dev/gpu-0a1b2c3d4e", &["gpu-0a1b2c3d4e-1"]),
            pod("rouse.dev/gpu", &["gpu-0", "gpu-1"]),
            pod("rouse.dev.example/gpu", &["other"]),
            pod("nvidia.com/gpu", &["GPU-a::3", "GPU-b"]),
        ]);
        assert_eq!(found.ids, BTreeSet::from(["gpu-0", "gpu-0a1b2c3d4e-1", "gpu-1"].map(str::to_owned)));
        let foreign = found.foreign.unwrap();
        let foreign: Vec<(&str, &str)> =
            foreign.iter().map(|(id, resource)| (id.as_str(), resource.as_str())).collect();
        let nvidia = "nvidia.com/gpu";
        assert_eq!(foreign, [("GPU-a", nvidia), ("GPU-b", nvidia), ("other", "rouse.dev.example/gpu")]);
    }

    #[test]
    fn an_annotation_names_the_device_that_the_kubelet_gave() {
        let id = |value| slot_id("slot.rouse.dev/gpu-0a1b2c3d4e-1", value);
        assert_eq!(id("gpu-0a1b2c3d4e node-a").as_deref(), Some("gpu-0a1b2c3d4e-1"));
        assert_eq!(id("gpu-0a1b2c3d4e C:gpu-0:node-a").as_deref(), Some("gpu-0"));
        assert_eq!(id("").as_deref(), Some("gpu-0a1b2c3d4e-1"), "an unreadable value still is a use");
        assert_eq!(slot_id("rouse.dev/slot", "gpu-0a1b2c3d4e node-a"), None);
    }
}
