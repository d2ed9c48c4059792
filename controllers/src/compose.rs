//! Composes a cluster gateway's configuration from the file's settings and the cluster's objects.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{Accelerator, AcceleratorId, FleetConfig, FleetSettings},
    units::Bytes,
};
use rouse_config::Config;

use super::index::{Resolved, ResolvedPool, ServedModel, SlotAccelerator};

/// Returns the file's configuration with the cluster's pools and served models in place of its own.
///
/// Each pool becomes one accelerator with the pool's name and its total grantable memory. Of a pool with slots, each
/// accelerator that a node agent lists becomes one instead. A pool with a problem gets no memory: nothing starts there,
/// and running engines stay.
#[must_use]
pub fn compose(base: &Config, resolved: &Resolved) -> Config {
    let served = || resolved.served.values();
    // What a gateway reads here is the same for all variants.
    let engine =
        |served: &ServedModel| Some((served.spec.name.clone(), Arc::clone(&served.cheapest()?.engine)));
    Config {
        core: FleetConfig {
            settings: FleetSettings { host_memory: host_memory(resolved), ..base.core.settings.clone() },
            accelerators: resolved.pools.iter().flat_map(|(name, pool)| accelerators(name, pool)).collect(),
            models: served().map(|served| served.spec.clone()).collect(),
        },
        engines: served().filter_map(engine).collect(),
        model_locations: BTreeMap::new(),
        meters: BTreeMap::new(),
        accelerators_auto: false,
        ..base.clone()
    }
}

/// Returns what the decisions know of a pool as accelerators.
fn accelerators(name: &str, pool: &ResolvedPool) -> Vec<Accelerator> {
    let (id, total) = (AcceleratorId::from(name), pool.total.unwrap_or_default());
    if pool.slots.is_none() {
        return vec![Accelerator { units: pool.units, ..Accelerator::new(id, total) }];
    }
    let of_pool = |(uuid, accelerator): (&AcceleratorId, &SlotAccelerator)| {
        let capacity = if pool.problem.is_none() { accelerator.capacity } else { Bytes::ZERO };
        Accelerator {
            units: Some(accelerator.slots),
            pool: Some(id.clone()),
            node: Some(accelerator.node.clone()),
            cordoned: !accelerator.takes_pods,
            host_memory: pool.terms.as_ref().map(|terms| terms.host_sleep_memory),
            ..Accelerator::new(uuid.clone(), capacity)
        }
    };
    pool.slot_accelerators.iter().map(of_pool).collect()
}

/// Sums the RAM that engines asleep at level 1 may hold, over all nodes.
fn host_memory(resolved: &Resolved) -> Bytes {
    let of_pool = |pool: &ResolvedPool| {
        let each = pool.terms.as_ref().map_or(0, |terms| terms.host_sleep_memory.0);
        Bytes(each.saturating_mul(u64::from(pool.nodes)))
    };
    resolved.pools.values().map(of_pool).sum()
}

#[cfg(test)]
mod tests {
    use rouse::model::AcceleratorRequirement;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        convert::ConversionPolicy,
        index::{ClusterIndex, IndexedObject, WatchScope},
    };

    fn apply(index: &mut ClusterIndex, kind: &str, name: &str, spec: Value) {
        let whole = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": "chat"},
            "spec": spec,
        });
        index.apply(match kind {
            "AcceleratorPool" => IndexedObject::Pool(serde_json::from_value(whole).unwrap()),
            _ => IndexedObject::Model(serde_json::from_value(whole).unwrap()),
        });
    }

    #[test]
    fn the_objects_take_the_place_of_the_files_models_and_accelerators() {
        let base = rouse_config::parse(
            "accelerators: [{id: gpu-0, memory: 80Gi}]\n\
             queue: {maxWaiting: 17}\n\
             models: [{name: local, memory: {awake: 1Gi}, engine: {kind: custom, command: [x, '${PORT}']}}]",
            "test",
        );
        let base = base.unwrap_or_else(|errors| panic!("{errors}"));
        let mut index = ClusterIndex::new(WatchScope {
            policy: ConversionPolicy::default(),
            nodes: false,
            namespaces: 1,
        });
        let pool = |name: &str| json!({"nodeSelector": {"inference-pool": name}, "memory": "320Gi"});
        apply(&mut index, "AcceleratorPool", "default", pool("default"));
        apply(&mut index, "AcceleratorPool", "broken", json!({"nodeSelector": {"a": "b"}, "memory": "x"}));
        let model = |name: &str, more: Value| {
            let mut spec = json!({"modelName": name, "memory": "40Gi", "containerImage": "vllm:1"});
            more.as_object().unwrap().iter().for_each(|(key, value)| spec[key] = value.clone());
            spec
        };
        apply(&mut index, "InferenceModel", "large", model("org/large", json!({"accelerators": 4})));
        apply(&mut index, "InferenceModel", "waits", model("waits", json!({"nodeSelector": {"a": "b"}})));
        apply(&mut index, "InferenceModel", "bad", model("bad", json!({"memory": "x"})));
        let config = compose(&base, &index.resolved());

        let capacities: Vec<_> =
            config.core.accelerators.iter().map(|it| (it.id.as_str(), it.capacity)).collect();
        assert_eq!(capacities, [("broken", Bytes::ZERO), ("default", Bytes::gib(320))]);
        let models: Vec<_> = config.core.models.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(models, ["org/large", "waits"]);
        let large = &config.core.models[0];
        assert_eq!(
            (&large.accelerators, large.memory.awake),
            (&AcceleratorRequirement::InPool { pool: "default".into(), count: 4 }, Bytes::gib(40))
        );
        assert_eq!(config.engines.keys().map(|name| name.as_str()).collect::<Vec<_>>(), models);
        for spec in &config.core.models {
            assert_eq!(config.engines[&spec.name].fingerprint, spec.fingerprint);
        }
        assert_eq!(config.core.settings.queue.max_waiting, 17, "what is no object's is as the file has it");
        assert_eq!(config.core.settings.host_memory, Bytes::ZERO, "no pool has RAM for sleepers");
    }

    #[test]
    fn each_accelerator_with_slots_is_one_for_the_decisions_and_the_pool_is_none() {
        let mut index =
            ClusterIndex::new(WatchScope { policy: ConversionPolicy::default(), nodes: true, namespaces: 1 });
        let pool = |meter_lag: &str| {
            let slots = json!({
                "slots": 3,
                "resource": "rouse.dev/h100",
                "hostSleepMemory": "64Gi",
                "meterLag": meter_lag,
            });
            let mut spec = json!({"nodeSelector": {"inference-pool": "p"}});
            slots.as_object().unwrap().iter().for_each(|(key, value)| spec[key] = value.clone());
            spec
        };
        apply(&mut index, "AcceleratorPool", "p", pool("1m"));
        let node = json!({"metadata": {"name": "n", "labels": {"inference-pool": "p"}}});
        index.apply(IndexedObject::Node(serde_json::from_value(node).unwrap()));
        let listed = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "AcceleratorNode",
            "metadata": {"name": "n"},
            "spec": {},
            "status": {"accelerators": [
                {"uuid": "GPU-1", "capacity": "79Gi", "healthy": true},
                {"uuid": "GPU-2", "capacity": "79Gi", "healthy": false, "configuration": "h100", "slots": 2},
            ]},
        });
        index.apply(IndexedObject::AcceleratorNode(serde_json::from_value(listed).unwrap()));
        let base = rouse_config::parse("", "test").unwrap();
        let with_slots = |uuid: &str, gib: u64, slots: u32| Accelerator {
            units: Some(slots),
            pool: Some("p".into()),
            node: Some("n".to_owned()),
            host_memory: Some(Bytes::gib(64)),
            ..Accelerator::new(uuid.into(), Bytes::gib(gib))
        };
        let accelerators = |index: &mut ClusterIndex| compose(&base, &index.resolved()).core.accelerators;
        assert_eq!(accelerators(&mut index), [with_slots("GPU-1", 79, 3), with_slots("GPU-2", 0, 2)]);
        // The overlap keeps the nodes of both pools from both.
        apply(&mut index, "AcceleratorPool", "twin", json!({"nodeSelector": {"inference-pool": "p"}}));
        let found = accelerators(&mut index);
        assert!(found.iter().all(|accelerator| accelerator.capacity == Bytes::ZERO), "{found:?}");
        apply(&mut index, "AcceleratorPool", "p", pool("soon"));
        assert!(accelerators(&mut index).iter().all(|accelerator| accelerator.id.as_str() != "p"));
    }

    #[test]
    fn ram_for_sleepers_is_that_of_all_nodes() {
        let mut index =
            ClusterIndex::new(WatchScope { policy: ConversionPolicy::default(), nodes: true, namespaces: 1 });
        let pool = json!({"nodeSelector": {"inference-pool": "default"}, "hostSleepMemory": "64Gi"});
        apply(&mut index, "AcceleratorPool", "default", pool);
        for name in ["a", "b"] {
            let labels = json!({"inference-pool": "default"});
            let node = json!({"metadata": {"name": name, "labels": labels}});
            index.apply(IndexedObject::Node(serde_json::from_value(node).unwrap()));
        }
        let base = rouse_config::parse("", "test").unwrap();
        assert_eq!(compose(&base, &index.resolved()).core.settings.host_memory, Bytes::gib(128));
    }
}
