//! Tests that facts which are computed only where something changed are the same as if all were computed each time.

use proptest::prelude::*;
use rouse::{
    pairing::{
        event::{ObservedProvider, ProviderPhase},
        ids::PairingEngineId,
    },
    units::Bytes,
};
use serde_json::json;

use super::*;
use crate::{
    convert::ConversionPolicy,
    crd::{
        AcceleratorPool,
        fma::{InferenceServerConfig, LauncherPopulationPolicy},
    },
    dual_pods::{template_revision::TemplateRevision, testing::engine_record},
    index::{ClusterIndex, WatchScope},
};

const NODES: [&str; 3] = ["a", "b", "c"];

/// A change of what facts depend on. `variant` selects one of a few values.
#[derive(Clone, Copy, Debug)]
struct FactChange {
    kind: FactKind,
    node: usize,
    variant: usize,
}

#[derive(Clone, Copy, Debug)]
enum FactKind {
    Node,
    NodeGone,
    /// A list of nodes, up to the chosen one.
    Nodes,
    /// The node as pools know it.
    PooledNode,
    Pool,
    GpuMap,
    Assigned,
    Launcher,
    LauncherGone,
    Engine,
    Revision,
    Faults,
    ServerConfigs,
    LauncherConfigs,
    Policies,
    NewLeader,
    Nothing,
}

fn fact_change() -> impl Strategy<Value = FactChange> {
    let kinds = [
        FactKind::Node,
        FactKind::NodeGone,
        FactKind::Nodes,
        FactKind::PooledNode,
        FactKind::Pool,
        FactKind::GpuMap,
        FactKind::Assigned,
        FactKind::Launcher,
        FactKind::LauncherGone,
        FactKind::Engine,
        FactKind::Revision,
        FactKind::Faults,
        FactKind::ServerConfigs,
        FactKind::LauncherConfigs,
        FactKind::Policies,
        FactKind::NewLeader,
        FactKind::Nothing,
    ];
    let change = (prop::sample::select(kinds.to_vec()), 0..NODES.len(), 0..4_usize);
    change.prop_map(|(kind, node, variant)| FactChange { kind, node, variant })
}

fn object<K: serde::de::DeserializeOwned>(object: serde_json::Value) -> WatchedObject<K> {
    WatchedObject::from(serde_json::from_value::<K>(object).unwrap())
}

fn applied<K: serde::de::DeserializeOwned>(value: serde_json::Value) -> Delta<K> {
    Delta::Applied(object(value))
}

impl FactChange {
    fn node(&self) -> NodeName {
        NODES[self.node].into()
    }

    fn accelerator(&self) -> AcceleratorId {
        format!("GPU-{}{}", NODES[self.node], self.variant % 2).as_str().into()
    }

    /// A Node, of which the heartbeat is not read.
    fn node_object(&self) -> serde_json::Value {
        let labels = [
            json!({"pool": "p", "nvidia.com/gpu.memory": "81920"}),
            json!({"pool": "p", "gpu": "h100", "nvidia.com/gpu.memory": "81920"}),
            json!({"pool": "q", "gpu": "h100"}),
            json!({}),
        ];
        let taints =
            if self.variant == 1 { json!([{"key": "gpu", "effect": "NoSchedule"}]) } else { json!([]) };
        let ready = if self.variant == 2 { "Unknown" } else { "True" };
        json!({
            "metadata": {"name": NODES[self.node], "labels": labels[self.variant]},
            "spec": {"unschedulable": self.variant == 3, "taints": taints},
            "status": {
                "allocatable": {"nvidia.com/gpu": "2"},
                "conditions": [{"type": "Ready", "status": ready, "lastHeartbeatTime": "2027-01-15T08:00:00Z"}],
            },
        })
    }

    fn apply_to_index(&self, index: &mut ClusterIndex) {
        match self.kind {
            FactKind::PooledNode => {
                index.apply(serde_json::from_value::<Node>(self.node_object()).unwrap());
            }
            FactKind::Pool => {
                let name = ["p", "q"][self.node % 2];
                let more = [
                    json!({}),
                    json!({"taint": "gpu"}),
                    json!({"sleepingMemory": "8Gi", "resource": "example.com/gpu"}),
                    json!({"hostSleepMemory": "64Gi"}),
                ];
                let mut spec = more[self.variant].clone();
                spec["nodeSelector"] = json!({"pool": name});
                let pool = json!({
                    "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "spec": spec,
                    "metadata": {"name": name, "uid": format!("uid-{name}"), "generation": self.variant + 1},
                });
                index.apply(serde_json::from_value::<AcceleratorPool>(pool).unwrap());
            }
            _ => {}
        }
    }

    fn apply(&self, facts: &mut ClusterFacts, resolved: &Arc<Resolved>) {
        let (node, variant) = (self.node(), self.variant);
        let provider = ProviderId::launcher(self.accelerator());
        match self.kind {
            FactKind::Node => facts.apply_nodes(applied(self.node_object())),
            FactKind::NodeGone => facts.apply_nodes(Delta::Deleted(ObjectName::new("", node.as_str()))),
            FactKind::Nodes => {
                let listed = (0..=self.node).map(|node| object(Self { node, ..*self }.node_object()));
                facts.apply_nodes(Delta::All { namespace: None, objects: listed.collect() });
            }
            FactKind::PooledNode | FactKind::Pool | FactKind::Nothing => {
                facts.set_resolved_pools(Arc::clone(resolved));
            }
            FactKind::GpuMap if variant == 0 => {
                facts.apply_gpu_map(Delta::Deleted(ObjectName::new("ns", "gpu-map")));
            }
            FactKind::GpuMap => {
                let indices = json!({(self.accelerator().as_str()): variant}).to_string();
                let map = json!({"metadata": {"name": "gpu-map"}, "data": {(node.as_str()): indices}});
                facts.apply_gpu_map(applied(map));
            }
            FactKind::Assigned => facts.record_assigned(&node, &[self.accelerator()]),
            FactKind::Launcher => {
                let hash = if variant < 2 { "old" } else { "new" }.to_owned();
                let source = LauncherRevision { namespace: "ns".to_owned(), config: "big".to_owned(), hash };
                facts.observe_launcher(&node, &provider, &source, variant % 2 == 1);
            }
            FactKind::LauncherGone => {
                facts.observe_event(&PairingEvent::ProviderGone { node, provider, uid: "u".into() });
            }
            FactKind::Engine => {
                let mut record = engine_record(Bytes::gib(1), Bytes::ZERO, Bytes::ZERO);
                record.engine = PairingEngineId {
                    mode: ProviderMode::Launcher,
                    accelerators: [self.accelerator()].into(),
                    fingerprint: EngineFingerprint(variant as u64),
                };
                let observed = ObservedProvider {
                    uid: "u".into(),
                    phase: ProviderPhase::Ready,
                    deleting: false,
                    restarts: 0,
                    build: None,
                    memory_limit: None,
                    records: vec![record],
                };
                facts.observe_event(&PairingEvent::ProviderObserved { node, provider, observed });
            }
            FactKind::Revision => {
                let revision =
                    TemplateRevision { origin: format!("set/{}", self.node), version: variant as u64 };
                let fingerprint = EngineFingerprint(100 + variant as u64 % 3);
                facts.changed |=
                    facts.revisions.observe("ns", &revision, fingerprint, Some(Tick(variant as u64 % 2)));
            }
            FactKind::Faults => {
                let fault = (variant > 0).then(|| (self.accelerator(), "Xid 79".to_owned()));
                let faults = fault.into_iter().collect();
                facts.apply_samples(&DcgmSamples { faults, ..DcgmSamples::default() });
            }
            FactKind::ServerConfigs => {
                let config: Vec<WatchedObject<InferenceServerConfig>> = vec![object(json!({
                    "apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "InferenceServerConfig",
                    "metadata": {"name": "one", "namespace": "ns"},
                    "spec": {"launcherConfigName": "big", "modelServerConfig": {"options": format!("--x {variant}")}},
                }))];
                facts.configs.apply_server_configs(Delta::All { namespace: None, objects: config });
            }
            FactKind::LauncherConfigs => {
                let container = json!({"name": "inference-server", "image": format!("i{variant}")});
                let config: Vec<WatchedObject<LauncherConfig>> = vec![object(json!({
                    "apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "LauncherConfig",
                    "metadata": {"name": "big", "namespace": "ns"},
                    "spec": {"podTemplate": {"spec": {"containers": [container]}}},
                }))];
                facts.configs.apply_launcher_configs(Delta::All { namespace: None, objects: config });
            }
            FactKind::Policies => facts.configs.apply_policies(applied::<LauncherPopulationPolicy>(json!({
                "apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "LauncherPopulationPolicy",
                "metadata": {"name": "p", "namespace": "ns"},
                "spec": {
                    "enhancedNodeSelector": {"labelSelector": {"matchLabels": {"gpu": "h100"}}},
                    "countForLauncher": [{"launcherConfigName": "big", "launcherCount": variant}],
                },
            }))),
            FactKind::NewLeader => facts.reset_last_sent(),
        }
    }
}

fn sent(facts: &mut ClusterFacts) -> (Vec<PairingEvent>, FactChanges) {
    let mut events = Vec::new();
    let changes = facts.send_changes(&mut |event| events.push(event));
    (events, changes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_computed_only_where_something_changed_is_what_all_would_be(
        changes in prop::collection::vec((fact_change(), prop::bool::weighted(0.7)), 1..60),
    ) {
        let scope = WatchScope {
            policy: ConversionPolicy { any_backend: false, dual_pods: None },
            nodes: true,
            namespaces: 1,
        };
        let mut index = ClusterIndex::new(scope);
        let [mut incremental, mut whole] =
            [(); 2].map(|()| ClusterFacts::new(FmaConfigs::new(1)));
        for (change, sends) in changes {
            change.apply_to_index(&mut index);
            let resolved = index.resolved();
            change.apply(&mut incremental, &resolved);
            change.apply(&mut whole, &resolved);
            if sends {
                (whole.dirty.everything, whole.changed) = (true, true);
                let (events, affected) = sent(&mut incremental);
                let (all_events, all_affected) = sent(&mut whole);
                prop_assert_eq!(events, all_events);
                prop_assert_eq!(affected.nodes, all_affected.nodes);
                prop_assert_eq!(affected.configured, all_affected.configured);
            }
        }
    }
}

/// A heartbeat of a kubelet changes nothing that is read.
#[test]
fn a_node_whose_status_alone_is_written_again_costs_nothing() {
    let change = FactChange { kind: FactKind::Node, node: 0, variant: 1 };
    let mut facts = ClusterFacts::default();
    facts.apply_nodes(applied(change.node_object()));
    assert_eq!(sent(&mut facts).1.nodes, BTreeSet::from([change.node()]));
    let mut later = change.node_object();
    later["status"]["conditions"][0]["lastHeartbeatTime"] = json!("2027-01-15T08:05:00Z");
    facts.apply_nodes(applied(later));
    assert!(!facts.changed && facts.dirty.nodes.is_empty());
    let other = FactChange { node: 1, ..change };
    facts.apply_nodes(applied(other.node_object()));
    assert_eq!(sent(&mut facts).1.nodes, BTreeSet::from([other.node()]), "the other node is left alone");
}

/// The size of accelerators that no stub has reported yet is in no event, but requesters need it.
#[test]
fn requesters_are_observed_again_once_their_node_is_in_a_pool() {
    let mut index = ClusterIndex::new(WatchScope {
        policy: ConversionPolicy { any_backend: false, dual_pods: None },
        nodes: true,
        namespaces: 1,
    });
    let mut facts = ClusterFacts::default();
    let apply = |kind, facts: &mut ClusterFacts, index: &mut ClusterIndex| {
        let change = FactChange { kind, node: 0, variant: 0 };
        change.apply_to_index(index);
        change.apply(facts, &index.resolved());
        sent(facts)
    };
    let (events, changes) = apply(FactKind::Node, &mut facts, &mut index);
    assert_eq!((events.len(), changes.nodes.len()), (1, 1));
    apply(FactKind::PooledNode, &mut facts, &mut index);
    let (events, changes) = apply(FactKind::Pool, &mut facts, &mut index);
    assert!(events.is_empty(), "{events:?}");
    assert_eq!(changes.nodes, BTreeSet::from([NodeName::from("a")]));
}
