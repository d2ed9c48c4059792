//! Models in a pool of slots: their Pods stay on one accelerator, and their engines take turns by sleep and wake.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::Arc,
    time::Duration,
};

use kube::ResourceExt as _;
use nix::sys::signal::Signal;
use rouse_cluster::{AuditedCall, podrunner::NodeSpec, wait::WAIT_TIMEOUT};
use rouse_controllers::crd::InferenceModel;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::{
    agent::SlotNodeFixture,
    fixture::{NODES_LABEL, SlotsFixture},
};
use crate::{
    installation::{ClusterGateway, Installation, blocking},
    rendered::ChartPart,
    runner::TestPrograms,
    site::GatewayNamespace,
    support::cluster,
};

const MODELS: [&str; 2] = ["left", "right"];
/// Rounds in which each model is requested once, while the other one is awake.
const ROUNDS: usize = 3;
const SETTINGS: &str = ", dualPods: {meterLag: 1s}";
/// Writes of the leader for one switch: annotations and labels of four Pods, two reservations, and statuses.
const MAX_WRITES_PER_SWITCH: usize = 20;
/// What gateways write at all times.
const BACKGROUND: [&str; 3] = ["leases", "gatewayreplicas", "gatewayreplicas/status"];

/// A node with one accelerator of 80 GiB, on which two Pods have a slot, and two models of 60 GiB.
struct SlotModelsFixture {
    slots: SlotsFixture<'static>,
    node: SlotNodeFixture,
    accelerator: String,
}

impl SlotModelsFixture {
    async fn new(name: &str) -> Self {
        let parts = [ChartPart::DualPods, ChartPart::Slots];
        let site = GatewayNamespace::with_parts(cluster().await, name, &parts).await;
        let own = site.namespace.name().to_owned();
        let account = site.agent_account().await;
        let node = |own: &str| NodeSpec::new("a").label("inference-pool", own).label(NODES_LABEL, own);
        let world = Installation::with_programs(TestPrograms::from_cargo(), site, "1Ti", node).await;
        let accelerator = format!("GPU-{own}");
        let slots = SlotsFixture::with(world, &account).await;
        slots.configure("gpu", json!({"capacity": 2, "discovery": {"accelerators": {}}})).await;
        let pool = json!({
            "nodeSelector": {"inference-pool": own}, "resource": format!("rouse.dev/{}", slots.configuration_name("gpu")),
            "slots": 2, "sleepingMemory": "8Gi", "hostSleepMemory": "256Gi", "meterLag": "1s",
        });
        slots.world.pool(&own, pool).await;
        let mut node = SlotNodeFixture::new(&slots, "a").await;
        slots.world.runner.use_device_manager("a", Arc::clone(&node.kubelet)).await.unwrap();
        // The agent leaves out one GiB as headroom.
        fs::write(node.file("gpus"), format!("{accelerator} 81Gi\n")).unwrap();
        let list = node.file("gpus").display().to_string();
        node.start_with(&["--accelerators-file", &list], &[]);
        node.until_all(&slots.device("gpu", &accelerator, Some(&node.name)), true).await;
        Self { slots, node, accelerator }
    }

    fn world(&self) -> &Installation<'static> {
        &self.slots.world
    }

    /// Creates the models. An engine dies where less memory is free than it needs.
    async fn create_models(&self) {
        let cards = self.node.file("cards");
        let card = json!({"accelerators": {&self.accelerator: {"capacity": 80_u64 << 30}}});
        fs::write(&cards, card.to_string()).unwrap();
        let flags = format!(
            "--enable-sleep-mode --accelerator-file {} --memory-awake 60Gi --memory-asleep 1Gi",
            cards.display()
        );
        let spec =
            json!({"mode": "dualPods", "memoryAsleep": "1Gi", "hostMemory": "8Gi", "cooldownPeriod": "10m"});
        for name in MODELS {
            self.world().model(name, "60Gi", &flags, spec.clone()).await;
        }
    }

    /// The uids of all Pods.
    async fn pods(&self) -> BTreeSet<String> {
        self.world().running().await.iter().filter_map(|pod| pod.uid()).collect()
    }

    /// The writes of the gateways, without those that they make at all times.
    fn writes(&self) -> Vec<AuditedCall> {
        let site = &self.world().site;
        let calls = site.cluster.calls(&site.account).unwrap().into_iter();
        let is_write = |call: &AuditedCall| {
            !["get", "list", "watch"].contains(&call.verb.as_str())
                && !BACKGROUND.contains(&call.resource.as_str())
        };
        calls.filter(is_write).collect()
    }
}

async fn ask(gateway: &ClusterGateway, model: &'static str) {
    let client = gateway.client();
    let answer = blocking(move || client.chat(model, true, 4)).await;
    assert!(answer.is_whole_stream(), "{model}: {answer:?}");
}

async fn ask_in_turns(gateway: &ClusterGateway, rounds: usize) {
    for _ in 0..rounds {
        for model in MODELS {
            ask(gateway, model).await;
        }
    }
}

/// Waits until the gateway has read that the node lists the accelerator. Before that, a request for a model of this pool
/// is refused: no node of it lists any.
async fn until_listed(gateway: &ClusterGateway, accelerator: &str) {
    let metric = format!("rouse_accelerator_memory_bytes{{accelerator=\"{accelerator}\",");
    let listed = async {
        while !gateway.metrics().contains(&metric) {
            sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(
        timeout(WAIT_TIMEOUT, listed).await.is_ok(),
        "{accelerator} is not listed: {}",
        gateway.metrics()
    );
}

/// Waits until the follower counts as much memory of the accelerator as reserved as the leader does.
async fn until_follower_agrees(leader: &ClusterGateway, follower: &ClusterGateway, accelerator: &str) {
    let metric =
        format!("rouse_accelerator_memory_bytes{{accelerator=\"{accelerator}\",kind=\"reserved\"}} ");
    let reserved = |gateway: &ClusterGateway| {
        let page = gateway.metrics();
        page.lines().find_map(|line| Some(line.strip_prefix(metric.as_str())?.to_owned()))
    };
    let agreed = async {
        loop {
            let of_leader = reserved(leader).filter(|bytes| bytes != "0");
            if of_leader.is_some() && of_leader == reserved(follower) {
                return;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    let agreed = timeout(WAIT_TIMEOUT, agreed).await;
    assert!(agreed.is_ok(), "leader: {:?}, follower: {:?}", reserved(leader), reserved(follower));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_take_turns_on_one_accelerator_without_a_new_pod_and_the_next_leader_goes_on() {
    let fixture = SlotModelsFixture::new("slots-models").await;
    let world = fixture.world();
    fixture.create_models().await;
    let mut leader = world.gateway_with("gateway-0", SETTINGS);
    let known = |model: &InferenceModel| {
        model.status.as_ref().is_some_and(|status| status.observed_generation.is_some())
    };
    for model in MODELS {
        world.until(model, "known to the gateway", known).await;
    }
    until_listed(&leader, &fixture.accelerator).await;
    ask_in_turns(&leader, 1).await;
    let pods = fixture.pods().await;
    assert_eq!(pods.len(), 4, "a requester and an engine for each model");
    let device = fixture.slots.device("gpu", &fixture.accelerator, Some(&fixture.node.name));
    assert_eq!(device.usage().await, device.map([&fixture.node.name; 2]), "each requester has a slot");

    let before = fixture.writes().len();
    ask_in_turns(&leader, ROUNDS).await;
    let writes = fixture.writes().split_off(before);
    assert_eq!(fixture.pods().await, pods, "a switch made or ended a Pod");
    let mut counts = BTreeMap::<(&str, &str), usize>::new();
    for call in &writes {
        *counts.entry((call.verb.as_str(), call.resource.as_str())).or_default() += 1;
    }
    let switches = ROUNDS * MODELS.len();
    println!("{} writes for {switches} switches: {counts:?}", writes.len());
    let makes_or_ends = |(verb, resource): &(&str, &str)| {
        ["create", "delete", "deletecollection"].contains(verb) && *resource != "events"
    };
    assert!(!counts.keys().any(makes_or_ends), "{counts:?}");
    assert!(writes.len() <= MAX_WRITES_PER_SWITCH * switches, "{counts:?}");

    let next = world.gateway_with("gateway-1", SETTINGS);
    until_follower_agrees(&leader, &next, &fixture.accelerator).await;
    leader.signal(Signal::SIGKILL);
    leader.wait().await;
    ask_in_turns(&next, 1).await;
    assert_eq!(fixture.pods().await, pods, "the next leader made or ended a Pod");
    assert_eq!(device.usage().await, device.map([&fixture.node.name; 2]));
}
