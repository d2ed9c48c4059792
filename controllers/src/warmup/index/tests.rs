use serde_json::{Value, json};

use super::*;
use crate::{
    convert::ConversionPolicy,
    crd::{AcceleratorPool, InferenceModel},
    index::{ClusterIndex, WatchScope},
    label,
};

const NOW: Tick = Tick(1_780_000_000_000);

fn index() -> WarmupIndex {
    let installation = "rouse".to_owned();
    WarmupIndex::new(IndexSettings { expected_lists: 1, installation, ..IndexSettings::default() })
}

fn read<K: serde::de::DeserializeOwned>(object: Value) -> WatchedObject<K> {
    WatchedObject::from(serde_json::from_value::<K>(object).unwrap())
}

fn listed<K>(objects: Vec<WatchedObject<K>>) -> Delta<K> {
    Delta::All { namespace: None, objects }
}

fn node(name: &str, labels: &Value) -> WatchedObject<Node> {
    read(json!({
        "metadata": {"name": name, "resourceVersion": "5", "labels": labels},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }))
}

fn warmup(generation: i64, spec: &Value) -> WatchedObject<Warmup> {
    read(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup",
        "metadata": {"name": "w", "namespace": "chat", "uid": "u", "generation": generation},
        "spec": spec,
    }))
}

fn selects(pool: &str) -> Value {
    let images = json!({"items": ["nginx:1.29"]});
    json!({"targetNodes": {"nodeSelector": {"pool": pool}, "imagesPreload": images}})
}

/// Lists everything of a term, with this Warmup.
fn list_all(index: &mut WarmupIndex, spec: &Value) {
    index.apply_nodes(&listed(vec![node("a", &json!({"pool": "x"})), node("b", &json!({}))]), true);
    index.apply_warmup_pods(&listed(Vec::new()), NOW);
    index.apply_engine_pods(&listed(Vec::new()));
    index.apply_group_pods(&listed(Vec::new()));
    index.set_resolved(Arc::default());
    assert!(!index.is_complete(), "the Warmups are missing");
    index.apply_warmups(&listed(vec![warmup(1, spec)]));
    assert!(index.is_complete());
}

/// Returns the names of the target nodes in these events; `None` if they have no targets.
fn target_nodes(events: &[WarmupEvent]) -> Option<Vec<String>> {
    events.iter().find_map(|event| match event {
        WarmupEvent::Targets { targets: WarmupTargets::Nodes(nodes), .. } => {
            Some(nodes.keys().map(ToString::to_string).collect())
        }
        _ => None,
    })
}

#[test]
fn the_first_events_have_everything_and_later_ones_what_has_changed() {
    let mut index = index();
    list_all(&mut index, &selects("x"));
    let first = index.take_events();
    assert_eq!(target_nodes(&first).unwrap(), ["a"]);
    assert!(first.iter().any(|event| matches!(event, WarmupEvent::Warmup { .. })));
    assert_eq!(first.iter().filter(|event| matches!(event, WarmupEvent::Node { .. })).count(), 2);
    assert_eq!(index.take_events(), []);

    index.apply_nodes(&Delta::Applied(node("b", &json!({"pool": "x"}))), true);
    let events = index.take_events();
    assert_eq!(target_nodes(&events).unwrap(), ["a", "b"]);
    let is_node = |event: &WarmupEvent| matches!(event, WarmupEvent::Node { .. });
    assert!(!events.iter().any(is_node), "its state is the same: {events:?}");
}

#[test]
fn the_label_of_a_warm_node_changes_no_target_and_is_counted() {
    let mut index = index();
    list_all(&mut index, &selects("x"));
    index.take_events();
    let set = index.warmup(&ObjectName::new("chat", "w")).unwrap().request().set;
    let key = label::warm_key(&set);
    index.apply_nodes(&Delta::Applied(node("a", &json!({"pool": "x", key: "rouse"}))), true);
    let events = index.take_events();
    assert_eq!(target_nodes(&events), None);
    let gauge = index.warm_sets().remove(&set).unwrap();
    assert_eq!((gauge.namespace.as_str(), gauge.target.as_str(), gauge.nodes), ("chat", "warmup/w", 1));
}

#[test]
fn an_invalid_spec_has_refused_targets_and_a_deleted_warmup_is_gone() {
    let mut index = index();
    list_all(&mut index, &json!({}));
    let events = index.take_events();
    let is_refused = |event: &WarmupEvent| {
        matches!(event, WarmupEvent::Targets { targets: WarmupTargets::Refused { .. }, .. })
    };
    assert!(events.iter().any(is_refused), "{events:?}");
    index.apply_warmups(&Delta::Deleted(ObjectName::new("chat", "w")));
    assert_eq!(index.take_events(), [WarmupEvent::WarmupDeleted(WarmupId::from("chat/w"))]);
}

#[test]
fn a_new_term_begins_without_pods_and_warmups_and_with_all_nodes() {
    let mut index = index();
    list_all(&mut index, &selects("x"));
    index.take_events();
    index.begin_term();
    assert!(!index.is_complete());
    list_all(&mut index, &selects("x"));
    let events = index.take_events();
    assert_eq!(events.iter().filter(|event| matches!(event, WarmupEvent::Node { .. })).count(), 2);
    assert_eq!(target_nodes(&events).unwrap(), ["a"]);
}

#[test]
fn a_change_of_a_node_resolves_the_targets_that_it_changes_and_no_others() {
    let mut index = index();
    list_all(&mut index, &selects("x"));
    for number in 0..40 {
        let of_pool = read(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup",
            "metadata": {"name": format!("w-{number}"), "namespace": "chat", "uid": "u", "generation": 1},
            "spec": selects(&format!("pool-{number}")),
        }));
        index.apply_warmups(&Delta::Applied(of_pool));
    }
    let pool_of = |number: usize| json!({"pool": format!("pool-{}", number % 40)});
    let nodes = (0..200).map(|number| node(&format!("n-{number}"), &pool_of(number)));
    index.apply_nodes(&listed(nodes.collect()), true);
    index.take_events();
    let mut resolved_by = |change: Delta<Node>| -> Vec<String> {
        index.apply_nodes(&change, true);
        index.mark_stale();
        let resolved = index.stale.iter().map(|name| name.name.clone()).collect();
        index.take_events();
        resolved
    };
    let applied = |name: &str, labels: Value| Delta::Applied(node(name, &labels));
    assert!(resolved_by(applied("n-7", json!({"pool": "pool-7", "zone": "a"}))).is_empty());
    assert_eq!(resolved_by(applied("n-7", json!({"pool": "pool-8"}))), ["w-7", "w-8"]);
    assert_eq!(resolved_by(applied("new", json!({"pool": "pool-3"}))), ["w-3"]);
    assert!(resolved_by(applied("other", json!({}))).is_empty());
    assert_eq!(resolved_by(Delta::Deleted(ObjectName::new("", "new"))), ["w-3"]);
    assert!(resolved_by(Delta::Deleted(ObjectName::new("", "other"))).is_empty());
}

/// A pool with a node of the same name, and a model in it that is called `m-POOL`.
fn add_pool(cluster: &mut ClusterIndex, pool: &str) {
    let object: AcceleratorPool = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "metadata": {"name": pool},
        "spec": {"nodeSelector": {"pool": pool}, "memory": "640Gi"},
    }))
    .unwrap();
    cluster.apply(object);
    cluster.apply(pool_node(pool, pool));
    cluster.apply(model(pool, "never"));
}

fn pool_node(name: &str, pool: &str) -> Node {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": {"pool": pool}}})).unwrap()
}

fn model(pool: &str, warmup: &str) -> InferenceModel {
    let name = format!("m-{pool}");
    serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
        "metadata": {"name": name, "namespace": "chat", "uid": "u"},
        "spec": {
            "modelName": name, "memory": "40Gi", "containerImage": "vllm:1", "warmup": warmup,
            "nodeSelector": {"pool": pool},
        },
    }))
    .unwrap()
}

fn cluster() -> ClusterIndex {
    let policy = ConversionPolicy { any_backend: false, dual_pods: None };
    let mut cluster = ClusterIndex::new(WatchScope { policy, nodes: true, namespaces: 1 });
    ["x", "y"].iter().for_each(|pool| add_pool(&mut cluster, pool));
    cluster
}

#[test]
fn a_change_of_a_node_or_a_model_concerns_the_models_of_the_pool_only() {
    let mut cluster = cluster();
    let models = ["x", "y"].map(|pool| ObjectName::new("chat", format!("m-{pool}")));
    let before = cluster.resolved();
    assert_eq!(before.served.len(), 2, "{:?}", before.rejected);
    let concerned = |cluster: &mut ClusterIndex| {
        let after = cluster.resolved();
        let changes = ResolvedChanges::between(&before, &after);
        models.each_ref().map(|model| changes.concern(model))
    };
    assert_eq!(concerned(&mut cluster), [false, false]);
    cluster.apply(pool_node("new", "y"));
    assert_eq!(concerned(&mut cluster), [false, true], "a node has come");
    cluster.apply(pool_node("new", "x"));
    assert_eq!(concerned(&mut cluster), [true, false], "it is in the other pool instead");
    cluster.apply(pool_node("y", "x"));
    assert_eq!(concerned(&mut cluster), [true, true], "a node has moved");
    cluster.apply(pool_node("y", "y"));
    cluster.apply(pool_node("new", "none"));
    cluster.apply(model("x", "auto"));
    assert_eq!(concerned(&mut cluster), [true, false], "the model has changed");
}

/// Returns the sets of models in these events; `None` if there is no such event.
fn known_sets(events: &[WarmupEvent]) -> Option<&BTreeSet<WarmSet>> {
    events.iter().find_map(|event| match event {
        WarmupEvent::KnownSets(sets) => Some(sets),
        _ => None,
    })
}

#[test]
fn labels_stay_without_a_warmup_only_for_models_that_are_to_be_kept_warm() {
    let (mut index, mut cluster) = (index(), cluster());
    list_all(&mut index, &selects("x"));
    assert_eq!(known_sets(&index.take_events()), Some(&BTreeSet::new()));
    index.set_resolved(cluster.resolved());
    assert_eq!(known_sets(&index.take_events()), None, "no model is to be kept warm");
    cluster.apply(model("x", "auto"));
    index.set_resolved(cluster.resolved());
    let set = model_set(&ObjectName::new("chat", "m-x"));
    assert_eq!(known_sets(&index.take_events()), Some(&BTreeSet::from([set])));
    cluster.apply(pool_node("new", "x"));
    index.set_resolved(cluster.resolved());
    assert_eq!(known_sets(&index.take_events()), None, "the same models");
    cluster.apply(model("x", "never"));
    index.set_resolved(cluster.resolved());
    assert_eq!(known_sets(&index.take_events()), Some(&BTreeSet::new()));
}

#[test]
fn an_image_that_a_later_warmup_wants_is_found_on_nodes_that_have_not_changed() {
    let mut index = index();
    let with_images = |image: &str| {
        read(json!({
            "metadata": {"name": "a", "labels": {"pool": "x"}},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "images": [{"names": ["<none>:<none>", image]}, {"names": ["docker.io/library/other:1"]}],
            },
        }))
    };
    let nodes = |index: &mut WarmupIndex| {
        let events = index.take_events().into_iter();
        let images = events.filter_map(|event| match event {
            WarmupEvent::Node { name, facts } => Some((name.to_string(), facts.unwrap().images)),
            _ => None,
        });
        images.collect::<Vec<_>>()
    };
    list_all(&mut index, &selects("none"));
    index.apply_nodes(&Delta::Applied(with_images("docker.io/library/nginx:1.29")), true);
    nodes(&mut index);
    index.apply_nodes(&Delta::Applied(with_images("docker.io/library/nginx:1.29")), true);
    assert!(nodes(&mut index).is_empty(), "nothing of it has changed");
    index.apply_warmups(&Delta::Applied(warmup(2, &selects("x"))));
    let has_it = BTreeSet::from([ImageName::from("nginx:1.29")]);
    assert_eq!(nodes(&mut index), [("a".to_owned(), has_it), ("b".to_owned(), BTreeSet::new())]);
    index.apply_nodes(&Delta::Applied(with_images("docker.io/library/nginx:1.28")), true);
    assert_eq!(nodes(&mut index), [("a".to_owned(), BTreeSet::new())]);
}
