use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::util::intstr::IntOrString};
use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        event::{EngineRecord, MemorySizes},
        ids::{NodeName, PairingEngineId, ProviderMode},
        settings::PairingSettings,
    },
    slots::{instance_name, instance_resource},
    units::{Bytes, Generation, Millis, Tick},
};
use serde_json::json;

use super::*;
use crate::{
    convert::{ConversionPolicy, ModelHosting, convert},
    crd::{InferenceModel, pool::NVIDIA_GPU},
    dual_pods::{
        keys,
        provider::{self, ProviderPlacement},
        record,
    },
    ledger::ReservationLocation,
};

fn workload(spec: Value, look: impl FnOnce(Value)) {
    workload_in(spec, NVIDIA_GPU, None, look);
}

/// `resource`: that of the pool.
fn workload_in(spec: Value, resource: &str, slots: Option<&SlotTerms>, look: impl FnOnce(Value)) {
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
        "metadata": {"name": "qwen", "namespace": "team", "uid": "u1"},
        "spec": spec,
    });
    let object: InferenceModel = serde_json::from_value(object).unwrap();
    let model = convert(&object, ConversionPolicy::default()).unwrap();
    let (ModelHosting::Deployment(pods) | ModelHosting::DualPods(pods)) = &model.hosting else {
        panic!("{:?}", model.hosting)
    };
    let owner = ModelRef { object: model.object.clone(), uid: "u1".into() };
    let sidecar = Sidecar {
        image: "stub:1".into(),
        pull_policy: Some("Never".into()),
        key: StubKey::example(),
        timing: PairingSettings::default(),
    };
    let workload = Workload {
        owner: &owner,
        engine: &model.engine,
        pod_template: pods,
        variant: &model.variants[0],
        taint: Some("gpu"),
        resource,
        slots,
        sidecar: &sidecar,
        dual_pods: matches!(model.hosting, ModelHosting::DualPods(_)),
        replicas: 2,
        epoch: 7,
    };
    look(workload.deployment());
}

#[test]
fn an_engine_has_its_template_and_a_stub_beside_it() {
    let spec = json!({
        "modelName": "org/Qwen", "memory": "80Gi", "nodeSelector": {"inference-pool": "h200"},
        "engine": {"port": 9000},
        "template": {
            "metadata": {"labels": {"team": "a"}, "name": "ignored"},
            "spec": {
                "nodeSelector": {"zone": "x"},
                "tolerations": [{"key": "own"}],
                "containers": [{"name": "vllm", "image": "vllm:1"}],
            },
        },
    });
    workload(spec, |made| {
        let name = made.pointer("/metadata/name").unwrap().as_str().unwrap();
        let (object, template) = name.rsplit_once('-').unwrap();
        assert_eq!((object, template.len()), ("qwen", 8));
        let owner = json!([{"apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel", "name": "qwen", "uid": "u1",
            "controller": true}]);
        assert_eq!(made["metadata"]["ownerReferences"], owner);
        assert_eq!(made["metadata"]["annotations"][EPOCH], "7");
        assert_eq!(made["spec"]["replicas"], 2);
        let pod = &made["spec"]["template"];
        assert_eq!(pod["metadata"]["labels"]["team"], "a");
        assert_eq!(pod["metadata"]["labels"][TEMPLATE], template);
        assert_eq!(pod["metadata"]["labels"][label::MODEL], label::value("org/Qwen"));
        assert_eq!(pod["metadata"].get("name"), None);
        // The leader's annotations on the Deployment must not reach the template, whose hash they would change.
        assert_eq!(pod["metadata"]["annotations"].get(EPOCH), None);
        assert_eq!(made["spec"]["selector"]["matchLabels"][TEMPLATE], template);
        assert_eq!(pod["spec"]["nodeSelector"], json!({"zone": "x", "inference-pool": "h200"}));
        let keys: Vec<_> = pod["spec"]["tolerations"].as_array().unwrap().iter().map(|t| &t["key"]).collect();
        assert_eq!(keys, ["own", "gpu"]);
        let containers = pod["spec"]["containers"].as_array().unwrap();
        let names: Vec<_> = containers.iter().map(|c| c["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["vllm", STUB]);
        let args = containers[1]["args"].as_array().unwrap();
        assert!(
            args.contains(&json!("--epoch-gate")) && args.contains(&json!("--host=$(POD_IP)")),
            "{args:?}"
        );
        assert_eq!(containers[1]["imagePullPolicy"], "Never");
    });
}

#[test]
fn a_named_variant_has_a_deployment_of_its_own_and_the_default_one_keeps_its_name() {
    let spec = |name: &str| json!({"modelName": "m", "memory": "1Gi", "containerImage": "x", "variants": [{"name": name}]});
    let plain = json!({"modelName": "m", "memory": "1Gi", "containerImage": "x"});
    let (mut default, mut listed) = (Value::Null, Value::Null);
    workload(plain, |made| default = made);
    workload(spec("default"), |made| listed = made);
    assert_eq!(default, listed);
    workload(spec("large"), |made| {
        let template = default["metadata"]["labels"][TEMPLATE].as_str().unwrap();
        assert_eq!(made["metadata"]["name"], format!("qwen-large-{template}"));
        assert_eq!(default["metadata"]["name"], format!("qwen-{template}"));
        for labels in ["/metadata/labels", "/spec/selector/matchLabels", "/spec/template/metadata/labels"] {
            assert_eq!(made.pointer(labels).unwrap()[label::VARIANT], "large", "{labels}");
            assert_eq!(default.pointer(labels).unwrap().get(label::VARIANT), None, "{labels}");
        }
        assert_eq!(made["spec"]["template"]["spec"], default["spec"]["template"]["spec"]);
    });
}

#[test]
fn a_long_name_is_cut_and_still_the_variants_own() {
    let object = ObjectName::new("team", "m".repeat(198));
    let names =
        ["default", "a", "large", "large-2"].map(|variant| name(&object, &variant.into(), "01234567"));
    assert_eq!(names[0], format!("{}-01234567", object.name));
    assert_eq!(names[1], format!("{}-a-01234567", object.name), "it is just short enough");
    assert!(names.iter().all(|name| name.len() <= MAX_NAME_CHARS + 9), "{names:?}");
    assert_ne!(names[2], names[3]);
}

#[test]
fn a_stub_has_the_resource_claims_of_its_engine_and_no_others() {
    let container =
        |name: &str, resources: Value| json!({"name": name, "image": "x", "resources": resources});
    let spec = |containers: Value| {
        json!({"modelName": "m", "memory": "1Gi", "engine": {"container": "vllm"},
            "template": {"spec": {"containers": containers}}})
    };
    let stub = |made: &Value| made.pointer("/spec/template/spec/containers/2").unwrap().clone();
    let claims = json!([{"name": "gpus", "request": "two"}]);
    let helper = container("helper", json!({"claims": [{"name": "other"}]}));
    let with = spec(json!([helper, container("vllm", json!({"claims": claims}))]));
    workload(with, |made| {
        assert_eq!(stub(&made)["name"], STUB);
        assert_eq!(stub(&made)["resources"]["claims"], claims);
        assert!(stub(&made)["resources"]["limits"].get("memory").is_some());
    });
    let without = spec(json!([helper, container("vllm", json!({"limits": {"nvidia.com/gpu": "1"}}))]));
    workload(without, |made| {
        assert_eq!(stub(&made)["resources"].get("claims"), None);
        assert_eq!(stub(&made)["resources"]["limits"].get("nvidia.com/gpu"), None, "it would be another one");
    });
}

/// A template can be any object: the API server validates it only in the Deployment, so nothing in it may crash a
/// gateway before that.
#[test]
fn a_template_whose_fields_are_not_what_a_pod_has_is_passed_on_and_brings_nothing_down() {
    const PREFERRED: &str =
        "/spec/template/spec/affinity/podAffinity/preferredDuringSchedulingIgnoredDuringExecution";
    const PREFERRED_NODES: &str =
        "/spec/template/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution";
    let odd = [
        json!("x"),
        json!(7),
        json!([]),
        json!(["x"]),
        json!({"labels": "x", "annotations": 7}),
        Value::Null,
    ];
    let within = |at: &str, odd: &Value| {
        let mut template = json!({"metadata": {}, "spec": {"affinity": {"podAffinity": {}, "nodeAffinity": {}},
            "containers": ["x", {"name": "vllm"}]}});
        if let Some((parent, key)) = at.rsplit_once('/') {
            let parent = template.pointer_mut(parent).and_then(Value::as_object_mut).unwrap();
            parent.insert(key.to_owned(), odd.clone());
        }
        template
    };
    for at in [
        "/metadata",
        "/metadata/annotations",
        "/spec/affinity",
        "/spec/affinity/podAffinity",
        "/spec/affinity/podAffinity/preferredDuringSchedulingIgnoredDuringExecution",
        "/spec/affinity/nodeAffinity",
        "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution",
        "/spec/nodeSelector",
        "/spec/tolerations",
        "/spec/containers/1/env",
        "/spec/containers/1/resources",
        "/spec/containers/1/readinessProbe",
    ] {
        for (odd, mode) in odd.iter().flat_map(|odd| [(odd, "dualPods"), (odd, "deployment")]) {
            let engine =
                if mode == "deployment" { json!({"kind": "vllm", "sleepMode": "vllm"}) } else { json!({}) };
            let spec = json!({"modelName": "m", "memory": "1Gi", "mode": mode, "engine": engine,
                "nodeSelector": {"inference-pool": "h200"}, "template": within(at, odd)});
            workload(spec, |made| {
                let all = made.pointer(PREFERRED).and_then(Value::as_array);
                assert!(mode == "deployment" || all.is_some_and(|all| !all.is_empty()), "{at}: {made}");
                let nodes = made.pointer(PREFERRED_NODES).and_then(Value::as_array);
                assert!(nodes.is_some_and(|all| !all.is_empty()), "{at}: {made}");
            });
        }
    }
}

#[test]
fn an_engine_prefers_warm_nodes_beside_its_users_own_preferences_and_whether_or_not_the_model_is_kept_warm() {
    let zone = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
    let own = json!({"weight": 80, "preference": zone});
    let required = json!({"nodeSelectorTerms": [zone]});
    let affinity = json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": required,
        "preferredDuringSchedulingIgnoredDuringExecution": [own],
    }});
    let set = crate::convert::warmup::model_set(&ObjectName::new("team", "qwen"));
    let warm = json!({"weight": 50, "preference": {
        "matchExpressions": [{"key": format!("warm.rouse.dev/{set}"), "operator": "Exists"}],
    }});
    for mode in ["deployment", "dualPods"] {
        let spec = |warmup: &str| {
            json!({"modelName": "m", "memory": "1Gi", "mode": mode, "warmup": warmup,
                "template": {"spec": {"affinity": affinity, "containers": [{"name": "vllm", "image": "x"}]}}})
        };
        let mut names = Vec::new();
        for warmup in ["auto", "never"] {
            workload(spec(warmup), |made| {
                let nodes = made.pointer("/spec/template/spec/affinity/nodeAffinity").unwrap();
                assert_eq!(nodes["requiredDuringSchedulingIgnoredDuringExecution"], required, "{mode}");
                assert_eq!(
                    nodes["preferredDuringSchedulingIgnoredDuringExecution"],
                    json!([own, warm]),
                    "{mode}"
                );
                names.push(made["metadata"]["name"].clone());
            });
        }
        assert_eq!(names[0], names[1], "{mode}: another Deployment would replace engines");
    }
}

#[test]
fn another_template_is_another_deployment_and_more_replicas_are_not() {
    let spec = |image: &str| json!({"modelName": "m", "memory": "1Gi", "containerImage": image});
    let mut names = Vec::new();
    for image in ["a", "b", "a"] {
        workload(spec(image), |made| names.push(made["metadata"]["name"].clone()));
    }
    assert_eq!(names[0], names[2]);
    assert_ne!(names[0], names[1]);
}

#[test]
fn a_name_fits_and_is_its_objects_own() {
    let object = |name: String| ObjectName::new("ns", name);
    let default = VariantName::default();
    assert_eq!(name(&object("m".into()), &default, "0123abcd"), "m-0123abcd");
    assert_eq!(name(&object("m".into()), &VariantName::from("l4"), "0123abcd"), "m-l4-0123abcd");
    let long = |last: &str| name(&object("x".repeat(250) + last), &default, "0123abcd");
    assert!(long("a").len() <= 220 && long("a") != long("b"));
}

/// A Pod that a ReplicaSet creates from this template.
fn pod_of(made: &Value) -> Pod {
    let mut pod = made["spec"]["template"].clone();
    merge::into(&mut pod, &json!({"metadata": {"name": "qwen-1", "namespace": "team", "uid": "p1"}}));
    merge::into(&mut pod, &json!({"metadata": {"labels": {"pod-template-hash": "h"}}}));
    serde_json::from_value(pod).unwrap()
}

#[test]
fn a_requester_asks_for_the_engine_of_the_template_and_for_its_accelerators() {
    let spec = json!({
        "modelName": "org/Qwen", "mode": "dualPods", "memory": "40Gi", "memoryAsleep": "2Gi", "hostMemory": "15Gi", "accelerators": 2,
        "nodeSelector": {"inference-pool": "h200"}, "stopAfter": "2h",
        "engine": {"kind": "vllm", "port": 9000, "container": "vllm", "level": "1"},
        "template": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "serviceAccountName": "models", "priorityClassName": "high",
                "volumes": [{"name": "weights", "emptyDir": {}}],
                "containers": [
                    {"name": "helper", "image": "helper:1"},
                    {
                        "name": "vllm", "image": "vllm:1", "volumeMounts": [{"name": "weights", "mountPath": "/w"}],
                        "command": ["vllm", "serve", "--enable-sleep-mode", "--chat-template={{ messages }}"],
                        "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"}},
                    },
                ],
            },
        },
    });
    workload(spec, |made| {
        let requester = pod_of(&made);
        let requester_spec = requester.spec.as_ref().unwrap();
        let [stub] = &requester_spec.containers[..] else { panic!("{:?}", requester_spec.containers) };
        assert_eq!((stub.name.as_str(), stub.image.as_deref()), (keys::CONTAINER, Some("stub:1")));
        let args = stub.args.as_ref().unwrap();
        // 30 s to drain, and for sleep 10 s plus one second for each of 40 GiB.
        assert!(args.contains(&"--hold=80s".to_owned()), "{args:?}");
        let owner = ModelRef::of_requester(&requester).unwrap();
        let hash = format!("--token-sha256={}", StubKey::example().hash(&owner));
        assert!(args.contains(&hash), "{args:?}");
        assert_eq!(requester_spec.termination_grace_period_seconds, Some(90), "it outlives its stub's hold");
        let limits = stub.resources.as_ref().unwrap().limits.as_ref().unwrap();
        assert_eq!(limits["nvidia.com/gpu"].0, "2");
        assert_ne!(limits["memory"].0, "1Gi");
        assert_eq!(requester_spec.priority_class_name.as_deref(), Some("high"));
        assert!(requester_spec.volumes.is_none() && requester_spec.service_account_name.is_none());
        let affinity = requester_spec.affinity.as_ref().unwrap().pod_affinity.as_ref().unwrap();
        let drawn = &affinity.preferred_during_scheduling_ignored_during_execution.as_ref().unwrap()[0];
        let sleepers =
            drawn.pod_affinity_term.label_selector.as_ref().unwrap().match_labels.as_ref().unwrap();
        assert_eq!(
            (&*sleepers[keys::SLEEPING], &sleepers[keys::ENGINE_OF]),
            ("true", &label::value("org/Qwen"))
        );

        let node = NodeName::from("n1");
        let asked = provider::patched_engine(&requester, &node).unwrap();
        assert_eq!(
            asked.labels,
            [("team".to_owned(), "a".to_owned()), (keys::ENGINE_OF.to_owned(), label::value("org/Qwen"))]
                .into(),
            "Rouse's would make it an engine's Pod"
        );
        let wanted = record::MemoryRequest {
            awake: Some(Bytes::gib(40)),
            asleep: Bytes::gib(2),
            host: Some(Bytes::gib(30)),
        };
        assert_eq!(record::memory_request(&requester), Ok(wanted));
        let rest = record::SleepPolicy { level: SleepLevelPolicy::One, stop_after: Some(Millis::secs(7200)) };
        assert_eq!(record::sleep_policy(&requester), Ok(rest));
        let accelerators = ["GPU-1".into(), "GPU-2".into()].into();
        let record = EngineRecord {
            engine: PairingEngineId {
                mode: ProviderMode::Sleep,
                accelerators,
                fingerprint: asked.fingerprint,
            },
            generation: Generation(1),
            sizes: MemorySizes { awake: Bytes::gib(40), asleep: Bytes::gib(2), host: Bytes::gib(30) },
            level: SleepLevelPolicy::Auto,
            stop_after: None,
            requester: Some("p1".into()),
            last_used: Tick(0),
        };
        let place =
            ProviderPlacement { node: &node, accelerators: &record.engine.accelerators, numbers: None };
        let made = provider::build(&requester, &place, &record, None, NVIDIA_GPU).unwrap();
        let spec = made.pod.spec.unwrap();
        let names: Vec<_> = spec.containers.iter().map(|own| own.name.as_str()).collect();
        assert_eq!(names, ["helper", keys::CONTAINER]);
        let engine = &spec.containers[1];
        assert_eq!(engine.command.as_ref().unwrap()[3], "--chat-template={{ messages }}");
        assert_eq!(engine.image.as_deref(), Some("vllm:1"));
        assert!(engine.args.is_none(), "the stub's");
        let port = engine.readiness_probe.as_ref().unwrap().http_get.as_ref().unwrap().port.clone();
        assert_eq!(port, IntOrString::Int(9000));
        assert!(engine.env.as_ref().unwrap().iter().any(|env| env.name == "VLLM_SERVER_DEV_MODE"));
        assert_eq!(spec.service_account_name.as_deref(), Some("models"));
        assert_eq!(spec.node_selector.unwrap()["inference-pool"], "h200");
        let affinity = spec.affinity.unwrap();
        assert!(affinity.pod_affinity.is_none(), "it is where its requester is");
        let preferred = affinity.node_affinity.unwrap().preferred_during_scheduling_ignored_during_execution;
        assert!(preferred.is_none(), "the requester, which decides the node, prefers warm nodes");
        assert_eq!(made.pod.metadata.annotations.unwrap()["note"], "b");
    });
}

/// Templates merge as in an API server: mounts by path, since two may share a volume, and ports by number.
#[test]
fn a_variants_template_is_merged_as_the_api_server_merges_one() {
    let spec = json!({
        "modelName": "qwen", "memory": "80Gi",
        "template": {"spec": {"containers": [{
            "name": "vllm", "image": "vllm:1",
            "env": [{"name": "A", "value": "1"}],
            "volumeMounts": [
                {"name": "disk", "mountPath": "/models"},
                {"name": "disk", "mountPath": "/cache", "subPath": "c"},
            ],
        }]}},
        "variants": [{"name": "big", "template": {"spec": {"containers": [{
            "name": "vllm",
            "env": [{"name": "A", "$patch": "delete"}, {"name": "B", "value": "2"}],
            "volumeMounts": [{"name": "disk", "mountPath": "/cache", "readOnly": true}],
        }]}}}],
    });
    workload(spec, |made| {
        let engine = &made["spec"]["template"]["spec"]["containers"][0];
        assert_eq!((&engine["name"], &engine["image"]), (&json!("vllm"), &json!("vllm:1")));
        assert_eq!(engine["env"], json!([{"name": "B", "value": "2"}]));
        let mounts = json!([
            {"name": "disk", "mountPath": "/models"},
            {"name": "disk", "mountPath": "/cache", "subPath": "c", "readOnly": true},
        ]);
        assert_eq!(engine["volumeMounts"], mounts);
    });
}

fn slots_on(accelerators: &[&str]) -> SlotTerms {
    let accelerators = accelerators.iter().map(|id| (*id).into()).collect();
    let location = Some(ReservationLocation { node: "n1".to_owned(), accelerators });
    SlotTerms { configuration: Some("h100".into()), location }
}

fn instance(accelerator: &str) -> String {
    instance_resource(&instance_name(&"h100".into(), accelerator, Some(&"n1".into())))
}

/// A model whose template requests accelerators by the names that other pools have.
fn slot_model(mode: &str) -> Value {
    let limits = json!({"nvidia.com/gpu": "2", "rouse.dev/h100": "2", "rdma/hca": "1", "memory": "1Gi"});
    json!({
        "modelName": "m", "memory": "40Gi", "mode": mode, "accelerators": 2,
        "engine": {"kind": "vllm", "container": "vllm", "sleepMode": "vllm"},
        "template": {"spec": {"containers": [{
            "name": "vllm", "image": "vllm:1", "resources": {"limits": limits, "requests": {"nvidia.com/gpu": "2"}},
        }]}},
    })
}

#[test]
fn a_requester_of_slots_requests_the_accelerators_that_the_leader_chose_and_its_engine_none() {
    let node = NodeName::from("n1");
    let mut seen = Vec::new();
    for on in [["GPU-1", "GPU-2"], ["GPU-3", "GPU-4"]] {
        workload_in(slot_model("dualPods"), "rouse.dev/h100", Some(&slots_on(&on)), |made| {
            let pod = &made["spec"]["template"];
            let resources = pod.pointer("/spec/containers/0/resources").unwrap();
            for amounts in ["limits", "requests"] {
                let extended: BTreeMap<String, Value> = resources[amounts]
                    .as_object()
                    .unwrap()
                    .iter()
                    .filter(|(name, _)| name.contains('/'))
                    .map(|(name, amount)| (name.clone(), amount.clone()))
                    .collect();
                let wanted = [instance(on[0]), instance(on[1]), "rdma/hca".to_owned()];
                assert_eq!(extended, wanted.map(|name| (name, json!("1"))).into(), "{amounts}");
            }
            assert_eq!(pod["metadata"]["annotations"][keys::ACTUATION], "gateway");
            assert_eq!(pod["spec"]["tolerations"], json!([{"key": "gpu", "operator": "Exists"}]));
            let requester = pod_of(&made);
            let patch = keys::read(&requester, keys::SERVER_PATCH).unwrap();
            assert!(patch.contains("rdma/hca") && !patch.contains("nvidia.com/gpu"), "{patch}");
            assert!(!patch.contains("rouse.dev/h100"), "{patch}");
            let engine = provider::patched_engine(&requester, &node).unwrap();
            seen.push((made["metadata"]["name"].clone(), engine.fingerprint));
        });
    }
    assert_ne!(seen[0].0, seen[1].0, "a Deployment for each choice");
    assert_eq!(seen[0].1, seen[1].1, "engines on other accelerators are the same engine");
}

#[test]
fn an_engine_of_slots_in_mode_deployment_requests_them_itself_and_its_stub_knows_them() {
    let slots = slots_on(&["GPU-1", "GPU-2"]);
    workload_in(slot_model("deployment"), "rouse.dev/h100", Some(&slots), |made| {
        let containers = made.pointer("/spec/template/spec/containers").unwrap();
        let limits =
            json!({instance("GPU-1"): "1", instance("GPU-2"): "1", "rdma/hca": "1", "memory": "1Gi"});
        assert_eq!(containers[0]["resources"], json!({"limits": limits, "requests": {}}));
        let env = containers[1]["env"].as_array().unwrap();
        assert!(env.contains(&json!({"name": "ROUSE_ACCELERATORS", "value": "GPU-1,GPU-2"})), "{env:?}");
        assert_eq!(containers[1]["resources"]["limits"].as_object().unwrap().len(), 1, "its memory");
        let annotations = &made["spec"]["template"]["metadata"]["annotations"];
        assert_eq!(annotations.get(keys::ACTUATION), None, "its own stub executes the orders");
    });
}

#[test]
fn before_the_leader_has_chosen_a_pod_requests_any_slots_of_its_pool() {
    let terms = SlotTerms { location: None, ..slots_on(&[]) };
    workload_in(slot_model("dualPods"), "rouse.dev/h100", Some(&terms), |made| {
        let limits = made.pointer("/spec/template/spec/containers/0/resources/limits").unwrap();
        assert_eq!((&limits["rouse.dev/h100"], limits.get("nvidia.com/gpu")), (&json!("2"), None));
    });
}

#[test]
fn a_pools_own_resource_takes_the_place_of_nvidias() {
    let spec = |mode: &str| json!({"modelName": "m", "memory": "1Gi", "mode": mode, "accelerators": 2, "containerImage": "x"});
    for mode in ["deployment", "dualPods"] {
        workload_in(spec(mode), "amd.com/gpu", None, |made| {
            let limits = made.pointer("/spec/template/spec/containers/0/resources/limits").unwrap();
            assert_eq!(
                (&limits["amd.com/gpu"], limits.get("nvidia.com/gpu")),
                (&json!("2"), None),
                "{mode}: {limits}"
            );
        });
        let mut names = Vec::new();
        for resource in ["nvidia.com/gpu", "amd.com/gpu"] {
            workload_in(spec(mode), resource, None, |made| names.push(made["metadata"]["name"].clone()));
        }
        assert_ne!(names[0], names[1]);
    }
}
