//! What a container with a slot gets from a real kubelet and containerd.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::Pod;
use rouse::slots::property_suffix;
use serde_json::json;

use super::{
    slots_node::{SlotsNode, kind, slots_node},
    worker::{RunningWorker, phase, waits_for},
};
use crate::shared_node::run;

#[test]
fn pods_with_a_slot_get_environment_mounts_devices_and_annotations_and_one_more_pod_waits() {
    run(async {
        let node = slots_node().await;
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("licence"), "valid").unwrap();
        let device = node
            .share(
                "box",
                2,
                json!({
                    "discovery": {"static": {"devices": [{"id": "box", "properties": {"port": "7000"}}]}},
                    "env": {"BOX": "$(id):$(port)"},
                    "mounts": [{"hostPath": folder.path(), "containerPath": "/box", "readOnly": true}],
                    "devices": [{"hostPath": "/dev/null", "containerPath": "/dev/box", "permissions": "r"}],
                }),
            )
            .await;
        let (of_kind, of_device) = (kind("box"), device.resource());

        node.create_worker("by-kind", &of_kind).await;
        let by_kind = node.until_ready("by-kind").await;
        // The kind has one device for the container and one for the free slot. The other slot is not the instance's.
        node.until_allocatable(&[(&of_kind, 2), (&of_device, 1)]).await;
        node.create_worker("by-device", &of_device).await;
        let by_device = node.until_ready("by-device").await;
        node.until_allocatable(&[(&of_kind, 1), (&of_device, 1)]).await;

        let own = node.name().to_owned();
        let usage = device.usage().await;
        let uses = [(&by_kind, format!("C:box-0:{own}")), (&by_device, own)];
        assert_eq!(usage.len(), 2, "{usage:?}");
        for (worker, text) in uses {
            let slot = usage.iter().find(|(_, found)| **found == text);
            let (slot, _) = slot.unwrap_or_else(|| panic!("no {text} in {usage:?}"));
            let env = worker.environment();
            assert_eq!(env["BOX"], "box:7000", "{}", worker.name());
            assert_eq!(env[&format!("PORT_{}", property_suffix(&device.name))], "7000");
            let root = PathBuf::from(format!("/proc/{}/root", worker.pid));
            assert_eq!(fs::read_to_string(root.join("box/licence")).unwrap(), "valid");
            assert!(is_read_only(worker, "/box"));
            assert_eq!(device_number(&root.join("dev/box")), device_number(Path::new("/dev/null")));
            let annotation = (format!("slot.rouse.dev/{slot}"), format!("{} {text}", device.name));
            assert_eq!(annotations(&node, worker).await, BTreeMap::from([annotation]));
        }

        node.create_worker("one-more", &of_kind).await;
        let waiting = |pod: &Pod| waits_for(pod, &of_kind);
        let pod = node.until_worker("one-more", "to wait for a slot", waiting).await;
        assert_eq!(phase(&pod), "Pending");
        for name in ["one-more", "by-kind", "by-device"] {
            node.delete_worker(name).await;
        }
    });
}

fn device_number(file: &Path) -> u64 {
    fs::metadata(file).unwrap().rdev()
}

/// Whether this is a mount of the container that it may only read.
fn is_read_only(worker: &RunningWorker, path: &str) -> bool {
    let mounts = fs::read_to_string(format!("/proc/{}/mounts", worker.pid)).unwrap();
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = fields.find(|fields| fields[1] == path).unwrap_or_else(|| panic!("no {path} in {mounts}"));
    found[3].split(',').any(|option| option == "ro")
}

/// The annotations of the container that tell its slots.
async fn annotations(node: &SlotsNode, worker: &RunningWorker) -> BTreeMap<String, String> {
    let statuses = worker.pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let ids: Vec<&str> =
        statuses.filter_map(|status| status.container_id.as_deref()?.strip_prefix("containerd://")).collect();
    let containers = node.runner().containers().await.unwrap();
    let own = containers.into_iter().filter(|container| ids.contains(&container.id.as_str()));
    own.flat_map(|container| container.annotations)
        .filter(|(key, _)| key.starts_with("slot.rouse.dev/"))
        .collect()
}
