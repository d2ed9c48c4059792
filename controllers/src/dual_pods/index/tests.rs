mod incremental;

use rouse::units::Bytes;
use serde_json::{Value, json};

use super::*;
use crate::dual_pods::testing::engine_record;

/// A provider's Pod. All Pods of one engine have the same name.
fn provider(uid: &str) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.name = Some("n-1-dual".to_owned());
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.uid = Some(uid.to_owned());
    let record = engine_record(Bytes::gib(1), Bytes::ZERO, Bytes::ZERO);
    record::write(&mut pod, &NodeName::from("n"), "chat", &record, 8000);
    pod
}

/// A scheduled Pod in this phase.
fn placed(uid: &str, phase: &str) -> Delta<Pod> {
    let mut pod = provider(uid);
    pod.spec.get_or_insert_default().node_name = Some("n".to_owned());
    pod.status.get_or_insert_default().phase = Some(phase.to_owned());
    Delta::Applied(pod.into())
}

fn applied(uid: &str) -> Delta<Pod> {
    Delta::Applied(provider(uid).into())
}

fn all(uids: &[&str]) -> Delta<Pod> {
    Delta::All { namespace: None, objects: uids.iter().map(|uid| provider(uid).into()).collect() }
}

/// The events of these changes: `+uid` seen, `-uid` gone, `?uid` gone without a seen end.
fn event_log(index: &mut PairingPodIndex, changes: impl IntoIterator<Item = Delta<Pod>>) -> Vec<String> {
    let mut log = Vec::new();
    for change in changes {
        index.apply(change, &ClusterFacts::default(), &mut |event| match event {
            PairingEvent::ProviderObserved { observed: seen, .. } => log.push(format!("+{}", seen.uid)),
            PairingEvent::ProviderGone { uid, .. } => log.push(format!("-{uid}")),
            PairingEvent::ProviderVanished { uid, .. } => log.push(format!("?{uid}")),
            other => panic!("{other:?}"),
        });
    }
    log
}

#[test]
fn a_pod_of_the_same_name_tells_that_the_one_before_is_gone() {
    let mut index = PairingPodIndex::new(ProviderMode::Sleep);
    assert_eq!(event_log(&mut index, [applied("a"), applied("b")]), ["+a", "-a", "+b"]);
    assert_eq!(event_log(&mut index, [all(&[])]), ["-b"]);
}

/// A list or a coalesced change may show a Pod of an earlier provider's name that is no part of dual pods.
#[test]
fn a_pod_of_the_same_name_and_no_role_tells_that_the_one_before_is_gone() {
    let mut index = PairingPodIndex::new(ProviderMode::Sleep);
    let other = || -> WatchedObject<Pod> {
        let mut pod = provider("b");
        pod.metadata.annotations = None;
        WatchedObject::from(pod)
    };
    assert_eq!(event_log(&mut index, [applied("a"), Delta::Applied(other())]), ["+a", "-a"]);
    let list = Delta::All { namespace: None, objects: vec![other()] };
    assert_eq!(event_log(&mut index, [applied("c"), list]), ["+c", "-c"]);
    assert!(index.names().next().is_none() && index.nodes.is_empty());
}

#[test]
fn a_pod_whose_end_nobody_saw_is_not_told_to_have_ended() {
    let mut index = PairingPodIndex::new(ProviderMode::Sleep);
    let gone = || Delta::Deleted(ObjectName::new("ns", "n-1-dual"));
    assert_eq!(event_log(&mut index, [placed("a", "Running"), gone()]), ["+a", "?a"]);
    assert_eq!(
        event_log(&mut index, [placed("b", "Running"), placed("b", "Failed"), gone()]),
        ["+b", "+b", "-b"]
    );
}

#[test]
fn a_failure_is_kept_until_a_provider_is_ready_or_the_node_has_no_pod() {
    let mut index = PairingPodIndex::new(ProviderMode::Sleep);
    let gone = |name: &str| -> Delta<Pod> { Delta::Deleted(ObjectName::new("ns", name)) };
    let with_state = |state: Value| -> Delta<Pod> {
        let mut pod = provider("a");
        let mut container = json!({
            "name": keys::CONTAINER, "containerID": "c", "image": "", "imageID": "", "restartCount": 0,
        });
        container["ready"] = json!(state.get("running").is_some());
        container["state"] = state;
        pod.status.get_or_insert_default().container_statuses =
            Some(vec![serde_json::from_value(container).unwrap()]);
        Delta::Applied(pod.into())
    };
    let failed = || with_state(json!({"terminated": {"exitCode": 3}}));
    let ready = || with_state(json!({"running": {}}));
    let other = || -> Delta<Pod> {
        let mut pod = provider("b");
        pod.metadata.name = Some("other".to_owned());
        Delta::Applied(pod.into())
    };
    let failure = |index: &PairingPodIndex| index.container_failure(&"n".into(), &["GPU-1".into()]).is_some();
    event_log(&mut index, [failed()]);
    assert!(failure(&index));
    event_log(&mut index, [ready()]);
    assert!(!failure(&index), "it serves");

    event_log(&mut index, [other(), failed(), gone("n-1-dual")]);
    assert!(failure(&index), "another Pod on the node may wait for the next provider");
    event_log(&mut index, [gone("other")]);
    assert!(!failure(&index) && index.container_failures.is_empty());
}
