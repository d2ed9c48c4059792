use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;

use super::*;

/// What happens to one of three names: the present object changes, is deleted, or everything is listed again.
#[derive(Clone, Debug)]
enum Step {
    Apply(u8),
    Delete(u8),
    List,
    /// The reader takes this many changes.
    Read(u8),
}

fn name(n: u8) -> ObjectName {
    ObjectName::new("ns", format!("pod-{n}"))
}

fn pod(n: u8, uid: u32, version: u32) -> WatchedObject<Pod> {
    let mut pod = Pod::default();
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.name = Some(name(n).name);
    pod.metadata.uid = Some(uid.to_string());
    pod.metadata.resource_version = Some(version.to_string());
    pod.into()
}

fn identity(found: &WatchedObject<Pod>) -> (String, String) {
    let metadata = found.metadata();
    (metadata.uid.clone().unwrap(), metadata.resource_version.clone().unwrap())
}

/// The objects as the API server has them, and as a reader of the queue has seen them.
#[derive(Default)]
struct QueueModel {
    queue: ChangeQueue<Pod>,
    truth: BTreeMap<ObjectName, (u32, u32)>,
    seen: BTreeMap<ObjectName, (String, String)>,
    /// Last state of each deleted object, by uid, unless a list has replaced the deletion.
    last: BTreeMap<String, String>,
    clock: u32,
}

impl QueueModel {
    fn take(&mut self, step: &Step) {
        self.clock += 1;
        match *step {
            Step::Apply(n) => {
                let uid = self.truth.get(&name(n)).map_or(self.clock, |(uid, _)| *uid);
                self.truth.insert(name(n), (uid, self.clock));
                self.last.insert(uid.to_string(), self.clock.to_string());
                self.queue.push_applied(pod(n, uid, self.clock));
            }
            Step::Delete(n) => {
                if self.truth.remove(&name(n)).is_some() {
                    self.queue.push_deleted(name(n));
                }
            }
            Step::List => {
                let each = (0..3)
                    .filter_map(|n| self.truth.get(&name(n)).map(|(uid, version)| pod(n, *uid, *version)));
                let all: Vec<_> = each.collect();
                self.queue.push_list(Some("ns".to_owned()), all);
            }
            Step::Read(count) => (0..count).for_each(|_| self.read()),
        }
    }

    fn read(&mut self) {
        match self.queue.pop() {
            None => {}
            Some(Delta::All { objects, .. }) => {
                self.seen = objects.iter().map(|found| (found.name(), identity(found))).collect();
            }
            Some(Delta::Applied(found)) => drop(self.seen.insert(found.name(), identity(&found))),
            Some(Delta::Deleted(name)) => {
                // The reader has seen the last state before the deletion.
                if let Some((uid, version)) = self.seen.remove(&name) {
                    assert_eq!(self.last.get(&uid), Some(&version), "{name} {uid}");
                }
            }
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..3_u8).prop_map(Step::Apply),
        3 => (0..3_u8).prop_map(Step::Delete),
        1 => Just(Step::List),
        2 => (0..4_u8).prop_map(Step::Read),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn a_reader_ends_with_the_present_and_sees_the_last_state_before_each_deletion(steps in steps()) {
        let mut scene = QueueModel::default();
        for step in &steps {
            scene.take(step);
            for changes in scene.queue.changes.values() {
                prop_assert!(!changes.is_empty() && changes.len() <= MAX_CHANGES);
            }
            prop_assert_eq!(scene.queue.order.len(), scene.queue.changes.len());
        }
        for _ in 0..steps.len() + 1 {
            scene.read();
        }
        prop_assert!(scene.queue.pop().is_none());
        let text = |(uid, version): &(u32, u32)| (uid.to_string(), version.to_string());
        let truth: BTreeMap<_, _> = scene.truth.iter().map(|(name, state)| (name.clone(), text(state))).collect();
        prop_assert_eq!(&scene.seen, &truth);
    }
}

#[test]
fn a_flood_of_one_object_is_one_change() {
    let mut queue = ChangeQueue::default();
    (1..1000).for_each(|version| queue.push_applied(pod(0, 1, version)));
    assert!(matches!(queue.pop(), Some(Delta::Applied(found)) if identity(&found).1 == "999"));
    assert!(queue.pop().is_none());
}

#[test]
fn an_object_that_comes_and_goes_under_one_name_takes_no_more_room_each_time() {
    let mut queue = ChangeQueue::default();
    for uid in 1..100 {
        queue.push_applied(pod(0, uid, 2 * uid));
        queue.push_deleted(name(0));
    }
    queue.push_applied(pod(0, 100, 200));
    let mut read = || match queue.pop() {
        Some(Delta::Applied(found)) => identity(&found).0,
        Some(Delta::Deleted(_)) => "deleted".to_owned(),
        other => format!("{other:?}"),
    };
    assert_eq!([(); 3].map(|()| read()), ["1", "deleted", "100"]);
}
