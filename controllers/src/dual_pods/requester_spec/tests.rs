use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use super::*;
use crate::{
    convert::ConversionPolicy,
    crd::AcceleratorPool,
    index::{ClusterIndex, WatchScope},
};

/// Facts of one node, whose accelerators have 80 GiB, of which asleep engines may keep eight.
fn facts() -> ClusterFacts {
    let sight = WatchScope {
        policy: ConversionPolicy { any_backend: false, dual_pods: None },
        nodes: true,
        namespaces: 1,
    };
    let mut index = ClusterIndex::new(sight);
    let pool = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool",
        "metadata": {"name": "p", "uid": "uid-p", "generation": 1},
        "spec": {"nodeSelector": {"pool": "p"}, "sleepingMemory": "8Gi"},
    });
    index.apply(serde_json::from_value::<AcceleratorPool>(pool).unwrap());
    let node = json!({
        "metadata": {"name": "n1", "labels": {"pool": "p", "nvidia.com/gpu.memory": "81920"}},
        "status": {"allocatable": {"nvidia.com/gpu": "4"}},
    });
    index.apply(serde_json::from_value::<Node>(node).unwrap());
    let mut facts = ClusterFacts::default();
    facts.set_resolved_pools(index.resolved());
    facts
}

/// Resolves the sizes of a requester with this many accelerators and this engine command.
fn sizes(gpus: &str, command: &[&str], annotations: &[(&str, &str)]) -> MemorySizes {
    let engine = json!({"name": "inference-server", "image": "vllm", "command": command});
    let patch = json!({"spec": {"containers": [engine]}});
    let mut pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "one", "namespace": "ns", "annotations": {keys::SERVER_PATCH: patch.to_string()}},
        "spec": {"containers": [
            {"name": "inference-server", "image": "stub", "resources": {"limits": {"nvidia.com/gpu": gpus, "memory": "1Gi"}}},
        ]},
    }))
    .unwrap();
    let all = pod.metadata.annotations.as_mut().unwrap();
    all.extend(annotations.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())));
    let node = NodeName::from("n1");
    RequesterSpec::of(&pod, &node, ProviderMode::Sleep).unwrap().resolve(&node, &facts()).unwrap().sizes
}

#[test]
fn what_a_requester_does_not_say_of_host_memory_are_the_weights_on_all_its_accelerators() {
    let of = |awake, asleep, host| MemorySizes {
        awake: Bytes::gib(awake),
        asleep: Bytes::gib(asleep),
        host: Bytes::gib(host),
    };
    let (plain, kv_cache) = (["vllm", "serve", "m"], ["vllm", "serve", "m", "--kv-cache-memory-bytes=56Gi"]);
    assert_eq!(sizes("1", &plain, &[]), of(72, 2, 72), "all that sleepers may not keep");
    assert_eq!(sizes("1", &kv_cache, &[]), of(72, 2, 16));
    assert_eq!(sizes("2", &kv_cache, &[]), of(72, 2, 32), "16 for each of two");
    assert_eq!(sizes("1", &kv_cache, &[(keys::MEMORY, "60Gi")]), of(60, 2, 4));
    let said = [(keys::MEMORY, "60Gi"), (keys::MEMORY_ASLEEP, "1Gi"), (keys::HOST_MEMORY, "30Gi")];
    assert_eq!(sizes("2", &kv_cache, &said), of(60, 1, 30), "as it says, for all of them");
}

#[test]
fn a_server_patch_is_run_in_the_mode_of_the_requester_or_else_of_the_installation() {
    let node = NodeName::from("n1");
    let spec = |own: Option<&str>, installation| {
        let engine = json!({"name": "inference-server", "image": "vllm", "command": ["vllm", "serve", "m"]});
        let patch = json!({"spec": {"containers": [engine]}}).to_string();
        let mut annotations = json!({keys::SERVER_PATCH: patch});
        if let Some(own) = own {
            annotations[keys::MODE] = json!(own);
        }
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "one", "namespace": "ns", "annotations": annotations},
            "spec": {"containers": [{"name": "inference-server", "image": "stub"}]},
        }))
        .unwrap();
        RequesterSpec::of(&pod, &node, installation)
    };
    for (own, installation, mode) in [
        (None, ProviderMode::Launcher, ProviderMode::Launcher),
        (Some("launcher"), ProviderMode::Sleep, ProviderMode::Launcher),
        (Some("sleep"), ProviderMode::Launcher, ProviderMode::Sleep),
        (Some("plain"), ProviderMode::Launcher, ProviderMode::Plain),
    ] {
        let spec = spec(own, installation).unwrap();
        let requested = spec.resolve(&node, &facts()).unwrap();
        let patched = spec.patched_launcher();
        assert_eq!(requested.mode, mode, "{own:?}");
        assert_eq!(requested.build, patched.map(|patched| patched.revision.build()), "{own:?}");
        assert_eq!(patched.is_some(), mode == ProviderMode::Launcher, "{own:?}");
    }
    let unknown = spec(Some("direct"), ProviderMode::Sleep).unwrap_err().to_string();
    assert!(unknown.ends_with("is 'direct': use plain, sleep or launcher"), "{unknown}");
}

#[test]
fn an_engine_with_adapters_sleeps_at_level_1_or_not_at_all() {
    for (said, expected) in [
        (SleepLevelPolicy::Auto, SleepLevelPolicy::OneOrStop),
        (SleepLevelPolicy::One, SleepLevelPolicy::OneOrStop),
        (SleepLevelPolicy::Never, SleepLevelPolicy::Never),
    ] {
        assert_eq!(level_with_adapters(said, ProviderMode::Sleep).unwrap(), expected);
    }
    for mode in [ProviderMode::Sleep, ProviderMode::Launcher] {
        let refused = level_with_adapters(SleepLevelPolicy::Two, mode).unwrap_err().to_string();
        assert!(
            refused
                .starts_with("the annotation rouse.dev/sleep-level is '2': --enable-lora rules out level 2"),
            "{refused}"
        );
    }
    assert_eq!(
        level_with_adapters(SleepLevelPolicy::Two, ProviderMode::Plain).unwrap(),
        SleepLevelPolicy::Two
    );
}
