use std::collections::BTreeSet;

use super::*;

fn config(template: Value) -> LauncherConfig {
    let object = json!({
        "apiVersion": "fma.llm-d.ai/v1alpha1",
        "kind": "LauncherConfig",
        "metadata": {"name": "vllm", "namespace": "chat", "uid": "u-1"},
        "spec": {"maxInstances": 2, "podTemplate": template},
    });
    serde_json::from_value(object).unwrap()
}

fn made(origin: LauncherSource<'_>) -> Result<Value, NoContainer> {
    let place = LauncherPlacement {
        namespace: "chat",
        node: &"node-1.example".into(),
        hostname: "node-1",
        accelerator: &"GPU-7".into(),
        resource: NVIDIA_GPU,
    };
    place.pod(origin, &StubKey::example())
}

fn of_config(template: Value) -> Value {
    made(LauncherSource::Config(&config(template))).unwrap()
}

fn env(container: &Value) -> Vec<(&str, &str)> {
    let all = container["env"].as_array().unwrap().iter();
    all.filter_map(|one| one["name"].as_str().zip(one["value"].as_str())).collect()
}

#[test]
fn a_configurations_pod_is_kept_but_for_what_makes_it_a_launcher_of_its_place() {
    let pod = of_config(json!({
        "metadata": {
            "labels": {"team": "a", "app.kubernetes.io/component": "theirs"},
            "annotations": {"note": "x"},
        },
        "spec": {
            "runtimeClassName": "nvidia",
            "aFieldOfTomorrow": {"x": null},
            "tolerations": [{"key": "mine"}],
            "initContainers": [{"name": "first", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
            "containers": [
                {"name": "helper", "resources": {"requests": {"nvidia.com/gpu": "2", "cpu": "1"}}},
                {
                    "name": "inference-server",
                    "image": "launcher:1",
                    "env": [
                        {"name": "VLLM_SERVER_DEV_MODE", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
                        {"name": "MINE", "value": "1"},
                        {"name": "ROUSE_TOKEN_SHA256", "value": "of somebody else"},
                    ],
                    "livenessProbe": {"exec": {"command": ["x"]}},
                    "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}},
                },
            ],
        },
    }));
    let metadata = &pod["metadata"];
    assert_eq!((&pod["kind"], &metadata["namespace"]), (&json!("Pod"), &json!("chat")));
    assert_eq!(
        metadata["labels"],
        json!({
            "team": "a",
            "app.kubernetes.io/component": "launcher",
            "app.kubernetes.io/managed-by": "rouse",
            "dual-pods.llm-d.ai/launcher-config-name": "vllm",
            "dual-pods.llm-d.ai/node-name": "node-1.example",
        })
    );
    assert_eq!(metadata["annotations"]["note"], "x");
    assert_eq!(metadata["annotations"]["dual-pods.llm-d.ai/accelerators"], "GPU-7");
    let owner = json!({
        "apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "LauncherConfig", "name": "vllm", "uid": "u-1",
    });
    assert_eq!(metadata["ownerReferences"], json!([owner]));

    let spec = &pod["spec"];
    assert_eq!(
        (&spec["runtimeClassName"], &spec["aFieldOfTomorrow"]),
        (&json!("nvidia"), &json!({"x": null}))
    );
    assert_eq!(spec["tolerations"], json!([{"key": "mine"}]));
    assert_eq!(spec["initContainers"][0]["resources"], json!({"limits": {"nvidia.com/gpu": "0"}}));
    assert_eq!(
        spec["containers"][0],
        json!({"name": "helper", "resources": {"requests": {"nvidia.com/gpu": "0", "cpu": "1"}}})
    );
    let launcher = &spec["containers"][1];
    assert_eq!(
        launcher["resources"],
        json!({"limits": {"nvidia.com/gpu": "0", "memory": "64Gi"}, "requests": {"nvidia.com/gpu": "0"}})
    );
    let token = StubKey::example()
        .launcher_hash(&ObjectName::new("chat", name(&"node-1.example".into(), &"GPU-7".into())));
    assert_eq!(
        env(launcher),
        [
            ("MINE", "1"),
            ("PYTHONPATH", "/app"),
            ("NVIDIA_VISIBLE_DEVICES", "all"),
            ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("ROUSE_TOKEN_SHA256", token.as_str()),
        ]
    );
    assert_eq!(launcher["env"].as_array().unwrap().len(), 6);
    assert_eq!(launcher["livenessProbe"]["httpGet"], json!({"path": "/health", "port": 8001}));
    assert_eq!(launcher["livenessProbe"].get("exec"), None, "two ways of probing are one too many");
    assert_eq!(
        launcher["readinessProbe"]["httpGet"],
        json!({"path": "/health", "port": 8001}),
        "it has no token"
    );
}

/// The launcher's part of a patched Pod with this image.
fn patched(image: &str) -> PodTemplateJson {
    let container =
        json!({"name": "inference-server", "image": image, "command": ["/rouse-stub", "launcher"]});
    let tolerations = json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]);
    let template = json!({"metadata": {}, "spec": {"containers": [container], "tolerations": tolerations}});
    serde_json::from_value(template).unwrap()
}

#[test]
fn a_server_patch_makes_a_launcher_without_a_launcher_config() {
    let pod = made(LauncherSource::Patch(&patched("vllm-with-rouse:1"))).unwrap();
    let launcher = &pod["spec"]["containers"][0];
    assert_eq!(
        (&launcher["name"], &launcher["image"], &launcher["command"]),
        (&json!("inference-server"), &json!("vllm-with-rouse:1"), &json!(["/rouse-stub", "launcher"]))
    );
    assert_eq!((env(launcher).len(), &launcher["resources"]["limits"]), (4, &json!({"nvidia.com/gpu": "0"})));
    assert_eq!(pod["spec"]["tolerations"], json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]));
    assert_eq!(pod["metadata"].get("ownerReferences"), None);
    assert_eq!(pod["metadata"]["labels"].get(CONFIG_NAME), None);
    assert_eq!(pod["metadata"]["labels"][COMPONENT], "launcher");
    // The API server's own types have fields for all of it.
    let typed: k8s_openapi::api::core::v1::Pod = serde_json::from_value(pod.clone()).unwrap();
    assert_eq!(serde_json::to_value(typed).unwrap(), pod);
}

#[test]
fn the_public_launchers_modules_are_where_its_template_says() {
    let own = json!([{"name": "PYTHONPATH", "value": "/own"}]);
    let pod = of_config(json!({"spec": {"containers": [{"name": "inference-server", "env": own}]}}));
    let all = env(&pod["spec"]["containers"][0]);
    assert!(all.contains(&("PYTHONPATH", "/own")) && !all.contains(&("PYTHONPATH", "/app")), "{all:?}");
}

#[test]
fn it_runs_on_its_node_alone_and_only_where_its_template_lets_it() {
    let with = |affinity: Value| {
        let containers = json!([{"name": "inference-server"}]);
        of_config(json!({"spec": {"containers": containers, "affinity": affinity}}))["spec"]["affinity"]
            .take()
    };
    let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]});
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let alone = json!({"nodeAffinity": {required: {"nodeSelectorTerms": [{"matchExpressions": [here]}]}}});
    assert_eq!(with(Value::Null), alone);
    assert_eq!(with(json!({"nodeAffinity": {required: {"nodeSelectorTerms": []}}})), alone);
    let zone = json!({"key": "zone", "operator": "Exists"});
    let field = json!([{"key": "metadata.name", "operator": "In", "values": ["x"]}]);
    let terms = json!([{"matchExpressions": [zone]}, {"matchFields": field}, {}]);
    let preferred = json!([{"weight": 1}]);
    let mine = json!({
        "nodeAffinity": {required: {"nodeSelectorTerms": terms}, "preferred": preferred},
        "podAntiAffinity": {"x": 1},
    });
    let terms = json!([
        {"matchExpressions": [zone, here]},
        {"matchFields": field, "matchExpressions": [here]},
        {},
    ]);
    let want = json!({
        "nodeAffinity": {required: {"nodeSelectorTerms": terms}, "preferred": preferred},
        "podAntiAffinity": {"x": 1},
    });
    assert_eq!(with(mine), want);
}

#[test]
fn a_template_that_does_not_say_which_container_it_is_makes_none() {
    for template in [
        json!({}),
        json!({"spec": {"containers": []}}),
        json!({"spec": {"containers": [{"name": "main"}]}}),
        json!({"spec": {"containers": ["inference-server", 7]}}),
        json!({"spec": {"initContainers": [{"name": "inference-server"}]}}),
    ] {
        assert_eq!(made(LauncherSource::Config(&config(template.clone()))), Err(NoContainer), "{template}");
    }
}

#[test]
fn a_name_is_a_dns_label_and_its_places_alone() {
    let nodes =
        ["n", "node.a", "node-a", "ip-10-0-0-1.eu-central-1.compute.internal", &"x".repeat(253), "-."];
    let mut names = BTreeSet::new();
    for node in nodes {
        for accelerator in ["GPU-0", "GPU-1"] {
            let name = name(&node.into(), &accelerator.into());
            assert!(name.len() <= 63, "{name}");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'),
                "{name}"
            );
            assert!(name.starts_with("launcher-") && !name.ends_with('-'), "{name}");
            assert!(names.insert(name));
        }
    }
    assert!(name(&"node-a".into(), &"GPU-0".into()).starts_with("launcher-node-a-"));
}

#[test]
fn long_names_of_objects_are_labels_all_the_same() {
    let place = LauncherPlacement {
        namespace: "chat",
        node: &"n".repeat(64).into(),
        hostname: "n",
        accelerator: &"GPU-7".into(),
        resource: NVIDIA_GPU,
    };
    let pod = place.pod(LauncherSource::Patch(&patched("i")), &StubKey::example()).unwrap();
    assert_eq!(pod["metadata"]["labels"][NODE_NAME], label::value(&"n".repeat(64)));
}

#[test]
fn a_launchers_pod_says_what_it_was_made_from() {
    let template =
        |image: &str| json!({"spec": {"containers": [{"name": "inference-server", "image": image}]}});
    let pod: Pod = serde_json::from_value(of_config(template("a"))).unwrap();
    let made_from = LauncherRevision::read(&pod).unwrap();
    assert_eq!(made_from, LauncherRevision::of(&config(template("a"))));
    let edited = LauncherRevision::of(&config(template("b")));
    assert_eq!(edited.config_key(), made_from.config_key());
    assert_ne!(edited.build(), made_from.build());
    let mut other = config(template("a"));
    other.spec.max_instances = None;
    assert_eq!(LauncherRevision::of(&other), made_from, "that is no part of the Pod");
    other.metadata.namespace = Some("other".to_owned());
    assert_ne!(LauncherRevision::of(&other).build(), made_from.build());
    let by_patch: Pod = serde_json::from_value(made(LauncherSource::Patch(&patched("a"))).unwrap()).unwrap();
    let of_patch = LauncherRevision::read(&by_patch).unwrap();
    assert_eq!(of_patch, LauncherRevision::of_patch("chat", &patched("a")));
    assert!(of_patch.is_of_patch() && !made_from.is_of_patch());
    assert_ne!(of_patch.build(), LauncherRevision::of_patch("chat", &patched("b")).build());
}

#[test]
fn a_template_has_one_hash_on_all_nodes_and_in_any_order_of_its_keys() {
    let of = |text: &str| LauncherSource::Config(&config(serde_json::from_str(text).unwrap())).hash();
    let hash = of(r#"{"metadata":{"labels":{"a":"1","b":"2"}},"spec":{"x":1,"containers":[]}}"#);
    assert_eq!(of(r#"{"spec":{"containers":[],"x":1},"metadata":{"labels":{"b":"2","a":"1"}}}"#), hash);
    assert_ne!(of(r#"{"metadata":{"labels":{"a":"1","b":"2"}},"spec":{"x":2,"containers":[]}}"#), hash);
    assert_ne!(of(r#"{"metadata":{"labels":{"a":"1"}},"spec":{"x":1,"containers":[]}}"#), hash);
    let (a, b) = (patched("a"), patched("b"));
    assert_ne!(LauncherSource::Patch(&a).hash(), LauncherSource::Patch(&b).hash());
    let pod = made(LauncherSource::Patch(&a)).unwrap();
    assert_eq!(pod["metadata"]["annotations"][TEMPLATE_HASH], LauncherSource::Patch(&a).hash());
}

#[test]
fn a_launcher_in_a_pool_of_slots_takes_none_of_them() {
    let place = LauncherPlacement {
        namespace: "chat",
        node: &"node-1".into(),
        hostname: "node-1",
        accelerator: &"GPU-7".into(),
        resource: "rouse.dev/h100",
    };
    let limits = json!({"rouse.dev/h100-0123456789": "1", "nvidia.com/gpu": 1, "rdma/hca": "1"});
    let template =
        json!({"spec": {"containers": [{"name": "inference-server", "resources": {"limits": limits}}]}});
    let pod = place.pod(LauncherSource::Config(&config(template)), &StubKey::example()).unwrap();
    let resources = &pod["spec"]["containers"][0]["resources"];
    assert_eq!(resources, &json!({"limits": {"nvidia.com/gpu": "0", "rdma/hca": "1"}}));
}
