use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Task {
    deployment: Option<ObjectName>,
    pod: Option<ObjectName>,
    need: PodNeed,
}

impl PodUser for Task {
    fn deployment(&self) -> Option<&ObjectName> {
        self.deployment.as_ref()
    }

    fn pod(&self) -> Option<&ObjectName> {
        self.pod.as_ref()
    }

    fn need(&self) -> PodNeed {
        self.need
    }
}

/// A change of the engine with this number.
#[derive(Clone, Debug)]
enum EngineChange {
    Insert(u32, Task),
    Update(u32, Task),
    Remove(u32),
    Clear,
}

const DEPLOYMENTS: [&str; 3] = ["d0", "d1", "d2"];
const PODS: [&str; 4] = ["p0", "p1", "p2", "p3"];

fn name(name: &str) -> ObjectName {
    ObjectName::new("chat", name)
}

fn task() -> impl Strategy<Value = Task> {
    let some = |names: Vec<&'static str>| prop::option::of(prop::sample::select(names).prop_map(name));
    let need = prop::sample::select(vec![PodNeed::Seeking, PodNeed::Bound, PodNeed::Leaving]);
    (some(DEPLOYMENTS.to_vec()), some(PODS.to_vec()), need).prop_map(|(deployment, pod, need)| Task {
        deployment,
        pod,
        need,
    })
}

fn change() -> impl Strategy<Value = EngineChange> {
    prop_oneof![
        4 => (0..6_u32, task()).prop_map(|(number, task)| EngineChange::Insert(number, task)),
        8 => (0..6_u32, task()).prop_map(|(number, task)| EngineChange::Update(number, task)),
        3 => (0..6_u32).prop_map(EngineChange::Remove),
        1 => Just(EngineChange::Clear),
    ]
}

fn engine(number: u32) -> EngineId {
    EngineId::new("m".into(), number)
}

/// Returns the engines whose tasks are as `found` says.
fn scan(tasks: &BTreeMap<EngineId, Task>, found: impl Fn(&Task) -> bool) -> Vec<EngineId> {
    tasks.iter().filter(|(_, task)| found(task)).map(|(id, _)| id.clone()).collect()
}

/// Compares each answer of the index with a walk over all tasks.
fn check(index: &EngineIndex<Task>, tasks: &BTreeMap<EngineId, Task>) -> Result<(), TestCaseError> {
    prop_assert!(index.iter().eq(tasks.iter()));
    for pod in PODS.map(name) {
        let users = scan(tasks, |task| task.pod.as_ref() == Some(&pod));
        prop_assert_eq!(index.has_pod(&pod), !users.is_empty());
        prop_assert_eq!(index.of_pod(&pod), users);
    }
    for deployment in DEPLOYMENTS.map(name) {
        let of = |task: &Task| task.deployment.as_ref() == Some(&deployment);
        let members = scan(tasks, of);
        prop_assert_eq!(index.has_members(&deployment), !members.is_empty());
        let found: Vec<EngineId> = index.members(&deployment).map(|(id, _)| id.clone()).collect();
        prop_assert_eq!(found, members);
        let keeping = scan(tasks, |task| of(task) && task.need != PodNeed::Leaving);
        prop_assert_eq!(index.keeping(&deployment), keeping.len());
        let seeking = scan(tasks, |task| of(task) && task.need == PodNeed::Seeking);
        prop_assert_eq!(index.seeking(&deployment), seeking.len());
        let waiting = scan(tasks, |task| of(task) && task.need == PodNeed::Seeking && task.pod.is_none());
        prop_assert_eq!(index.waiting(&deployment), waiting);
        let leaving = scan(tasks, |task| of(task) && task.need == PodNeed::Leaving);
        prop_assert_eq!(index.leaving(&deployment), leaving);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn each_lookup_finds_what_a_scan_finds(changes in prop::collection::vec(change(), 1..40)) {
        let mut index: EngineIndex<Task> = EngineIndex::default();
        let mut tasks: BTreeMap<EngineId, Task> = BTreeMap::new();
        for change in changes {
            match change {
                EngineChange::Insert(number, task) => {
                    index.insert(engine(number), task.clone());
                    tasks.insert(engine(number), task);
                }
                EngineChange::Update(number, task) => {
                    let changed = index.change(&engine(number), |known| *known = task.clone());
                    let known = tasks.get_mut(&engine(number));
                    prop_assert_eq!(changed.is_some(), known.is_some());
                    if let Some(known) = known {
                        *known = task;
                    }
                }
                EngineChange::Remove(number) => {
                    prop_assert_eq!(index.remove(&engine(number)), tasks.remove(&engine(number)));
                }
                EngineChange::Clear => {
                    index.clear();
                    tasks.clear();
                }
            }
            check(&index, &tasks)?;
        }
    }
}
