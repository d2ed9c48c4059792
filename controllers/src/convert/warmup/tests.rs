use rouse::warmup::ActionHash;
use serde_json::{Value, json};

use super::*;

mod merged;

const RETRY_DELAY: Millis = Millis::secs(10);

fn object(spec: &Value) -> Warmup {
    let metadata = json!({
        "name": "demo", "namespace": "team-a", "generation": 3, "creationTimestamp": "2026-11-01T00:00:00Z",
    });
    let whole =
        json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup", "metadata": metadata, "spec": spec});
    serde_json::from_value(whole).unwrap()
}

fn accepted(spec: &Value) -> AcceptedWarmup {
    convert(&object(spec), RETRY_DELAY).unwrap_or_else(|refused| panic!("{refused}"))
}

/// Asserts that each spec is refused with these words.
fn assert_refused<const N: usize>(cases: [(Value, &str); N]) {
    for (spec, words) in cases {
        let refused = convert(&object(&spec), RETRY_DELAY).expect_err(&spec.to_string());
        assert!(refused.contains(words), "{spec}: '{words}' is not in: {refused}");
    }
}

/// The smallest valid spec, with these fields of targetNodes on top; `null` removes a field.
fn nodes(fields: Value) -> Value {
    let mut target = json!({"nodeNames": ["node-1"], "imagesPreload": {"items": ["image1:tag1"]}});
    for (name, value) in fields.as_object().unwrap() {
        target[name] = value.clone();
    }
    target.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    json!({ "targetNodes": target })
}

/// A spec whose custom action has this template.
fn action(template: Value) -> Value {
    nodes(json!({"customizedAction": {"podTemplate": template}}))
}

fn container(name: &str) -> Value {
    json!({"name": name, "image": "image1:tag1"})
}

fn example(text: &str) -> AcceptedWarmup {
    let object: Value = serde_saphyr::from_str(text).unwrap();
    let warmup: Warmup = serde_json::from_value(object).unwrap();
    convert(&warmup, RETRY_DELAY).unwrap_or_else(|refused| panic!("{refused}"))
}

fn images(names: &[&str]) -> BTreeSet<ImageName> {
    names.iter().map(|name| ImageName::from(*name)).collect()
}

#[test]
fn the_example_of_the_kep_is_accepted_with_its_nodes() {
    let warmup = example(include_str!("../tests/kep-warmup-nodes.yaml"));
    assert_eq!(warmup.id.as_str(), "default/warmup-demo");
    let limits = WarmupLimits {
        parallelism: Some(10),
        backoff_limit: Some(3),
        timeout: Some(Millis::secs(300)),
        ttl: Some(Millis::secs(86_400)),
        max_failed_nodes: 0,
        retry_delay: RETRY_DELAY,
    };
    assert_eq!(warmup.request.limits, limits);
    let WarmupTarget::Nodes { names, selector, actions } = &warmup.target else { panic!("{warmup:?}") };
    assert_eq!(*names, ["node1", "node2"].map(NodeName::from).into());
    assert_eq!(*selector, BTreeMap::from([("pool".to_owned(), "gpu".to_owned())]));
    assert_eq!(actions.images, images(&["image1:tag1", "image2:tag2"]));
    assert_eq!(actions.pull_secrets, ["secret1", "secret2"].map(str::to_owned).into());
    let template = actions.action.as_ref().unwrap().template.value();
    assert_eq!(
        Value::Object(template),
        json!({"spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "copy", "image": "image1:tag1", "command": ["copy-model"]}],
        }})
    );
}

#[test]
fn the_example_of_the_kep_is_accepted_with_its_group() {
    let warmup = example(include_str!("../tests/kep-warmup-group.yaml"));
    let WarmupTarget::Group { group, roles } = &warmup.target else { panic!("{warmup:?}") };
    assert_eq!((group.to_string().as_str(), roles.len()), ("default/sglang", 2));
    for actions in roles.values() {
        assert_eq!(actions.images, images(&["image1:tag1", "image2:tag2"]));
        assert_eq!(actions.pull_secrets.len(), 2);
        let template = actions.action.as_ref().unwrap().template.value();
        assert_eq!(template["spec"]["restartPolicy"], "OnFailure");
    }
    let both = merge_roles(roles, &roles.keys().cloned().collect()).unwrap();
    let pod = both.action.unwrap().template.value();
    assert_eq!(pod["spec"]["containers"].as_array().unwrap().len(), 2);
}

#[test]
fn the_smallest_warmup_has_no_limits_and_tolerates_no_failure() {
    let warmup = accepted(&nodes(json!({})));
    let unlimited = WarmupLimits {
        parallelism: None,
        backoff_limit: None,
        timeout: None,
        ttl: None,
        max_failed_nodes: 0,
        retry_delay: RETRY_DELAY,
    };
    assert_eq!(warmup.request.limits, unlimited);
    assert!(!warmup.request.paused && !warmup.request.keep_warm && warmup.tolerations.is_empty());
    assert_eq!((warmup.request.generation, warmup.request.created.0), (3, 1_793_491_200_000));
    assert_eq!(warmup.target.to_string(), "nodes");
    let mut paused = nodes(json!({}));
    paused["paused"] = json!(true);
    assert!(accepted(&paused).request.paused);
}

#[test]
fn a_set_belongs_to_the_warmup_or_to_the_model_that_it_is_for() {
    let model = json!({"targetModel": {"name": "qwen3", "nodes": 2, "keepWarm": true}});
    let warmup = accepted(&model);
    let object = ObjectName::new("team-a", "qwen3");
    assert_eq!(warmup.target, WarmupTarget::Model { model: object.clone(), nodes: Some(2) });
    assert!(warmup.request.keep_warm);
    assert_eq!(warmup.request.set, model_set(&object));
    assert_eq!(warmup.target.to_string(), "model qwen3");
    let of_nodes = accepted(&nodes(json!({}))).request.set;
    assert_ne!(of_nodes, model_set(&object));
    for set in [of_nodes, model_set(&object)] {
        let set = set.as_str();
        assert!(set.len() == 16 && set.bytes().all(|byte| byte.is_ascii_hexdigit()), "{set}");
    }
}

#[test]
fn a_warmup_needs_exactly_one_target_and_something_to_do() {
    let model = json!({"name": "qwen3"});
    let mut both = nodes(json!({}));
    both["targetModel"] = model.clone();
    let group = |roles: Value| json!({"targetRoleBasedGroup": {"name": "sglang", "roles": roles}});
    assert_refused([
        (json!({}), "there is no target"),
        (both, "exclude each other"),
        (json!({"targetRoleBasedGroup": {"name": "a"}, "targetModel": model}), "exclude each other"),
        (nodes(json!({"nodeNames": null})), "targetNodes selects no node"),
        (nodes(json!({"nodeNames": [], "nodeSelector": {}})), "targetNodes selects no node"),
        (nodes(json!({"imagesPreload": null})), "targetNodes has nothing to do"),
        (nodes(json!({"imagesPreload": {}})), "targetNodes.imagesPreload.items is empty"),
        (nodes(json!({"imagesPreload": {"items": []}})), "targetNodes.imagesPreload.items is empty"),
        (group(json!({})), "targetRoleBasedGroup.roles is empty"),
        (group(json!({"prefill": {}})), "targetRoleBasedGroup.roles.prefill has nothing to do"),
        (
            group(json!({"prefill": {"imagesPreload": {"items": []}}})),
            "targetRoleBasedGroup.roles.prefill.imagesPreload.items is empty",
        ),
    ]);
}

#[test]
fn images_are_references_and_count_once_however_they_are_spelled() {
    let preload = |items: Value| nodes(json!({"imagesPreload": {"items": items}}));
    assert_refused([
        (preload(json!([""])), "it is empty"),
        (preload(json!(["two words"])), "'two words' is not the reference of an image"),
        (preload(json!(["Image"])), "uppercase"),
        (preload(json!(["image:"])), "the tag is invalid"),
        (preload(json!(["image@sha256:12"])), "the digest is invalid"),
        (preload(json!(["https://registry.example.com/image"])), "the registry's name is invalid"),
    ]);
    let spec =
        preload(json!(["image1", "docker.io/library/image1:latest", "image1:latest", "image2", "image1"]));
    let WarmupTarget::Nodes { actions, .. } = accepted(&spec).target else { panic!("{spec}") };
    assert_eq!(actions.images, images(&["image1", "image2"]));
}

#[test]
fn names_are_those_that_an_api_server_accepts() {
    let long = "x".repeat(254);
    let role = json!({"imagesPreload": {"items": ["a"]}});
    let secrets = |names: Value| nodes(json!({"imagesPreload": {"items": ["a"], "pullSecrets": names}}));
    let group = |fields: Value| json!({ "targetRoleBasedGroup": fields });
    assert_refused([
        (nodes(json!({"nodeNames": [""]})), "targetNodes.nodeNames: '' is not the name of a node"),
        (nodes(json!({"nodeNames": ["Node_1"]})), "'Node_1' is not the name of a node"),
        (nodes(json!({ "nodeNames": [long] })), "is not the name of a node"),
        (nodes(json!({"nodeSelector": {"a b": "c"}})), "'a b' is not the key of a label"),
        (nodes(json!({"nodeSelector": {"a": "-"}})), "'-' is not the value of a label"),
        (secrets(json!([""])), "targetNodes.imagesPreload.pullSecrets: '' is not the name of an object"),
        (secrets(json!(["My_Secret"])), "'My_Secret' is not the name of an object"),
        (group(json!({"name": "", "roles": {"a": role}})), "targetRoleBasedGroup.name: ''"),
        (group(json!({"name": long, "roles": {"a": role}})), "targetRoleBasedGroup.name: 'xxx"),
        (group(json!({"name": "a", "namespace": "No", "roles": {"a": role}})), "namespace: 'No'"),
        (group(json!({"name": "a", "roles": {"a role": role}})), "'a role' is not the name of a role"),
        (group(json!({"name": "a", "roles": {"": role}})), "'' is not the name of a role"),
        (json!({"targetModel": {"name": "Qwen/3"}}), "targetModel.name: 'Qwen/3'"),
    ]);
}

#[test]
fn limits_are_numbers_of_their_range() {
    let limited = |field: &str, value: i64| {
        let mut spec = nodes(json!({}));
        spec["policies"] = json!({ field: value });
        spec
    };
    for (field, least) in [
        ("parallelism", 1),
        ("backoffLimit", 0),
        ("timeoutSeconds", 1),
        ("ttlSecondsAfterFinished", 0),
        ("maxFailedNodes", 0),
    ] {
        let beyond = i64::from(u32::MAX) + 1;
        for value in [least, i64::from(u32::MAX)] {
            assert_eq!(convert(&object(&limited(field, value)), RETRY_DELAY).err(), None, "{field} {value}");
        }
        for value in [-1, least - 1, beyond] {
            let words = format!("policies.{field} ({value}) must be between {least} and 4294967295");
            assert_refused([(limited(field, value), words.as_str())]);
        }
    }
    let model = |nodes: i64| json!({"targetModel": {"name": "qwen3", "nodes": nodes}});
    assert_refused([(model(0), "targetModel.nodes (0)"), (model(-1), "targetModel.nodes (-1)")]);
    let none = accepted(&limited("ttlSecondsAfterFinished", 0)).request.limits;
    assert_eq!((none.ttl, none.timeout), (Some(Millis::ZERO), None));
}

#[test]
fn tolerations_are_those_of_a_pod() {
    let tolerating = |toleration: Value| {
        let mut spec = nodes(json!({}));
        spec["tolerations"] = json!([toleration]);
        spec
    };
    assert_refused([
        (tolerating(json!({})), "tolerations[0] has no key"),
        (tolerating(json!({"operator": "Equal", "value": "a"})), "tolerations[0] has no key"),
        (tolerating(json!({"key": "a", "operator": "Gt"})), "'Gt' must be Equal or Exists"),
        (tolerating(json!({"key": "a b"})), "'a b' is not the key of a label"),
        (tolerating(json!({"key": "a", "value": "b c"})), "'b c' is not the value of a label"),
        (
            tolerating(json!({"key": "a", "operator": "Exists", "value": "b"})),
            "value is not for operator Exists",
        ),
        (tolerating(json!({"key": "a", "effect": "Evict"})), "'Evict' must be NoSchedule"),
        (tolerating(json!({"key": "a", "tolerationSeconds": 5})), "only for effect NoExecute"),
    ]);
    for good in [
        json!({"operator": "Exists"}),
        json!({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}),
        json!({"key": "a", "value": "b"}),
        json!({"key": "a", "operator": "Equal", "effect": "NoExecute", "tolerationSeconds": 5}),
    ] {
        let warmup = accepted(&tolerating(good.clone()));
        assert_eq!((warmup.tolerations.len(), warmup.request.tolerations.len()), (1, 1), "{good}");
    }
}

#[test]
fn an_action_has_containers_with_names_and_images() {
    let pod = |spec: Value| action(json!({ "spec": spec }));
    let list = |containers: Value| pod(json!({ "containers": containers }));
    let twice = json!({"initContainers": [container("a")], "containers": [container("a")]});
    let volume = json!({"name": "a", "emptyDir": {}});
    assert_refused([
        (action(json!({})), "targetNodes.customizedAction.podTemplate.spec is missing"),
        (action(json!({"restartPolicy": "Never"})), "podTemplate.spec is missing"),
        (pod(json!({})), "podTemplate.spec.containers is empty"),
        (list(json!([])), "podTemplate.spec.containers is empty"),
        (list(json!({"name": "a"})), "podTemplate.spec.containers must be a list"),
        (list(json!([{"image": "a"}])), "podTemplate.spec.containers: '' is not the name of a container"),
        (list(json!([{"name": "A", "image": "a"}])), "'A' is not the name of a container"),
        (list(json!([container(&"x".repeat(64))])), "is not the name of a container"),
        (list(json!([{"name": "a"}])), "it is empty"),
        (list(json!([{"name": "a", "image": "A"}])), "uppercase"),
        (list(json!([container("a"), container("a")])), "two containers are named 'a'"),
        (pod(twice), "two containers are named 'a'"),
        (
            pod(json!({"containers": [container("a")], "volumes": [volume, volume]})),
            "two volumes are named 'a'",
        ),
        (
            pod(json!({"containers": [container("a")], "volumes": [{"emptyDir": {}}]})),
            "'' is not the name of a volume",
        ),
    ]);
    for field in ["nodeName", "nodeSelector", "affinity"] {
        let mut spec = json!({"containers": [container("a")]});
        spec[field] = json!({"x": "y"});
        let words = format!("podTemplate.spec.{field} is not allowed");
        assert_refused([(pod(spec), words.as_str())]);
    }
}

#[test]
fn the_restart_policy_stands_beside_the_spec_or_in_it() {
    let template = |beside: Value, within: Value| {
        action(json!({
            "restartPolicy": beside,
            "spec": {"containers": [container("a")], "restartPolicy": within},
        }))
    };
    for (beside, within, want) in [
        (json!(null), json!(null), "Never"),
        (json!("OnFailure"), json!(null), "OnFailure"),
        (json!(null), json!("OnFailure"), "OnFailure"),
        (json!("Never"), json!("Never"), "Never"),
    ] {
        let WarmupTarget::Nodes { actions, .. } = accepted(&template(beside, within)).target else {
            panic!()
        };
        let template = actions.action.unwrap().template.value();
        assert_eq!(template["spec"]["restartPolicy"], want);
        assert!(!template.contains_key("restartPolicy"), "{template:?}");
    }
    assert_refused([
        (
            template(json!("Always"), json!(null)),
            "podTemplate.restartPolicy (\"Always\") must be Never or OnFailure",
        ),
        (template(json!(null), json!("Always")), "podTemplate.spec.restartPolicy (\"Always\") must be"),
        (template(json!("Never|OnFailure"), json!(null)), "must be Never or OnFailure"),
        (template(json!(1), json!(null)), "must be Never or OnFailure"),
        (template(json!("Never"), json!("OnFailure")), "two restart policies"),
    ]);
}

#[test]
fn an_action_keeps_its_labels_and_annotations_and_no_other_metadata() {
    let with = |metadata: Value| {
        action(json!({"metadata": metadata, "spec": {"containers": [container("a")], "newField": 1}}))
    };
    let spec = with(json!({
        "name": "other", "creationTimestamp": null, "labels": {"team": "a"}, "annotations": {"note": "two words"},
    }));
    let WarmupTarget::Nodes { actions, .. } = accepted(&spec).target else { panic!("{spec}") };
    let template = Value::Object(actions.action.unwrap().template.value());
    let kept = json!({"labels": {"team": "a"}, "annotations": {"note": "two words"}});
    assert_eq!(template["metadata"], kept);
    assert_eq!(template["spec"]["newField"], 1, "a field was lost");
    assert_refused([
        (with(json!({"labels": {"rouse.dev/model": "a"}})), "'rouse.dev/model' is not allowed"),
        (with(json!({"annotations": {"rouse.dev/epoch": "1"}})), "'rouse.dev/epoch' is not allowed"),
        (with(json!({"labels": {"a": 1}})), "the value of 'a' must be a text"),
        (with(json!({"labels": {"a": "two words"}})), "'two words' is not the value of a label"),
        (with(json!({"labels": "a"})), "metadata.labels must be a mapping of texts"),
    ]);
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let mut spec = nodes(json!({"nodeNames": ["A"], "imagesPreload": {"items": ["B"]}}));
    spec["policies"] = json!({"parallelism": 0});
    spec["tolerations"] = json!([{}]);
    let refused = convert(&object(&spec), RETRY_DELAY).unwrap_err();
    assert_eq!(refused.split("; ").count(), 4, "{refused}");
}

#[test]
fn equal_actions_have_equal_hashes() {
    let hash = |template: Value| -> ActionHash {
        let WarmupTarget::Nodes { actions, .. } = accepted(&action(template)).target else { panic!() };
        actions.items().action.unwrap()
    };
    let spec = json!({"containers": [container("a")]});
    let beside = hash(json!({"restartPolicy": "Never", "spec": spec}));
    assert_eq!(beside, hash(json!({"metadata": {"name": "x"}, "spec": spec})));
    assert_ne!(beside, hash(json!({"spec": {"containers": [container("b")]}})));
    assert_ne!(beside, hash(json!({"restartPolicy": "OnFailure", "spec": spec})));
}

#[test]
fn the_hash_of_a_spec_changes_with_everything_but_a_pause() {
    let hash = |spec: &Value| accepted(spec).request.spec_hash;
    let with = |field: &str, value: Value| {
        let mut spec = nodes(json!({}));
        spec[field] = value;
        spec
    };
    let plain = hash(&nodes(json!({})));
    assert_eq!(hash(&with("paused", json!(true))), plain);
    for edited in [
        nodes(json!({"nodeNames": ["node-1", "node-2"]})),
        nodes(json!({"imagesPreload": {"items": ["image1:tag2"]}})),
        action(json!({"spec": {"containers": [container("a")]}})),
        with("policies", json!({"parallelism": 2})),
        with("tolerations", json!([{"key": "gpu", "operator": "Exists"}])),
    ] {
        assert_ne!(hash(&edited), plain, "{edited}");
    }
    // A refused spec has a hash of its own, too.
    assert_ne!(spec_hash(&object(&nodes(json!({"nodeNames": ["A"]}))).spec), plain);
}
