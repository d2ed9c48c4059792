//! Vectors of the analysis: from metrics to spare capacity.

use std::collections::BTreeMap;

use rouse::saturation::{ModelAnalysis, ModelLoad, Profile, ReplicaMetrics, Role, ScaleUpCause, Thresholds};
use serde_json::Value;

use crate::{
    NOW, PROFILES, decide, replicas, state, target,
    vectors::{count, fields, id, items, number, section, text},
};

/// The outputs are rounded to six digits, and so are some of the inputs.
const TOLERANCE: f64 = 1.5e-6;

/// Where the default profile departs from the vectors: half of the replicas are saturated and the mean hides it.
const HALF_SATURATED: [&str; 4] = [
    "a09-mixed-saturation",
    "a29-one-saturated-one-idle",
    "a30-nine-saturated-one-idle",
    "a32-zero-triggers-all-saturated",
];

fn thresholds(vector: &Value) -> Thresholds {
    let Some(numbers) = vector["cfg"].as_array() else {
        return Thresholds::default();
    };
    Thresholds {
        kv_cache: number(&numbers[0]),
        queue_length: number(&numbers[1]),
        kv_spare_trigger: number(&numbers[2]),
        queue_spare_trigger: number(&numbers[3]),
        ..Thresholds::default()
    }
}

/// The replicas of a vector, and a state for each of their variants. Without replicas, one variant runs none.
fn load(vector: &Value) -> ModelLoad {
    let metrics = items(&vector["metrics"]).map(|row| ReplicaMetrics {
        replica: text(&row["pod"]).to_owned(),
        variant: text(&row["v"]).into(),
        kv_use: Some(number(&row["kv"])),
        waiting: Some(number(&row["q"])),
        ..ReplicaMetrics::default()
    });
    let replicas: Vec<ReplicaMetrics> = metrics.collect();
    let mut current: BTreeMap<&str, u32> = BTreeMap::new();
    for metrics in &replicas {
        *current.entry(metrics.variant.as_str()).or_default() += 1;
    }
    if current.is_empty() {
        current.insert("v1", 0);
    }
    let states = current.into_iter().map(|(variant, current)| state(variant, 10.0, current)).collect();
    ModelLoad { replicas, states, thresholds: thresholds(vector), ..ModelLoad::default() }
}

fn close(at: &str, found: f64, expected: &Value) {
    let expected = number(expected);
    assert!((found - expected).abs() <= TOLERANCE, "{at}: {found} instead of {expected}");
}

fn assert_model(at: &str, analysis: &ModelAnalysis, expected: &Value) {
    assert_eq!(analysis.total, count(&expected["total"]), "{at}: total");
    assert_eq!(analysis.non_saturated, count(&expected["nonSaturated"]), "{at}: nonSaturated");
    close(&format!("{at}: avgSpareKv"), analysis.avg_spare_kv, &expected["avgSpareKv"]);
    close(&format!("{at}: avgSpareQueue"), analysis.avg_spare_queue, &expected["avgSpareQueue"]);
    assert_eq!(analysis.scale_down_safe, expected["scaleDownSafe"], "{at}: scaleDownSafe");
    for (name, found) in [
        ("remainingSpareKv", analysis.remaining_spare_kv),
        ("remainingSpareQueue", analysis.remaining_spare_queue),
    ] {
        assert_eq!(found.is_some(), !expected[name].is_null(), "{at}: {name}");
        if let Some(found) = found {
            close(&format!("{at}: {name}"), found, &expected[name]);
        }
    }
}

fn assert_variants(at: &str, analysis: &ModelAnalysis, expected: &Value) {
    assert_eq!(analysis.variants.len(), fields(expected).count(), "{at}: variants");
    for (name, expected) in fields(expected) {
        let (at, found) = (format!("{at}: {name}"), &analysis.variants[name]);
        assert_eq!(found.replicas, count(&expected["replicas"]), "{at}");
        assert_eq!(found.non_saturated, count(&expected["nonSaturated"]), "{at}");
        assert_eq!(found.unknown, 0, "{at}");
        let saturated: Vec<&str> = items(&expected["saturatedPods"]).map(text).collect();
        assert_eq!(found.saturated, saturated, "{at}");
        close(&at, found.max_kv, &expected["maxKv"]);
        close(&at, found.max_queue, &expected["maxQueue"]);
        close(&at, found.avg_kv, &expected["avgKv"]);
        close(&at, found.avg_spare_kv, &expected["avgSpareKv"]);
        close(&at, found.avg_spare_queue, &expected["avgSpareQueue"]);
    }
}

#[test]
fn every_profile_analyses_as_the_vectors_say() {
    for vector in section("analyze") {
        for profile in PROFILES {
            let at = format!("{} in {profile:?}", id(vector));
            let decision = decide(profile, &load(vector));
            assert_eq!(decision.decided_at, NOW, "{at}");
            let analysis = &decision.analyses[&Role::Both];
            assert_model(&at, analysis, &vector["expect"]);
            assert_variants(&at, analysis, &vector["expect_variants"]);
            let cause = serde_json::to_value(analysis.cause).unwrap();
            if profile == Profile::Rouse && HALF_SATURATED.contains(&id(vector)) {
                assert_eq!(vector["expect"]["scaleUp"], false, "{at}: it does not depart from the vector");
                assert_eq!(analysis.cause, ScaleUpCause::Saturated, "{at}");
            } else {
                assert_eq!(cause, vector["expect"]["scaleUpCause"], "{at}");
            }
            assert_eq!(analysis.scale_up, cause != "none", "{at}");
            assert_eq!(analysis.shortage > 0, analysis.scale_up, "{at}");
        }
    }
}

#[test]
fn no_departure_is_listed_without_its_vector() {
    for listed in HALF_SATURATED {
        assert!(section("analyze").iter().any(|vector| id(vector) == listed), "{listed}");
    }
}

/// Sequence s04: the two examples of the design document.
#[test]
fn the_examples_of_the_document_fall_on_both_sides_of_the_trigger() {
    let vectors = section("sequences");
    assert!(vectors.iter().any(|vector| id(vector) == "s04-doc-spare-examples"));
    for profile in PROFILES {
        for (second, spare, wanted) in [(0.72, 0.115, 2), (0.76, 0.095, 3)] {
            let replicas = replicas("v1", &[(0.65, 0.0), (second, 0.0)]);
            let load = ModelLoad { replicas, states: vec![state("v1", 5.0, 2)], ..ModelLoad::default() };
            let decision = decide(profile, &load);
            assert!((decision.analyses[&Role::Both].avg_spare_kv - spare).abs() < TOLERANCE);
            assert_eq!(target(&decision, "v1"), wanted, "{profile:?}: {spare}");
        }
    }
}
