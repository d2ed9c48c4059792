//! Vectors of the thresholds: what is valid, and which entry holds for a model.

use std::collections::BTreeMap;

use rouse::saturation::{
    Decision, ModelLoad, Profile, TargetReason, ThresholdEntry, ThresholdTable, Thresholds,
};
use serde_json::{Map, Value, json};

use crate::{
    PROFILES, decide, replicas, state,
    vectors::{fields, id, items, number, section, text},
};

const KEY: &str = "m#ns";

fn entry(value: Value) -> ThresholdEntry {
    serde_json::from_value(value).unwrap()
}

/// The entry of a vector of the validation. Its analyzers are written as texts, or as one overridden threshold.
fn validated_entry(vector: &Value) -> ThresholdEntry {
    let fields_of_cfg = ["kvCacheThreshold", "queueLengthThreshold", "kvSpareTrigger", "queueSpareTrigger"];
    let mut written: Map<String, Value> =
        fields_of_cfg.into_iter().map(str::to_owned).zip(items(&vector["in"]).cloned()).collect();
    for (name, value) in fields(&vector["extras"]) {
        let (name, value) = match name {
            "analyzers" => {
                (name, items(value).map(|analyzer| json!({"name": analyzer})).collect::<Vec<_>>().into())
            }
            "analyzer_override_up" => {
                ("analyzers", json!([{"name": "saturation", "scaleUpThreshold": value}]))
            }
            "analyzer_override_down" => {
                ("analyzers", json!([{"name": "saturation", "scaleDownBoundary": value}]))
            }
            _ => (name, value.clone()),
        };
        written.insert(name.to_owned(), value);
    }
    entry(Value::Object(written))
}

/// Decides about a model of two replicas that need a third.
fn decide_with(profile: Profile, thresholds: Thresholds) -> Decision {
    let replicas = replicas("v1", &[(0.79, 4.0); 2]);
    let states = vec![state("v1", 10.0, 2)];
    decide(profile, &ModelLoad { replicas, states, thresholds, ..ModelLoad::default() })
}

fn is_refused(decision: &Decision) -> bool {
    decision.targets.iter().any(|target| matches!(target.reason, TargetReason::BadThresholds { .. }))
}

#[test]
fn thresholds_are_valid_or_refused_as_the_vectors_say() {
    for vector in section("config_validation") {
        let (entry, is_valid) = (validated_entry(vector), vector["ok"] == true);
        let mut table = ThresholdTable::default();
        table.replace(BTreeMap::from([(KEY.to_owned(), Ok(entry.clone()))]));
        assert_eq!(table.refused().is_empty(), is_valid, "{}: {:?}", id(vector), table.refused());
        for profile in PROFILES {
            let at = format!("{} in {profile:?}", id(vector));
            // The table never hands bad thresholds out. An object's own reach a decision, which then changes nothing.
            let decision = decide_with(profile, entry.onto(Thresholds::default()));
            assert_eq!(is_refused(&decision), !is_valid, "{at}");
            assert!(is_valid || decision.targets.iter().all(|target| target.replicas == 2), "{at}");
            let resolved = table.resolve(profile, "m", "ns", None);
            assert!(!is_refused(&decide_with(profile, resolved)), "{at}");
        }
    }
}

/// The thresholds that decide for the model of a vector of the resolution.
fn resolved(vector: &Value, profile: Profile, is_merged: bool) -> Thresholds {
    let long_name = |name: &str| match name {
        "kv" => "kvCacheThreshold".to_owned(),
        "kvTrig" => "kvSpareTrigger".to_owned(),
        other => other.to_owned(),
    };
    let entries = fields(&vector["entries"]).map(|(key, values)| {
        let values = fields(values).map(|(name, value)| (long_name(name), value.clone()));
        let merge = ("merge".to_owned(), Value::from(is_merged));
        (key.to_owned(), Ok(entry(Value::Object(values.chain([merge]).collect()))))
    });
    let mut table = ThresholdTable::default();
    table.replace(entries.collect());
    let is_bad = id(vector) == "k06-invalid-entry-skipped";
    assert_eq!(table.refused().contains_key(KEY), is_bad, "{}: {:?}", id(vector), table.refused());
    let (model, namespace) = text(&vector["ask"]).split_once('#').unwrap();
    decide_with(profile, table.resolve(profile, model, namespace, None)).thresholds
}

fn assert_values(at: &str, found: Thresholds, expected: &Value) {
    for (name, value) in fields(expected) {
        let found = match name {
            "kv" => found.kv_cache,
            "kvTrig" => found.kv_spare_trigger,
            "queue" => found.queue_length,
            "queueTrig" => found.queue_spare_trigger,
            other => panic!("{other} is no threshold"),
        };
        assert!((found - number(value)).abs() < 1e-12, "{at}: {name} is {found}");
    }
}

#[test]
fn the_entry_of_a_model_is_found_as_the_vectors_say() {
    for vector in section("config_resolution") {
        for profile in PROFILES {
            let at = format!("{} in {profile:?}", id(vector));
            let found = resolved(vector, profile, false);
            match id(vector) {
                "k02-override-partial" if profile == Profile::Doc => {
                    assert_values(&at, found, &vector["full_replace"]);
                }
                "k02-override-partial" if profile == Profile::Latest => {
                    assert_values(&at, found, &vector["merge"]);
                }
                "k02-override-partial" => {
                    assert_values(&at, resolved(vector, profile, true), &vector["merge"]);
                    // A whole entry stands by itself: what it leaves out has the built-in value.
                    assert_values(&at, found, &json!({"kv": 0.90, "kvTrig": 0.10, "queueTrig": 3}));
                }
                "k05-empty-map" if profile == Profile::Doc => assert_values(&at, found, &vector["doc"]),
                "k05-empty-map" => assert_values(&at, found, &vector["latest"]),
                _ => assert_values(&at, found, &json!({"kv": vector["kv"]})),
            }
        }
    }
}

fn table(entries: &[(&str, Value)]) -> ThresholdTable {
    let mut table = ThresholdTable::default();
    replace(&mut table, entries);
    table
}

fn replace(table: &mut ThresholdTable, entries: &[(&str, Value)]) {
    let parsed = |value: &Value| serde_json::from_value(value.clone()).map_err(|error| error.to_string());
    table.replace(entries.iter().map(|(key, value)| ((*key).to_owned(), parsed(value))).collect());
}

fn kv(table: &ThresholdTable) -> f64 {
    table.resolve(Profile::Rouse, "m", "ns", None).kv_cache
}

#[test]
fn the_last_good_entry_stays_until_its_key_is_gone() {
    let mut table = table(&[(KEY, json!({"kvCacheThreshold": 0.5}))]);
    assert!((kv(&table) - 0.5).abs() < f64::EPSILON);
    for bad in [
        json!({"kvCacheThreshold": 1.5}),
        json!({"kvCacheThreshold": "much"}),
        json!({"kvCacheTreshold": 0.9}),
        json!({"queueLengthThreshold": 3, "queueSpareTrigger": 4}),
    ] {
        replace(&mut table, &[(KEY, bad.clone())]);
        assert!(table.refused().contains_key(KEY), "{bad}");
        assert!((kv(&table) - 0.5).abs() < f64::EPSILON, "{bad}");
    }
    replace(&mut table, &[]);
    assert!(table.refused().is_empty());
    assert!((kv(&table) - Thresholds::default().kv_cache).abs() < f64::EPSILON);
}

#[test]
fn a_refusal_says_what_is_wrong() {
    for (bad, reason) in [
        (json!({"kvCacheThreshold": 1.5}), "kvCacheThreshold is 1.5: it must be from 0 to 1"),
        (json!({"kvCacheTreshold": 0.9}), "unknown field 'kvCacheTreshold'"),
        (json!({"queueLengthThreshold": 3, "queueSpareTrigger": 4}), "queueSpareTrigger (4) is above"),
        (json!({"scaleUpThreshold": 0.6}), "scaleUpThreshold (0.6) must be above scaleDownBoundary (0.7)"),
        (json!({"priority": -1}), "priority is -1: it must be a number from 0"),
        (json!({"scaleUpThreshold": 1.2}), "scaleUpThreshold is 1.2: it must be above 0, and 1 at most"),
    ] {
        let table = table(&[(KEY, bad.clone())]);
        let said = table.refused()[KEY].to_string();
        assert!(said.contains(reason), "{bad}: {said}");
    }
}

#[test]
fn a_merged_entry_takes_what_it_leaves_out_from_the_default_and_a_written_zero_is_a_zero() {
    let default =
        ("default", json!({"kvCacheThreshold": 0.6, "kvSpareTrigger": 0.2, "queueLengthThreshold": 9}));
    let whole = table(&[default.clone(), (KEY, json!({"queueLengthThreshold": 7}))]);
    let merged = table(&[default, (KEY, json!({"kvSpareTrigger": 0, "merge": true}))]);
    let whole = whole.resolve(Profile::Rouse, "m", "ns", None);
    assert_eq!(whole, Thresholds { queue_length: 7.0, ..Thresholds::default() });
    let found = merged.resolve(Profile::Rouse, "m", "ns", None);
    let expected =
        Thresholds { kv_cache: 0.6, kv_spare_trigger: 0.0, queue_length: 9.0, ..Thresholds::default() };
    assert_eq!(found, expected);
    let latest = merged.resolve(Profile::Latest, "m", "ns", None);
    assert_eq!(latest, Thresholds { kv_spare_trigger: 0.2, ..expected }, "there a zero is not set");
}

#[test]
fn a_merged_entry_that_a_new_default_contradicts_is_refused() {
    let merged = json!({"kvSpareTrigger": 0.3, "merge": true});
    let mut table = table(&[("default", json!({"kvCacheThreshold": 0.6})), (KEY, merged.clone())]);
    assert!(table.refused().is_empty());
    replace(&mut table, &[("default", json!({"kvCacheThreshold": 0.2})), (KEY, merged)]);
    assert!(table.refused().contains_key(KEY));
    let found = table.resolve(Profile::Rouse, "m", "ns", None);
    assert!((found.kv_cache - 0.2).abs() < f64::EPSILON, "the last good entry is not valid any more");
}

#[test]
fn the_fields_of_the_object_itself_win_over_the_table() {
    let table = table(&[(KEY, json!({"kvCacheThreshold": 0.5, "queueLengthThreshold": 7}))]);
    let own = entry(json!({"kvCacheThreshold": 0.9}));
    let found = table.resolve(Profile::Rouse, "m", "ns", Some(&own));
    assert_eq!(found, Thresholds { kv_cache: 0.9, queue_length: 7.0, ..Thresholds::default() });
}

#[test]
fn fields_of_the_public_project_that_decide_nothing_here_are_accepted() {
    let written = "{analyzerName: saturation, enableLimiter: true, limiters: [{type: quota}], model_id: x, \
                   analyzers: [{type: saturation, score: 1.0, scaleUpThreshold: 0.9}]}";
    let parsed = serde_saphyr::from_str::<ThresholdEntry>(written).map_err(|error| error.to_string());
    let mut table = ThresholdTable::default();
    table.replace(BTreeMap::from([(KEY.to_owned(), parsed)]));
    assert_eq!(table.refused(), &BTreeMap::new());
    assert!((table.resolve(Profile::Rouse, "m", "ns", None).scale_up - 0.9).abs() < f64::EPSILON);
}
