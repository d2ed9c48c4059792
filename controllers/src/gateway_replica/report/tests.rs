use proptest::prelude::*;

use super::*;
use crate::{condition::condition, gateway_replica::SEES_ALL};

const NOW: Tick = Tick(1_795_000_000_000);
const LAG: Millis = Millis::secs(60);

fn demand(waiting: u32, in_flight: u32, last_request: Tick) -> GatewayDemand {
    GatewayDemand { waiting, in_flight, last_request }
}

fn stored(waiting: u32, in_flight: u32, last_request: Tick) -> ModelDemand {
    ModelDemand { waiting, in_flight, last_request: Some(time(last_request)) }
}

fn written(of: GatewayDemand, before: Option<&ModelDemand>) -> Option<ModelDemand> {
    entry(&of, before, LAG, NOW)
}

#[test]
fn an_entry_lasts_until_the_model_is_put_away() {
    let ago = |secs: u64| Tick(NOW.0 - secs * 1000);
    assert_eq!(written(demand(0, 0, ago(599)), None), Some(stored(0, 0, ago(599))));
    assert_eq!(written(demand(0, 0, ago(600)), Some(&stored(0, 0, ago(600)))), None);
    assert_eq!(written(demand(0, 0, Tick(0)), None), None);
    // A request may wait or last for longer than that.
    assert_eq!(written(demand(1, 0, ago(900)), None), Some(stored(1, 0, ago(900))));
    let first = ModelDemand { waiting: 0, in_flight: 1, last_request: None };
    assert_eq!(written(demand(0, 1, Tick(0)), None), Some(first));
}

#[test]
fn the_time_of_the_last_request_is_written_once_in_its_lag() {
    let at = |secs: u64| Tick(NOW.0 - 120_000 + secs * 1000);
    let before = stored(0, 3, at(0));
    assert_eq!(written(demand(0, 3, at(59)), Some(&before)), Some(before.clone()), "nothing to write");
    assert_eq!(written(demand(0, 0, at(59)), Some(&before)), Some(stored(0, 0, at(0))), "not beside others");
    assert_eq!(written(demand(0, 3, at(60)), Some(&before)), Some(stored(0, 3, at(60))));
    // The clock of a former gateway of this name was ahead.
    assert_eq!(written(demand(0, 3, at(0)), Some(&stored(0, 3, at(90)))), Some(before));
    let fraction = Tick(at(0).0 + 999);
    assert_eq!(written(demand(0, 3, fraction), Some(&stored(0, 3, at(0)))), Some(stored(0, 3, at(0))));
}

#[test]
fn only_what_changed_is_in_the_patch() {
    let names = ["awake", "busy", "gone"].map(ModelName::from);
    let [awake, busy, _] = &names;
    let status = GatewayReplicaStatus {
        models: names.iter().map(|model| (model.to_string(), stored(0, 2, NOW))).collect(),
        ..GatewayReplicaStatus::default()
    };
    let now = BTreeMap::from([(awake.clone(), demand(0, 2, NOW)), (busy.clone(), demand(1, 4, NOW))]);
    let changes = entry_changes(all_models(&now, &status.models).iter(), &now, &status.models, |_| LAG, NOW);
    let patch = status_patch(&status, &changes, &[], NOW);
    let busy = json!({"waiting": 1, "inFlight": 4, "lastRequest": time(NOW)});
    let models = json!({"busy": busy, "gone": null});
    assert_eq!(patch, json!({"waiting": 1, "inFlight": 6, "renewed": time(NOW), "models": models}));
    let one = entry_changes([awake].into_iter(), &now, &status.models, |_| LAG, NOW);
    assert!(one.is_empty(), "{one:?}");
}

#[test]
fn an_object_with_a_hundred_models_in_use_is_small() {
    let model = |n: u32| (format!("meta-llama/Llama-3.3-70B-{n:03}"), stored(n, n, NOW));
    let status =
        GatewayReplicaStatus { models: (0..100).map(model).collect(), ..GatewayReplicaStatus::default() };
    let bytes = serde_json::to_vec(&status).unwrap().len();
    assert!((8_000..12_000).contains(&bytes), "{bytes} bytes");
}

/// Applies a merge patch, as RFC 7386 defines it.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let target = target.as_object_mut().unwrap();
    for (name, value) in fields {
        if value.is_null() {
            target.remove(name);
        } else {
            merge(target.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Demand for some of a few models, as of a few minutes.
fn demands() -> impl Strategy<Value = BTreeMap<ModelName, GatewayDemand>> {
    let ago = prop_oneof![Just(0_u64), Just(30_000), Just(70_500), Just(599_000), Just(700_000)];
    let one = (0_u32..3, 0_u32..3, ago)
        .prop_map(|(waiting, in_flight, ago)| demand(waiting, in_flight, Tick(NOW.0 - ago)));
    prop::collection::btree_map("[a-f]".prop_map(ModelName::from), one, 0..6)
}

proptest! {
    #[test]
    fn the_patches_one_after_another_make_the_whole(
        steps in prop::collection::vec((demands(), any::<bool>(), any::<bool>()), 1..12),
    ) {
        let mut object = json!({});
        let (mut known, mut wanted) = (BTreeMap::new(), BTreeMap::<String, ModelDemand>::new());
        for (number, (now_wanted, everything, sees_all)) in (0_u64..).zip(steps) {
            let now = Tick(NOW.0 + number * 1000);
            let stored: GatewayReplicaStatus = serde_json::from_value(object.clone()).unwrap();
            prop_assert_eq!(&stored.models, &wanted);
            // A report of changes is about some models, and one of everything about all.
            let about = if everything {
                all_models(&now_wanted, &stored.models)
            } else {
                now_wanted.keys().take(2).cloned().collect()
            };
            let changes = entry_changes(about.iter(), &now_wanted, &stored.models, |_| LAG, now);
            let conditions =
                vec![condition(SEES_ALL, sees_all, "SeesAll", "it sees", None, &stored.conditions, now)];
            merge(&mut object, &status_patch(&stored, &changes, &conditions, now));

            for model in &about {
                let before = stored.models.get(model.as_str());
                match now_wanted.get(model).and_then(|demand| entry(demand, before, LAG, now)) {
                    Some(entry) => {
                        wanted.insert(model.to_string(), entry);
                    }
                    None => {
                        wanted.remove(model.as_str());
                    }
                }
            }
            let each = |of: fn(&ModelDemand) -> u32| wanted.values().map(of).sum::<u32>();
            let whole = GatewayReplicaStatus {
                waiting: each(|entry| entry.waiting),
                in_flight: each(|entry| entry.in_flight),
                models: wanted.clone(),
                renewed: Some(time(now)),
                conditions,
            };
            let found: GatewayReplicaStatus = serde_json::from_value(object.clone()).unwrap();
            prop_assert_eq!(found, whole);
            known.extend(now_wanted);
        }
        // One report of everything is enough after any history, and a second one has nothing to write.
        let stored: GatewayReplicaStatus = serde_json::from_value(object.clone()).unwrap();
        let changes =
            entry_changes(all_models(&known, &stored.models).iter(), &known, &stored.models, |_| LAG, NOW);
        merge(&mut object, &status_patch(&stored, &changes, &[], NOW));
        let stored: GatewayReplicaStatus = serde_json::from_value(object).unwrap();
        let again =
            entry_changes(all_models(&known, &stored.models).iter(), &known, &stored.models, |_| LAG, NOW);
        prop_assert!(again.is_empty(), "{:?}", again);
        for (model, demand) in &known {
            let entry = stored.models.get(model.as_str());
            let numbers = entry.map_or((0, 0), |entry| (entry.waiting, entry.in_flight));
            prop_assert_eq!(numbers, (demand.waiting, demand.in_flight));
        }
    }
}
