//! The accelerators of a node: its agent lists them, and offers none that is faulty.

use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use rouse_cluster::wait;
use rouse_controllers::crd::AcceleratorNode;
use serde_json::json;

use super::{agent::SlotNodeFixture, fixture::SlotsFixture};
use crate::{nvml::FakeNvmlLibrary, support::FIELD_MANAGER};

/// Writes the AcceleratorNode of a node, as the leader does for a node of a pool that is in use.
async fn write_accelerator_node(fixture: &SlotsFixture<'_>, name: &str) -> Api<AcceleratorNode> {
    let uid = fixture.node_api().get(name).await.unwrap().uid();
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid});
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorNode",
        "metadata": {"name": name, "ownerReferences": [owner]}, "spec": {}, "status": {"count": 0, "healthy": 0},
    });
    let api: Api<AcceleratorNode> = Api::all(fixture.world.site.admin.clone());
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(name, &parameters, &Patch::Apply(&object)).await.unwrap();
    api.patch_status(name, &parameters, &Patch::Apply(&object)).await.unwrap();
    api
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_lists_its_nodes_accelerators_and_a_faulty_one_gets_no_new_container() {
    let fixture = SlotsFixture::new("slots-gpus", &["a"]).await;
    let mut a = SlotNodeFixture::new(&fixture, "a").await;
    let [sound, weak] = ["sound", "weak"].map(|name| format!("GPU-{}-{name}", fixture.world.name()));
    let lines = |state: &str| [format!("{sound} - 0"), format!("{weak} - {state}")];
    let driver = FakeNvmlLibrary::new(&lines("0").each_ref().map(String::as_str));
    let copies = write_accelerator_node(&fixture, &a.name).await;
    fixture.configure("gpu", json!({"capacity": 2, "discovery": {"accelerators": {}}})).await;
    let env = driver.environment().map(|(name, path)| (name, path.display().to_string()));
    a.start_with(&["--headroom", "2Gi"], &env);
    let [first, second] = [&sound, &weak].map(|uuid| fixture.device("gpu", uuid, Some(&a.name)));
    a.until_health(&first, [true, true]).await;
    a.until_health(&second, [true, true]).await;

    let listed = |copy: &Option<AcceleratorNode>| {
        let status = copy.as_ref().and_then(|copy| copy.status.as_ref());
        let all = status.into_iter().flat_map(|status| &status.accelerators);
        all.map(|own| (own.uuid.clone(), own.index, own.healthy)).collect::<Vec<_>>()
    };
    let expected = |healthy: bool| vec![(sound.clone(), Some(0), true), (weak.clone(), Some(1), healthy)];
    let both = |copy: &Option<AcceleratorNode>| listed(copy) == expected(true);
    let copy = wait::until(&copies, &a.name, "both accelerators", both).await.unwrap().unwrap();
    let status = copy.status.unwrap();
    assert!(!status.partial, "the agent's list is whole: {status:?}");
    let capacity = status.accelerators[0].capacity.bytes().unwrap();
    assert!(
        (77..78).contains(&(capacity.0 >> 30)),
        "without the driver's 600 MiB and the headroom: {capacity}"
    );
    let granted = a.kubelet.allocate("engine", &second.resource(), 1).await.unwrap();
    for variable in ["ROUSE_ACCELERATORS", "NVIDIA_VISIBLE_DEVICES"] {
        assert_eq!(granted.allocation.env[variable], weak, "{variable}");
    }

    driver.set_accelerators(&lines("lost").each_ref().map(String::as_str));
    a.until_health(&second, [false, false]).await;
    a.until_health(&first, [true, true]).await;
    let faulty = |copy: &Option<AcceleratorNode>| listed(copy) == expected(false);
    wait::until(&copies, &a.name, "one faulty accelerator", faulty).await.unwrap();
    fixture.until_node_event(&a.name, "DeviceFaulty").await;
    assert_eq!(second.usage().await, second.map([&a.name, ""]), "its container keeps the slot");
}
