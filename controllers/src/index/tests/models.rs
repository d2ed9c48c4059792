//! Tests which models are served, where, and why others are rejected.

use rouse::{
    model::{AcceleratorRequirement, EngineMemory},
    units::Bytes,
};

use super::*;
use crate::rejection::Rejection;

/// A pool `default` with one node of eight accelerators, and a valid model in it.
fn world() -> Vec<IndexedObject> {
    vec![pool("default", json!({})), node("n1", "default", json!("8")), model("good", json!({}))]
}

#[test]
fn a_model_goes_to_the_pool_that_has_all_of_its_nodes() {
    let rack = json!({"inference-pool": "default", "rack": "7"});
    let resolved = settled(world().into_iter().chain([
        model("exact", json!({"accelerators": 2, "memory": "75Gi", "memoryAsleep": "2Gi"})),
        model("narrower", json!({"nodeSelector": rack})),
    ]));
    assert_eq!(resolved.served.len(), 3);
    assert!(resolved.rejected.is_empty());
    for served in resolved.served.values() {
        assert_eq!(served.pools().collect::<Vec<_>>(), ["default"]);
        assert!(
            matches!(&served.spec.accelerators, AcceleratorRequirement::InPool { pool, .. } if pool.as_str() == "default")
        );
        assert_eq!((served.blocked_by(), served.notes.len()), (None, 0));
        assert_eq!(served.spec.variants, [], "the model lists none");
    }
    let exact = &resolved.served[&object("exact")];
    let memory = EngineMemory { awake: Bytes::gib(75), asleep: Bytes::gib(2), host: Bytes::ZERO };
    assert_eq!(exact.spec.memory, memory, "on each accelerator");
    assert_eq!(exact.spec.accelerators, AcceleratorRequirement::InPool { pool: "default".into(), count: 2 });
    assert_eq!(exact.uid.as_deref(), Some("uid-exact"));
    assert_eq!(exact.pods().unwrap().container, "engine");
}

#[test]
fn what_is_wrong_with_one_object_is_told_there_and_nowhere_else() {
    let before = settled(world()).served[&object("good")].clone();
    let external =
        |url: &str| json!({"mode": "external", "backendUrl": url, "containerImage": null, "memory": null});
    let elsewhere = json!({"nodeSelector": {"inference-pool": "none"}});
    let picky = json!({"nodeSelector": {"inference-pool": "picky"}});
    let pinned = json!({"nodeSelector": {"inference-pool": "picky"}, "pinned": true});
    let least = json!({"nodeSelector": {"inference-pool": "picky"}, "minReplicas": 1});
    let namespaces = json!({"allowedNamespaces": ["other"]});
    for (bad, reason, says) in [
        (vec![model("bad", json!({"memory": "lots"}))], "InvalidQuantity", "memory: 'lots'"),
        (vec![model("bad", json!({"cooldownPeriod": "x"}))], "InvalidDuration", "cooldownPeriod"),
        (vec![model("bad", json!({"modelName": ""}))], "InvalidName", "the name is empty"),
        (vec![model("good2", json!({"modelName": "good"}))], "DuplicateName", "chat/good"),
        (vec![model("good2", json!({"modelName": "x", "aliases": ["good"]}))], "DuplicateName", "alias"),
        (vec![model("bad", elsewhere)], "NoPool", "'default' (inference-pool=default)"),
        (vec![model("bad", json!({"dependencies": ["gone"]}))], "DependencyMissing", "chat/gone"),
        (vec![model("bad", external("http://169.254.169.254/"))], "ForbiddenBackend", "metadata"),
        (vec![model("bad", external("http://127.0.0.1:1"))], "ForbiddenBackend", "127.0.0.1"),
        (vec![model("bad", json!({"mode": "dualPods"}))], "Unsupported", "dualPods"),
        (vec![pool("picky", namespaces), model("bad", picky)], "NamespaceNotAllowed", "'picky'"),
        (
            vec![pool("picky", json!({"pinnable": false})), model("bad", pinned)],
            "PinningNotAllowed",
            "'picky'",
        ),
        (
            vec![pool("picky", json!({"pinnable": false})), model("bad", least)],
            "PinningNotAllowed",
            "remove minReplicas, or",
        ),
    ] {
        let resolved = settled(bad.into_iter().chain(world()));
        let name = resolved.rejected.keys().next().unwrap_or_else(|| panic!("{reason}: all is well"));
        let (found, text) = rejected(&resolved, &name.name.clone());
        assert_eq!(found, reason, "{text}");
        assert!(text.contains(says), "{reason}: {text}");
        assert_eq!(resolved.rejected.len(), 1, "{reason}");
        assert_eq!(resolved.served.get(&object("good")), Some(&before), "{reason}: another is affected");
    }
}

#[test]
fn a_pool_without_pinned_models_names_each_field_that_keeps_an_engine_awake() {
    let picky = json!({"inference-pool": "picky"});
    let refusal = |mut fields: Value| {
        fields["saturation"] = json!({"scaleToZero": {"enabled": false}});
        let objects = [pool("picky", json!({"pinnable": false})), model("bad", fields)];
        let resolved = settled(world().into_iter().chain(objects));
        match resolved.served.get(&object("bad")) {
            Some(served) => served.notes.join("\n"),
            None => rejected(&resolved, "bad").1,
        }
    };
    let scale_to_zero = "remove saturation.scaleToZero.enabled false, or";
    let both = "remove minReplicas and saturation.scaleToZero.enabled false, or";
    let alone = refusal(json!({"nodeSelector": picky}));
    assert!(alone.contains(scale_to_zero), "{alone}");
    let with_floor = refusal(json!({"nodeSelector": picky, "minReplicas": 1}));
    assert!(with_floor.contains(both), "{with_floor}");
    let pinned = refusal(json!({"nodeSelector": picky, "pinned": true, "minReplicas": 1}));
    let all = "remove pinned and minReplicas and saturation.scaleToZero.enabled false, or";
    assert!(pinned.contains(all), "{pinned}");
    let variants = |cheap: Value, dear: Value| {
        let variants = [("cheap", 1, cheap), ("dear", 9, dear)].map(|(name, cost, fields)| {
            with(json!({"name": name, "cost": cost, "nodeSelector": {"inference-pool": "default"}}), fields)
        });
        json!({"variants": variants})
    };
    // The engine that always runs is of the cheapest variant, so the other one's own floor refuses it.
    let dear = refusal(variants(json!({}), json!({"nodeSelector": picky, "minReplicas": 1})));
    assert!(dear.contains("'dear' does not run") && dear.contains("remove minReplicas, or"), "{dear}");
    let cheap = refusal(variants(json!({"nodeSelector": picky}), json!({})));
    assert!(cheap.contains("'cheap' does not run") && cheap.contains(scale_to_zero), "{cheap}");
    let floor = json!({"nodeSelector": picky, "minReplicas": 2, "maxReplicas": 2});
    let cheap = refusal(variants(floor, json!({})));
    assert!(cheap.contains(both), "{cheap}");
}

#[test]
fn who_needs_a_model_that_no_pool_takes_is_not_served_either() {
    let nowhere = json!({"nodeSelector": {"a": "b"}});
    let resolved = settled(
        world().into_iter().chain([model("base", nowhere), model("top", json!({"dependencies": ["base"]}))]),
    );
    assert_eq!(rejected(&resolved, "base").0, "NoPool");
    assert_eq!(rejected(&resolved, "top").0, "DependencyRefused");
}

#[test]
fn what_a_model_needs_goes_by_the_names_of_models() {
    let top = json!({"modelName": "org/top", "dependencies": ["base", "elsewhere"], "minReplicas": 1});
    let elsewhere = json!({"modelName": "org/elsewhere", "mode": "external", "backendUrl": "http://vllm",
        "containerImage": null, "memory": null});
    let objects =
        [model("base", json!({"modelName": "org/base"})), model("elsewhere", elsewhere), model("top", top)];
    let resolved = settled(world().into_iter().chain(objects));
    let needs = |name: &str| resolved.served[&object(name)].spec.dependencies.clone();
    assert_eq!(needs("top"), ["org/base".into(), "org/elsewhere".into()]);
    assert_eq!((needs("base"), needs("elsewhere")), (vec![], vec![]));
    assert_eq!(resolved.served[&object("top")].spec.min_replicas, 1);
}

#[test]
fn a_model_of_a_pool_in_trouble_waits_and_says_why() {
    let mut index = ClusterIndex::new(SCOPE);
    world().into_iter().for_each(|object| index.apply(object));
    let waits = |index: &mut ClusterIndex| index.resolved().served[&object("good")].blocked_by();
    assert_eq!(waits(&mut index), None);
    index.delete(&ObjectKey::Node("n1".into()));
    let text = waits(&mut index).unwrap();
    assert!(text.contains("'default' is not ready") && text.contains("no node"), "{text}");
    index.apply(node("n1", "default", json!("8")));
    // A second pool selects the same nodes: reservations of running engines stay in the first.
    let twin = json!({"nodeSelector": {"inference-pool": "default"}});
    index.apply(pool("a-twin", twin));
    let text = waits(&mut index).unwrap();
    assert!(text.contains("'a-twin', 'default', which overlap"), "{text}");
    // Between pools of one age, the name decides.
    let pool = |index: &mut ClusterIndex| index.resolved().served[&object("good")].variants[0].pool.clone();
    assert_eq!(pool(&mut index).as_deref(), Some("a-twin"));
    let mut old = pool_at("default", json!({}), 2);
    old.metadata.creation_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    index.apply(old);
    assert_eq!(pool(&mut index).as_deref(), Some("default"));
    let metadata = ObjectMeta { name: Some("default".into()), ..ObjectMeta::default() };
    index.delete(&ObjectKey::Pool("a-twin".into()));
    assert_eq!(waits(&mut index), None);
    index.unreadable(ObjectKind::Pool, &metadata, "the ledger is cut short");
    let text = waits(&mut index).unwrap();
    assert!(text.contains("the ledger is cut short"), "{text}");
    assert_eq!(trouble(&index.resolved(), "default").0, "Unreadable");
}

#[test]
fn a_selector_of_two_pools_that_share_no_node_is_the_models_mistake() {
    let both = json!({"nodeSelector": {"inference-pool": "default", "rack": "7"}});
    let rack = json!({"nodeSelector": {"rack": "7"}});
    let resolved = settled(world().into_iter().chain([pool("rack", rack), model("both", both)]));
    let (reason, text) = rejected(&resolved, "both");
    assert_eq!(reason, "SeveralPools");
    assert!(text.contains("'default', 'rack'"), "{text}");
    assert!(resolved.pools["default"].problem.is_none());
}

#[test]
fn a_pools_terms_bind_its_models() {
    let terms = json!({
        "allowedNamespaces": ["chat", "b"],
        "namespaceQuota": {"chat": "100Gi", "*": "10Gi"},
        "maxPriority": 5,
    });
    let resolved = settled([
        pool("default", terms),
        node("n", "default", json!("8")),
        model("high", json!({"priority": 50})),
        model("low", json!({"priority": -3})),
    ]);
    let [high, low] = ["high", "low"].map(|name| &resolved.served[&object(name)]);
    assert_eq!((high.spec.priority, low.spec.priority), (5, -3));
    assert!(high.notes[0].contains("limited to 5") && low.notes.is_empty(), "{:?}", high.notes);
    assert_eq!(high.variants[0].quota, Some(Bytes::gib(100)));
    let terms = resolved.pools["default"].terms.as_ref().unwrap();
    assert_eq!(terms.quota("b"), Some(Bytes::gib(10)));
    assert!(terms.allows("b") && !terms.allows("c"));
}

#[test]
fn each_variant_that_a_pool_takes_runs_there_and_the_others_are_named() {
    let variants = json!({"variants": [
        {"name": "h100", "cost": 30, "nodeSelector": {"inference-pool": "default"}, "memory": "60Gi", "maxReplicas": 2},
        {"name": "l4", "cost": 1, "nodeSelector": {"inference-pool": "l4"}, "template": {"spec": {"priority": 1}}},
    ]});
    let mut index = ClusterIndex::new(SCOPE);
    world().into_iter().for_each(|object| index.apply(object));
    index.apply(model("m", variants));
    let of = |index: &mut ClusterIndex| index.resolved().served[&object("m")].clone();
    let served = of(&mut index);
    let [only] = served.variants.as_slice() else { panic!("{:?}", served.variants) };
    assert_eq!((only.name.as_str(), only.pool.as_deref()), ("h100", Some("default")));
    assert_eq!(served.spec.memory.awake, Bytes::gib(60));
    assert!(served.notes[0].starts_with("the variant 'l4' does not run: no AcceleratorPool matches"));
    assert!(Arc::ptr_eq(&only.engine, &served.model.engine));
    let listed = |served: &ServedModel| -> Vec<String> {
        served.spec.variants.iter().map(|variant| variant.name.to_string()).collect()
    };
    assert_eq!(listed(&served), ["h100"], "a named variant is not the default one, even alone");

    index.apply(pool("l4", json!({"memory": "24Gi"})));
    let served = of(&mut index);
    assert_eq!((listed(&served), served.notes.len()), (vec!["l4".to_owned(), "h100".to_owned()], 0));
    let [l4, h100] = served.variants.as_slice() else { panic!("{:?}", served.variants) };
    assert_eq!((l4.pool.as_deref(), h100.pool.as_deref()), (Some("l4"), Some("default")));
    assert!(
        l4.blocked_by.is_some() && h100.blocked_by.is_none(),
        "a pool without nodes takes it all the same"
    );
    assert_eq!(served.blocked_by(), None, "the other variant can start");
    let [small, large] = served.spec.variants.as_slice() else { panic!("{:?}", served.spec.variants) };
    let in_pool = |pool: &str| AcceleratorRequirement::InPool { pool: pool.into(), count: 1 };
    assert_eq!(
        (&small.accelerators, small.memory.awake, small.replicas),
        (&in_pool("l4"), Bytes::gib(40), 1)
    );
    let of_large = (&large.accelerators, large.memory.awake, large.replicas);
    assert_eq!(of_large, (&in_pool("default"), Bytes::gib(60), 2));
    assert_eq!((small.cost, large.cost), (1.0, 30.0));
    assert_eq!((l4.engine.fingerprint, h100.engine.fingerprint), (small.fingerprint, large.fingerprint));
    assert_ne!(small.fingerprint, large.fingerprint, "the cheaper one's template is patched");
    assert_eq!(served.spec.memory, small.memory, "the model's own values are the cheapest variant's");
}

#[test]
fn the_cheapest_variants_run_what_the_others_leave_of_the_models_least() {
    let least = |min: u32| {
        let variants = json!([
            {"name": "large", "cost": 9, "maxReplicas": 4, "minReplicas": 1},
            {"name": "small", "cost": 1, "maxReplicas": 2},
        ]);
        let spec = json!({"minReplicas": min, "maxReplicas": 9, "variants": variants});
        let resolved = settled(world().into_iter().chain([model("m", spec)]));
        let served = &resolved.served[&object("m")];
        let counts: Vec<u32> = served.spec.variants.iter().map(|variant| variant.min_replicas).collect();
        (counts, served.notes.clone())
    };
    assert_eq!(least(0).0, [0, 1], "the cheapest first");
    assert_eq!(least(1).0, [0, 1]);
    assert_eq!(least(3).0, [2, 1]);
    assert_eq!(least(5), (vec![2, 3], vec![]));
    let resolved = settled([
        pool("default", json!({"pinnable": false})),
        pool("own", json!({})),
        node("n1", "default", json!("8")),
        node("n2", "own", json!("8")),
        model(
            "m",
            json!({"minReplicas": 2, "maxReplicas": 2, "variants": [
                {"name": "small", "cost": 1},
                {"name": "large", "cost": 9, "maxReplicas": 1, "nodeSelector": {"inference-pool": "own"}},
            ]}),
        ),
    ]);
    let served = &resolved.served[&object("m")];
    let counts: Vec<u32> = served.spec.variants.iter().map(|variant| variant.min_replicas).collect();
    assert_eq!(counts, [0, 1], "the cheapest's pool does not allow it");
    assert!(served.notes[0].contains("only 1 of the 2 engines of minReplicas"), "{:?}", served.notes);
}

#[test]
fn engines_that_have_their_accelerators_to_themselves_may_start_together() {
    let vllm = json!({"engine": {"kind": "vllm"}});
    let explicit = |slots: u32| {
        let pool = pool("default", json!({"slots": slots}));
        let settled = settled([pool, node("n", "default", json!("8")), model("m", vllm.clone())]);
        settled.served[&object("m")].spec.explicit_memory
    };
    assert!(explicit(1) && !explicit(2));
}

#[test]
fn an_external_model_needs_no_pool() {
    let fields = json!({
        "modelName": "org/m",
        "aliases": ["short"],
        "mode": "external",
        "backendUrl": "http://vllm:8000",
        "containerImage": null,
        "memory": null,
    });
    let resolved = settled([model("m", fields)]);
    let served = resolved.find(&"org/m".into()).unwrap();
    assert_eq!(resolved.served.get(&object("m")), Some(served));
    assert_eq!(resolved.find(&"short".into()), None);
    assert!(served.is_external());
    assert_eq!((served.pools().count(), served.blocked_by(), served.pods()), (0, None, None));
    assert_eq!(served.spec.accelerators, AcceleratorRequirement::Count(0));
}

#[test]
fn what_cannot_be_read_keeps_its_name_and_what_is_deleted_serves_no_more() {
    let mut index = ClusterIndex::new(SCOPE);
    world().into_iter().for_each(|object| index.apply(object));
    let mut newer = model_at("newer", json!({"modelName": "good"}), 1);
    newer.metadata.creation_timestamp = serde_json::from_value(json!("2026-11-02T00:00:00Z")).unwrap();
    index.apply(newer);
    let metadata = |name: &str| ObjectMeta {
        name: Some(name.into()),
        namespace: Some("chat".into()),
        ..ObjectMeta::default()
    };
    index.unreadable(ObjectKind::Model, &metadata("good"), "spec.memory: a map");
    // Two models that were never readable do not conflict with each other.
    index.unreadable(ObjectKind::Model, &metadata("x"), "spec is missing");
    index.unreadable(ObjectKind::Model, &metadata("y"), "spec is missing");
    let resolved = index.resolved();
    let (reason, text) = rejected(&resolved, "good");
    assert_eq!((reason, text.as_str()), ("Unreadable", "the object cannot be read: spec.memory: a map"));
    assert_eq!(rejected(&resolved, "newer").0, "DuplicateName");
    for name in ["x", "y"] {
        let refused = &resolved.rejected[&object(name)].rejections;
        assert_eq!(refused.all(), [Rejection::Unreadable("spec is missing".into())]);
    }
    // The model is readable again, at the same generation: the index converts it again.
    index.apply(model("good", json!({})));
    assert!(index.resolved().served.contains_key(&object("good")));
    let mut going = model_at("good", json!({}), 1);
    going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-11-03T00:00:00Z")).unwrap();
    index.apply(going);
    assert_eq!(rejected(&index.resolved(), "good").0, "Terminating");
    index.delete(&ObjectKey::Model(object("good")));
    assert!(index.resolved().served.contains_key(&object("newer")));
}

#[test]
fn the_list_of_one_namespace_says_nothing_of_another() {
    let mut index = ClusterIndex::new(WatchScope { namespaces: 2, ..SCOPE });
    world().into_iter().for_each(|object| index.apply(object));
    let mut other = model_at("other", json!({}), 1);
    other.metadata.namespace = Some("team".into());
    index.apply(other);
    for kind in [ObjectKind::Pool, ObjectKind::AcceleratorNode, ObjectKind::Node] {
        let there = BTreeSet::from([ObjectKey::Pool("default".into()), ObjectKey::Node("n1".into())]);
        index.apply_list(kind, None, &there);
    }
    index.apply_list(ObjectKind::Model, Some("team"), &BTreeSet::new());
    let served = |index: &mut ClusterIndex| {
        index.resolved().served.keys().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(served(&mut index), ["chat/good"], "the other namespace is empty");
    // A restarted watch lists the same namespace again.
    index.apply_list(ObjectKind::Model, Some("team"), &BTreeSet::new());
    assert!(!index.is_complete(), "one namespace was not seen yet");
    index.apply_list(ObjectKind::Model, Some("chat"), &BTreeSet::from([ObjectKey::Model(object("good"))]));
    assert!(index.is_complete());
    assert_eq!(served(&mut index), ["chat/good"]);
}
