use std::collections::BTreeMap;

use rouse::{
    model::{EngineId, VariantName},
    saturation::{Autoscaler, Decision, Role, TargetReason, VariantEngines, ZeroRule},
    units::{Generation, Millis},
};
use rouse_net::engine_load::{EngineTokens, LengthCounter};
use serde_json::{Value, json};

use super::*;
use crate::{
    index::ClusterIndex,
    saturation::test_cluster::{POOLS, cluster, node, pool},
};

const NOW: Tick = Tick(1_780_000_000_000);
/// Accelerators of each node.
const ACCELERATORS: u32 = 4;

/// A model with two variants, the cheaper one in the pool `l4` and the other in `h100`, with an accelerator for each
/// engine.
struct DecidedWorld {
    index: SaturationIndex,
    tokens: TokenReadings,
    fleet: FleetLoad,
    replicas: Vec<ReplicaMetrics>,
    /// Accelerators that each pool's ledger has reserved.
    held: BTreeMap<String, u32>,
    unused_since: Option<Tick>,
}

/// The cluster of a world. `roles`: those of the two variants.
fn scaled_cluster(saturation: &Value, roles: [&str; 2]) -> ClusterIndex {
    let variant = |name: &str, role: &str, cost: u32| {
        let selector = json!({"pool": name});
        json!({"name": name, "role": role, "cost": cost, "nodeSelector": selector})
    };
    let variants = json!([variant("l4", roles[0], 5), variant("h100", roles[1], 20)]);
    let spec = json!({"maxReplicas": 4, "saturation": saturation, "variants": variants});
    cluster(ACCELERATORS, &spec)
}

impl DecidedWorld {
    /// A world with four accelerators in each pool. `roles`: those of the two variants.
    fn new(saturation: &Value, roles: [&str; 2]) -> Self {
        Self::of(scaled_cluster(saturation, roles))
    }

    fn of(mut cluster: ClusterIndex) -> Self {
        let mut index = SaturationIndex::new(1);
        index.set_resolved(cluster.resolved());
        let variants = POOLS.map(|name| (VariantName::from(name), VariantEngines::default()));
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

    fn load(&self, model: ScaledModel<'_>) -> ModelLoad {
        let sources = LoadSources { index: &self.index, tokens: &self.tokens };
        ModelLoad {
            idle_for: self.unused_since.map(|since| NOW.since(since)),
            ..sources.load(model, &self.fleet, self.replicas.clone())
        }
    }

    fn decide(&self) -> Decision {
        let model = self.index.models().next().unwrap();
        let budget = self.index.accelerator_budget(&self.held);
        let accelerators = model.is_limited().then(|| budget.pool());
        let load = ModelLoad { accelerators, ..self.load(model) };
        Autoscaler::new(model.policy(Millis::ZERO)).decide(&load, NOW)
    }

    /// The targets of the two variants.
    fn targets(&self) -> [u32; 2] {
        let decision = self.decide();
        POOLS.map(|name| decision.target(&name.into()).unwrap().replicas)
    }

    /// Makes a step, and returns the accelerators of each pool that it leaves to the models after it. `external`: what
    /// another autoscaler asks for.
    fn left_after_step(&self, external: Option<u32>) -> [u32; 2] {
        let model = self.index.models().next().unwrap();
        let mut budget = self.index.accelerator_budget(&self.held);
        let input = ScalingInput {
            policy: model.policy(Millis::ZERO),
            load: self.load(model),
            fleet: &self.fleet,
            availability: &MetricsAvailability::Known,
            external,
        };
        step(&mut ModelScaling::default(), input, model.is_limited(), &mut budget, NOW);
        POOLS.map(|pool| budget.pool().free()[pool])
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
fn a_pool_whose_number_of_accelerators_is_unknown_lifts_no_limit_of_another_of_its_type() {
    let mut cluster = scaled_cluster(&json!({"limiter": "inventory"}), ["both", "both"]);
    let labels = json!({"nvidia.com/gpu.product": "H100"});
    cluster.apply(node("l4", ACCELERATORS, &json!({"metadata": {"labels": labels}})));
    let uncounted =
        json!({"metadata": {"labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": null}}});
    cluster.apply(node("h100", ACCELERATORS, &uncounted));
    cluster.apply(pool("h100", &json!({"memory": "320Gi"})));
    let mut world = DecidedWorld::of(cluster);
    world.engine("l4", 0.95, 9.0);
    world.held.insert("l4".to_owned(), ACCELERATORS);
    assert_eq!(world.targets(), [1, 4], "there is none free for a further engine in l4");
}

#[test]
fn every_model_takes_what_it_starts_from_those_that_are_decided_after_it() {
    for limiter in ["none", "inventory"] {
        let mut cluster = scaled_cluster(&json!({"limiter": limiter}), ["both", "both"]);
        // The pool l4 has accelerators of two types.
        for (name, product) in [("node-l4", "L4"), ("node-l4-2", "L40S")] {
            let labels = json!({"nvidia.com/gpu.product": product});
            cluster.apply(node("l4", ACCELERATORS, &json!({"metadata": {"name": name, "labels": labels}})));
        }
        let mut world = DecidedWorld::of(cluster);
        world.engine("l4", 0.95, 9.0);
        world.held.insert("l4".to_owned(), 1);
        assert_eq!(world.targets(), [4, 1], "{limiter}");
        assert_eq!(world.left_after_step(None), [4, 3], "{limiter}");
        assert_eq!(world.left_after_step(Some(3)), [5, 4], "{limiter}: another autoscaler asks for three");
        assert_eq!(world.left_after_step(Some(1)), [7, 4], "{limiter}: it asks for what runs");
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
