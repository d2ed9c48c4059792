//! What a node agent may write: the chart's policies confine it to its own node, by the node that its token names.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use rouse::slots::instance_name;
use rouse_cluster::{TestCluster, wait::WAIT_TIMEOUT};
use serde_json::{Value, json};

use crate::support::{FIELD_MANAGER, own_cluster, repo_path};

const INSTANCE: &str = "box-0123456789";
/// Changed until the policies deny it.
const PROBED: &str = "probed-0123456789";
const INSTANCES: &str = "/apis/rouse.dev/v1alpha1/deviceinstances";
const NODES: &str = "/apis/rouse.dev/v1alpha1/acceleratornodes";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

/// A node agent, or another Pod with its account. All rights are given, so that only the policies can deny something.
struct NodeAgent {
    client: Client,
    /// The node that the token names.
    node: Option<&'static str>,
}

impl NodeAgent {
    /// Sends a request. Returns the refusal, if the API server denies it.
    async fn send(&self, request: http::request::Builder, body: &Value) -> Result<(), String> {
        let mut request = request
            .header("impersonate-user", "system:serviceaccount:rouse:rouse-node")
            .header("impersonate-group", "system:masters");
        if let Some(node) = self.node {
            request = request.header("impersonate-extra-authentication.kubernetes.io%2fnode-name", node);
        }
        let request = request.body(body.to_string().into_bytes()).unwrap();
        match self.client.request::<Value>(request).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 422 => Err(status.message),
            Err(error) => panic!("{error}"),
        }
    }

    /// Changes a status with a JSON Patch.
    async fn patch(&self, object: &str, operations: Value) -> Result<(), String> {
        let request = http::Request::patch(format!("{object}/status"))
            .header("content-type", "application/json-patch+json");
        self.send(request, &operations).await
    }

    async fn create(&self, path: &str, object: Value) -> Result<(), String> {
        self.send(http::Request::post(path).header("content-type", "application/json"), &object).await
    }

    /// Sets the use of a slot. `null` removes the slot.
    async fn set(&self, slot: u32, usage: Value) -> Result<(), String> {
        let path = format!("/status/deviceUsage/{INSTANCE}-{slot}");
        let operation = if usage.is_null() {
            json!({"op": "remove", "path": path})
        } else {
            json!({"op": "add", "path": path, "value": usage})
        };
        self.patch(&format!("{INSTANCES}/{INSTANCE}"), json!([operation])).await
    }

    async fn add(&self, field: &str, value: Value) -> Result<(), String> {
        let operation = json!({"op": "add", "path": format!("/status/{field}"), "value": value});
        self.patch(&format!("{INSTANCES}/{INSTANCE}"), json!([operation])).await
    }
}

async fn apply(client: &Client, object: &Value) {
    let (version, kind) = (object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
    let (group, version) = version.split_once('/').unwrap();
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let (name, parameters) =
        (object["metadata"]["name"].as_str().unwrap(), PatchParams::apply(FIELD_MANAGER).force());
    api.patch(name, &parameters, &Patch::Apply(object)).await.unwrap();
    if object.get("status").is_some() {
        api.patch_status(name, &parameters, &Patch::Apply(object)).await.unwrap();
    }
}

fn rouse(kind: &str, name: &str, spec: Value, status: Value) -> Value {
    let version = "rouse.dev/v1alpha1";
    json!({
        "apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec, "status": status,
    })
}

/// Applies the policies, an instance with a slot of each sort, and the AcceleratorNodes of two nodes.
async fn install(client: &Client) {
    let policies = std::fs::read_to_string(repo_path("charts/rouse/policies/node-agent.yaml")).unwrap();
    for document in policies.split("---\n") {
        apply(client, &serde_saphyr::from_str(document).unwrap()).await;
    }
    let spec = json!({"configuration": "box", "deviceId": "box-1", "shared": true, "capacity": 5});
    let slot = |n: u32| format!("{INSTANCE}-{n}");
    let status = json!({
        "nodes": ["node-b"],
        "deviceUsage": {
            slot(0): "", slot(1): "node-a", slot(2): "node-b", slot(3): "C:box-0:node-b", slot(4): "C:box-0:node-a",
        },
        "unusedSince": {slot(2): "2026-11-22T08:00:00Z"},
    });
    apply(client, &rouse("DeviceInstance", PROBED, spec.clone(), json!({"nodes": ["node-b"]}))).await;
    apply(client, &rouse("DeviceInstance", INSTANCE, spec, status)).await;
    for node in ["node-a", "node-b"] {
        apply(client, &rouse("AcceleratorNode", node, json!({}), json!({"count": 1}))).await;
    }
}

/// Returns a cluster that enforces the policies, and the agent of `node-a`.
async fn confined_agent() -> (TestCluster, NodeAgent) {
    let cluster = own_cluster().await;
    let client = cluster.client().await.unwrap();
    install(&client).await;
    let agent = NodeAgent { client, node: Some("node-a") };
    until_enforced(&agent).await;
    (cluster, agent)
}

/// Waits until the API server enforces the policies: it learns of them by a watch, and denies nothing before.
async fn until_enforced(agent: &NodeAgent) {
    let denied = async {
        let (other, mut n) = (json!([{"op": "add", "path": "/status/count", "value": 1}]), 0);
        while agent.patch(&format!("{NODES}/node-b"), other.clone()).await.is_ok() {}
        let early = |n: u32| json!([{"op": "add", "path": "/status/nodes", "value": [format!("early-{n}")]}]);
        while agent.patch(&format!("{INSTANCES}/{PROBED}"), early(n)).await.is_ok() {
            n += 1;
        }
        while agent.create(EVENTS, event(&format!("early-{n}"), "Pod", "node-a")).await.is_ok() {
            n += 1;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, denied).await.unwrap();
}

fn event(name: &str, kind: &str, regarding: &str) -> Value {
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": name, "namespace": "default"},
        "eventTime": "2026-11-22T08:00:00.000000Z", "reportingController": "rouse.dev/node", "action": "Test",
        "reportingInstance": "node-a", "reason": "Test", "type": "Normal",
        "regarding": {"kind": kind, "name": regarding, "apiVersion": "v1"},
    })
}

fn denied(outcome: Result<(), String>, words: &str) {
    let refused = outcome.expect_err(words);
    assert!(refused.contains(words), "'{words}' is not in: {refused}");
}

#[tokio::test]
async fn an_agent_claims_and_frees_slots_for_its_own_node_only() {
    let (_cluster, a) = confined_agent().await;
    let anyone = NodeAgent { client: a.client.clone(), node: None };

    // Its own slots and free ones, for itself.
    a.set(0, json!("node-a")).await.unwrap();
    a.set(0, json!("C:box-7:node-a")).await.unwrap();
    a.set(0, json!("")).await.unwrap();
    a.set(5, json!("")).await.unwrap();
    a.set(5, Value::Null).await.unwrap();
    a.set(6, json!("node-a")).await.unwrap();
    a.set(6, Value::Null).await.unwrap();
    let foreign = "this slot belongs to another node";
    denied(a.set(0, json!("node-b")).await, foreign);
    denied(a.set(0, json!("C:box-7:node-b")).await, foreign);
    denied(a.set(0, json!("C:node-a:x")).await, foreign);
    denied(a.set(0, json!("not-node-a")).await, foreign);
    denied(a.set(1, json!("node-b")).await, foreign);
    for slot in [2, 3] {
        denied(a.set(slot, json!("node-a")).await, foreign);
        denied(a.set(slot, json!("")).await, foreign);
        denied(a.set(slot, Value::Null).await, foreign);
    }
    denied(a.set(7, json!("node-b")).await, foreign);
    denied(anyone.set(0, json!("node-a")).await, "a token that names its node");

    // When its own slots became unused.
    let moment = || json!("2026-11-22T09:00:00Z");
    a.add(&format!("unusedSince/{INSTANCE}-1"), moment()).await.unwrap();
    a.add(&format!("unusedSince/{INSTANCE}-4"), moment()).await.unwrap();
    let path = |field: &str, slot: u32| format!("/status/{field}/{INSTANCE}-{slot}");
    let free = json!([
        {"op": "test", "path": path("deviceUsage", 1), "value": "node-a"},
        {"op": "replace", "path": path("deviceUsage", 1), "value": ""},
        {"op": "remove", "path": path("unusedSince", 1)},
    ]);
    a.patch(&format!("{INSTANCES}/{INSTANCE}"), free).await.unwrap();
    for slot in [0, 2, 3] {
        denied(
            a.add(&format!("unusedSince/{INSTANCE}-{slot}"), moment()).await,
            "only slots of its own node",
        );
    }

    // The nodes that see the device.
    a.add("nodes/-", json!("node-a")).await.unwrap();
    a.add("nodes", json!(["node-b"])).await.unwrap();
    for nodes in [json!([]), json!(["node-a"]), json!(["node-b", "node-c"])] {
        denied(a.add("nodes", nodes).await, "only its own node where a device is seen");
    }

    creates_only_instances_that_the_leader_deletes_under_their_configurations_name(&a).await;
}

async fn creates_only_instances_that_the_leader_deletes_under_their_configurations_name(a: &NodeAgent) {
    let new = |name: &str, configuration: &str| {
        let spec =
            json!({"configuration": configuration, "deviceId": "box-2", "shared": true, "capacity": 5});
        rouse("DeviceInstance", name, spec, json!({}))
    };
    let made = new("box-9876543210", "box");
    let mut owned = made.clone();
    owned["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceConfiguration", "name": "box", "controller": true,
        "uid": "2f1c6a54-0b7e-4c9a-8a67-0d9b4a8f7a11",
    }]);
    let mut held = made.clone();
    held["metadata"]["finalizers"] = json!(["example.com/held"]);
    for other in [owned, held] {
        denied(a.create(INSTANCES, other).await, "has no owner and no finalizer");
    }
    a.create(INSTANCES, made).await.unwrap();

    for (name, configuration) in [
        ("box-1111111111", "other"),
        ("box-1111111111", "bo"),
        ("box-111111111", "box"),
        ("box-11111111111", "box"),
        ("box-111111111g", "box"),
        ("box", "box"),
    ] {
        denied(a.create(INSTANCES, new(name, configuration)).await, "has the name of its configuration");
    }
    // Long names of configurations are cut.
    for configuration in ["a".repeat(48), "a".repeat(49), format!("{}.{}", "a".repeat(42), "b".repeat(20))] {
        let name = instance_name(&configuration.as_str().into(), "box-2", None);
        a.create(INSTANCES, new(name.as_str(), &configuration)).await.unwrap();
        let other = format!("c{configuration}");
        denied(a.create(INSTANCES, new(name.as_str(), &other)).await, "has the name of its configuration");
    }
    let name = instance_name(&"a".repeat(63).as_str().into(), "box-2", None);
    let shorter = name.as_str().replacen("aaa", "a", 1);
    denied(a.create(INSTANCES, new(&shorter, &"a".repeat(63))).await, "has the name of its configuration");
}

#[tokio::test]
async fn an_agent_lists_its_own_accelerators_and_reports_on_its_own_node_only() {
    let (_cluster, a) = confined_agent().await;

    let accelerators = json!([{"uuid": "GPU-1", "index": 0, "capacity": "79Gi", "healthy": true}]);
    let list = json!([
        {"op": "add", "path": "/status/accelerators", "value": accelerators},
        {"op": "add", "path": "/status/partial", "value": false},
    ]);
    a.patch(&format!("{NODES}/node-a"), list.clone()).await.unwrap();
    denied(a.patch(&format!("{NODES}/node-b"), list).await, "only the AcceleratorNode of its own node");
    for (field, value) in [("count", json!(8)), ("total", json!("1Ti")), ("reserved", json!("0"))] {
        let other = json!([{"op": "add", "path": format!("/status/{field}"), "value": value}]);
        denied(a.patch(&format!("{NODES}/node-a"), other).await, "only the list of accelerators");
    }

    a.create(EVENTS, event("own", "Node", "node-a")).await.unwrap();
    denied(a.create(EVENTS, event("other", "Node", "node-b")).await, "only Events about its own node");
    denied(a.create(EVENTS, event("pod", "Pod", "node-a")).await, "only Events about its own node");
}
