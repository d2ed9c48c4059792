//! Vectors of the token capacity, which sizes a step.

use rouse::{
    saturation::{
        Autoscaler, EngineTokenLimits, ModelLoad, Profile, ReplicaMetrics, Role, TokenAnalysis,
        TokenCapacity, TokenLengths, TokenMetrics, VariantState,
    },
    units::{Millis, Tick},
};
use serde_json::Value;

use crate::{
    NOW, PROFILES, policy, replicas, state, target,
    vectors::{count, id, number, section},
};

/// A replica that reports tokens, at this length of its queue.
fn measured(used: f64, total: f64, queue: f64) -> ReplicaMetrics {
    let tokens = Some(TokenMetrics { used, total });
    let metrics = replicas("v1", &[(0.5, queue)]).into_iter().next().unwrap();
    ReplicaMetrics { tokens, ..metrics }
}

fn load(metrics: Vec<ReplicaMetrics>, input: f64, output: f64) -> ModelLoad {
    ModelLoad {
        states: vec![state("v1", 10.0, u32::try_from(metrics.len()).unwrap())],
        replicas: metrics,
        lengths: Some(TokenLengths { input, output }),
        ..ModelLoad::default()
    }
}

fn analysis(autoscaler: &mut Autoscaler, load: &ModelLoad, now: Tick) -> TokenAnalysis {
    autoscaler.decide(load, now).tokens[&Role::Both].clone()
}

fn capacity(autoscaler: &mut Autoscaler, load: &ModelLoad) -> TokenCapacity {
    analysis(autoscaler, load, NOW).variants["v1"]
}

fn close(at: &str, found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-6, "{at}: {found} instead of {expected}");
}

/// A replica of a vector, with lengths of its own or those of the first vectors.
fn measured_load(row: &Value) -> ModelLoad {
    let length = |name: &str, default: f64| row.get(name).map_or(default, number);
    let metrics = measured(number(&row["tokens"]), number(&row["cap"]), number(&row["q"]));
    load(vec![metrics], length("I", 100.0), length("O", 50.0))
}

/// A variant without replicas, of which only the engine's flags are known.
fn unmeasured_load(vector: &Value, total: Option<f64>) -> ModelLoad {
    let length = |name: &str| vector.get(name).map_or(0.0, number);
    let default = EngineTokenLimits::default();
    let limits = EngineTokenLimits {
        batched: vector.get("B").map_or(default.batched, count),
        sequences: vector.get("S").map_or(default.sequences, count),
        total,
    };
    let states = vec![VariantState { limits: Some(limits), ..state("v1", 10.0, 0) }];
    let lengths = Some(TokenLengths { input: length("I"), output: length("O") });
    ModelLoad { states, lengths, ..ModelLoad::default() }
}

fn assert_capacity(at: &str, vector: &Value, found: TokenCapacity) {
    let expected = |name: &str| vector.get(name).map(number);
    if let Some(expected) = expected("k1") {
        close(at, found.k1.unwrap(), expected);
    }
    if let Some(expected) = expected("k2") {
        // A limit of 0 means that nothing tells it.
        close(at, found.k2.unwrap_or_default(), expected);
    }
    if let Some(expected) = expected("perReplica") {
        close(at, found.per_replica, expected);
    }
    assert!(expected("k2").or_else(|| expected("perReplica")).is_some(), "{at}: nothing is expected");
}

/// The capacity observed at a full replica is remembered for later.
fn assert_history(vector: &Value, autoscaler: &mut Autoscaler) {
    let first = section("token_capacity").iter().find(|other| vector["first"] == other["id"]).unwrap();
    let _observed = autoscaler.decide(&measured_load(first), NOW);
    let found = capacity(autoscaler, &measured_load(&vector["then"]));
    assert_capacity(id(vector), vector, found);
}

/// `required = max(0, demand/0.85 - anticipated)`, `spare = max(0, supply - demand/0.70)`.
fn assert_demand(at: &str, autoscaler: &mut Autoscaler) {
    let mut busy = load(vec![measured(12_000.0, 16_000.0, 2.0)], 100.0, 50.0);
    let found = analysis(autoscaler, &busy, NOW);
    close(at, found.demand, 12_000.0 + 2.0 * 150.0);
    close(at, found.supply, 12_800.0);
    close(at, found.required, 12_300.0 / 0.85 - 12_800.0);
    close(at, found.spare, 0.0);
    // A replica that is starting is anticipated, and not yet supply.
    for state in &mut busy.states {
        (state.current, state.pending) = (2, 1);
    }
    let found = analysis(autoscaler, &busy, NOW);
    close(at, found.supply, 12_800.0);
    close(at, found.anticipated, 25_600.0);
    close(at, found.required, 0.0);
    let quiet = load(vec![measured(4_000.0, 16_000.0, 0.0)], 100.0, 50.0);
    close(at, analysis(autoscaler, &quiet, NOW).spare, 12_800.0 - 4_000.0 / 0.70);
    // Requests that wait at the gateways are demand too.
    let parked = ModelLoad { parked: 10, ..quiet };
    close(at, analysis(autoscaler, &parked, NOW).demand, 4_000.0 + 10.0 * 150.0);
}

/// Observations count for outputs of the same class, and the last ten of them.
fn assert_buckets(at: &str, autoscaler: &mut Autoscaler) {
    let full = |used: f64, output: f64| load(vec![measured(used, 16_000.0, 6.0)], 100.0, output);
    let free = |output: f64| load(vec![measured(10.0, 16_000.0, 0.0)], 100.0, output);
    for (output, observed) in [(99.0, 1_000.0), (100.0, 2_000.0), (500.0, 3_000.0)] {
        close(at, capacity(autoscaler, &full(observed, output)).per_replica, observed);
    }
    for (output, observed) in
        [(0.0, 1_000.0), (99.9, 1_000.0), (100.0, 2_000.0), (499.9, 2_000.0), (500.0, 3_000.0)]
    {
        close(at, capacity(autoscaler, &free(output)).per_replica, observed);
    }
    for n in 1..=11 {
        let _observed = autoscaler.decide(&full(f64::from(n) * 1_000.0, 50.0), NOW);
    }
    close(at, capacity(autoscaler, &free(50.0)).per_replica, 6_500.0);
}

#[test]
fn every_profile_measures_token_capacity_as_the_vectors_say() {
    for vector in section("token_capacity") {
        for profile in PROFILES {
            let mut autoscaler = Autoscaler::new(policy(profile));
            let load = match id(vector) {
                "v04-k2-history" => {
                    assert_history(vector, &mut autoscaler);
                    continue;
                }
                "v12-post-step" => {
                    assert_demand(id(vector), &mut autoscaler);
                    continue;
                }
                "v13-buckets" => {
                    assert_buckets(id(vector), &mut autoscaler);
                    continue;
                }
                _ if vector.get("tokens").is_some() => measured_load(vector),
                // The vector gives k1, which is 80 % of the size.
                "v05-k2-derived" => unmeasured_load(vector, Some(16_000.0)),
                _ => unmeasured_load(vector, vector.get("total").map(number)),
            };
            let at = format!("{} in {profile:?}", id(vector));
            assert_capacity(&at, vector, capacity(&mut autoscaler, &load));
        }
    }
}

#[test]
fn tokens_size_the_step_where_every_replica_reports_them() {
    // By the share of the KV cache one more replica is enough; by the tokens that wait, four more are.
    let mut metrics = measured(12_000.0, 16_000.0, 4.0);
    metrics.kv_use = Some(0.75);
    let load = load(vec![metrics], 6_000.0, 2_000.0);
    let now = NOW + Millis::secs(1);
    let decision = Autoscaler::new(policy(Profile::Rouse)).decide(&load, now);
    // (12,000 + 4 * 8,000) / 0.85 - 12,800 = 38,965, which is 3.04 replicas of 12,800.
    assert_eq!(decision.analyses[&Role::Both].shortage, 4);
    assert_eq!(target(&decision, "v1"), 5);
    let mut unmeasured = load;
    unmeasured.replicas[0].tokens = None;
    let decision = Autoscaler::new(policy(Profile::Rouse)).decide(&unmeasured, now);
    assert_eq!(target(&decision, "v1"), 2, "the queue of four takes two replicas at two each");
    for profile in [Profile::Doc, Profile::Latest] {
        let decision = Autoscaler::new(policy(profile)).decide(&unmeasured, now);
        assert_eq!(target(&decision, "v1"), 2, "{profile:?} adds one at a time");
    }
}
