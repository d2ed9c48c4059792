use rouse::{
    pairing::ids::Uid,
    slots::{SlotName, SlotUsage},
};
use serde_json::{Value, json};

use super::*;

const UNREADY: &str = "Unknown";

fn read<K: serde::de::DeserializeOwned>(object: Value) -> WatchedObject<K> {
    WatchedObject::from(serde_json::from_value::<K>(object).unwrap())
}

fn listed<K>(objects: Vec<WatchedObject<K>>) -> Delta<K> {
    Delta::All { namespace: None, objects }
}

fn configuration(capacity: u32) -> WatchedObject<DeviceConfiguration> {
    read(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceConfiguration",
        "metadata": {"name": "cam", "resourceVersion": "3", "generation": 1},
        "spec": {"discovery": {"static": {"devices": [{"id": "one"}]}}, "capacity": capacity},
    }))
}

fn instance(version: &str, status: &Value) -> WatchedObject<DeviceInstance> {
    read(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceInstance",
        "metadata": {"name": "cam-1", "resourceVersion": version},
        "spec": {"configuration": "cam", "shared": true, "capacity": 2, "deviceId": "one"},
        "status": status,
    }))
}

/// A node whose kubelet offers the slots of the instance.
fn node(name: &str, ready: &str) -> WatchedObject<Node> {
    node_with(name, ready, &json!({"cpu": "8", "rouse.dev/cam": "1", "rouse.dev/cam-1": "2"}))
}

fn node_with(name: &str, ready: &str, capacity: &Value) -> WatchedObject<Node> {
    read(json!({
        "metadata": {"name": name},
        "status": {"conditions": [{"type": "Ready", "status": ready}], "capacity": capacity},
    }))
}

/// The state of such a node.
fn offering(ready: bool, instances: &[&str]) -> Option<NodeState> {
    Some(NodeState { ready, offered: instances.iter().map(|name| InstanceName::from(*name)).collect() })
}

fn unserved(index: &SlotsIndex) -> Vec<&str> {
    index.unserved_nodes().map(NodeName::as_str).collect()
}

fn rejected(uid: &str) -> WatchedObject<Pod> {
    read(json!({
        "metadata": {
            "name": "one", "namespace": "chat", "uid": uid, "resourceVersion": "9",
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-u", "controller": true},
            ],
        },
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"rouse.dev/cam": "1"}}}]},
        "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "taken"},
    }))
}

/// Returns the index of a leader that has seen one configuration, one instance and two nodes.
fn leading(status: &Value) -> SlotsIndex {
    let mut index = SlotsIndex::new(1);
    index.apply_nodes(&listed(vec![node("a", "True"), node("b", "True")]));
    assert!(index.take_events().is_empty(), "a follower has no events");
    index.begin_term(true);
    index.apply_configurations(&listed(vec![configuration(2)]));
    index.apply_instances(&listed(vec![instance("5", status)]));
    assert!(!index.is_complete(), "the Pods are missing");
    index.apply_rejected_pods(&listed(Vec::new()));
    assert!(index.is_complete());
    index
}

#[test]
fn a_new_leader_gets_all_nodes_and_all_objects() {
    let mut index = leading(&json!({"nodes": ["a"], "deviceUsage": {"cam-1-0": "a", "cam-1-1": ""}}));
    let events = index.take_events();
    let node = |name: &str| node_event(&name.into(), offering(true, &["cam", "cam-1"]));
    assert_eq!(events[..2], [node("a"), node("b")]);
    let facts = Some(ConfigurationFacts { capacity: 2 });
    assert_eq!(events[2], SlotsEvent::Configuration { name: "cam".into(), facts });
    let SlotsEvent::Instance { name, observed: Some((facts, usage)) } = &events[3] else {
        panic!("{events:?}");
    };
    assert_eq!((name.as_str(), facts.configuration.as_str(), facts.version.as_str()), ("cam-1", "cam", "5"));
    assert_eq!(usage.slots[&SlotName::from("cam-1-0")], SlotUsage::Instance { node: "a".into() });
    assert_eq!(events.len(), 4);
    index.begin_term(true);
    assert!(!index.is_complete() && index.instance(&"cam-1".into()).is_none());
    assert_eq!(index.take_events().len(), 2, "the nodes alone");
}

#[test]
fn a_node_is_an_event_only_when_its_readiness_or_its_slots_change() {
    let mut index = leading(&json!({"nodes": ["a"], "deviceUsage": {"cam-1-0": "b"}}));
    index.take_events();
    let other = json!({"cpu": "16", "rouse.dev/cam": "2", "rouse.dev/cam-1": "3", "nvidia.com/gpu": "8"});
    index.apply_nodes(&Delta::Applied(node_with("a", "True", &other)));
    assert!(index.take_events().is_empty());
    index.apply_nodes(&Delta::Applied(node_with("a", "True", &json!({"rouse.dev/cam-1": "0"}))));
    assert_eq!(index.take_events(), [node_event(&"a".into(), offering(true, &[]))]);
    index.apply_nodes(&Delta::Applied(node("a", UNREADY)));
    let slots = ["cam", "cam-1"];
    assert_eq!(index.take_events(), [node_event(&"a".into(), offering(false, &slots))]);
    index.apply_nodes(&listed(vec![node("b", "False")]));
    let expected = [node_event(&"a".into(), None), node_event(&"b".into(), offering(false, &slots))];
    assert_eq!(index.take_events(), expected);
}

#[test]
fn only_nodes_that_an_instance_names_and_no_agent_serves_are_asked_for_their_pods() {
    let mut index = leading(&json!({"nodes": ["a"], "deviceUsage": {"cam-1-0": "C:cam-0:b"}}));
    index.apply_nodes(&listed(vec![node("a", "True"), node("b", UNREADY), node("c", UNREADY)]));
    assert_eq!(unserved(&index), ["b"]);
    index.apply_instances(&Delta::Applied(instance("6", &json!({"nodes": ["a", "c"]}))));
    assert_eq!(unserved(&index), ["c"]);

    // The plugin of the instance has ended on this node, and the other one has not.
    let gone = json!({"rouse.dev/cam": "1", "rouse.dev/cam-1": "0"});
    index.apply_nodes(&listed(vec![node_with("a", "True", &gone), node("c", "True")]));
    assert_eq!(unserved(&index), ["a"]);
    assert!(index.is_ready(&"a".into()) && !index.is_ready(&"b".into()));
    let metadata = serde_json::from_value(json!({"name": "c"})).unwrap();
    let unreadable = WatchedObject::Unreadable { metadata: Box::new(metadata), error: "no spec".to_owned() };
    index.apply_nodes(&Delta::Applied(unreadable));
    assert_eq!(unserved(&index), ["a"], "what cannot be read counts as it was");
    index.apply_nodes(&Delta::Applied(node("a", "True")));
    assert_eq!(unserved(&index), [""; 0]);

    index.apply_nodes(&Delta::Applied(node("a", "False")));
    index.apply_instances(&Delta::Deleted(ObjectName::new("", "cam-1")));
    assert_eq!(unserved(&index), [""; 0]);
}

#[test]
fn the_sums_follow_each_change_of_an_instance() {
    let name = ConfigurationName::from("cam");
    let usage = json!({"cam-1-0": "a", "cam-1-1": "a", "cam-1-2": ""});
    let mut index = leading(&json!({
        "nodes": ["a"], "deviceUsage": usage, "unusedSince": {"cam-1-1": "2026-01-02T03:04:05Z"},
    }));
    assert_eq!(index.totals(&name), DeviceSlotGauges { devices: 1, free: 1, used: 1, unused: 1 });
    assert!(index.take_changed_configurations().contains(&name));
    assert!(index.take_changed_configurations().is_empty());
    let freed = instance("6", &json!({"deviceUsage": {"cam-1-0": "", "cam-1-1": ""}}));
    index.apply_instances(&Delta::Applied(freed));
    assert_eq!(index.totals(&name), DeviceSlotGauges { devices: 1, free: 2, used: 0, unused: 0 });
    assert!(index.take_changed_configurations().contains(&name));
    index.apply_instances(&listed(Vec::new()));
    assert_eq!(index.totals(&name), DeviceSlotGauges::default());
    let events = index.take_events();
    assert_eq!(events.last(), Some(&SlotsEvent::Instance { name: "cam-1".into(), observed: None }));
}

#[test]
fn another_capacity_is_an_event_and_another_status_is_none() {
    let mut index = leading(&json!({}));
    index.take_events();
    index.take_changed_instances();
    index.apply_configurations(&Delta::Applied(configuration(2)));
    assert!(index.take_events().is_empty() && index.take_changed_instances().is_empty());
    index.apply_configurations(&Delta::Applied(configuration(5)));
    let facts = Some(ConfigurationFacts { capacity: 5 });
    assert_eq!(index.take_events(), [SlotsEvent::Configuration { name: "cam".into(), facts }]);
    assert_eq!(index.take_changed_instances().len(), 1, "its spec has the former capacity");
    index.apply_configurations(&Delta::Deleted(ObjectName::new("", "cam")));
    let gone = SlotsEvent::Configuration { name: "cam".into(), facts: None };
    assert_eq!(index.take_events(), [gone]);
}

#[test]
fn an_object_that_cannot_be_read_is_not_taken_for_a_deleted_configuration() {
    let mut index = leading(&json!({}));
    index.take_events();
    let metadata = serde_json::from_value(json!({"name": "cam"})).unwrap();
    let unreadable = WatchedObject::Unreadable { metadata: Box::new(metadata), error: "no spec".to_owned() };
    index.apply_configurations(&listed(vec![unreadable]));
    assert!(index.take_events().is_empty() && index.configuration(&"cam".into()).is_some());
}

#[test]
fn the_next_rejected_pod_of_a_name_is_another_one() {
    let mut index = leading(&json!({}));
    index.take_events();
    index.apply_rejected_pods(&Delta::Applied(rejected("u-1")));
    index.apply_rejected_pods(&Delta::Applied(rejected("u-1")));
    let events = index.take_events();
    let [SlotsEvent::Rejected { pod }] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((pod.uid.as_str(), pod.owner.as_str()), ("u-1", "rs-u"));
    assert_eq!(index.rejected_pod(pod).map(|(_, message)| message), Some("taken"));
    index.apply_rejected_pods(&Delta::Applied(rejected("u-2")));
    assert!(index.rejected_pod(pod).is_none(), "its fence is that of another Pod");
    index.apply_rejected_pods(&Delta::Deleted(ObjectName::new("chat", "one")));
    let events = index.take_events();
    assert_eq!(events.len(), 3);
    assert_eq!(events[0], SlotsEvent::RejectedGone { uid: Uid::from("u-1") });
    assert_eq!(events[2], SlotsEvent::RejectedGone { uid: Uid::from("u-2") });
}

#[test]
fn of_two_configurations_of_the_same_accelerators_the_older_one_is_preferred_until_it_is_deleted() {
    let of_accelerators = |name: &str, second: u32, pool: &str| -> WatchedObject<DeviceConfiguration> {
        read(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceConfiguration",
            "metadata": {"name": name, "creationTimestamp": format!("2026-01-01T00:00:0{second}Z")},
            "spec": {"discovery": {"accelerators": {}}, "nodeSelector": {"pool": pool}},
        }))
    };
    let mut index = leading(&json!({}));
    index.apply_configurations(&Delta::Applied(of_accelerators("old", 1, "shared")));
    index.take_changed_configurations();
    index.apply_configurations(&Delta::Applied(of_accelerators("new", 2, "shared")));
    index.apply_configurations(&Delta::Applied(of_accelerators("apart", 3, "other")));
    let preferred =
        |index: &SlotsIndex, name: &str| index.preferred_to(&name.into()).map(ToString::to_string);
    assert_eq!(preferred(&index, "new").as_deref(), Some("old"));
    for name in ["old", "apart", "cam"] {
        assert_eq!(preferred(&index, name), None, "{name}");
    }
    index.take_changed_configurations();
    index.apply_configurations(&Delta::Deleted(ObjectName::new("", "old")));
    assert!(index.take_changed_configurations().contains("new"));
    assert_eq!(preferred(&index, "new"), None);
}
