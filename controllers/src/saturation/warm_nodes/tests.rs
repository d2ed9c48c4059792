use std::sync::Arc;

use rouse::saturation::{FleetLoad, VariantState};
use serde_json::{Value, json};

use super::*;
use crate::{
    convert::warmup::model_set,
    crd::ledger::ObjectName,
    index::ClusterIndex,
    saturation::{
        index::SaturationIndex,
        test_cluster::{self, POOLS},
    },
    workload::merge,
};

/// Accelerators of each node.
const ACCELERATORS: u32 = 2;

/// A model with two variants, in pools of the same names, each with one node of two accelerators of 80 GiB.
struct World {
    cluster: ClusterIndex,
    saturation: SaturationIndex,
    label: String,
}

impl World {
    fn new() -> Self {
        let variants = POOLS.map(|name| json!({"name": name, "nodeSelector": {"pool": name, "zone": "a"}}));
        let cluster = test_cluster::cluster(ACCELERATORS, &json!({"accelerators": 2, "variants": variants}));
        let label = label::warm_key(&model_set(&ObjectName::new("chat", "qwen")));
        let mut world = Self { cluster, saturation: SaturationIndex::new(1), label };
        for name in POOLS {
            world.node(name, &json!({}));
        }
        world
    }

    /// Applies the node of this pool with these changes.
    fn node(&mut self, pool: &str, changes: &Value) {
        let node = test_cluster::node(pool, ACCELERATORS, changes);
        self.saturation.apply_nodes(&Delta::Applied(WatchedObject::from(node.clone())));
        self.cluster.apply(node);
    }

    fn warm(&self, value: &Value) -> Value {
        json!({"metadata": {"labels": {self.label.as_str(): value}}})
    }

    fn reserve(&mut self, pool: &str, reserved: &str) {
        let node: AcceleratorNode = serde_json::from_value(json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorNode",
            "metadata": {"name": format!("node-{pool}")}, "spec": {},
            "status": {"reserved": reserved},
        }))
        .unwrap();
        self.saturation.apply_accelerator_nodes(&Delta::Applied(WatchedObject::from(node)));
    }

    /// The warm variants of the model.
    fn warm_variants(&mut self) -> Vec<String> {
        let resolved: Arc<crate::index::Resolved> = self.cluster.resolved();
        self.saturation.set_resolved(resolved);
        let model = self.saturation.models().next().unwrap();
        let states = self.saturation.variant_states(model, &FleetLoad::default());
        assert_eq!(states.len(), 2);
        let warm = |state: VariantState| state.warm.then(|| state.variant.to_string());
        states.into_iter().filter_map(warm).collect()
    }
}

#[test]
fn a_variant_is_warm_while_a_node_that_may_run_it_has_the_models_label() {
    let mut world = World::new();
    assert_eq!(world.warm_variants(), [""; 0]);
    world.node("h100", &world.warm(&json!("rouse")));
    assert_eq!(world.warm_variants(), ["h100"]);
    world.node("l4", &world.warm(&json!("rouse")));
    assert_eq!(world.warm_variants(), ["h100", "l4"]);
    world.node("h100", &json!({}));
    assert_eq!(world.warm_variants(), ["l4"], "the label is gone");
    world.saturation.apply_nodes(&Delta::Deleted(ObjectName::new("", "node-l4")));
    assert_eq!(world.warm_variants(), [""; 0]);
    world.node("l4", &json!({"metadata": {"labels": {"warm.rouse.dev/0123456789abcdef": "rouse"}}}));
    assert_eq!(world.warm_variants(), [""; 0], "it is warm for another model");
}

#[test]
fn a_warm_node_that_takes_no_other_engine_does_not_count() {
    let mut world = World::new();
    let warm = world.warm(&json!("rouse"));
    let with = |changes: &Value| {
        let mut node = warm.clone();
        merge::into(&mut node, changes);
        node
    };
    for (what, changes) in [
        ("cordoned", json!({"spec": {"unschedulable": true}})),
        ("silent", json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})),
        ("not selected", json!({"metadata": {"labels": {"zone": "b"}}})),
        ("too few accelerators", json!({"status": {"allocatable": {"nvidia.com/gpu": "1"}}})),
        ("too small", json!({"metadata": {"labels": {"nvidia.com/gpu.memory": "20480"}}})),
    ] {
        world.node("h100", &with(&changes));
        assert_eq!(world.warm_variants(), [""; 0], "{what}");
    }
    world.node("h100", &with(&json!({})));
    assert_eq!(world.warm_variants(), ["h100"]);
    world.reserve("h100", "100Gi");
    assert_eq!(world.warm_variants(), [""; 0], "60 GiB are left of 160, and an engine needs 80");
    world.reserve("h100", "80Gi");
    assert_eq!(world.warm_variants(), ["h100"]);
}
