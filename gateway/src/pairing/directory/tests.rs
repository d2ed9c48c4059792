use rouse::{
    model::LevelPolicy,
    pairing::{
        event::Sizes,
        ids::{EngineId, Fingerprint},
    },
    units::{Bytes, Generation, Tick},
};

use super::*;

/// A provider's Pod; those of one engine have one name.
fn provider(uid: &str) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.name = Some("n-1-dual".to_owned());
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.uid = Some(uid.to_owned());
    let record = Record {
        engine: EngineId {
            mode: Mode::Sleep,
            accelerators: ["GPU-1".into()].into(),
            fingerprint: Fingerprint(7),
        },
        generation: Generation(1),
        sizes: Sizes { awake: Bytes::gib(1), asleep: Bytes::ZERO, host: Bytes::ZERO },
        level: LevelPolicy::Auto,
        stop_after: None,
        requester: None,
        last_used: Tick(0),
    };
    record::write(&mut pod, &NodeName::from("n"), "chat", &record, 8000);
    pod
}

/// One that a kubelet has, in this phase.
fn placed(uid: &str, phase: &str) -> Change<Pod> {
    let mut pod = provider(uid);
    pod.spec.get_or_insert_default().node_name = Some("n".to_owned());
    pod.status.get_or_insert_default().phase = Some(phase.to_owned());
    Change::Applied(Box::new(Found::Good(pod)))
}

fn applied(uid: &str) -> Change<Pod> {
    Change::Applied(Box::new(Found::Good(provider(uid))))
}

fn all(uids: &[&str]) -> Change<Pod> {
    Change::All { namespace: None, objects: uids.iter().map(|uid| Found::Good(provider(uid))).collect() }
}

/// What the changes come to: `+uid` seen, `-uid` gone, `?uid` gone and not seen to have ended.
fn told(directory: &mut Directory, changes: impl IntoIterator<Item = Change<Pod>>) -> Vec<String> {
    let mut told = Vec::new();
    for change in changes {
        directory.take(change, &Facts::default(), &mut |event| match event {
            Event::SeenProvider { seen, .. } => told.push(format!("+{}", seen.uid)),
            Event::ProviderGone { uid, .. } => told.push(format!("-{uid}")),
            Event::ProviderVanished { uid, .. } => told.push(format!("?{uid}")),
            other => panic!("{other:?}"),
        });
    }
    told
}

#[test]
fn a_watch_that_is_behind_a_list_takes_nothing_away_that_the_list_has() {
    let mut directory = Directory::new(Mode::Sleep);
    let gone = || Change::Deleted(ObjectName::new("ns", "n-1-dual"));
    assert_eq!(told(&mut directory, [all(&["old"])]), ["+old"]);
    directory.list(vec![all(&["new"])], &Facts::default());
    let later = [applied("old"), gone(), applied("new")];
    assert_eq!(told(&mut directory, later), ["+new"], "of the old one nothing is heard any more");
    assert_eq!(told(&mut directory, [gone()]), ["-new"]);
}

/// As it stands, by their versions.
fn there(directory: &Directory) -> Vec<u64> {
    directory.pods.values().map(Role::version).collect()
}

fn versioned(uid: &str, name: &str, version: u64) -> Pod {
    let mut pod = provider(uid);
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.resource_version = Some(version.to_string());
    pod
}

#[test]
fn what_a_watch_says_while_a_list_is_under_way_is_neither_lost_nor_undone_by_it() {
    let mut directory = Directory::new(Mode::Sleep);
    let apply = |pod: Pod| Change::Applied(Box::new(Found::Good(pod)));
    let [a, b, c] = ["n-a-dual", "n-b-dual", "n-c-dual"];
    directory.await_lists();
    // The list is of version 10. Before it came, the watch was at 9 and then at 13.
    let meanwhile = [
        apply(versioned("a", a, 5)),
        apply(versioned("b", b, 9)),
        apply(versioned("b", b, 11)),
        apply(versioned("c", c, 12)),
        Change::Deleted(ObjectName::new("ns", a)),
    ];
    assert_eq!(told(&mut directory, meanwhile), [""; 0]);
    let objects = [versioned("a", a, 5), versioned("b", b, 10)].map(Found::Good).into();
    directory.list(vec![Change::All { namespace: None, objects }], &Facts::default());
    assert_eq!(there(&directory), [11, 12]);
    // One that was behind the list says nothing new.
    assert_eq!(told(&mut directory, [apply(versioned("b", b, 9))]), [""; 0]);
    assert_eq!(told(&mut directory, [apply(versioned("b", b, 14))]), ["+b"]);
}

#[test]
fn a_pod_of_the_same_name_tells_that_the_one_before_is_gone() {
    let mut directory = Directory::new(Mode::Sleep);
    assert_eq!(told(&mut directory, [applied("a"), applied("b")]), ["+a", "-a", "+b"]);
    assert_eq!(told(&mut directory, [all(&[])]), ["-b"]);
}

#[test]
fn a_pod_whose_end_nobody_saw_is_not_told_to_have_ended() {
    let mut directory = Directory::new(Mode::Sleep);
    let gone = || Change::Deleted(ObjectName::new("ns", "n-1-dual"));
    assert_eq!(told(&mut directory, [placed("a", "Running"), gone()]), ["+a", "?a"]);
    assert_eq!(
        told(&mut directory, [placed("b", "Running"), placed("b", "Failed"), gone()]),
        ["+b", "+b", "-b"]
    );
}
