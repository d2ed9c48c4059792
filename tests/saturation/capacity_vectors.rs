//! Vectors of the accelerators and of zero: the limiter, the pools, and the rule for idle models.

use std::collections::BTreeMap;

use rouse::{
    model::VariantName,
    saturation::{
        AcceleratorPool, Decision, ModelLoad, Profile, ReplicaMetrics, TargetReason, VariantState, ZeroRule,
    },
    units::Millis,
};
use serde_json::Value;

use crate::{
    PROFILES, decide, decide_with, replicas, state, target,
    vectors::{count, fields, id, items, number, section, text},
};

/// Time after which an idle model goes to zero.
const RETENTION: Millis = Millis::secs(600);

fn pool(value: &Value) -> AcceleratorPool {
    fields(value).map(|(kind, number)| (kind.to_owned(), count(number))).collect()
}

fn free(pool: &AcceleratorPool) -> BTreeMap<&str, u32> {
    pool.free().iter().map(|(kind, count)| (kind.as_str(), *count)).collect()
}

fn counts(value: &Value) -> BTreeMap<&str, u32> {
    fields(value).map(|(name, value)| (name, count(value))).collect()
}

fn count_or(value: Option<&Value>, default: u32) -> u32 {
    value.map_or(default, count)
}

/// A model whose wanted numbers another autoscaler set, which is how a vector can ask for any number.
fn limited_load(vector: &Value) -> ModelLoad {
    let rows = || items(&vector["in"]);
    let of_row = |row: &Value| VariantState {
        min: count_or(row.get("min"), 0),
        max: row.get("max").map(count),
        gpus: count(&row["gpr"]),
        ..state(text(&row["v"]), row.get("cost").map_or(10.0, number), count(&row["cur"]))
    };
    let metrics = |row: &Value| -> Vec<ReplicaMetrics> {
        let kv = 0.8 - number(&row["spare"]);
        replicas(text(&row["v"]), &vec![(kv, 0.0); usize::try_from(count(&row["cur"])).unwrap()])
    };
    let wanted = |row: &Value| (VariantName::from(text(&row["v"])), count(&row["want"]));
    ModelLoad {
        replicas: rows().flat_map(metrics).collect(),
        states: rows().map(of_row).collect(),
        external: Some(rows().map(wanted).collect()),
        accelerators: Some([("gpu".to_owned(), count(&vector["free"]))].into_iter().collect()),
        ..ModelLoad::default()
    }
}

fn assert_limited(at: &str, vector: &Value, decision: &Decision) {
    for (variant, replicas) in fields(&vector["out"]) {
        assert_eq!(target(decision, variant), count(replicas), "{at}: {variant}");
    }
    assert_eq!(decision.targets.len(), fields(&vector["out"]).count(), "{at}");
    if let Some(left) = vector.get("left") {
        assert_eq!(decision.accelerators_left.as_ref().unwrap().total(), count(left), "{at}");
    }
    if let Some(limited) = vector.get("limited") {
        let found = decision.allocations.iter().filter(|allocation| allocation.limited);
        let found: Vec<&str> = found.map(|allocation| allocation.variant.as_str()).collect();
        let reasons = decision.targets.iter().filter(|t| matches!(t.reason, TargetReason::Limited { .. }));
        assert_eq!(reasons.count(), found.len(), "{at}");
        assert_eq!(found, items(limited).map(text).collect::<Vec<_>>(), "{at}");
    }
    if let Some(allocated) = vector.get("allocated") {
        let found: u32 = decision.allocations.iter().map(|allocation| allocation.accelerators).sum();
        assert_eq!(found, count(allocated), "{at}");
    }
    if let Some(order) = vector.get("serve_order") {
        let found: Vec<&str> = decision.allocations.iter().map(|served| served.variant.as_str()).collect();
        assert_eq!(found, items(order).map(text).collect::<Vec<_>>(), "{at}");
    }
}

#[test]
fn scarce_accelerators_go_where_the_vectors_say() {
    for vector in section("gpu_limiter") {
        for profile in PROFILES {
            let decision = decide(profile, &limited_load(vector));
            assert_limited(&format!("{} in {profile:?}", id(vector)), vector, &decision);
        }
    }
}

/// Decides about a variant with one replica of one accelerator that asks for more.
fn ask(profile: Profile, accelerators: AcceleratorPool, kind: &str, more: u32) -> Decision {
    let states = vec![VariantState { accelerator: kind.to_owned(), ..state("v1", 10.0, 1) }];
    let external = Some(BTreeMap::from([("v1".into(), 1 + more)]));
    let load = ModelLoad { states, external, accelerators: Some(accelerators), ..ModelLoad::default() };
    decide(profile, &load)
}

#[test]
fn a_pool_hands_out_accelerators_of_one_type_as_the_vectors_say() {
    for vector in section("gpu_pool") {
        for profile in PROFILES {
            let at = format!("{} in {profile:?}", id(vector));
            let decision = ask(profile, pool(&vector["pool"]), text(&vector["type"]), count(&vector["ask"]));
            assert_eq!(target(&decision, "v1") - 1, count(&vector["got"]), "{at}");
            let left = decision.accelerators_left.unwrap();
            assert_eq!(free(&left), counts(&vector["left"]), "{at}");
        }
    }
}

#[test]
fn the_capacity_of_nodes_adds_up_as_the_vectors_say() {
    for vector in section("gpu_capacity") {
        for profile in PROFILES {
            let at = format!("{} in {profile:?}", id(vector));
            let accelerators = fields(&vector["nodes"]).flat_map(|(_, node)| fields(node));
            let pool = accelerators.map(|(kind, number)| (kind.to_owned(), count(number))).collect();
            let left = ask(profile, pool, "", 0).accelerators_left.unwrap();
            assert_eq!(free(&left), counts(&vector["limits"]), "{at}");
            assert_eq!(left.total(), count(&vector["total"]), "{at}");
        }
    }
}

/// A model with rows of cost, current number and target. An autoscaler elsewhere set the targets.
fn idle_load(vector: &Value) -> ModelLoad {
    let of_row = |(variant, row): (&str, &Value)| state(variant, number(&row[0]), count(&row[1]));
    let wanted = |(variant, row): (&str, &Value)| (VariantName::from(variant), count(&row[2]));
    ModelLoad {
        states: fields(&vector["in"]).map(of_row).collect(),
        external: Some(fields(&vector["in"]).map(wanted).collect()),
        // No request over the retention is an idle model; a failed query is an unknown time.
        idle_for: vector["requests"].as_u64().map(|n| if n == 0 { RETENTION } else { Millis::ZERO }),
        ..ModelLoad::default()
    }
}

fn zero_rule(vector: &Value) -> ZeroRule {
    if vector["enabled"] == true { ZeroRule::After(RETENTION) } else { ZeroRule::KeepOne }
}

fn goes_to_zero(decision: &Decision) -> bool {
    decision.targets.iter().any(|target| matches!(target.reason, TargetReason::IdleToZero { .. }))
}

/// Two models with variants of the same name, one in use: each has an autoscaler of its own.
fn assert_scope(profile: Profile) {
    let states = vec![state("a", 1.0, 2)];
    let external = Some(BTreeMap::from([("a".into(), 2)]));
    let idle = ModelLoad { states, external, idle_for: Some(RETENTION), ..ModelLoad::default() };
    let used = ModelLoad { idle_for: Some(Millis::ZERO), ..idle.clone() };
    let rule = ZeroRule::After(RETENTION);
    assert_eq!(target(&decide_with(rule, profile, &idle), "a"), 0);
    assert_eq!(target(&decide_with(rule, profile, &used), "a"), 2);
}

fn assert_floor(profile: Profile) {
    let states = vec![state("a", 1.0, 2), VariantState { min: 1, ..state("b", 2.0, 1) }];
    let external = Some(BTreeMap::from([("a".into(), 2), ("b".into(), 1)]));
    let load = ModelLoad { states, external, idle_for: Some(RETENTION), ..ModelLoad::default() };
    let decision = decide_with(ZeroRule::After(RETENTION), profile, &load);
    assert_eq!((target(&decision, "a"), target(&decision, "b")), (2, 1), "{profile:?}");
}

#[test]
fn an_idle_model_goes_to_zero_or_keeps_one_as_the_vectors_say() {
    for vector in section("idle_enforcer") {
        for profile in PROFILES {
            match id(vector) {
                "e07-scope" => assert_scope(profile),
                "e08-min-above-zero" => assert_floor(profile),
                name => {
                    let decision = decide_with(zero_rule(vector), profile, &idle_load(vector));
                    for (variant, replicas) in fields(&vector["out"]) {
                        assert_eq!(target(&decision, variant), count(replicas), "{name}: {variant}");
                    }
                    assert!(fields(&vector["out"]).count() > 0, "{name}");
                    let applied = vector["applied"].as_bool().unwrap_or(false);
                    assert_eq!(goes_to_zero(&decision), applied, "{name} in {profile:?}");
                }
            }
        }
    }
}
