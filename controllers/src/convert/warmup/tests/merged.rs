//! Several roles on one node.

use serde_json::{Value, json};

use super::*;

/// Reads roles, and merges those that run on the node.
fn merged(roles: Value, on_node: &[&str]) -> Result<NodeActions, String> {
    let spec = json!({"targetRoleBasedGroup": {"name": "sglang", "roles": roles}});
    let WarmupTarget::Group { roles, .. } = accepted(&spec).target else { panic!("{spec}") };
    merge_roles(&roles, &on_node.iter().map(|role| (*role).to_owned()).collect())
}

fn preload(items: Value, secrets: Value) -> Value {
    json!({"imagesPreload": {"items": items, "pullSecrets": secrets}})
}

fn running(spec: Value) -> Value {
    json!({"customizedAction": {"podTemplate": {"spec": spec}}})
}

/// The Pod's spec if both roles run on the node.
fn pod(a: Value, b: Value) -> Result<Value, String> {
    let both = merged(json!({"a": running(a), "b": running(b)}), &["a", "b"])?;
    Ok(both.action.unwrap().template.value().remove("spec").unwrap())
}

fn named(name: &str, command: &str) -> Value {
    json!({"name": name, "image": "image1:tag1", "command": [command]})
}

fn container_names(pod: &Value) -> Vec<&str> {
    pod["containers"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect()
}

#[test]
fn images_and_secrets_of_several_roles_count_once() {
    let roles = json!({
        "prefill": preload(json!(["a", "b"]), json!(["a", "b"])),
        "decode": preload(json!(["a:latest", "c"]), json!(["a", "c"])),
        "router": preload(json!(["d"]), json!([])),
    });
    let both = merged(roles.clone(), &["prefill", "decode", "unknown"]).unwrap();
    // `decode` is the first of the two by name, and its spelling stays.
    assert_eq!(both.images, images(&["a:latest", "b", "c"]));
    assert_eq!(both.pull_secrets, ["a", "b", "c"].map(str::to_owned).into());
    assert_eq!(both.action, None);
    assert_eq!(merged(roles.clone(), &["router"]).unwrap().images, images(&["d"]));
    assert_eq!(merged(roles, &[]), Ok(NodeActions::default()));
}

#[test]
fn an_equal_container_under_two_names_runs_once() {
    let one = json!({"containers": [named("copy", "x")]});
    let same = pod(one.clone(), json!({"containers": [named("other", "x")]})).unwrap();
    assert_eq!(container_names(&same), ["copy"]);
    let both = pod(one.clone(), json!({"containers": [named("build", "y")]})).unwrap();
    assert_eq!(container_names(&both), ["copy", "build"]);
    let clash = pod(one, json!({"containers": [named("copy", "y"), named("copy-2", "z")]})).unwrap();
    assert_eq!(container_names(&clash), ["copy", "copy-2", "copy-2-2"], "each has a name of its own");
    let long = "x".repeat(63);
    let clash =
        pod(json!({"containers": [named(&long, "x")]}), json!({"containers": [named(&long, "y")]})).unwrap();
    assert_eq!(container_names(&clash)[1], format!("{}-2", "x".repeat(61)));
}

#[test]
fn init_containers_and_volumes_merge_too() {
    let volume = json!({"name": "models", "hostPath": {"path": "/models"}});
    let a =
        json!({"initContainers": [named("get", "x")], "containers": [named("a", "a")], "volumes": [volume]});
    let b =
        json!({"initContainers": [named("get", "y")], "containers": [named("b", "b")], "volumes": [volume]});
    let both = pod(a, b).unwrap();
    assert_eq!(both["volumes"], json!([volume]));
    assert_eq!(both["initContainers"], json!([named("get", "x"), named("get-2", "y")]));
    assert_eq!(both["restartPolicy"], "Never");
}

#[test]
fn roles_that_contradict_each_other_are_refused_with_what_differs() {
    let with = |fields: Value| {
        let mut spec = json!({"containers": [container("a")]});
        for (name, value) in fields.as_object().unwrap() {
            spec[name] = value.clone();
        }
        spec
    };
    let volume = |path: &str| json!({"volumes": [{"name": "models", "hostPath": {"path": path}}]});
    for (a, b, words) in [
        (volume("/a"), volume("/b"), "different volumes 'models'"),
        (json!({"restartPolicy": "OnFailure"}), json!({}), "different restartPolicy"),
        (json!({"hostNetwork": true}), json!({}), "different hostNetwork"),
        (json!({}), json!({"hostNetwork": true}), "different hostNetwork"),
        (json!({"serviceAccountName": "a"}), json!({"serviceAccountName": "b"}), "serviceAccountName"),
    ] {
        let refused = pod(with(a), with(b)).unwrap_err();
        assert!(
            refused.contains("the roles a and b run on one node") && refused.contains(words),
            "{refused}"
        );
    }
    let label = |value: &str| {
        json!({"customizedAction": {"podTemplate": {
            "metadata": {"labels": {"team": value}}, "spec": {"containers": [container("a")]},
        }}})
    };
    let refused = merged(json!({"a": label("x"), "b": label("y")}), &["a", "b"]).unwrap_err();
    assert!(refused.contains("different labels 'team'"), "{refused}");
    let same = merged(json!({"a": label("x"), "b": label("x")}), &["a", "b"]).unwrap();
    assert_eq!(same.action.unwrap().template.value()["metadata"], json!({"labels": {"team": "x"}}));
}

#[test]
fn tolerations_and_pull_secrets_of_the_templates_add_up() {
    let with = |key: &str| {
        json!({
            "containers": [container("a")], "tolerations": [{"key": "gpu"}, {"key": key}],
            "imagePullSecrets": [{"name": key}],
        })
    };
    let both = pod(with("a"), with("b")).unwrap();
    assert_eq!(both["tolerations"], json!([{"key": "gpu"}, {"key": "a"}, {"key": "b"}]));
    assert_eq!(both["imagePullSecrets"], json!([{"name": "a"}, {"name": "b"}]));
    assert_eq!(container_names(&both), ["a"]);
}

#[test]
fn the_order_in_which_roles_are_written_does_not_matter() {
    let role = |command: &str| running(json!({"containers": [named("x", command)]}));
    let one = merged(json!({"a": role("a"), "b": role("b")}), &["b", "a"]).unwrap();
    let other = merged(json!({"b": role("b"), "a": role("a")}), &["a", "b"]).unwrap();
    assert_eq!(one.action, other.action);
}
