use kube::core::{
    Status,
    response::{StatusCause, StatusDetails},
};
use rouse::slots::VirtualId;

use super::*;

const MARK: &str = "2026-01-02T03:04:05Z";
/// The moment of [`MARK`], with milliseconds that an object does not keep.
const MARKED_AT: Tick = Tick(1_767_323_045_678);

fn object(status: &Value) -> DeviceInstance {
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "DeviceInstance",
        "metadata": {"name": "cam-1", "resourceVersion": "7"},
        "spec": {
            "configuration": "cam", "shared": true, "capacity": 2, "deviceId": "d", "properties": {},
        },
        "status": status,
    });
    serde_json::from_value(object).unwrap()
}

fn change(slot: &str, from: SlotUsage, to: SlotUsage, unused_since: Option<UnusedChange>) -> SlotChange {
    SlotChange { slot: slot.into(), from, to, unused_since }
}

fn of(node: &str) -> SlotUsage {
    SlotUsage::Instance { node: node.into() }
}

#[test]
fn a_claim_tests_and_replaces_its_own_slots_and_no_version() {
    let object = object(&json!({"nodes": ["a"], "deviceUsage": {"cam-1-0": "", "cam-1-1": ""}}));
    let virtual_device = SlotUsage::Configuration { virtual_id: VirtualId::from("cam-0"), node: "a".into() };
    let changes = [
        change("cam-1-0", SlotUsage::Free, of("a"), None),
        change("cam-1-1", SlotUsage::Free, virtual_device, None),
    ];
    let expected = json!([
        {"op": "test", "path": "/status/deviceUsage/cam-1-0", "value": ""},
        {"op": "replace", "path": "/status/deviceUsage/cam-1-0", "value": "a"},
        {"op": "test", "path": "/status/deviceUsage/cam-1-1", "value": ""},
        {"op": "replace", "path": "/status/deviceUsage/cam-1-1", "value": "C:cam-0:a"},
    ]);
    assert_eq!(slot_patch(&object, &changes), expected);
    assert!(json_patch(&expected).is_ok());
}

#[test]
fn the_first_mark_of_an_object_tests_the_version_and_a_later_one_its_slot_alone() {
    let mark = [change("cam-1-0", of("a"), of("a"), Some(UnusedChange::Set { at: MARKED_AT }))];
    let usage = json!({"cam-1-0": "a", "cam-1-1": "b"});
    let first = slot_patch(&object(&json!({"deviceUsage": usage})), &mark);
    assert_eq!(
        first,
        json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "test", "path": "/status/deviceUsage/cam-1-0", "value": "a"},
            {"op": "add", "path": "/status/unusedSince", "value": {"cam-1-0": MARK}},
        ])
    );
    let marked = json!({"deviceUsage": usage, "unusedSince": {"cam-1-1": MARK}});
    assert_eq!(
        slot_patch(&object(&marked), &mark),
        json!([
            {"op": "test", "path": "/status/deviceUsage/cam-1-0", "value": "a"},
            {"op": "add", "path": "/status/unusedSince/cam-1-0", "value": MARK},
        ])
    );
}

#[test]
fn a_slot_is_freed_only_with_the_mark_that_was_read() {
    let marked = json!({"deviceUsage": {"cam-1-0": "a"}, "unusedSince": {"cam-1-0": MARK}});
    let object = object(&marked);
    let was = instance_usage(&object).unused_since[&SlotName::from("cam-1-0")];
    let freed = [change("cam-1-0", of("a"), SlotUsage::Free, Some(UnusedChange::Clear { was }))];
    assert_eq!(
        slot_patch(&object, &freed),
        json!([
            {"op": "test", "path": "/status/deviceUsage/cam-1-0", "value": "a"},
            {"op": "replace", "path": "/status/deviceUsage/cam-1-0", "value": ""},
            {"op": "test", "path": "/status/unusedSince/cam-1-0", "value": MARK},
            {"op": "remove", "path": "/status/unusedSince/cam-1-0"},
        ])
    );
}

#[test]
fn a_mark_with_a_fraction_of_a_second_is_removed_in_the_version_that_was_read() {
    let marked = json!({
        "deviceUsage": {"cam-1-0": "a"}, "unusedSince": {"cam-1-0": "2026-01-02T03:04:05.678Z"},
    });
    let object = object(&marked);
    let was = instance_usage(&object).unused_since[&SlotName::from("cam-1-0")];
    assert_eq!(was, MARKED_AT);
    let used = [change("cam-1-0", of("a"), of("a"), Some(UnusedChange::Clear { was }))];
    assert_eq!(
        slot_patch(&object, &used),
        json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "test", "path": "/status/deviceUsage/cam-1-0", "value": "a"},
            {"op": "remove", "path": "/status/unusedSince/cam-1-0"},
        ])
    );
    // Another mark than the one that was read is tested, and the patch refused.
    let other = [change("cam-1-0", of("a"), of("a"), Some(UnusedChange::Clear { was: Tick(1_000) }))];
    let tested = json!({
        "op": "test", "path": "/status/unusedSince/cam-1-0", "value": "1970-01-01T00:00:01Z",
    });
    assert_eq!(slot_patch(&object, &other)[1], tested);
}

#[test]
fn the_nodes_of_others_stay_in_their_order() {
    let object = object(&json!({"nodes": ["c", "a"]}));
    let nodes = BTreeSet::from(["a", "b", "c"].map(NodeName::from));
    let last = nodes_patch(&object, &nodes).as_array().and_then(|all| all.last().cloned());
    assert_eq!(last, Some(json!({"op": "add", "path": "/status/nodes", "value": ["c", "a", "b"]})));
}

#[test]
fn a_first_layout_creates_the_status_in_the_version_that_was_read() {
    let added = [LayoutChange::Add(vec!["cam-1-0".into(), "cam-1-1".into()])];
    let mut object = object(&json!({}));
    object.status = None;
    assert_eq!(
        layout_patch(&object, &added),
        json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "add", "path": "/status", "value": {}},
            {"op": "add", "path": "/status/deviceUsage", "value": {}},
            {"op": "add", "path": "/status/deviceUsage/cam-1-0", "value": ""},
            {"op": "add", "path": "/status/deviceUsage/cam-1-1", "value": ""},
        ])
    );
}

#[test]
fn a_layout_that_shrinks_removes_only_slots_that_are_still_free() {
    let object = object(&json!({"deviceUsage": {"cam-1-0": "a", "cam-1-1": ""}}));
    assert_eq!(
        layout_patch(&object, &[LayoutChange::Remove(vec!["cam-1-1".into()])]),
        json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "test", "path": "/status/deviceUsage/cam-1-1", "value": ""},
            {"op": "remove", "path": "/status/deviceUsage/cam-1-1"},
        ])
    );
}

#[test]
fn a_lost_node_leaves_the_list_together_with_its_slots() {
    let object = object(&json!({"nodes": ["a", "b"], "deviceUsage": {"cam-1-0": "a", "cam-1-1": "b"}}));
    let freed = [change("cam-1-0", of("a"), SlotUsage::Free, None)];
    assert_eq!(
        lost_node_patch(&object, &"a".into(), &freed),
        json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "add", "path": "/status/nodes", "value": ["b"]},
            {"op": "test", "path": "/status/deviceUsage/cam-1-0", "value": "a"},
            {"op": "replace", "path": "/status/deviceUsage/cam-1-0", "value": ""},
        ])
    );
    let nodes = BTreeSet::from(["a".into(), "c".into()]);
    let last = nodes_patch(&object, &nodes).as_array().and_then(|all| all.last().cloned());
    assert_eq!(last, Some(json!({"op": "add", "path": "/status/nodes", "value": ["a", "c"]})));
}

#[test]
fn a_usage_that_is_none_counts_as_that_of_a_node_that_does_not_exist() {
    let usage = json!({"cam-1-0": "C:", "cam-1-1": "C:cam-0:node-a"});
    let usage = instance_usage(&object(&json!({"nodes": ["node-a"], "deviceUsage": usage})));
    assert_eq!(usage.slots[&SlotName::from("cam-1-0")], of("C:"));
    assert_eq!(usage.slots[&SlotName::from("cam-1-1")].node(), Some(&NodeName::from("node-a")));
    assert_eq!((usage.capacity, usage.nodes.len()), (2, 1));
}

#[test]
fn a_slot_with_signs_of_a_path_is_one_key() {
    assert_eq!(key(DEVICE_USAGE, &"a/b~c".into()), "/status/deviceUsage/a~1b~0c");
}

#[test]
fn a_failed_test_is_a_conflict_and_a_refused_object_is_not() {
    let status = |causes: Vec<StatusCause>| {
        let details = StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes,
            retry_after_seconds: 0,
        };
        let status = Status::failure("the server rejected our request", "Invalid").with_code(422);
        kube::Error::Api(status.with_details(details).boxed())
    };
    assert!(matches!(json_patch_error(status(Vec::new())), Error::Conflict));
    let cause = StatusCause {
        reason: "FieldValueInvalid".to_owned(),
        message: "must be a text".to_owned(),
        field: "status.deviceUsage".to_owned(),
    };
    assert!(matches!(json_patch_error(status(vec![cause])), Error::Invalid(_)));
    let gone = Status::failure("not found", "NotFound").with_code(404).boxed();
    assert!(matches!(json_patch_error(kube::Error::Api(gone)), Error::Gone));
}
