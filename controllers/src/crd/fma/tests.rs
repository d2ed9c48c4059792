use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

fn read<T: DeserializeOwned>(kind: &str, spec: &Value) -> T {
    let object = json!({
        "apiVersion": "fma.llm-d.ai/v1alpha1",
        "kind": kind,
        "metadata": {"name": "a", "namespace": "chat"},
        "spec": spec,
        "status": {"observedGeneration": 3, "somethingNew": [1]},
    });
    serde_json::from_value(object).unwrap()
}

fn server(config: &Value) -> InferenceServerConfigSpec {
    let spec = json!({"launcherConfigName": "l", "modelServerConfig": config});
    read::<InferenceServerConfig>("InferenceServerConfig", &spec).spec
}

fn policy(selector: &Value, counts: &Value) -> LauncherPopulationPolicySpec {
    let spec = json!({"enhancedNodeSelector": selector, "countForLauncher": counts});
    read::<LauncherPopulationPolicy>("LauncherPopulationPolicy", &spec).spec
}

fn has(problems: &[String], expected: &[&str]) {
    assert_eq!(problems.len(), expected.len(), "{problems:?}");
    for (problem, expected) in problems.iter().zip(expected) {
        assert!(problem.contains(expected), "{problem}: {expected}");
    }
}

#[test]
fn an_engines_configuration_is_read_with_what_later_versions_add_and_leave_out() {
    let spec = server(&json!({
        "port": 8005,
        "options": "--model org/name --enable-sleep-mode",
        "env_vars": {"A": "1"},
        "labels": {"component": "inference"},
        "annotations": {"description": "x"},
        "replicaHints": {"new": true},
    }));
    let config = &spec.model_server_config;
    assert_eq!((config.port, config.env_vars["A"].as_str()), (Some(8005), "1"));
    assert_eq!(config.labels.len() + config.annotations.len(), 2);
    assert_eq!(spec.problems(), [""; 0]);
    let bare = server(&json!({}));
    assert_eq!((bare.model_server_config.port, bare.problems()), (None, vec![]));
}

#[test]
fn what_no_engine_can_be_started_with_is_said() {
    has(&server(&json!({"port": 0})).problems(), &["port: 0 is not between"]);
    has(&server(&json!({"port": 65536})).problems(), &["port: 65536"]);
    has(
        &server(&json!({"options": "--x '{\"a\": 1}"})).problems(),
        &["options: a quotation begun with ' does not end"],
    );
    has(&server(&json!({"options": "--x \\"})).problems(), &["options: a quotation begun with \\"]);
    has(
        &server(&json!({"options": "a\0b", "env_vars": {"A=B": "", "C": "\0"}})).problems(),
        &["zero byte", "\"A=B\" cannot be set", "\"C\" cannot be set"],
    );
    let metadata = json!({
        "dual-pods.llm-d.ai/dual": "x",
        "kubernetes.io/hostname": "x",
        "k8s.io/x": "x",
        // Only what begins so is the controllers'.
        "app.kubernetes.io/name": "x",
        "mine": "x",
    });
    let reserved = ["'dual-pods.llm-d.ai/dual'", "'k8s.io/x'", "'kubernetes.io/hostname'"];
    has(&server(&json!({"labels": metadata})).problems(), &reserved);
    has(&server(&json!({"annotations": metadata})).problems(), &reserved);
    let mut nameless = server(&json!({}));
    nameless.launcher_config_name.clear();
    has(&nameless.problems(), &["launcherConfigName is empty"]);
}

#[test]
fn a_launchers_pod_is_kept_as_it_is() {
    let spec = json!({
        "maxInstances": 2,
        "podTemplate": {
            "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "generateName": "x"},
            "spec": {"containers": [{"name": "inference-server", "aFieldOfTomorrow": {"x": [1, null]}}]},
        },
    });
    let config: LauncherConfig = read("LauncherConfig", &spec);
    assert_eq!(config.spec.max_instances, Some(2));
    assert_eq!(config.spec.pod_template.metadata.labels["a"], "b");
    assert_eq!(Value::Object(config.spec.pod_template.spec.value()), spec["podTemplate"]["spec"]);
    assert_eq!(config.spec.problems(), [""; 0]);
    assert_eq!(config.status.unwrap().observed_generation, Some(3));
}

#[test]
fn what_no_launcher_can_be_made_of_is_said() {
    let problems = |spec: Value| read::<LauncherConfig>("LauncherConfig", &spec).spec.problems();
    // Earlier versions had another limit, and it was optional to say anything of Pods.
    has(&problems(json!({"maxSleepingInstances": 1})), &["no container is named 'inference-server'"]);
    let other = json!({"spec": {"containers": [{"name": "main"}]}});
    has(
        &problems(json!({"maxInstances": 0, "podTemplate": other})),
        &["room for 0", "no container is named"],
    );
    has(
        &problems(json!({"podTemplate": {"spec": {"containers": "inference-server"}}})),
        &["no container is named"],
    );
}

#[test]
fn a_policy_chooses_nodes_by_labels_and_by_what_they_have() {
    let selector = json!({
        "labelSelector": {
            "matchLabels": {"family": "ada"},
            "matchExpressions": [{"key": "type", "operator": "In", "values": ["a", "b"]}],
        },
        "allocatableResources": {"cpu": {"min": 16, "max": "64"}, "nvidia.com/gpu": {"min": "8", "max": null}},
    });
    let spec = policy(&selector, &json!([{"launcherConfigName": "l", "launcherCount": 2}]));
    assert_eq!(spec.problems(), [""; 0]);
    assert_eq!(spec.count_for_launcher[0].launcher_count, 2);
    let labels = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let chosen = |these: &[(&str, &str)], cpu: &str, gpus: &str| {
        let has = labels(&[("cpu", cpu), ("nvidia.com/gpu", gpus)]);
        let has = has.into_iter().map(|(resource, amount)| (resource, Quantity(amount))).collect();
        spec.enhanced_node_selector.matches(&labels(these), &has)
    };
    let good = [("family", "ada"), ("type", "b"), ("zone", "z")];
    assert!(chosen(&good, "16", "8") && chosen(&good, "63999m", "9") && chosen(&good, "64", "1k"));
    assert!(!chosen(&good, "15999m", "8") && !chosen(&good, "64001m", "8") && !chosen(&good, "16", "7"));
    assert!(!chosen(&good, "much", "8"), "it cannot be told");
    assert!(!chosen(&good[..1], "16", "8") && !chosen(&[("family", "ada"), ("type", "c")], "16", "8"));
    assert!(!spec.enhanced_node_selector.matches(&labels(&good), &BTreeMap::new()), "it has none of them");
    assert!(
        policy(&json!({"labelSelector": {}}), &json!([]))
            .enhanced_node_selector
            .matches(&BTreeMap::new(), &BTreeMap::new())
    );
}

#[test]
fn a_policy_that_cannot_be_followed_says_why_and_chooses_nothing() {
    let wrong = json!({
        "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Near"}]},
        "allocatableResources": {"cpu": {"min": "much"}, "memory": {"min": "2Gi", "max": "2G"}},
    });
    let counts = json!([
        {"launcherConfigName": "l", "launcherCount": -1},
        {"launcherConfigName": "m", "launcherCount": 0},
        {"launcherConfigName": "l", "launcherCount": 1},
    ]);
    has(
        &policy(&wrong, &counts).problems(),
        &[
            "labelSelector: ",
            "allocatableResources.cpu: 'much' is not a quantity",
            "allocatableResources.memory: min is greater than max",
            "-1 launchers of 'l'",
            "'l' is listed twice",
        ],
    );
    let none = |selector: Value| {
        let has = BTreeMap::from([("cpu".to_owned(), Quantity("8".to_owned()))]);
        !policy(&selector, &json!([])).enhanced_node_selector.matches(&BTreeMap::new(), &has)
    };
    assert!(none(json!({"labelSelector": {"matchExpressions": [{"key": "a", "operator": "Near"}]}})));
    assert!(none(json!({"labelSelector": {}, "allocatableResources": {"cpu": {"min": "much"}}})));
}
