//! Vectors of the step: from an analysis and states to a target for each variant. And the walks of the document.

use std::collections::BTreeMap;

use rouse::{
    model::VariantName,
    saturation::{
        Autoscaler, Decision, ModelLoad, Profile, ReplicaMetrics, ScaleUpCause, StepLimits, Target,
        TargetReason, Thresholds, VariantState, analyze, targets,
    },
    units::{Millis, Tick},
};
use serde_json::Value;

use crate::{
    PROFILES, decide, policy, replicas, state,
    vectors::{count, fields, id, items, number, section, text},
};

/// A vector, the targets of the default profile, and the reason.
type Departure = (&'static str, &'static [(&'static str, u32)], &'static str);

/// Where the default profile departs from `latest`.
const DEPARTURES: [Departure; 8] = [
    ("t09-down-skips-single", &[("v1", 0), ("v2", 2)], "the dearest goes first, to its last replica"),
    ("t21-no-analysis-keeps-current", &[("a", 5), ("b", 0)], "without metrics the last decision holds"),
    ("t24-down-single-replica-everywhere", &[("a", 1), ("b", 0)], "one replica of the model is enough"),
    ("t27-clamp-max", &[("a", 2), ("b", 3)], "what the cheapest has no room for goes to the next"),
    ("t32-no-clamp-in-transition", &[("a", 4)], "bounds hold in a transition too"),
    ("t36-variant-without-any-metrics", &[("a", 3), ("b", 2)], "every variant has a target"),
    ("t37-variant-without-state", &[("a", 3)], "replicas of a variant that does not exist are ignored"),
    ("t41-scale-down-to-min-clamp", &[("a", 3), ("b", 2)], "the next dearest goes when one is at its floor"),
];

type Numbers = BTreeMap<String, u32>;

fn numbers(targets: &[Target]) -> Numbers {
    targets.iter().map(|target| (target.variant.to_string(), target.replicas)).collect()
}

/// KV use that makes the analysis signal what the vector says.
fn kv_for(signals: &Value) -> f64 {
    match (signals["scaleUp"].as_bool(), signals["scaleDownSafe"].as_bool()) {
        (Some(true), _) => 0.75,
        (_, Some(true)) => 0.0,
        _ => 0.65,
    }
}

fn metrics(rows: &Value, signals: &Value) -> Vec<ReplicaMetrics> {
    let kv = kv_for(signals);
    let of_row = |row: &Value| {
        let reporting = usize::try_from(count(&row[2])).unwrap();
        replicas(text(&row[0]), &vec![(kv, 0.0); reporting])
    };
    items(rows).flat_map(of_row).collect()
}

fn states(vector: &Value) -> Vec<VariantState> {
    let cost = |name: &str| {
        let row = items(&vector["analyses"]).find(|row| text(&row[0]) == name);
        row.map_or(VariantState::DEFAULT_COST, |row| number(&row[1]))
    };
    let of_row = |row: &Value| VariantState {
        desired: Some(count(&row["des"])).filter(|desired| *desired > 0),
        pending: count(&row["pend"]),
        min: row.get("min").map_or(0, count),
        max: row.get("max").map(count),
        ..state(text(&row["v"]), cost(text(&row["v"])), count(&row["cur"]))
    };
    items(&vector["states"]).map(of_row).collect()
}

/// The way to the targets, in the words of the vectors.
fn path(targets: &[Target]) -> String {
    let word = |target: &Target| match &target.reason {
        TargetReason::ScaleUp { .. } => Some(format!("up:{}", target.variant)),
        TargetReason::ScaleDown { .. } => Some(format!("down:{}", target.variant)),
        TargetReason::Transition(_) => Some("transition".to_owned()),
        TargetReason::NoMetrics => Some("no-analysis".to_owned()),
        TargetReason::NoneToRaise { .. } => Some("up-none-eligible".to_owned()),
        TargetReason::NoneToLower => Some("down-none-eligible".to_owned()),
        _ => None,
    };
    targets.iter().find_map(word).unwrap_or_else(|| "steady".to_owned())
}

fn departure(vector: &Value) -> Option<Numbers> {
    let (_, numbers, _) = DEPARTURES.iter().find(|(listed, _, _)| *listed == id(vector))?;
    Some(numbers.iter().map(|(variant, replicas)| ((*variant).to_owned(), *replicas)).collect())
}

fn expectation(vector: &Value, profile: Profile) -> &Value {
    &vector["expect"][if profile == Profile::Doc { "doc" } else { "latest" }]
}

/// The expected numbers; the path only where the profile takes that of the vector.
fn expected(vector: &Value, profile: Profile) -> (Numbers, Option<&str>) {
    let expected = expectation(vector, profile);
    let listed = fields(&expected["targets"]).map(|(name, replicas)| (name.to_owned(), count(replicas)));
    let listed: Numbers = listed.collect();
    match departure(vector).filter(|_| profile == Profile::Rouse) {
        Some(numbers) => {
            assert_ne!(numbers, listed, "{}: it does not depart from the vector", id(vector));
            (numbers, None)
        }
        None => (listed, Some(text(&expected["path"]))),
    }
}

/// Sets the signals of the vector, which for two vectors no load can give.
fn step_of(vector: &Value, profile: Profile) -> Vec<Target> {
    let metrics = metrics(&vector["analyses"], &vector["signals"]);
    let mut analysis = analyze(profile, &metrics, &Thresholds::default());
    analysis.scale_up = vector["signals"]["scaleUp"] == true;
    analysis.scale_down_safe = vector["signals"]["scaleDownSafe"] == true;
    analysis.shortage = u32::from(analysis.scale_up);
    analysis.cause = if analysis.scale_up { ScaleUpCause::Kv } else { ScaleUpCause::None };
    targets(profile, &analysis, &states(vector), &StepLimits::default())
}

#[test]
fn every_profile_steps_as_the_vectors_say() {
    for vector in section("targets") {
        for profile in PROFILES {
            let at = format!("{} in {profile:?}", id(vector));
            let found = step_of(vector, profile);
            let (numbers_expected, path_expected) = expected(vector, profile);
            assert_eq!(numbers(&found), numbers_expected, "{at}");
            if let Some(path_expected) = path_expected {
                assert_eq!(path(&found), path_expected, "{at}");
            }
        }
    }
}

#[test]
fn every_profile_decides_as_the_vectors_say_from_loads_that_give_their_signals() {
    for vector in section("targets") {
        for profile in PROFILES {
            let replicas = metrics(&vector["analyses"], &vector["signals"]);
            let load = ModelLoad { replicas, states: states(vector), ..ModelLoad::default() };
            let mut found = numbers(&decide(profile, &load).targets);
            let (expected, _) = expected(vector, profile);
            // A decision is about every variant; the vectors leave out those that do not report.
            for state in &load.states {
                if !expected.contains_key(state.variant.as_str()) {
                    assert_eq!(found.remove(state.variant.as_str()), Some(state.current));
                }
            }
            assert_eq!(found, expected, "{} in {profile:?}", id(vector));
        }
    }
}

#[test]
fn no_departure_is_listed_without_its_vector() {
    for (listed, _, why) in DEPARTURES {
        assert!(section("targets").iter().any(|vector| id(vector) == listed), "{listed}: {why}");
    }
}

/// A load with this many reporting replicas of each variant.
fn walk_load(rows: &[(&str, f64, u32, u32)], scale_up: bool) -> ModelLoad {
    let kv = if scale_up { 0.75 } else { 0.65 };
    let of_row = |(variant, cost, current, reporting): &(&str, f64, u32, u32)| VariantState {
        pending: current - reporting,
        ..state(variant, *cost, *current)
    };
    let metrics = rows.iter().flat_map(|(variant, _, _, reporting)| {
        replicas(variant, &vec![(kv, 0.0); usize::try_from(*reporting).unwrap()])
    });
    ModelLoad {
        replicas: metrics.collect(),
        states: rows.iter().map(of_row).collect(),
        ..ModelLoad::default()
    }
}

fn walk_in_one_step(vector: &Value, profile: Profile) {
    let rows = items(&vector["states"])
        .map(|row| (text(&row["v"]), number(&row["cost"]), count(&row["cur"]), count(&row["reporting"])));
    let rows: Vec<_> = rows.collect();
    let decision = decide(profile, &walk_load(&rows, vector["signals"]["scaleUp"] == true));
    for (variant, replicas) in fields(&vector["expect"]) {
        let found = decision.target(&VariantName::from(variant)).unwrap().replicas;
        assert_eq!(found, count(replicas), "{}: {variant} in {profile:?}", id(vector));
    }
}

fn walk_in_time(vector: &Value, profile: Profile) {
    let mut autoscaler = Autoscaler::new(policy(profile));
    let mut decisions: Vec<Decision> = Vec::new();
    for step in items(&vector["steps"]) {
        let row = ("v1", 5.0, count(&step["cur"]), count(&step["reporting"]));
        let now = Tick(0) + Millis::secs(u64::from(count(&step["t"])));
        // The autoscaler itself remembers what the vector gives as the desired number.
        let remembered = autoscaler.last().and_then(|last| last.replicas.get("v1")).copied();
        assert_eq!(remembered.unwrap_or_default(), count(&step["des"]), "{}", id(vector));
        let decision = autoscaler.decide(&walk_load(&[row], step["scaleUp"] == true), now);
        let found = decision.target(&VariantName::from("v1")).unwrap().replicas;
        assert_eq!(found, count(&step["target"]), "{} at {now:?} in {profile:?}", id(vector));
        decisions.push(decision);
    }
    let in_transition: Vec<bool> = decisions.iter().map(|decision| decision.transition.is_some()).collect();
    assert_eq!(in_transition, [false, true, false], "{}", id(vector));
}

#[test]
fn every_profile_walks_as_the_document_does() {
    for vector in section("sequences") {
        for profile in PROFILES {
            match id(vector) {
                "s01-doc-stable" | "s02-doc-transition" => walk_in_one_step(vector, profile),
                "s03-doc-cascade" => walk_in_time(vector, profile),
                // In `analysis_vectors`, because it is about the analysis.
                "s04-doc-spare-examples" => {}
                other => panic!("{other} has no test"),
            }
        }
    }
}
