use serde_json::json;

use super::*;

fn merged(pod: Value, patch: Value) -> Value {
    merge(&pod, &patch).unwrap()
}

fn containers(all: Value) -> Value {
    json!({"spec": {"containers": all}})
}

#[test]
fn objects_are_merged_and_null_takes_away() {
    let pod = json!({"metadata": {"labels": {"app": "x", "team": "y"}}, "spec": {"hostNetwork": true}});
    let patch = json!({"metadata": {"labels": {"app": null, "new": "z"}}, "spec": {"dnsPolicy": "None"}});
    assert_eq!(
        merged(pod, patch),
        json!({"metadata": {"labels": {"team": "y", "new": "z"}}, "spec": {"hostNetwork": true, "dnsPolicy": "None"}})
    );
}

#[test]
fn items_are_merged_with_their_namesakes_and_other_lists_are_replaced() {
    let pod = containers(
        json!([{"name": "a", "args": ["1", "2"], "image": "i", "env": [{"name": "X", "value": "1"}],
        "ports": [{"containerPort": 80, "name": "old"}], "volumeMounts": [{"mountPath": "/p", "name": "v"}]}]),
    );
    let patch = containers(json!([{"name": "a", "args": ["3"], "env": [{"name": "Y", "value": "2"}],
        "ports": [{"containerPort": 80, "name": "new"}], "volumeMounts": [{"mountPath": "/p", "readOnly": true}]}]));
    assert_eq!(
        merged(pod, patch),
        containers(json!([{"name": "a", "args": ["3"], "image": "i",
            "env": [{"name": "Y", "value": "2"}, {"name": "X", "value": "1"}],
            "ports": [{"containerPort": 80, "name": "new"}],
            "volumeMounts": [{"mountPath": "/p", "name": "v", "readOnly": true}]}]))
    );
    let tolerations = |key: &str| json!({"spec": {"tolerations": [{"key": key}]}});
    assert_eq!(merged(tolerations("a"), tolerations("b")), tolerations("b"));
}

/// As the API server has it: what the patch names is in its order, what it does not name keeps its place before what was behind it.
#[test]
fn lists_have_the_order_of_the_api_server() {
    let names = |all: &[&str]| containers(all.iter().map(|name| json!({"name": name})).collect());
    for (old, patch, wanted) in [
        (&["a", "b", "c"][..], &["b"][..], &["a", "b", "c"][..]),
        (&["a", "b", "c"], &["c", "a"], &["b", "c", "a"]),
        (&["a"], &["new"], &["new", "a"]),
        (&["a", "b"], &["new", "b"], &["new", "a", "b"]),
        (&[], &["x", "y"], &["x", "y"]),
    ] {
        assert_eq!(merged(names(old), names(patch)), names(wanted), "{old:?} and {patch:?}");
    }
    let mut patch = names(&["b"]);
    patch["spec"]["$setElementOrder/containers"] = json!([{"name": "c"}, {"name": "b"}, {"name": "a"}]);
    assert_eq!(merged(names(&["a", "b", "c"]), patch), names(&["c", "b", "a"]));
}

#[test]
fn directives_replace_delete_and_retain() {
    let pod =
        containers(json!([{"name": "a", "image": "i", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]));
    let deleted = containers(json!([{"name": "b", "$patch": "delete"}]));
    assert_eq!(merged(pod.clone(), deleted)["spec"]["containers"].as_array().unwrap().len(), 1);
    let replaced = containers(json!([{"$patch": "replace"}, {"name": "c"}]));
    assert_eq!(merged(pod.clone(), replaced), containers(json!([{"name": "c"}])));
    let emptied = containers(json!([{"name": "a", "$patch": "replace", "image": "j"}]));
    assert_eq!(merged(pod, emptied), containers(json!([{"name": "a", "image": "j"}, {"name": "b"}])));
    let volume = |own: Value| json!({"spec": {"volumes": [own]}});
    let claim = json!({"name": "v", "$retainKeys": ["name", "emptyDir"], "emptyDir": {}});
    let before = volume(json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}));
    assert_eq!(merged(before, volume(claim)), volume(json!({"name": "v", "emptyDir": {}})));
    let finalizers = |all: Value| json!({"metadata": {"finalizers": all}});
    let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["c"]}});
    assert_eq!(merged(finalizers(json!(["a", "b"])), patch), finalizers(json!(["c", "b"])));
}

#[test]
fn what_cannot_be_merged_says_why() {
    let error = |patch: Value| merge(&containers(json!([{"name": "a"}])), &patch).unwrap_err().to_string();
    assert_eq!(
        error(containers(json!([{"image": "i"}]))),
        "an item of containers has no name, by which its items are told apart"
    );
    assert_eq!(
        error(containers(json!([{"name": "a", "$patch": "destroy"}]))),
        "$patch is \"destroy\" in spec.containers[name=a]: it can be replace, delete or merge"
    );
    assert_eq!(error(json!({"spec": "x"})), "spec is a text in the patch, and an object in the Pod");
    assert_eq!(
        error(containers(json!({"name": "a"}))),
        "spec.containers is an object in the patch, and a list in the Pod"
    );
}
