use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;

fn fields(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn merged(pod: Value, patch: Value) -> Value {
    Value::Object(merge(fields(pod), fields(patch)).unwrap_or_else(|error| panic!("{error}")))
}

fn refused(pod: Value, patch: Value) -> Error {
    merge(fields(pod), fields(patch.clone())).expect_err(&patch.to_string())
}

/// Merges a patch into a Pod with this spec.
fn spec(spec: Value, patch: Value) -> Value {
    merged(json!({"spec": spec}), json!({"spec": patch}))["spec"].take()
}

/// Merges a patch into a container with these fields beside its name.
fn container(mut before: Value, mut patch: Value) -> Value {
    before["name"] = "c".into();
    patch["name"] = "c".into();
    let mut after =
        spec(json!({"containers": [before]}), json!({"containers": [patch]}))["containers"][0].take();
    after.as_object_mut().unwrap().remove("name");
    after
}

#[test]
fn objects_are_merged_by_their_keys_and_null_takes_out() {
    for (before, patch, after) in [
        (json!({"a": 1, "b": 2}), json!({"b": 3, "c": 4}), json!({"a": 1, "b": 3, "c": 4})),
        (json!({"a": {"x": 1, "y": 2}}), json!({"a": {"y": null}}), json!({"a": {"x": 1}})),
        (json!({"a": 1}), json!({"a": null, "b": null}), json!({})),
        // A value of another type is replaced, without nulls and directives.
        (
            json!({"a": "text"}),
            json!({"a": {"x": null, "y": 1, "$retainKeys": ["y"]}}),
            json!({"a": {"y": 1}}),
        ),
        (json!({}), json!({"a": {"x": [{"y": null}]}}), json!({"a": {"x": [{}]}})),
        // Replacing and deleting objects.
        (json!({"a": {"x": 1}}), json!({"a": {"$patch": "replace", "y": 2}}), json!({"a": {"y": 2}})),
        (json!({"a": {"x": 1}}), json!({"a": {"$patch": "delete"}}), json!({"a": {}})),
        (json!({"a": {"x": 1}}), json!({"a": {"$patch": "merge", "y": 2}}), json!({"a": {"x": 1, "y": 2}})),
        (json!({}), json!({"a": {"$patch": "replace", "y": 2}}), json!({"a": {"y": 2}})),
        (json!({}), json!({"a": {"$patch": "delete", "y": 2}}), json!({})),
        // Fields that `$retainKeys` omits are removed; null fields need no mention there.
        (
            json!({"a": {"x": 1, "y": 2}}),
            json!({"a": {"$retainKeys": ["y", "z"], "z": 3, "x": null}}),
            json!({"a": {"y": 2, "z": 3}}),
        ),
    ] {
        assert_eq!(spec(before.clone(), patch.clone()), after, "{before} {patch}");
    }
}

#[test]
fn lists_are_merged_by_the_keys_of_the_api() {
    for (list, key) in [
        ("containers", "name"),
        ("initContainers", "name"),
        ("ephemeralContainers", "name"),
        ("volumes", "name"),
        ("imagePullSecrets", "name"),
        ("resourceClaims", "name"),
        ("schedulingGates", "name"),
        ("hostAliases", "ip"),
        ("topologySpreadConstraints", "topologyKey"),
    ] {
        let [before, patch, after] = [
            json!({list: [{key: "1", "x": 1}]}),
            json!({list: [{key: "1", "y": 2}]}),
            json!({list: [{key: "1", "x": 1, "y": 2}]}),
        ];
        assert_eq!(spec(before, patch), after, "{list}");
    }
    for (list, key) in [
        ("env", "name"),
        ("ports", "containerPort"),
        ("volumeMounts", "mountPath"),
        ("volumeDevices", "devicePath"),
    ] {
        for containers in ["containers", "initContainers", "ephemeralContainers"] {
            let pod = |item: Value| json!({containers: [{"name": "c", list: [item]}]});
            let after = spec(pod(json!({key: 1, "x": 1})), pod(json!({key: 1, "y": 2})));
            assert_eq!(after, pod(json!({key: 1, "x": 1, "y": 2})), "{containers}.{list}");
        }
    }
    let owner = |item: Value| json!({"metadata": {"ownerReferences": [item]}});
    let after = merged(owner(json!({"uid": "1", "x": 1})), owner(json!({"uid": "1", "y": 2})));
    assert_eq!(after, owner(json!({"uid": "1", "x": 1, "y": 2})));
}

#[test]
fn other_lists_are_replaced_whatever_their_items_have() {
    for list in ["tolerations", "readinessGates"] {
        let [before, patch] = [json!({list: [{"name": "a", "key": "a"}]}), json!({list: [{"name": "b"}]})];
        assert_eq!(spec(before, patch.clone()), patch, "{list}");
    }
    for list in ["command", "args", "envFrom", "resizePolicy"] {
        let [before, patch] = [json!({list: ["a", "b"]}), json!({list: ["b", "c"]})];
        assert_eq!(container(before, patch.clone()), patch, "{list}");
    }
    // These lists have names and no merge key.
    let [before, patch] = [
        json!({"resources": {"claims": [{"name": "a"}]}}),
        json!({"resources": {"claims": [{"name": "b"}]}}),
    ];
    assert_eq!(container(before, patch.clone()), patch);
    let volume = |paths: Value| json!({"volumes": [{"name": "v", "configMap": {"items": paths}}]});
    assert_eq!(
        spec(volume(json!([{"key": "a"}])), volume(json!([{"key": "b"}]))),
        volume(json!([{"key": "b"}]))
    );
    // A list in an unrelated object has no merge key, even if its name equals one that has.
    let [before, patch] = [json!({"x": {"containers": [{"name": "a"}]}}), json!({"x": {"containers": []}})];
    assert_eq!(spec(before, patch.clone()), patch);
}

/// Names of environment variables before the merge, in the patch, and after it.
#[test]
fn what_the_patch_names_comes_in_its_order_and_before_what_it_tells_nothing_of() {
    let list =
        |names: &str| -> Vec<Value> { names.chars().map(|name| json!({"name": name.to_string()})).collect() };
    for (before, patch, after) in [
        ("ab", "", "ab"),
        ("", "ab", "ab"),
        ("ab", "c", "cab"),
        ("ab", "ac", "acb"),
        ("ab", "bc", "abc"),
        ("ab", "b", "ab"),
        ("abc", "b", "abc"),
        ("abc", "ca", "bca"),
        ("abcd", "db", "acdb"),
        ("ab", "cba", "cba"),
    ] {
        let result = container(json!({"env": list(before)}), json!({"env": list(patch)}));
        assert_eq!(result, json!({"env": list(after)}), "{before} {patch}");
    }
}

#[test]
fn directives_in_lists() {
    let before = json!({"env": [{"name": "a", "value": "1"}, {"name": "b"}, {"name": "c"}]});
    for (patch, after) in [
        (json!([{"name": "b", "$patch": "delete"}]), json!([{"name": "a", "value": "1"}, {"name": "c"}])),
        (json!([{"name": "z", "$patch": "delete"}]), before["env"].clone()),
        (json!([{"$patch": "replace"}, {"name": "d", "value": null}]), json!([{"name": "d"}])),
        (json!([{"$patch": "replace"}]), json!([])),
        (
            json!([{"name": "a", "$patch": "merge", "x": 1}, {"$patch": "delete", "name": "b"}, {"name": "c", "$patch": "delete"}]),
            json!([{"name": "a", "value": "1", "x": 1}]),
        ),
        // An item that occurs twice is merged twice.
        (
            json!([{"name": "d", "x": 1}, {"name": "d", "y": 2}, {"$patch": "delete", "name": "b"}]),
            json!([{"name": "d", "x": 1, "y": 2}, {"name": "a", "value": "1"}, {"name": "c"}]),
        ),
    ] {
        assert_eq!(container(before.clone(), json!({"env": patch})), json!({"env": after}), "{patch}");
    }
    // In a new list, items with a directive are dropped.
    let patch = json!({"env": [{"$patch": "replace"}, {"name": "a"}, {"name": "b", "$patch": "delete"}]});
    assert_eq!(container(json!({}), patch), json!({"env": [{"name": "a"}]}));
    // A source of another kind replaces the former.
    let volume = |source: Value| json!({"volumes": [source]});
    assert_eq!(
        spec(
            volume(json!({"name": "v", "emptyDir": {}})),
            volume(json!({"name": "v", "hostPath": {"path": "/"}, "$retainKeys": ["name", "hostPath"]})),
        ),
        volume(json!({"name": "v", "hostPath": {"path": "/"}})),
    );
}

#[test]
fn plain_values_are_a_set() {
    let meta = |value: Value| json!({"metadata": value});
    for (before, patch, after) in [
        (json!(["a", "b"]), json!({"finalizers": ["b", "c"]}), json!(["a", "b", "c"])),
        (json!(["a", "b"]), json!({"finalizers": ["c"]}), json!(["c", "a", "b"])),
        (
            json!(["a", "b", "c"]),
            json!({"$deleteFromPrimitiveList/finalizers": ["a", "z"]}),
            json!(["b", "c"]),
        ),
        (
            json!(["a", "b"]),
            json!({"finalizers": ["c"], "$deleteFromPrimitiveList/finalizers": ["a"]}),
            json!(["c", "b"]),
        ),
        (json!(["a", "b", "c"]), json!({"$setElementOrder/finalizers": ["c", "a"]}), json!(["b", "c", "a"])),
    ] {
        let result = merged(meta(json!({"finalizers": before})), meta(patch.clone()));
        assert_eq!(result, meta(json!({"finalizers": after})), "{patch}");
    }
    let nothing = merged(meta(json!({})), meta(json!({"$deleteFromPrimitiveList/finalizers": ["a"]})));
    assert_eq!(nothing, meta(json!({})));
}

#[test]
fn the_order_that_is_asked_for_counts() {
    let list =
        |names: &str| -> Vec<Value> { names.chars().map(|name| json!({"name": name.to_string()})).collect() };
    for (before, patch, order, after) in [
        ("ab", "c", "abc", "abc"),
        ("ab", "c", "bca", "bca"),
        ("abx", "c", "bca", "bcax"),
        ("xab", "", "ba", "xba"),
        ("", "ab", "ab", "ab"),
    ] {
        let patch = json!({"env": list(patch), "$setElementOrder/env": list(order)});
        let result = container(json!({"env": list(before)}), patch.clone());
        assert_eq!(result, json!({"env": list(after)}), "{before} {patch}");
    }
    // An order without a list in the patch, and without any list.
    let order = json!({"$setElementOrder/env": list("ba")});
    assert_eq!(container(json!({"env": list("ab")}), order.clone()), json!({"env": list("ba")}));
    assert_eq!(container(json!({}), order), json!({}));
}

#[test]
fn what_contradicts_itself_is_an_error_that_says_where() {
    let before = || json!({"spec": {"containers": [{"name": "c", "env": [{"name": "a"}], "args": ["x"]}]}});
    let of = |patch: Value| {
        let mut patch = patch;
        patch["name"] = "c".into();
        refused(before(), json!({"spec": {"containers": [patch]}})).to_string()
    };
    for (error, parts) in [
        (
            refused(before(), json!({"spec": {"containers": [{"image": "x"}]}})).to_string(),
            ["spec.containers", "'name'"],
        ),
        (of(json!({"env": ["a"]})), ["spec.containers.env", "objects"]),
        (of(json!({"env": [{"$patch": "delete"}]})), ["spec.containers.env", "'name'"]),
        (of(json!({"env": [{"name": "a", "$patch": "drop"}]})), ["spec.containers.env", "\"drop\""]),
        (of(json!({"$patch": 1})), ["spec.containers", "replace, delete or merge"]),
        (of(json!({"$retainKeys": ["name"], "args": []})), ["spec.containers", "'args'"]),
        (of(json!({"$retainKeys": "name"})), ["spec.containers", "$retainKeys"]),
        (
            of(json!({"$deleteFromPrimitiveList/args": ["x"]})),
            ["spec.containers", "$deleteFromPrimitiveList/args"],
        ),
        (of(json!({"$setElementOrder/args": ["x"]})), ["spec.containers", "$setElementOrder/args"]),
        (of(json!({"$setElementOrder/env": [{}]})), ["spec.containers.env", "'name'"]),
        (
            of(json!({"$setElementOrder/env": [{"name": "a"}], "env": [{"name": "b"}]})),
            ["spec.containers.env", "$setElementOrder"],
        ),
        (of(json!({"$setElementOrder/env": "a"})), ["spec.containers.env", "a list"]),
        (
            refused(
                json!({"metadata": {}}),
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": "a"}}),
            )
            .to_string(),
            ["metadata", "a list"],
        ),
        (
            refused(json!({"metadata": {"finalizers": ["a"]}}), json!({"metadata": {"finalizers": [{}]}}))
                .to_string(),
            ["metadata.finalizers", "plain"],
        ),
        (refused(json!({}), json!({"$patch": "x"})).to_string(), ["the patch", "\"x\""]),
    ] {
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

fn names() -> impl Strategy<Value = Vec<Value>> {
    let item = ("[a-f]", any::<bool>()).prop_map(|(name, flag)| json!({"name": name, "flag": flag}));
    prop::collection::vec(item, 0..6).prop_map(|mut items| {
        items.sort_by_key(|item| item["name"].to_string());
        items.dedup_by_key(|item| item["name"].to_string());
        items
    })
}

proptest! {
    #[test]
    fn a_patch_changes_nothing_the_second_time_and_loses_no_item(
        before in names(), patch in names().prop_shuffle(),
    ) {
        let patch = json!({"env": patch});
        let once = container(json!({"env": before}), patch.clone());
        prop_assert_eq!(&container(once.clone(), patch.clone()), &once);
        let after = once["env"].as_array().unwrap();
        for item in before.iter().chain(patch["env"].as_array().unwrap()) {
            prop_assert_eq!(after.iter().filter(|found| found["name"] == item["name"]).count(), 1);
        }
        // The patch's values are in the result.
        prop_assert!(patch["env"].as_array().unwrap().iter().all(|item| after.contains(item)));
    }
}
