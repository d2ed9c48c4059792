use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use rouse::{
    model::{EngineId, VariantName},
    saturation::{Autoscaler, Decision, Role, TargetReason, VariantEngines, ZeroRule},
    units::{Generation, Millis},
};
use rouse_net::engine_load::{EngineTokens, LengthCounter};
use serde_json::{Value, json};

use super::*;
use crate::{
    convert::ConversionPolicy,
    crd::{AcceleratorPool, InferenceModel},
    index::{ClusterIndex, WatchScope},
};

const NOW: Tick = Tick(1_780_000_000_000);

/// A model with two variants, the cheaper one in the pool `l4` and the other in `h100`: four accelerators each, one for
/// an engine.
struct DecidedWorld {
    index: SaturationIndex,
    tokens: TokenReadings,
    fleet: FleetLoad,
    replicas: Vec<ReplicaMetrics>,
    /// Accelerators that each pool's ledger has reserved.
    held: BTreeMap<String, u32>,
    unused_since: Option<Tick>,
}

impl DecidedWorld {
    /// `roles`: those of the two variants.
    fn new(saturation: &Value, roles: [&str; 2]) -> Self {
        let policy = ConversionPolicy { any_backend: false, dual_pods: None };
        let mut cluster = ClusterIndex::new(WatchScope { policy, nodes: true, namespaces: 1 });
        for name in ["l4", "h100"] {
            let pool: AcceleratorPool = serde_json::from_value(json!({
                "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "metadata": {"name": name},
                "spec": {"nodeSelector": {"pool": name}},
            }))
            .unwrap();
            cluster.apply(pool);
            let node: Node = serde_json::from_value(json!({
                "metadata": {"name": format!("node-{name}"), "labels": {
                    "pool": name, "nvidia.com/gpu.memory": "81920",
                }},
                "status": {
                    "allocatable": {"nvidia.com/gpu": "4"},
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }))
            .unwrap();
            cluster.apply(node);
        }
        let variant = |name: &str, role: &str, cost: u32| {
            let selector = json!({"pool": name});
            json!({"name": name, "role": role, "cost": cost, "nodeSelector": selector})
        };
        let model: InferenceModel = serde_json::from_value(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
            "metadata": {"name": "qwen", "namespace": "chat", "uid": "u1"},
            "spec": {
                "modelName": "qwen", "memory": "40Gi", "containerImage": "vllm:1", "maxReplicas": 4,
                "saturation": saturation,
                "variants": [variant("l4", roles[0], 5), variant("h100", roles[1], 20)],
            },
        }))
        .unwrap();
        cluster.apply(model);
        let mut index = SaturationIndex::new(1);
        index.set_resolved(cluster.resolved());
        let variants = ["l4", "h100"].map(|name| (VariantName::from(name), VariantEngines::default()));
        Self {
            index,
            tokens: TokenReadings::default(),
            fleet: FleetLoad { variants: variants.into(), ..FleetLoad::default() },
            replicas: Vec::new(),
            held: BTreeMap::new(),
            unused_since: None,
        }
    }

    /// Adds an awake engine with this use of its KV cache, and as many waiting requests.
    fn engine(&mut self, variant: &str, kv_use: f64, waiting: f64) -> EngineId {
        let variant: VariantName = variant.into();
        let engines = self.fleet.variants.entry(variant.clone()).or_default();
        let id = EngineId::of_variant("qwen".into(), variant.clone(), engines.current);
        engines.current += 1;
        let (generation, since) = (Generation(1), Tick(0));
        self.fleet.awake.push(AwakeEngine { id: id.clone(), generation, address: None, since });
        let (kv_use, waiting) = (Some(kv_use), Some(waiting));
        let replica = id.to_string();
        self.replicas.push(ReplicaMetrics { replica, variant, kv_use, waiting, ..ReplicaMetrics::default() });
        id
    }

    fn decide(&self) -> Decision {
        let model = self.index.models().next().unwrap();
        let sources = LoadSources { index: &self.index, tokens: &self.tokens };
        let budget = self.index.accelerator_budget(&self.held);
        let load = ModelLoad {
            idle_for: self.unused_since.map(|since| NOW.since(since)),
            accelerators: model.is_limited().then(|| budget.pool()),
            ..sources.load(model, &self.fleet, self.replicas.clone())
        };
        Autoscaler::new(model.policy(Millis::ZERO)).decide(&load, NOW)
    }

    /// The targets of the two variants.
    fn targets(&self) -> [u32; 2] {
        let decision = self.decide();
        ["l4", "h100"].map(|name| decision.target(&name.into()).unwrap().replicas)
    }
}

#[test]
fn each_role_is_decided_by_its_own_load_and_gets_an_engine_once_the_model_serves() {
    let mut split = DecidedWorld::new(&json!({}), ["prefill", "decode"]);
    split.engine("l4", 0.95, 9.0);
    let decision = split.decide();
    let target = decision.target(&"h100".into()).unwrap();
    assert_eq!((target.role, target.replicas), (Role::Decode, 1), "no request can be answered without it");

    split.engine("h100", 0.05, 0.0);
    let decision = split.decide();
    assert_eq!(decision.analyses.keys().copied().collect::<Vec<_>>(), [Role::Decode, Role::Prefill]);
    assert_eq!(split.targets(), [4, 1]);

    let mut whole = DecidedWorld::new(&json!({}), ["both", "both"]);
    whole.engine("l4", 0.1, 0.0);
    assert_eq!(whole.targets(), [1, 0], "the other variant is not needed");
}

#[test]
fn with_the_limiter_targets_rise_only_by_what_the_pools_ledgers_leave() {
    for (limiter, expected, without_h100) in [("none", [4, 1], [4, 1]), ("inventory", [2, 3], [2, 0])] {
        let mut world = DecidedWorld::new(&json!({"limiter": limiter}), ["both", "both"]);
        world.engine("l4", 0.95, 9.0);
        world.held = BTreeMap::from([("l4".to_owned(), 3), ("h100".to_owned(), 0)]);
        assert_eq!(world.targets(), expected, "{limiter}");
        world.held.insert("h100".to_owned(), 4);
        assert_eq!(world.targets(), without_h100, "{limiter}");
    }
}

#[test]
fn a_model_goes_to_zero_after_its_own_time_or_keeps_one_engine_for_ever() {
    let mut world = DecidedWorld::new(&json!({"scaleToZero": {"after": "5m"}}), ["both", "both"]);
    world.engine("l4", 0.0, 0.0);
    world.engine("h100", 0.0, 0.0);
    let since = |seconds: u64| Some(Tick(NOW.0 - Millis::secs(seconds).0));
    world.unused_since = since(300);
    assert_eq!(world.targets(), [0, 0]);
    let decision = world.decide();
    let reason = &decision.target(&"l4".into()).unwrap().reason;
    assert_eq!(*reason, TargetReason::IdleToZero { idle_for: Millis::secs(300) });
    for unused_since in [since(299), None] {
        world.unused_since = unused_since;
        assert!(world.targets()[0] > 0, "{unused_since:?}");
    }

    let world = DecidedWorld::new(&json!({"scaleToZero": {"enabled": false}}), ["both", "both"]);
    assert_eq!(world.targets(), [1, 0], "the cheapest one");
    let model = world.index.models().next().unwrap();
    assert_eq!(model.policy(Millis::ZERO).zero, ZeroRule::KeepOne);
    let without = DecidedWorld::new(&json!({}), ["both", "both"]);
    assert_eq!(without.targets(), [0, 0]);
}

#[test]
fn a_step_is_sized_in_tokens_where_every_engine_reports_its_size() {
    let targets = |analyzer: &str, sizes: usize| {
        let mut world = DecidedWorld::new(&json!({"analyzer": analyzer}), ["both", "both"]);
        for n in 0..2 {
            let id = world.engine("l4", 0.75, 1.0);
            // A request of 4000 tokens waits at an engine that takes 8000.
            let length = |tokens| LengthCounter { tokens, requests: 1.0 };
            let found =
                EngineTokens { kv_cache: Some(10_000.0), prompts: length(3000.0), outputs: length(1000.0) };
            if n < sizes {
                world.tokens.add(id, Generation(1), found);
            }
        }
        world.targets()
    };
    assert_eq!(targets("percent", 2), [3, 0]);
    assert_eq!(targets("tokens", 2), [4, 0]);
    assert_eq!(targets("tokens", 1), [3, 0], "the size of one is unknown");
}
