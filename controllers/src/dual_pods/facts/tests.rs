mod incremental;

use k8s_openapi::api::core::v1::{NodeCondition, NodeStatus};
use rouse::{
    pairing::{Pairing, event::TemplateStatus},
    units::Tick,
};
use serde_json::json;

use super::{last_sent::MIN_RETAINED, *};
use crate::{
    convert::ConversionPolicy,
    crd::{AcceleratorNode, AcceleratorPool, ledger::ObjectName},
    index::{ClusterIndex, WatchScope},
    platform::dcgm::DcgmSamples,
};

fn node(ready: &str) -> Delta<Node> {
    let condition = |type_: &str, status: &str| NodeCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        ..NodeCondition::default()
    };
    let mut node = Node::default();
    node.metadata.name = Some("a".to_owned());
    let conditions = Some(vec![condition("MemoryPressure", "Unknown"), condition("Ready", ready)]);
    node.status = Some(NodeStatus { conditions, ..NodeStatus::default() });
    Delta::Applied(node.into())
}

fn reporting_changes(facts: &mut ClusterFacts) -> Vec<bool> {
    let mut all = Vec::new();
    facts.send_changes(&mut |event| {
        if let PairingEvent::KubeletReporting { reports, .. } = event {
            all.push(reports);
        }
    });
    all
}

#[test]
fn a_kubelet_that_falls_silent_is_told_of_and_so_is_its_return() {
    let mut facts = ClusterFacts::default();
    let mut after = |change: Option<Delta<Node>>| {
        change.into_iter().for_each(|change| facts.apply_nodes(change));
        reporting_changes(&mut facts)
    };
    assert!(after(Some(node("True"))).is_empty(), "one of which nothing is told reports");
    assert_eq!(after(Some(node("Unknown"))), [false]);
    assert!(after(None).is_empty(), "it is said once");
    assert!(after(Some(node("Unknown"))).is_empty());
    assert_eq!(after(Some(node("False"))), [true], "it reports, if nothing good");
    after(Some(node("Unknown")));
    let gone = Delta::Deleted(ObjectName::new("", "a"));
    assert_eq!(after(Some(gone)), [true], "of what is not there nothing is told");
    facts.apply_nodes(node("Unknown"));
    reporting_changes(&mut facts);
    facts.reset_last_sent();
    assert_eq!(reporting_changes(&mut facts), [false], "a new leader is told again");
}

#[test]
fn the_accelerators_of_a_node_that_is_gone_are_forgotten() {
    let mut facts = ClusterFacts::default();
    let assign = |facts: &mut ClusterFacts| {
        facts.record_assigned(&"a".into(), &["GPU-1".into()]);
        facts.assigned_accelerators.len()
    };
    assert_eq!(assign(&mut facts), 1, "nodes are not listed yet");
    facts.apply_nodes(Delta::All { namespace: None, objects: Vec::new() });
    assert!(facts.assigned_accelerators.is_empty(), "there is no such node");
    facts.apply_nodes(node("True"));
    assert_eq!(assign(&mut facts), 1);
    facts.apply_nodes(Delta::Deleted(ObjectName::new("", "a")));
    assert!(facts.assigned_accelerators.is_empty());
    assert_eq!(assign(&mut facts), 0, "its Pods are deleted later than the node");
}

#[test]
fn a_fault_lasts_until_its_series_says_nothing_of_the_kind() {
    let mut facts = ClusterFacts::default();
    let id = AcceleratorId::from("GPU-1");
    let mut after = |faulty: bool, erred: bool| {
        let faults = faulty.then(|| (id.clone(), "Xid 79".to_owned())).into_iter().collect();
        let erred = erred.then(|| id.clone()).into_iter().collect();
        facts.apply_samples(&DcgmSamples { faults, with_xid: erred, ..DcgmSamples::default() });
        (facts.faults.contains_key(&id), std::mem::take(&mut facts.changed))
    };
    assert_eq!(after(false, true), (false, false), "a program that erred");
    assert_eq!(after(true, true), (true, true));
    assert_eq!(after(true, true), (true, false), "it is no news");
    assert_eq!(after(false, true), (true, false), "the last Xid is another, harmless one");
    assert_eq!(after(false, false), (false, true));
}

#[test]
fn engines_that_nobody_has_any_more_are_forgotten_here_and_by_the_decisions() {
    let (mut facts, mut core) =
        (ClusterFacts::default(), Pairing::new(rouse::pairing::settings::PairingSettings::default()));
    let many = u64::try_from(MIN_RETAINED).unwrap();
    let tell = |facts: &mut ClusterFacts, core: &mut Pairing| {
        facts.send_changes(&mut |event| core.on(&event, Tick(1)));
        (0..2 * many)
            .filter(|own| core.template_status(EngineFingerprint(*own)) == TemplateStatus::Outdated)
            .count()
    };
    // Each revision requests another engine, and so outdates the one before.
    for version in 0..many {
        let edition =
            crate::dual_pods::template_revision::TemplateRevision { origin: "set/a".to_owned(), version };
        facts.revisions.observe("ns", &edition, EngineFingerprint(version), Some(Tick(version)));
    }
    facts.changed = true;
    assert_eq!(tell(&mut facts, &mut core), MIN_RETAINED - 1);
    facts.forget_unused(&core);
    assert_eq!(tell(&mut facts, &mut core), 0);
    assert_eq!((facts.revisions.len(), facts.last_sent.template_statuses.len()), (0, 0));
}

#[test]
fn the_index_of_an_accelerator_is_the_nodes_own_unless_a_gpu_map_gives_one() {
    let scope = WatchScope { policy: ConversionPolicy::default(), nodes: true, namespaces: 1 };
    let mut index = ClusterIndex::new(scope);
    let labels = json!({"pool": "p"});
    let pool = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "metadata": {"name": "p"},
        "spec": {"nodeSelector": labels}});
    index.apply(serde_json::from_value::<AcceleratorPool>(pool).unwrap());
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "a", "labels": labels}})).unwrap();
    index.apply(node.clone());
    let listed = json!([
        {"uuid": "GPU-x", "capacity": "80Gi", "healthy": true, "index": 7},
        {"uuid": "GPU-y", "capacity": "80Gi", "healthy": true, "index": 3},
    ]);
    let listed = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorNode", "metadata": {"name": "a"},
        "spec": {}, "status": {"accelerators": listed}});
    index.apply(serde_json::from_value::<AcceleratorNode>(listed).unwrap());

    let (mut facts, name) = (ClusterFacts::default(), NodeName::from("a"));
    facts.apply_nodes(Delta::Applied(node.into()));
    facts.set_resolved_pools(index.resolved());
    let both: [AcceleratorId; 2] = ["GPU-x".into(), "GPU-y".into()];
    let sent = |facts: &mut ClusterFacts| {
        let mut indices = BTreeMap::new();
        facts.send_changes(&mut |event| {
            if let PairingEvent::Accelerator { accelerator, facts, .. } = event {
                indices.insert(accelerator, facts.index);
            }
        });
        indices
    };
    let [x, y] = both.clone();
    assert_eq!(sent(&mut facts), [(x.clone(), 7), (y.clone(), 3)].into());
    assert_eq!(facts.numbers(&name, &both), Some(vec![7, 3]));
    assert_eq!(facts.numbers(&name, &["GPU-z".into()]), None, "its UUID must do");
    let map =
        json!({"metadata": {"name": "gpu-map"}, "data": {"a": json!({"GPU-x": 0, "GPU-y": 1}).to_string()}});
    let map: ConfigMap = serde_json::from_value(map).unwrap();
    facts.apply_gpu_map(Delta::Applied(map.into()));
    assert_eq!(sent(&mut facts), [(x, 0), (y, 1)].into());
    assert_eq!(facts.numbers(&name, &both), Some(vec![0, 1]));
}
