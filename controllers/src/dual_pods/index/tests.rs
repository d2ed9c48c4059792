use rouse::units::Bytes;

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
    Delta::Applied(Box::new(WatchedObject::Readable(pod)))
}

fn applied(uid: &str) -> Delta<Pod> {
    Delta::Applied(Box::new(WatchedObject::Readable(provider(uid))))
}

fn all(uids: &[&str]) -> Delta<Pod> {
    Delta::All {
        namespace: None,
        objects: uids.iter().map(|uid| WatchedObject::Readable(provider(uid))).collect(),
    }
}

/// The events of these changes: `+uid` seen, `-uid` gone, `?uid` gone without a seen end.
fn event_log(index: &mut PodIndex, changes: impl IntoIterator<Item = Delta<Pod>>) -> Vec<String> {
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
fn a_watch_that_is_behind_a_list_takes_nothing_away_that_the_list_has() {
    let mut index = PodIndex::new(ProviderMode::Sleep);
    let gone = || Delta::Deleted(ObjectName::new("ns", "n-1-dual"));
    assert_eq!(event_log(&mut index, [all(&["old"])]), ["+old"]);
    index.apply_lists(vec![all(&["new"])], &ClusterFacts::default());
    let later = [applied("old"), gone(), applied("new")];
    assert_eq!(event_log(&mut index, later), ["+new"], "of the old one nothing is heard any more");
    assert_eq!(event_log(&mut index, [gone()]), ["-new"]);
}

/// Versions of the indexed Pods.
fn versions(directory: &PodIndex) -> Vec<u64> {
    directory.pods.values().map(IndexedPod::version).collect()
}

fn versioned(uid: &str, name: &str, version: u64) -> Pod {
    let mut pod = provider(uid);
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.resource_version = Some(version.to_string());
    pod
}

#[test]
fn what_a_watch_says_while_a_list_is_under_way_is_neither_lost_nor_undone_by_it() {
    let mut index = PodIndex::new(ProviderMode::Sleep);
    let apply = |pod: Pod| Delta::Applied(Box::new(WatchedObject::Readable(pod)));
    let [a, b, c] = ["n-a-dual", "n-b-dual", "n-c-dual"];
    index.defer_changes();
    // The list has version 10. Before it arrived, the watch was at 9 and then at 13.
    let meanwhile = [
        apply(versioned("a", a, 5)),
        apply(versioned("b", b, 9)),
        apply(versioned("b", b, 11)),
        apply(versioned("c", c, 12)),
        Delta::Deleted(ObjectName::new("ns", a)),
    ];
    assert_eq!(event_log(&mut index, meanwhile), [""; 0]);
    let objects = [versioned("a", a, 5), versioned("b", b, 10)].map(WatchedObject::Readable).into();
    index.apply_lists(vec![Delta::All { namespace: None, objects }], &ClusterFacts::default());
    assert_eq!(versions(&index), [11, 12]);
    // A watch event from before the list changes nothing.
    assert_eq!(event_log(&mut index, [apply(versioned("b", b, 9))]), [""; 0]);
    assert_eq!(event_log(&mut index, [apply(versioned("b", b, 14))]), ["+b"]);
}

#[test]
fn a_pod_of_the_same_name_tells_that_the_one_before_is_gone() {
    let mut index = PodIndex::new(ProviderMode::Sleep);
    assert_eq!(event_log(&mut index, [applied("a"), applied("b")]), ["+a", "-a", "+b"]);
    assert_eq!(event_log(&mut index, [all(&[])]), ["-b"]);
}

#[test]
fn a_pod_whose_end_nobody_saw_is_not_told_to_have_ended() {
    let mut index = PodIndex::new(ProviderMode::Sleep);
    let gone = || Delta::Deleted(ObjectName::new("ns", "n-1-dual"));
    assert_eq!(event_log(&mut index, [placed("a", "Running"), gone()]), ["+a", "?a"]);
    assert_eq!(
        event_log(&mut index, [placed("b", "Running"), placed("b", "Failed"), gone()]),
        ["+b", "+b", "-b"]
    );
}
