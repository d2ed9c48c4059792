//! Tests that an index that saw every change answers as one that saw only the Pods that are left.

use proptest::prelude::*;
use rouse::pairing::ids::Uid;
use serde_json::json;

use super::*;
use crate::dual_pods::launcher_engines::{self, LauncherEngine, RoutingMetadata};

const NODES: [&str; 2] = ["a", "b"];
/// Two launchers, two providers of one engine, and two requesters: one of each on each node.
const PODS: usize = 6;

/// The next version of a Pod, or its end.
#[derive(Clone, Debug)]
struct PodChange {
    pod: usize,
    exists: bool,
    /// Numbers the Pods of this name.
    uid: u8,
    /// Of a requester: it has a node, and is being deleted, so that it has an event whatever it requests.
    ready: bool,
    fingerprint: u64,
    /// The requester that a provider's engine is bound to.
    bound: Option<(usize, u8)>,
}

fn pod_change() -> impl Strategy<Value = PodChange> {
    let bound = prop::option::of((4..PODS, 0..2_u8));
    let change = (0..PODS, prop::bool::weighted(0.8), 0..2_u8, any::<bool>(), 1..3_u64, bound);
    change.prop_map(|(pod, exists, uid, ready, fingerprint, bound)| PodChange {
        pod,
        exists,
        uid,
        ready,
        fingerprint,
        bound,
    })
}

fn uid(pod: usize, number: u8) -> String {
    format!("{pod}-{number}")
}

impl PodChange {
    fn node(&self) -> NodeName {
        NODES[self.pod % 2].into()
    }

    /// The accelerators of the node's launcher and of its other provider.
    fn accelerator(&self) -> AcceleratorId {
        format!("GPU-{}", self.pod).as_str().into()
    }

    fn name(&self) -> ObjectName {
        let name = match self.pod {
            0 | 1 => launchers::name(&self.node(), &self.accelerator()),
            _ => format!("pod-{}", self.pod),
        };
        ObjectName::new("ns", name)
    }

    fn record(&self, mode: ProviderMode) -> EngineRecord {
        EngineRecord {
            engine: PairingEngineId {
                mode,
                accelerators: [self.accelerator()].into(),
                fingerprint: rouse::pairing::ids::EngineFingerprint(self.fingerprint),
            },
            requester: self.bound.map(|(pod, number)| uid(pod, number).as_str().into()),
            ..engine_record(Bytes::gib(self.fingerprint), Bytes::ZERO, Bytes::ZERO)
        }
    }

    fn object(&self) -> Pod {
        let node = self.node();
        let status = json!({"name": keys::CONTAINER, "image": "i", "imageID": "i", "ready": self.ready,
            "restartCount": 0, "containerID": "c", "state": {"running": {}}});
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": self.name().name, "namespace": "ns", "uid": uid(self.pod, self.uid)},
            "spec": {"containers": [], "nodeName": node.as_str()},
            "status": {"containerStatuses": [status]},
        }))
        .unwrap();
        match self.pod {
            0 | 1 => {
                let record = self.record(ProviderMode::Launcher);
                let key = launcher_engines::key(&record.engine);
                let port = 8100 + u16::try_from(self.fingerprint).unwrap();
                let routing = RoutingMetadata::default();
                let engine = LauncherEngine { record, sleep_level: None, port, routing };
                pod.metadata.labels =
                    Some([("app.kubernetes.io/component".to_owned(), "launcher".to_owned())].into());
                let accelerator = (keys::ACCELERATORS.to_owned(), self.accelerator().to_string());
                pod.metadata.annotations = Some([accelerator, (key, launcher_engines::text(&engine))].into());
            }
            2 | 3 => record::write(&mut pod, &node, "chat", &self.record(ProviderMode::Sleep), 8000),
            _ => {
                pod.metadata.annotations = Some([(keys::SERVER_PATCH.to_owned(), "{}".to_owned())].into());
                if self.ready {
                    pod.metadata.deletion_timestamp =
                        serde_json::from_value(json!("2027-01-15T08:00:00Z")).unwrap();
                } else if let Some(spec) = &mut pod.spec {
                    spec.node_name = None;
                }
            }
        }
        pod
    }
}

fn readable(pod: Pod) -> WatchedObject<Pod> {
    WatchedObject::from(pod)
}

/// The events of a replay of these changes' Pods.
fn replayed(index: &PairingPodIndex, changes: &FactChanges) -> Vec<PairingEvent> {
    let mut events = Vec::new();
    index.replay(changes, &ClusterFacts::default(), &mut |event| events.push(event));
    events
}

fn everywhere() -> FactChanges {
    FactChanges { everywhere: true, ..FactChanges::default() }
}

fn node_of(event: &PairingEvent) -> &NodeName {
    match event {
        PairingEvent::RequesterObserved { node, .. } | PairingEvent::ProviderObserved { node, .. } => node,
        other => panic!("{other:?}"),
    }
}

type Answers =
    (Vec<PairingEvent>, Vec<RequesterId>, Vec<Vec<(PairingEngineId, u16)>>, Vec<Option<ObjectName>>);

/// What the index answers to each question.
fn answers(index: &PairingPodIndex) -> Answers {
    let requesters = index.requesters().map(|requester| requester.id.clone()).collect();
    let ports = NODES.map(|node| {
        let node = NodeName::from(node);
        index.ports(&node).map(|(engine, port)| (engine.clone(), port)).collect::<Vec<_>>()
    });
    let mut providers = Vec::new();
    for pod in 0..4 {
        for fingerprint in 1..3 {
            let change = PodChange { pod, exists: true, uid: 0, ready: true, fingerprint, bound: None };
            let id = match pod {
                0 | 1 => ProviderId::launcher(change.accelerator()),
                _ => ProviderId::direct(&change.record(ProviderMode::Sleep).engine),
            };
            providers.push(index.provider(&change.node(), &id).map(|provider| provider.name.clone()));
        }
    }
    (replayed(index, &everywhere()), requesters, ports.into(), providers)
}

/// What decides on the connection to each launcher.
fn launcher_states(index: &PairingPodIndex) -> BTreeMap<LauncherLocation, (Uid, bool)> {
    let state = |role: &IndexedPod| match role {
        IndexedPod::Provider(provider) if provider.is_launcher() => Some((
            (provider.node.clone(), provider.id.clone()),
            (provider.uid.clone(), provider.accepts_launcher_calls()),
        )),
        _ => None,
    };
    index.pods.values().filter_map(state).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_the_index_answers_follows_from_the_pods_that_are_left(
        changes in prop::collection::vec(pod_change(), 1..25),
    ) {
        let facts = ClusterFacts::default();
        let mut index = PairingPodIndex::new(ProviderMode::Sleep);
        let mut pods: BTreeMap<usize, Pod> = BTreeMap::new();
        let mut known: BTreeMap<LauncherLocation, (Uid, bool)> = BTreeMap::new();
        for change in changes {
            let mut emitted = Vec::new();
            let delta = if change.exists {
                pods.insert(change.pod, change.object());
                Delta::Applied(readable(change.object()))
            } else {
                pods.remove(&change.pod);
                Delta::Deleted(change.name())
            };
            index.apply(delta, &facts, &mut |event| emitted.push(event));

            let mut fresh = PairingPodIndex::new(ProviderMode::Sleep);
            let objects = pods.values().cloned().map(readable).collect();
            fresh.apply(Delta::All { namespace: None, objects }, &facts, &mut drop);
            prop_assert_eq!(answers(&index), answers(&fresh));

            // A replay of one node has the events of that node, in the same order.
            let all = replayed(&index, &everywhere());
            for node in NODES.map(NodeName::from) {
                let of_node: Vec<_> = all.iter().filter(|event| *node_of(event) == node).cloned().collect();
                let changes = FactChanges { nodes: [node].into(), ..FactChanges::default() };
                prop_assert_eq!(replayed(&index, &changes), of_node);
            }
            // What a change emits of a Pod that is left is what a replay emits.
            let is_gone = |event: &PairingEvent| {
                !matches!(event, PairingEvent::RequesterObserved { .. } | PairingEvent::ProviderObserved { .. })
            };
            prop_assert!(emitted.iter().all(|event| is_gone(event) || all.contains(event)));

            // No launcher changes without being among the changed ones.
            let changed = index.take_changed_launchers();
            let now = launcher_states(&index);
            for location in known.keys().chain(now.keys()) {
                prop_assert!(known.get(location) == now.get(location) || changed.contains(location));
            }
            known = now;
        }
        let left = pods.len();
        let all: Vec<usize> = pods.into_keys().collect();
        for pod in all {
            let change = PodChange { pod, exists: false, uid: 0, ready: false, fingerprint: 1, bound: None };
            index.apply(Delta::Deleted(change.name()), &facts, &mut drop);
        }
        prop_assert!(index.nodes.is_empty() && index.requesters.is_empty(), "{} Pods were left", left);
    }
}
