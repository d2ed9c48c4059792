use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::pairing::ids::ProviderMode;
use serde_json::{Value, json};

use super::*;
use crate::{
    dual_pods::fma_configs::FmaConfigs, metrics::DualPodMetrics, platform::launcher::pod, watch::Delta,
};

const CREATED: Tick = Tick(1_800_000_000_000);

fn launcher(node: Option<&str>, hash: &str, ready: bool) -> Pod {
    let running = json!({"name": "inference-server", "image": "i", "imageID": "i", "ready": ready, "restartCount": 0,
        "containerID": "c", "state": {"running": {}}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": pod::name(&"n".into(), &"GPU-1".into()), "namespace": "ns", "uid": "u", "creationTimestamp": "2027-01-15T08:00:00Z",
            "labels": {"app.kubernetes.io/component": "launcher", "dual-pods.llm-d.ai/launcher-config-name": "big",
                "dual-pods.llm-d.ai/node-name": "n"},
            "annotations": {"dual-pods.llm-d.ai/accelerators": "GPU-1",
                "dual-pods.llm-d.ai/launcher-populator-template-hash": hash}},
        "spec": {"nodeName": node, "containers": []},
        "status": {"containerStatuses": node.map_or(json!([]), |_| json!([running]))}});
    serde_json::from_value(pod).unwrap()
}

/// Facts that contain one LauncherConfig, and the hash of its launchers.
fn facts() -> (ClusterFacts, String) {
    let object: Value = json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "LauncherConfig",
        "metadata": {"name": "big", "namespace": "ns"},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "inference-server", "image": "i"}]}}}});
    let config = serde_json::from_value(object).unwrap();
    let hash = pod::LauncherRevision::of(&config).hash;
    let mut configs = FmaConfigs::new(1);
    configs.apply_launcher_configs(Delta::All { namespace: None, objects: vec![config.into()] });
    configs.apply_server_configs(Delta::All { namespace: None, objects: Vec::new() });
    (ClusterFacts::new(configs), hash)
}

/// The exported launcher metrics.
fn launcher_metric_lines(metrics: &prometheus::Registry) -> Vec<String> {
    let page = prometheus::TextEncoder::new().encode_to_string(&metrics.gather()).unwrap();
    let lines =
        page.lines().filter_map(|line| line.strip_prefix("fma_launcher_pod_count{lcfg_name=\"big\",phase="));
    lines.map(str::to_owned).collect()
}

#[test]
fn a_launcher_that_does_not_become_ready_is_stuck_after_a_while_and_one_of_another_template_is_stale() {
    let metrics = prometheus::Registry::new();
    let (facts, hash) = facts();
    let mut index = PairingPodIndex::new(ProviderMode::Launcher);
    let mut pairing = PairingMetrics::new(DualPodMetrics::new(&metrics));
    let mut see = |pairing_metrics: &mut PairingMetrics, seen: Pod, now: Tick| {
        let name = ObjectName::new("ns", seen.name_any());
        index.apply(Delta::Applied(seen.into()), &facts, &mut drop);
        let inputs = MetricsInputs { index: &index, facts: &facts, now };
        pairing_metrics.recount(&name, inputs);
        pairing_metrics.recount_due(inputs);
        launcher_metric_lines(&metrics)
    };
    let later = |seconds: u64| CREATED + Millis::secs(seconds);
    assert_eq!(see(&mut pairing, launcher(None, &hash, false), CREATED), [""; 0], "it does not lead");
    pairing.leads = true;
    assert_eq!(see(&mut pairing, launcher(None, &hash, false), later(119)), ["\"unbound\"} 1"]);
    assert_eq!(pairing.due(), Some(later(120)));
    assert_eq!(see(&mut pairing, launcher(None, &hash, false), later(120)), ["\"stuck_scheduling\"} 1"]);
    assert_eq!(see(&mut pairing, launcher(Some("n"), &hash, false), later(130)), ["\"unbound\"} 1"]);
    assert_eq!(pairing.due(), Some(later(450)));
    assert_eq!(see(&mut pairing, launcher(Some("n"), &hash, false), later(450)), ["\"stuck_starting\"} 1"]);
    assert_eq!(see(&mut pairing, launcher(Some("n"), &hash, true), later(451)), ["\"unbound\"} 1"]);
    assert_eq!(pairing.due(), None);
    assert_eq!(see(&mut pairing, launcher(Some("n"), "another", true), later(452)), ["\"stale\"} 1"]);
    pairing.clear();
    assert_eq!(launcher_metric_lines(&metrics), [""; 0]);
}

/// Only time passes.
#[test]
fn what_is_due_is_looked_at_without_any_news_of_it() {
    let metrics = prometheus::Registry::new();
    let (facts, hash) = facts();
    let mut index = PairingPodIndex::new(ProviderMode::Launcher);
    let mut pairing = PairingMetrics::new(DualPodMetrics::new(&metrics));
    index.apply(Delta::Applied(launcher(None, &hash, false).into()), &facts, &mut drop);
    let inputs = |now| MetricsInputs { index: &index, facts: &facts, now };
    pairing.begin(inputs(CREATED));
    pairing.recount_due(inputs(CREATED + Millis::secs(119)));
    assert_eq!(launcher_metric_lines(&metrics), ["\"unbound\"} 1"]);
    pairing.recount_due(inputs(CREATED + Millis::secs(120)));
    assert_eq!(launcher_metric_lines(&metrics), ["\"stuck_scheduling\"} 1"]);
}
