use rouse_config::{EngineKind, SleepApi};
use serde_json::{Value, json};

use super::*;
use crate::backend_address::BackendHost;

/// The smallest valid object with these spec fields on top; `null` removes a field.
fn object(fields: Value) -> InferenceModel {
    let mut spec = json!({"modelName": "llama", "memory": "80Gi", "containerImage": "vllm:1"});
    for (name, value) in fields.as_object().unwrap() {
        spec[name] = value.clone();
    }
    spec.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    let metadata = json!({"name": "llama", "namespace": "team-a"});
    let whole = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel", "metadata": metadata, "spec": spec});
    serde_json::from_value(whole).unwrap()
}

fn read(fields: Value) -> ConvertedModel {
    convert(&object(fields), ConversionPolicy::default()).unwrap_or_else(|refused| panic!("{refused}"))
}

fn refused(fields: Value) -> (&'static str, String) {
    let refused =
        convert(&object(fields.clone()), ConversionPolicy::default()).expect_err(&fields.to_string());
    assert!(!refused.all().is_empty(), "{fields}: refused for nothing");
    (refused.reason(), refused.to_string())
}

fn external(fields: Value) -> Value {
    let mut all =
        json!({"mode": "external", "backendUrl": "http://vllm:8000", "containerImage": null, "memory": null});
    for (name, value) in fields.as_object().unwrap() {
        all[name] = value.clone();
    }
    all
}

#[test]
fn the_smallest_object_means_what_its_defaults_say() {
    let model = read(json!({}));
    let [variant] = model.variants.as_slice() else { panic!("{:?}", model.variants) };
    let spec = &variant.spec;
    assert_eq!((variant.name.as_str(), spec.min_replicas, spec.replicas), ("default", 0, 1));
    assert_eq!(spec.memory, EngineMemory { awake: Bytes::gib(80), asleep: Bytes::ZERO, host: Bytes::ZERO });
    assert_eq!(spec.accelerators, AcceleratorRequirement::Count(1));
    let idle = IdlePolicy {
        sleep_after: Some(Millis::secs(600)),
        stop_after: Some(Millis::secs(3600)),
        level: SleepLevelPolicy::Auto,
        rehearse: RehearsalPolicy::Never,
    };
    assert_eq!((spec.idle, spec.start_timeout), (idle, Millis::secs(300)));
    assert!(!spec.can_sleep && !spec.pinned && spec.explicit_memory);
    assert_eq!(variant.node_selector, super::super::crd::inference_model::default_pool());
    assert_eq!((model.engine.kind, model.engine.served_name.as_str()), (EngineKind::Custom, "llama"));
    assert!(model.engine.stub);
    assert_eq!(model.declared, Some(Bytes::gib(80)));
    assert_eq!((spec.eviction, spec.queue), (None, QueueOverrides::default()));
}

#[test]
fn the_short_form_is_a_pod_that_asks_for_the_accelerators() {
    let ModelHosting::Deployment(pods) = read(json!({
        "accelerators": 2,
        "resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "64Gi"}},
    }))
    .hosting
    else {
        panic!()
    };
    assert_eq!(
        Value::Object(pods.template.value()),
        json!({"spec": {
            "containers": [{
                "name": "engine",
                "image": "vllm:1",
                "ports": [{"name": "http", "containerPort": 8000}],
                "resources": {
                    "requests": {"cpu": "4", "memory": "32Gi"},
                    "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
                },
            }],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        }})
    );
    let ModelHosting::Deployment(pods) = read(json!({"resources": {"limits": {"gpu": "0"}}})).hosting else {
        panic!()
    };
    assert!(!Value::Object(pods.template.value()).to_string().contains("nvidia"), "it asked for none");
}

fn vllm(mode: &str, args: Value) -> Value {
    let containers =
        json!([{"name": "helper"}, {"name": "vllm", "command": ["vllm", "serve"], "args": args}]);
    json!({
        "mode": mode,
        "containerImage": null,
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": containers, "newField": true}},
        "engine": {"kind": "vllm", "container": "vllm", "port": 80, "servedName": "meta/llama"},
    })
}

#[test]
fn an_engine_sleeps_where_its_command_and_its_mode_let_it() {
    let args = json!(["--enable-sleep-mode", "--kv-cache-memory-bytes=60Gi"]);
    let model = read(vllm("dualPods", args.clone()));
    assert_eq!(model.engine.sleep, SleepApi::Vllm);
    let spec = &model.variants[0].spec;
    assert!(spec.can_sleep && spec.explicit_memory);
    assert_eq!((spec.memory.asleep, spec.memory.host), (Bytes::gib(4), Bytes::gib(20)), "its weights");
    let apart = read(vllm("dualPods", json!(["--kv-cache-memory-bytes", "60Gi", "--enable-sleep-mode"])));
    assert_eq!(apart.variants[0].spec.memory, spec.memory);
    let ModelHosting::DualPods(pods) = &model.hosting else { panic!() };
    assert_eq!((pods.container.as_str(), pods.port), ("vllm", 80));
    assert_eq!(Value::Object(pods.template.value())["spec"]["newField"], json!(true), "a field was lost");

    let deployed = read(vllm("deployment", args));
    assert!(!deployed.variants[0].spec.can_sleep);
    let without = read(vllm("dualPods", json!(["--gpu-memory-utilization", "0.9"])));
    assert!(!without.variants[0].spec.can_sleep && !without.variants[0].spec.explicit_memory);
    let mut model_spec = vllm("deployment", json!([]));
    model_spec["engine"]["sleepMode"] = "vllm".into();
    assert!(read(model_spec.clone()).variants[0].spec.can_sleep);
    model_spec["engine"]["kind"] = "custom".into();
    assert!(refused(model_spec.clone()).1.contains("engine.sleepMode"), "its stub would not know the calls");
    model_spec["engine"]["kind"] = "vllm".into();
    model_spec["engine"]["sleepMode"] = "none".into();
    model_spec["engine"]["level"] = "1".into();
    assert!(refused(model_spec).1.contains("engine.level"));
}

#[test]
fn a_pod_with_too_little_memory_for_the_weights_sleeps_at_level_2() {
    let mut model_spec = vllm("deployment", json!(["--kv-cache-memory-bytes=60Gi"]));
    model_spec["engine"]["sleepMode"] = "vllm".into();
    let level = |said: &Value| {
        let spec = read(said.clone()).variants.remove(0).spec;
        assert_eq!(spec.memory.host, Bytes::gib(20));
        spec.idle.level
    };
    assert_eq!(level(&model_spec), SleepLevelPolicy::Auto);
    for (limit, expected) in [("20Gi", SleepLevelPolicy::Auto), ("19Gi", SleepLevelPolicy::Two)] {
        model_spec["template"]["spec"]["containers"][1]["resources"] = json!({"limits": {"memory": limit}});
        assert_eq!(level(&model_spec), expected, "{limit}");
    }
    model_spec["engine"]["level"] = "never".into();
    assert_eq!(level(&model_spec), SleepLevelPolicy::Never);
    model_spec["engine"]["level"] = "1".into();
    model_spec["variants"] = json!([{"name": "big", "template":
        {"spec": {"containers": [{"name": "vllm", "resources": {"limits": {"memory": "64Gi"}}}]}}}]);
    assert_eq!(level(&model_spec), SleepLevelPolicy::One, "a variant says its own");
}

#[test]
fn an_engine_rehearses_its_sleep_where_its_memory_stays_reserved() {
    let with = |mode: &str, rehearse: &str| {
        let mut model_spec = vllm(mode, json!(["--enable-sleep-mode"]));
        model_spec["engine"]["sleepMode"] = "vllm".into();
        model_spec["engine"]["rehearse"] = rehearse.into();
        model_spec
    };
    let rehearse = |mode: &str, own: &str| read(with(mode, own)).variants.remove(0).spec.idle.rehearse;
    for (own, expected) in [
        ("start", RehearsalPolicy::Start),
        ("idle", RehearsalPolicy::Idle),
        ("never", RehearsalPolicy::Never),
    ] {
        assert_eq!(rehearse("deployment", own), expected);
    }
    assert_eq!(rehearse("dualPods", "never"), RehearsalPolicy::Never);
    let (_, why) = refused(with("dualPods", "idle"));
    assert!(why.contains("engine.rehearse is not for mode dualPods"), "{why}");
    for (field, value, expected) in [
        ("sleepMode", "none", "engine.rehearse needs an engine that can sleep"),
        ("level", "2", "engine.rehearse is only for sleeps at level 1"),
        ("level", "never", "engine.rehearse is only for sleeps at level 1"),
    ] {
        let mut model_spec = with("deployment", "start");
        model_spec["engine"][field] = value.into();
        let (_, why) = refused(model_spec);
        assert!(why.contains(expected), "{why}");
    }
}

#[test]
fn an_engine_with_adapters_does_not_sleep_at_level_2() {
    for mode in ["deployment", "dualPods"] {
        let mut model_spec = vllm(mode, json!(["--enable-lora"]));
        model_spec["engine"]["sleepMode"] = "vllm".into();
        let level = |said: &Value| read(said.clone()).variants.remove(0).spec.idle.level;
        for (own, expected) in [
            ("auto", SleepLevelPolicy::OneOrStop),
            ("1", SleepLevelPolicy::OneOrStop),
            ("never", SleepLevelPolicy::Never),
        ] {
            model_spec["engine"]["level"] = own.into();
            assert_eq!(level(&model_spec), expected, "{mode} {own}");
        }
        model_spec["engine"]["level"] = "2".into();
        let (reason, why) = refused(model_spec.clone());
        assert_eq!(reason, "InvalidSpec");
        assert!(
            why.contains("engine.level: --enable-lora rules out level 2: a wake from level 2 reloads only"),
            "{why}"
        );
        let pod = &mut model_spec["template"];
        pod["metadata"]["annotations"] = json!({SERVER_CONFIG: "one"});
        if mode == "dualPods" {
            assert_eq!(
                level(&model_spec),
                SleepLevelPolicy::Two,
                "its InferenceServerConfig says what is started"
            );
        }
    }
    let mut own = vllm("deployment", json!([]));
    own["engine"]["sleepMode"] = "vllm".into();
    own["variants"] = json!([{"name": "adapted", "template":
        {"spec": {"containers": [{"name": "vllm", "args": ["--enable-lora"]}]}}}]);
    assert_eq!(read(own).variants[0].spec.idle.level, SleepLevelPolicy::OneOrStop, "a variant says its own");
}

#[test]
fn variants_take_from_the_model_what_they_leave_out() {
    let model = read(json!({
        "pinned": true,
        "maxReplicas": 3,
        "variants": [
            {"name": "big", "cost": 20, "accelerators": 8, "nodeSelector": {"pool": "h100"}, "minReplicas": 2, "maxReplicas": 9},
            {"name": "small", "cost": 1.5, "memory": "40Gi", "template": {"spec": {"priorityClassName": "low"}}},
            {"name": "usual"},
        ],
    }));
    let seen: Vec<_> = model
        .variants
        .iter()
        .map(|v| {
            (v.name.as_str(), v.spec.memory.awake, &v.spec.accelerators, v.spec.min_replicas, v.spec.replicas)
        })
        .collect();
    let count = AcceleratorRequirement::Count;
    assert_eq!(
        seen,
        [
            ("small", Bytes::gib(40), &count(1), 0, 3),
            ("usual", Bytes::gib(80), &count(1), 0, 3),
            ("big", Bytes::gib(80), &count(8), 2, 9),
        ]
    );
    assert_eq!(model.min_replicas, 1, "of a pinned model, over all variants");
    assert_eq!(model.variants[2].node_selector["pool"], "h100");
    assert_eq!(model.variants[1].spec.fingerprint, model.engine.fingerprint);
    assert_ne!(
        model.variants[0].spec.fingerprint, model.engine.fingerprint,
        "it is started with something else"
    );
}

#[test]
fn every_variant_has_the_queue_and_the_eviction_of_its_model() {
    let model = read(json!({
        "eviction": "cooldown",
        "queue": {"policy": "reject", "maxWait": "90s", "maxWaiting": 3},
        "variants": [{"name": "big", "cost": 2}, {"name": "small", "cost": 1}],
    }));
    let queue = QueueOverrides {
        policy: Some(QueuePolicy::Reject),
        max_wait: Some(Millis::secs(90)),
        max_waiting: Some(3),
    };
    assert_eq!(model.variants.len(), 2);
    for ModelVariant { spec, .. } in &model.variants {
        assert_eq!((spec.eviction, spec.queue), (Some(EvictionPolicy::Cooldown), queue));
    }
}

#[test]
fn saturation_is_off_unless_the_object_has_it_and_keeps_what_is_written() {
    assert_eq!(read(json!({})).saturation, None);
    let off = read(json!({"saturation": {"enabled": false, "kvCacheThreshold": 0.9}}));
    assert_eq!((off.saturation, off.variants[0].spec.scaled), (None, false));
    assert!((off.variants[0].spec.saturation_thresholds.kv_cache - 0.9).abs() < 1e-9, "gateways limit by it");
    let model =
        read(json!({"saturation": {"kvSpareTrigger": 0.2, "mayEvict": "never", "stabilisation": "90s"}}));
    let saturation = model.saturation.unwrap();
    assert_eq!((saturation.written.kv_spare_trigger, saturation.written.profile), (Some(0.2), None));
    assert_eq!((saturation.stabilisation, saturation.replicas), (Some(Millis::secs(90)), None));
    let spec = &model.variants[0].spec;
    assert_eq!((spec.may_evict, spec.scaled), (ScaleUpEviction::Never, true));
    let expected = Thresholds { kv_spare_trigger: 0.2, ..Thresholds::default() };
    assert_eq!(spec.saturation_thresholds, expected);
    let scaled = json!({"replicas": 2, "saturation": {"actuation": "external", "profile": "doc"}});
    let saturation = read(scaled).saturation.unwrap();
    assert_eq!(saturation.replicas, Some(2));
    assert_eq!(saturation.written.profile, Some(written::SaturationProfileSpec::Doc));
}

#[test]
fn a_model_may_go_to_zero_after_its_own_time_or_never() {
    let found = |fields: Value| {
        let model = read(fields);
        let spec = &model.variants[0].spec;
        (model.saturation.unwrap().zero, spec.idle.sleep_after, spec.min_replicas)
    };
    let zero = |written: Value| json!({"saturation": {"scaleToZero": written}});
    let (ten, two) = (Millis::secs(600), Millis::secs(120));
    assert_eq!(found(json!({"saturation": {}})), (ZeroRule::Fleet, Some(ten), 0));
    assert_eq!(found(zero(json!({}))), (ZeroRule::After(ten), Some(ten), 0));
    assert_eq!(found(zero(json!({"after": "2m"}))), (ZeroRule::After(two), Some(two), 0));
    let hour = Millis::secs(3600);
    assert_eq!(found(zero(json!({"after": "1h"}))), (ZeroRule::After(hour), Some(hour), 0));
    for (period, after) in [("never", ten), ("1h", hour)] {
        let mut fields = zero(json!({"enabled": true}));
        fields["cooldownPeriod"] = period.into();
        assert_eq!(found(fields), (ZeroRule::After(after), Some(after), 0), "{period}");
    }
    assert_eq!(found(zero(json!({"enabled": false}))), (ZeroRule::KeepOne, Some(ten), 1));
    let off = json!({"saturation": {"enabled": false, "scaleToZero": {"enabled": false}}});
    assert_eq!(read(off).variants[0].spec.min_replicas, 0, "saturation does not scale it");
}

#[test]
fn variants_have_their_roles_and_each_role_keeps_one_engine() {
    let variant = |name: &str, cost: u32, role: &str| json!({"name": name, "cost": cost, "role": role});
    let model = read(json!({
        "saturation": {"scaleToZero": {"enabled": false}},
        "variants": [variant("a", 3, "prefill"), variant("b", 2, "decode"), variant("c", 1, "decode")],
    }));
    let roles: Vec<_> = model.variants.iter().map(|own| (own.role, own.spec.min_replicas)).collect();
    assert_eq!(roles, [(Role::Decode, 1), (Role::Decode, 0), (Role::Prefill, 1)]);
    assert_eq!(read(json!({})).variants[0].role, Role::Both);
}

#[test]
fn the_batch_limits_are_those_of_the_variant_s_command_and_only_vllm_s_are_known() {
    let container = |args: Value| json!({"spec": {"containers": [{"name": "engine", "args": args}]}});
    let limits = |kind: &str, args: Value| {
        let fields = json!({
            "containerImage": null, "template": container(args), "engine": {"kind": kind, "container": "engine"},
        });
        read(fields).variants[0].batch_limits.map(|limits| (limits.batched, limits.sequences))
    };
    assert_eq!(limits("vllm", json!(["--max-num-seqs", "64"])), Some((8192, 64)));
    assert_eq!(limits("vllm", json!(["--max_num_batched_tokens=2048"])), Some((2048, 256)));
    assert_eq!(limits("sglang", json!(["--max-num-seqs", "64"])), None);
}

#[test]
fn names_decide_between_variants_of_one_cost_and_not_their_order_in_the_object() {
    let names = |variants: Value| {
        let model = read(json!({"variants": variants}));
        model.variants.into_iter().map(|variant| variant.name.to_string()).collect::<Vec<_>>()
    };
    let variants = json!([{"name": "b", "cost": 2}, {"name": "c", "cost": 1}, {"name": "a", "cost": 2}]);
    assert_eq!(names(variants), ["c", "a", "b"]);
}

#[test]
fn a_fingerprint_is_of_what_an_engine_is_started_with_and_of_nothing_else() {
    let of = |fields: Value| read(fields).engine.fingerprint;
    let plain = of(json!({}));
    assert_eq!(
        plain,
        of(json!({"memory": "81Gi", "cooldownPeriod": "1m", "aliases": ["x"], "maxReplicas": 4}))
    );
    for other in [
        json!({"containerImage": "vllm:2"}),
        json!({"accelerators": 2}),
        json!({"engine": {"kind": "vllm"}}),
        json!({"engine": {"port": 9000}}),
        json!({"engine": {"servedName": "x"}}),
        json!({"nodeSelector": {"inference-pool": "other"}}),
    ] {
        assert_ne!(plain, of(other.clone()), "{other}");
    }
}

#[test]
fn a_model_is_kept_warm_only_if_it_says_so() {
    assert!(read(json!({"warmup": "auto"})).keeps_warm);
    for fields in [json!({}), json!({"warmup": "never"}), external(json!({"warmup": "never"}))] {
        assert!(!read(fields.clone()).keeps_warm, "{fields}");
    }
    // A kept image is no reason to start an engine anew.
    let fingerprint = |fields| read(fields).engine.fingerprint;
    assert_eq!(fingerprint(json!({"warmup": "auto"})), fingerprint(json!({})));
}

#[test]
fn an_external_model_is_only_spoken_to() {
    let model = read(external(json!({"aliases": ["x"], "maxConcurrency": 4, "engine": {"kind": "vllm"}})));
    let ModelHosting::External(backend) = &model.hosting else { panic!() };
    assert_eq!((&backend.host, backend.port), (&BackendHost::Name("vllm.team-a.svc".into()), 8000));
    let spec = &model.variants[0].spec;
    assert!(spec.pinned && !spec.can_sleep);
    assert_eq!((spec.idle.sleep_after, spec.idle.stop_after), (None, None));
    assert_eq!((&spec.accelerators, spec.memory.awake), (&AcceleratorRequirement::Count(0), Bytes::ZERO));
    assert_eq!((model.engine.sleep, model.engine.stub), (SleepApi::None, false));
    for (field, value) in [
        ("containerImage", json!("x")),
        ("stopAfter", json!("1h")),
        ("pinned", json!(true)),
        ("minReplicas", json!(1)),
        ("variants", json!([{"name": "x"}])),
        ("saturation", json!({})),
        ("hostMemory", json!("1Gi")),
        ("warmup", json!("auto")),
    ] {
        let (reason, text) = refused(external(json!({field: value})));
        assert!(reason == "InvalidSpec" && text.contains(field), "{field}: {reason}: {text}");
    }
}

#[test]
fn a_backend_is_refused_where_it_is_the_gateway_its_node_or_somebody_elses() {
    for (url, reason) in [
        ("http://127.0.0.1:9090", "ForbiddenBackend"),
        ("http://169.254.169.254/latest", "ForbiddenBackend"),
        ("http://[::1]", "ForbiddenBackend"),
        ("http://vllm.team-b.svc", "ForbiddenBackend"),
        ("file:///etc/passwd", "InvalidBackend"),
    ] {
        let (found, text) = refused(external(json!({"backendUrl": url})));
        assert_eq!(found, reason, "{url}");
        assert!(!text.contains("memory"), "{url} needs none: {text}");
    }
    let elsewhere = object(external(json!({"backendUrl": "https://api.example.com/v1"})));
    assert!(
        convert(&elsewhere, ConversionPolicy { any_backend: true, ..ConversionPolicy::default() }).is_ok()
    );
    let inside = object(external(json!({"backendUrl": "http://127.0.0.1"})));
    assert!(
        convert(&inside, ConversionPolicy { any_backend: true, ..ConversionPolicy::default() }).is_err(),
        "no flag allows that"
    );
}

#[test]
fn junk_that_slipped_past_the_schema_is_a_reason_and_a_sentence() {
    for (fields, reason, says) in [
        (json!({"memory": "lots"}), "InvalidQuantity", "memory: 'lots' is not a size"),
        (json!({"memory": "99999999Pi"}), "InvalidQuantity", "99999999Pi"),
        (json!({"memory": -1}), "InvalidQuantity", "'-1'"),
        (json!({"memory": 1.5e300}), "InvalidQuantity", "memory"),
        (json!({"memory": true}), "InvalidQuantity", "'true'"),
        (json!({"memory": "0"}), "InvalidSpec", "more than 0"),
        (json!({"memory": null}), "InvalidSpec", "memory is missing"),
        (json!({"memoryAsleep": "81Gi"}), "InvalidSpec", "at most memory"),
        (json!({"hostMemory": "Gi"}), "InvalidQuantity", "hostMemory"),
        (json!({"variants": [{"name": "a", "memory": "x"}]}), "InvalidQuantity", "variants 'a': memory: 'x'"),
        (json!({"variants": [{"name": "a"}, {"name": "a"}]}), "InvalidSpec", "two variants are named 'a'"),
        (
            json!({"variants": [{"name": "a", "template": {"spec": {"containers": [{"image": "x"}]}}}]}),
            "InvalidTemplate",
            "variants 'a': template: spec.containers has an item without 'name'",
        ),
        (json!({"variants": [{"name": "a", "minReplicas": 2}]}), "InvalidSpec", "minReplicas (2)"),
        (
            json!({"variants": [{"name": "A b"}]}),
            "InvalidSpec",
            "variants 'A b': the name must be a DNS label",
        ),
        (json!({"variants": [{"name": "a", "cost": -1}]}), "InvalidSpec", "variants 'a': cost (-1)"),
        (
            json!({"minReplicas": 3, "variants": [{"name": "a", "maxReplicas": 2}]}),
            "InvalidSpec",
            "minReplicas (3) must be at most the maxReplicas of all variants together (2)",
        ),
        (json!({"replicas": 1}), "InvalidSpec", "replicas is only for saturation.actuation external"),
        (json!({"saturation": {"actuation": "external"}}), "InvalidSpec", "external needs replicas"),
        (json!({"saturation": {"stabilisation": "soon"}}), "InvalidDuration", "saturation.stabilisation"),
        (
            json!({"saturation": {"kvCacheThreshold": 80}}),
            "InvalidSpec",
            "kvCacheThreshold (80) must be between 0 and 1",
        ),
        (
            json!({"saturation": {"queueLengthThreshold": 5, "queueSpareTrigger": 6}}),
            "InvalidSpec",
            "saturation.queueSpareTrigger (6) must be at most saturation.queueLengthThreshold (5)",
        ),
        (
            json!({"saturation": {"scaleToZero": {"enabled": false, "after": "1m"}}}),
            "InvalidSpec",
            "saturation.scaleToZero.after is only for enabled true",
        ),
        (
            json!({"saturation": {"scaleToZero": {"after": "0s"}}}),
            "InvalidSpec",
            "saturation.scaleToZero.after must be longer than 0",
        ),
        (
            json!({"minReplicas": 1, "saturation": {"scaleToZero": {}}}),
            "InvalidSpec",
            "saturation.scaleToZero contradicts minReplicas,",
        ),
        (
            json!({"variants": [{"name": "a", "minReplicas": 1}], "saturation": {"scaleToZero": {}}}),
            "InvalidSpec",
            "saturation.scaleToZero contradicts minReplicas of a variant,",
        ),
        (
            json!({"pinned": true, "saturation": {"scaleToZero": {}}}),
            "InvalidSpec",
            "saturation.scaleToZero contradicts pinned",
        ),
        (json!({"cooldownPeriod": "soon"}), "InvalidDuration", "cooldownPeriod: 'soon'"),
        (json!({"cooldownPeriod": 10}), "InvalidDuration", "'10'"),
        (json!({"startTimeout": "never"}), "InvalidDuration", "startTimeout"),
        (json!({"startTimeout": "0s"}), "InvalidSpec", "longer than 0"),
        (json!({"stopAfter": "1m"}), "InvalidSpec", "is shorter than cooldownPeriod"),
        (json!({"queue": {"maxWait": "x"}}), "InvalidDuration", "queue.maxWait"),
        (json!({"modelName": ""}), "InvalidName", "the name is empty"),
        (json!({"modelName": "a b"}), "InvalidName", "white space"),
        (json!({"aliases": ["../x"]}), "InvalidName", "'../x'"),
        (json!({"aliases": ["llama"]}), "InvalidSpec", "listed twice"),
        (json!({"accelerators": 0}), "InvalidSpec", "accelerators"),
        (json!({"maxReplicas": 0}), "InvalidSpec", "maxReplicas"),
        (json!({"maxConcurrency": 0}), "InvalidSpec", "maxConcurrency"),
        (json!({"backendUrl": "http://x"}), "InvalidSpec", "backendUrl is only for mode external"),
        (json!({"containerImage": null}), "InvalidSpec", "set template or containerImage"),
        (json!({"template": {"spec": {}}}), "InvalidSpec", "exclude each other"),
        (json!({"template": {"spec": {}}, "containerImage": null}), "InvalidTemplate", "no container"),
        (json!({"template": {}, "containerImage": null}), "InvalidTemplate", "no container"),
        (json!({"engine": {"container": "x"}}), "InvalidTemplate", "no container 'x': use one of engine"),
        (json!({"engine": {"passthrough": ["/sleep"]}}), "InvalidSpec", "never forwards a management path"),
        (json!({"engine": {"kind": "vllm", "passthrough": ["/x"]}}), "InvalidSpec", "custom engines"),
        (json!({"dependencies": ["llama"]}), "DependencyCycle", "llama needs llama"),
        (external(json!({"backendUrl": null})), "InvalidSpec", "mode external needs a backendUrl"),
    ] {
        let (found, text) = refused(fields.clone());
        assert_eq!(found, reason, "{fields}: {text}");
        assert!(text.contains(says), "{fields}: {text}");
    }
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let fields = json!({"memory": "x", "cooldownPeriod": "y", "modelName": " ", "startTimeout": "z", "maxReplicas": 0});
    let refused = convert(&object(fields), ConversionPolicy::default()).unwrap_err();
    let reasons: Vec<_> = refused.all().iter().map(Rejection::reason).collect();
    assert_eq!(
        reasons,
        ["InvalidName", "InvalidDuration", "InvalidDuration", "InvalidQuantity", "InvalidSpec"]
    );
}
