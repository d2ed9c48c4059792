//! On which nodes engines run, and how the gateway records that.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
};

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use nix::{sys::stat::Mode, unistd::mkfifo};
use rouse_cluster::wait;
use rouse_controllers::crd::{
    AcceleratorNode, AcceleratorNodeStatus, AcceleratorPool, ledger::ReservationState,
};
use serde_json::json;

use crate::{
    installation::{Installation, blocking, reason},
    runner::plain_node,
    site::GatewayNamespace,
    support::cluster,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_booking_is_placed_on_the_node_of_its_pod_and_the_nodes_object_says_so() {
    let world = Installation::new("node-placed", 2, "128Gi").await;
    world.model("qwen", "40Gi", "", json!({"cooldownPeriod": "10m"})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    let node = world.running().await[0].spec.clone().unwrap().node_name.unwrap();

    let pools: Api<AcceleratorPool> = Api::all(world.site.admin.clone());
    let placed = |pool: &Option<AcceleratorPool>| {
        let ledger = pool.as_ref().and_then(|pool| Some(&pool.status.as_ref()?.ledger));
        let mut reservations = ledger.into_iter().flat_map(|ledger| &ledger.reservations);
        reservations
            .any(|own| (own.state, own.node.as_deref()) == (ReservationState::Placed, Some(node.as_str())))
    };
    wait::until(&pools, world.name(), "placed", placed).await.unwrap();

    let copies: Api<AcceleratorNode> = Api::all(world.site.admin.clone());
    let says = |fits: fn(&AcceleratorNodeStatus) -> bool| {
        move |copy: &Option<AcceleratorNode>| {
            copy.as_ref().and_then(|copy| copy.status.as_ref()).is_some_and(fits)
        }
    };
    let booked = says(|status| status.reservations.len() == 1);
    let copy = wait::until(&copies, &node, "a copy of the booking", booked).await.unwrap().unwrap();
    assert_eq!(copy.spec.pool.as_deref(), Some(world.name()));
    assert_eq!(copy.metadata.owner_references.unwrap()[0].name, node, "it goes with its node");
    let status = copy.status.unwrap();
    let own = &status.reservations[0];
    assert_eq!((own.model.as_str(), own.replica), (format!("{}/qwen", world.name()).as_str(), 0));
    assert_eq!(own.bytes.to_string(), "40Gi");
    assert_eq!(status.reserved.unwrap().to_string(), "40Gi");
    assert_eq!((status.count, status.healthy), (2, 2), "what its device plugin offers");
    assert_eq!(status.conditions[0].reason, "Ready");

    world.model("qwen", "40Gi", "", json!({"cooldownPeriod": "1s"})).await;
    world.until("qwen", "scaled to zero", |model| reason(model, "Ready") == "ScaledToZero").await;
    let empty = says(|status| status.reservations.is_empty());
    wait::until(&copies, &node, "nothing booked", empty).await.unwrap();
}

/// The stub waits for its driver, and reports until then that it does not know its accelerators.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_serves_before_its_stub_knows_its_accelerators_is_placed_on_them_later() {
    let world = Installation::new("node-late", 2, "128Gi").await;
    world.set_accelerators("late", &[("GPU-late", 1)]);
    let driver = world.dir.path().join("driver/late");
    let answer = driver.with_extension("answer");
    fs::rename(&driver, &answer).unwrap();
    mkfifo(&driver, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    world.model("late", "40Gi", "", json!({"cooldownPeriod": "10m"})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("late", false, 4)).await.status, 200);
    let ledger = world.get_pool().await.status.unwrap().ledger;
    assert_eq!(ledger.reservations[0].state, ReservationState::Reserved, "the driver has not answered");

    blocking(move || {
        let mut asked = OpenOptions::new().write(true).open(&driver).unwrap();
        let text = fs::read(&answer).unwrap();
        fs::rename(answer, driver).unwrap();
        asked.write_all(&text).unwrap();
    })
    .await;
    let pools: Api<AcceleratorPool> = Api::all(world.site.admin.clone());
    let placed = |pool: &Option<AcceleratorPool>| {
        let status = pool.as_ref().and_then(|pool| pool.status.as_ref());
        let own = status.and_then(|status| status.ledger.reservations.first());
        own.is_some_and(|own| {
            own.state == ReservationState::Placed && own.accelerators == ["GPU-late".into()]
        })
    };
    wait::until(&pools, world.name(), "placed on its accelerator", placed).await.unwrap();
}

/// The accelerators that a node's object lists.
pub(crate) fn listed(copy: &Option<AcceleratorNode>) -> Vec<&str> {
    let status = copy.as_ref().and_then(|copy| copy.status.as_ref());
    let own = status.into_iter().flat_map(|status| &status.accelerators);
    own.map(|accelerator| accelerator.uuid.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nodes_object_lists_the_accelerators_that_stubs_report_and_those_that_are_gone_no_longer() {
    let site = GatewayNamespace::new(cluster().await, "node-listed").await;
    let large = |own: &str| plain_node(own, 2).label("nvidia.com/gpu.memory", "65536");
    let world = Installation::with_node(site, "128Gi", large).await;
    let node = world.runner.node(&format!("{}-a", world.name()));
    let node = node.name();
    let gateway = world.gateway("gateway-0", "");
    for (model, accelerator, cooldown) in [("stays", "GPU-a", "10m"), ("goes", "GPU-b", "1s")] {
        world.set_accelerators(model, &[(accelerator, 40 << 10)]);
        world.model(model, "40Gi", "", json!({"cooldownPeriod": cooldown})).await;
        world.until(model, "accepted", |model| reason(model, "Accepted") == "Accepted").await;
        let client = gateway.client();
        assert_eq!(blocking(move || client.chat(model, false, 4)).await.status, 200);
    }
    let copies: Api<AcceleratorNode> = Api::all(world.site.admin.clone());
    wait::until(&copies, node, "both", |copy| listed(copy) == ["GPU-a", "GPU-b"]).await.unwrap();

    world.until("goes", "scaled to zero", |model| reason(model, "Ready") == "ScaledToZero").await;
    let one_has = |copy: &Option<AcceleratorNode>| {
        let status = copy.as_ref().and_then(|copy| copy.status.as_ref());
        status.is_some_and(|status| status.reservations.len() == 1)
    };
    let copy = wait::until(&copies, node, "one has an engine", one_has).await.unwrap();
    assert_eq!(listed(&copy), ["GPU-a", "GPU-b"], "that no Pod has it is no evidence");

    let nodes: Api<Node> = Api::all(world.site.admin.clone());
    let offered = json!({"status": {"allocatable": {"nvidia.com/gpu": "1"}}});
    nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(&offered)).await.unwrap();
    wait::until(&copies, node, "one is gone", |copy| listed(copy) == ["GPU-a"]).await.unwrap();
}

/// The engine's Pod asks for one accelerator, and the pool's sum has room; only the accelerator that the Pod gets lacks
/// room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_comes_to_an_accelerator_without_room_for_it_goes_and_whoever_waits_is_told() {
    let site = GatewayNamespace::new(cluster().await, "node-misplaced").await;
    let small = |own: &str| plain_node(own, 4).label("nvidia.com/gpu.memory", "24576");
    let world = Installation::with_node(site, "128Gi", small).await;
    world.model("qwen", "40Gi", "--start-time 2m", json!({"queue": {"maxWait": "1m"}})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    let refused = blocking(move || client.chat("qwen", false, 4)).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.text().contains("misplaced"), "{}", refused.text());
    world.until_reserved("nothing", <[_]>::is_empty).await;
    assert_eq!(world.running().await.len(), 0);
}
