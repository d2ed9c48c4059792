//! An agent is killed, as by `kill -9`, before and after any one of its writes. The next agent goes on: no slot is lost,
//! and none is taken twice.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use kube::{Api, ResourceExt as _, api::ListParams};
use rouse_controllers::crd::DeviceInstance;
use serde_json::{Value, json};

use super::{agent::SlotNodeFixture, fixture::SlotsFixture};

const DEVICES: [&str; 2] = ["left", "right"];
const CAPACITY: usize = 2;

/// One node of a fixture, with a configuration of [`DEVICES`] for it alone.
struct CrashedNode<'a> {
    fixture: &'a SlotsFixture<'a>,
    node: SlotNodeFixture,
    /// The name of the node and of the configuration in the test.
    name: String,
    devices: Vec<&'static str>,
}

impl<'a> CrashedNode<'a> {
    async fn new(fixture: &'a SlotsFixture<'a>, name: &str, devices: &[&'static str]) -> Self {
        let node = SlotNodeFixture::new(fixture, name).await;
        let listed: Vec<Value> = devices.iter().map(|id| json!({"id": id})).collect();
        let spec = json!({
            "capacity": CAPACITY,
            "discovery": {"static": {"devices": listed}},
            "nodeSelector": {"kubernetes.io/hostname": node.name},
        });
        fixture.configure(name, spec).await;
        Self { fixture, node, name: name.to_owned(), devices: devices.to_vec() }
    }

    /// The agent's environment that makes it abort at this step, counted from the start or from [`Self::arm`].
    fn dies_at(&self, step: u32, from_start: bool) -> Vec<(&'static str, String)> {
        let mut env = vec![("ROUSE_TEST_ABORT_BEFORE_WRITE", step.to_string())];
        if !from_start {
            env.push(("ROUSE_TEST_ABORT_FROM", self.node.file("armed").display().to_string()));
        }
        env
    }

    fn arm(&self) {
        std::fs::write(self.node.file("armed"), "").unwrap();
    }

    /// The resource of the kind, or that of its first device.
    fn resource(&self, of_kind: bool) -> String {
        if of_kind {
            return format!("rouse.dev/{}", self.fixture.configuration_name(&self.name));
        }
        self.fixture.device(&self.name, self.devices[0], None).resource()
    }

    /// Waits until the kubelet has the slots of all devices, each as healthy as expected.
    async fn until_all(&self, healthy: bool) {
        for id in &self.devices {
            let device = self.fixture.device(&self.name, id, None);
            self.node.until_all(&device, healthy).await;
        }
    }

    /// The maps of slots of all instances of the configuration.
    async fn usage(&self) -> Vec<BTreeMap<String, String>> {
        let api: Api<DeviceInstance> = Api::all(self.fixture.world.site.admin.clone());
        let all = api.list(&ListParams::default()).await.unwrap().items;
        let name = self.fixture.configuration_name(&self.name);
        let own = all.into_iter().filter(|instance| instance.spec.configuration == name);
        own.map(|instance| {
            let name = instance.name_any();
            let status = instance.status.unwrap_or_default();
            assert_eq!(status.nodes, std::slice::from_ref(&self.node.name), "{name}");
            assert_eq!(status.device_usage.len(), CAPACITY, "{name}: {:?}", status.device_usage);
            status.device_usage
        })
        .collect()
    }
}

/// Runs a story for each of its steps, each on a node of its own.
async fn at_each_step(name: &str, steps: u32, story: impl AsyncFn(&SlotsFixture<'static>, &str, u32)) {
    let nodes: Vec<String> = (1..=steps).map(|step| format!("s{step}")).collect();
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let fixture = SlotsFixture::new(name, &names).await;
    join_all((1..=steps).zip(names).map(|(step, node)| Box::pin(story(&fixture, node, step)))).await;
}

/// Creates, lays out, joins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_killed_at_any_step_of_an_instances_creation_leaves_one_whole_instance_to_the_next() {
    at_each_step("slots-crash-new", 3, async |fixture, name, step| {
        let mut crashed = CrashedNode::new(fixture, name, &DEVICES[..1]).await;
        let env = crashed.dies_at(step, true);
        crashed.node.start_with(&[], &env);
        crashed.node.agent_ended().await;
        crashed.node.start();
        crashed.until_all(true).await;
        let usage = crashed.usage().await;
        assert_eq!(usage.len(), 1, "step {step}: {usage:?}");
        assert!(usage[0].values().all(String::is_empty), "step {step}: {usage:?}");
    })
    .await;
}

/// Kills the agent at this step of an Allocate of `count` devices, and allocates again with the next agent.
async fn allocated(
    fixture: &SlotsFixture<'static>,
    name: &str,
    step: u32,
    devices: &[&'static str],
    of_kind: bool,
) {
    let count = devices.len();
    let mut crashed = CrashedNode::new(fixture, name, devices).await;
    let env = crashed.dies_at(step, false);
    crashed.node.start_with(&[], &env);
    crashed.until_all(true).await;
    let resource = crashed.resource(of_kind);
    let offers = |found: &BTreeMap<String, bool>| found.values().filter(|healthy| **healthy).count() >= count;
    crashed.node.until_devices(&resource, "enough devices", offers).await;
    crashed.arm();
    let cut = crashed.node.kubelet.allocate("worker", &resource, count).await.unwrap_err();
    crashed.node.agent_ended().await;
    crashed.until_all(false).await;

    crashed.node.start();
    crashed.node.until_devices(&resource, "enough devices", offers).await;
    let granted = crashed.node.kubelet.allocate("worker", &resource, count).await;
    let granted = granted.unwrap_or_else(|error| panic!("step {step}, after '{cut}': {error}"));
    let usage = crashed.usage().await;
    assert_eq!(usage.len(), count, "step {step}: {usage:?}");
    for slots in &usage {
        let used = slots.iter().filter(|(_, usage)| !usage.is_empty());
        let used: Vec<&String> = used.map(|(slot, _)| slot).collect();
        let [slot] = &used[..] else { panic!("step {step}: {slots:?} after {granted:?}") };
        let annotation = format!("slot.rouse.dev/{slot}");
        assert!(
            granted.allocation.annotations.contains_key(&annotation),
            "step {step}: {slots:?} {granted:?}"
        );
    }
}

/// Before the claim, after it, and before the answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_killed_at_any_step_of_an_allocation_loses_no_slot_and_takes_none_twice() {
    at_each_step("slots-crash-one", 3, async |fixture, name, step| {
        allocated(fixture, name, step, &DEVICES[..1], false).await;
    })
    .await;
}

/// Before and after the claim of each device, and before the answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_killed_at_any_step_of_an_allocation_of_two_devices_loses_no_slot_and_takes_none_twice() {
    at_each_step("slots-crash-two", 5, async |fixture, name, step| {
        allocated(fixture, name, step, &DEVICES, true).await;
    })
    .await;
}
