use std::sync::Arc;

use rouse::pairing::ids::ProviderMode;

use super::*;
use crate::{
    convert::ConversionPolicy,
    crd::{AcceleratorPool, InferenceModel},
    index::{ClusterIndex, WatchScope},
};

fn index(models: &[(&str, Value)]) -> Arc<Resolved> {
    let policy = ConversionPolicy { any_backend: false, dual_pods: Some(ProviderMode::Sleep) };
    let mut index = ClusterIndex::new(WatchScope { policy, nodes: false, namespaces: 1 });
    let pool: AcceleratorPool = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "metadata": {"name": "default"},
        "spec": {"nodeSelector": {"inference-pool": "default"}, "memory": "640Gi"},
    }))
    .unwrap();
    index.apply(pool);
    for (name, fields) in models {
        let mut spec =
            json!({"modelName": format!("org/{name}"), "memory": "40Gi", "containerImage": "vllm:1"});
        merge::into(&mut spec, fields);
        let model: InferenceModel = serde_json::from_value(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
            "metadata": {"name": name, "namespace": "chat", "uid": format!("uid-{name}")},
            "spec": spec,
        }))
        .unwrap();
        index.apply(model);
    }
    index.resolved()
}

/// The changes with the default number of nodes at a time.
fn changes<'a>(
    resolved: &Resolved,
    existing: impl IntoIterator<Item = &'a Warmup>,
) -> Vec<OwnedWarmupChange> {
    super::changes(resolved, existing, 2)
}

fn auto() -> Value {
    json!({"warmup": "auto"})
}

/// The Warmup as an API server stores it after it was created.
fn stored(change: &OwnedWarmupChange) -> Warmup {
    let OwnedWarmupChange::Create { object, .. } = change else { panic!("{change:?}") };
    let mut object = object.clone();
    merge::into(&mut object, &json!({"metadata": {"uid": "w1", "resourceVersion": "7"}}));
    serde_json::from_value(object).unwrap()
}

fn created(resolved: &Resolved) -> OwnedWarmupChange {
    let all = changes(resolved, []);
    let [change] = all.as_slice() else { panic!("{all:?}") };
    change.clone()
}

#[test]
fn a_model_that_is_kept_warm_gets_a_warmup_that_it_owns_and_others_get_none() {
    let resolved = index(&[("a", auto()), ("b", json!({})), ("c", json!({"warmup": "never"}))]);
    let warmup = stored(&created(&resolved));
    assert_eq!(warmup.metadata.name.as_deref(), Some("a-warmup"));
    assert_eq!(warmup.metadata.namespace.as_deref(), Some("chat"));
    let [owner] = &warmup.metadata.owner_references.as_ref().unwrap()[..] else { panic!() };
    assert_eq!((owner.name.as_str(), owner.uid.as_str(), owner.controller), ("a", "uid-a", Some(true)));
    let target = warmup.spec.target_model.as_ref().unwrap();
    assert!(target.name == "a" && target.keep_warm && target.nodes.is_none());
    let policies = warmup.spec.policies.as_ref().unwrap();
    assert_eq!((policies.parallelism, policies.backoff_limit), (Some(2), None));
    assert!(crate::convert::warmup::convert(&warmup, Millis::secs(10)).is_ok());
    assert_eq!(changes(&resolved, [&warmup]), []);
}

#[test]
fn a_warmup_that_differs_is_corrected_and_what_a_user_added_stays() {
    let resolved = index(&[("a", auto())]);
    let mut warmup = stored(&created(&resolved));
    warmup.spec.paused = true;
    assert_eq!(changes(&resolved, [&warmup]), [], "a user may pause it");
    warmup.spec.policies.as_mut().unwrap().parallelism = Some(9);
    let all = changes(&resolved, [&warmup]);
    let [OwnedWarmupChange::Update { name, uid, object }] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((name.name.as_str(), uid.as_str()), ("a-warmup", "w1"));
    assert_eq!(object["spec"]["policies"]["parallelism"], 2);
}

#[test]
fn another_number_of_nodes_at_a_time_is_written_into_the_warmups_that_exist() {
    let resolved = index(&[("a", auto())]);
    let warmup = stored(&created(&resolved));
    let all = super::changes(&resolved, [&warmup], 5);
    let [OwnedWarmupChange::Update { object, .. }] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!(object["spec"]["policies"]["parallelism"], 5);
}

#[test]
fn it_goes_when_it_is_switched_off_and_stays_while_the_model_has_an_error() {
    let warmup = stored(&created(&index(&[("a", auto())])));
    for fields in [json!({}), json!({"warmup": "never"})] {
        let all = changes(&index(&[("a", fields)]), [&warmup]);
        let [OwnedWarmupChange::Delete { name, metadata }] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!((name.name.as_str(), metadata.uid.as_deref()), ("a-warmup", Some("w1")));
    }
    assert_eq!(changes(&index(&[("a", json!({"memory": "much"}))]), [&warmup]), []);
    assert_eq!(changes(&index(&[]), [&warmup]), [], "Kubernetes deletes what a deleted model owned");
    let mut terminating = warmup;
    terminating.metadata.deletion_timestamp = Some(crate::condition::time(Tick::default()));
    assert_eq!(changes(&index(&[("a", json!({}))]), [&terminating]), []);
}

#[test]
fn a_warmup_of_a_user_or_of_an_earlier_model_is_left_alone() {
    let resolved = index(&[("a", auto())]);
    let mut warmup = stored(&created(&resolved));
    warmup.spec.policies = None;
    warmup.metadata.owner_references.as_mut().unwrap()[0].uid = "uid-of-before".to_owned();
    assert_eq!(changes(&resolved, [&warmup]), []);
    warmup.metadata.owner_references = None;
    assert_eq!(changes(&resolved, [&warmup]), []);
}

#[test]
fn a_change_is_tried_again_after_a_pause_and_not_before() {
    let resolved = index(&[("a", auto())]);
    let mut warmups = OwnedWarmups::new(2);
    let start = Tick::default() + Millis::secs(1000);
    assert_eq!(warmups.due(&resolved, [], start).len(), 1);
    assert_eq!(warmups.next_deadline(), Some(start + Millis::secs(10)));
    assert_eq!(warmups.due(&resolved, [], start + Millis::secs(9)), []);
    assert_eq!(warmups.due(&resolved, [], start + Millis::secs(10)).len(), 1);
    let warmup = stored(&created(&resolved));
    assert_eq!(warmups.due(&resolved, [&warmup], start + Millis::secs(11)), []);
    assert_eq!(warmups.next_deadline(), None, "the watch has shown it");
    // After that, another change need not wait.
    assert_eq!(warmups.due(&index(&[("a", json!({}))]), [&warmup], start + Millis::secs(12)).len(), 1);
    warmups.clear();
    assert_eq!(warmups.next_deadline(), None);
}

#[test]
fn names_fit_and_stay_apart() {
    let name = |model: &str| warmup_name(&ObjectName::new("chat", model)).name;
    assert_eq!(name("qwen"), "qwen-warmup");
    let (long, other) = (format!("{}a", "x".repeat(252)), format!("{}b", "x".repeat(252)));
    assert!(name(&long).len() <= MAX_NAME_CHARS && name(&long) != name(&other));
    let dotted = format!("{}.{}", "x".repeat(212), "y".repeat(40));
    assert!(!name(&dotted).contains(".-"), "{}", name(&dotted));
}
