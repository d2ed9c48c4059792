//! Composes a cluster gateway's configuration from the file's settings and the cluster's objects.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{Accelerator, FleetConfig, FleetSettings},
    units::Bytes,
};
use rouse_config::Config;

use super::index::{Resolved, ResolvedPool, ServedModel};

/// Returns the file's configuration with the cluster's pools and served models in place of its own.
///
/// Each pool becomes one accelerator with the pool's name and its total grantable memory. A pool with a problem gets no
/// memory: nothing starts there, and running engines stay.
#[must_use]
pub fn compose(base: &Config, resolved: &Resolved) -> Config {
    let accelerator = |(name, pool): (&String, &ResolvedPool)| Accelerator {
        id: name.as_str().into(),
        capacity: pool.total.unwrap_or_default(),
        metered: false,
        units: pool.units,
    };
    let served = || resolved.served.values();
    // What a gateway reads here is the same for all variants.
    let engine =
        |served: &ServedModel| Some((served.spec.name.clone(), Arc::clone(&served.cheapest()?.engine)));
    Config {
        core: FleetConfig {
            settings: FleetSettings { host_memory: host_memory(resolved), ..base.core.settings.clone() },
            accelerators: resolved.pools.iter().map(accelerator).collect(),
            models: served().map(|served| served.spec.clone()).collect(),
        },
        engines: served().filter_map(engine).collect(),
        model_locations: BTreeMap::new(),
        meters: BTreeMap::new(),
        accelerators_auto: false,
        ..base.clone()
    }
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
