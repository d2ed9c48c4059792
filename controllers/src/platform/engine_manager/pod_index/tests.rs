use proptest::prelude::*;
use rouse::{model::VariantName, units::Generation};

use super::*;
use crate::platform::testing;

#[derive(Clone, Debug)]
enum EnginePodChange {
    Insert(Box<EnginePod>),
    Remove(ObjectName),
    GiveUp(ObjectName),
}

const NAMES: [&str; 5] = ["p0", "p1", "p2", "p3", "p4"];
const MODELS: [&str; 2] = ["m0", "m1"];
const TEMPLATES: [&str; 2] = ["t0", "t1"];
const VARIANTS: [&str; 2] = [VariantName::DEFAULT, "large"];

fn name() -> impl Strategy<Value = ObjectName> {
    prop::sample::select(NAMES.to_vec()).prop_map(|name| ObjectName::new("chat", name))
}

fn pod() -> impl Strategy<Value = EnginePod> {
    let labels = (
        prop::sample::select(MODELS.to_vec()),
        prop::sample::select(TEMPLATES.to_vec()),
        prop::sample::select(VARIANTS.to_vec()),
    );
    let state = (any::<bool>(), any::<bool>(), any::<bool>());
    (name(), labels, state, 0..3_u64, 0..3_u64, any::<bool>()).prop_map(
        |(name, (model, template, variant), (bound, terminating, finished), created, uid, owned)| EnginePod {
            uid: uid.to_string(),
            engine: bound.then_some((0, Generation(1))),
            object: owned.then(|| ObjectName::new("chat", model)),
            created: Tick(created),
            terminating,
            finished,
            variant: variant.into(),
            ..testing::pod("chat", &name.name, model, template)
        },
    )
}

fn change() -> impl Strategy<Value = EnginePodChange> {
    prop_oneof![
        8 => pod().prop_map(|pod| EnginePodChange::Insert(Box::new(pod))),
        3 => name().prop_map(EnginePodChange::Remove),
        2 => name().prop_map(EnginePodChange::GiveUp),
    ]
}

/// Compares each answer of the index with a walk over all Pods.
fn check(
    index: &PodIndex,
    pods: &BTreeMap<ObjectName, EnginePod>,
    surplus: &BTreeMap<ObjectName, String>,
) -> Result<(), TestCaseError> {
    prop_assert!(index.values().map(|pod| &**pod).eq(pods.values()));
    for name in NAMES.map(|name| ObjectName::new("chat", name)) {
        prop_assert_eq!(index.get(&name).map(|pod| &**pod), pods.get(&name));
        prop_assert_eq!(index.is_given_up(&name), surplus.contains_key(&name));
    }
    let labelled = pods.values().map(PodLabels::of);
    prop_assert!(index.labels().cloned().eq(labelled.collect::<BTreeSet<PodLabels>>()));
    let unbound = pods.values().filter(|pod| pod.is_free()).map(PodLabels::of);
    prop_assert!(index.free_labels().cloned().eq(unbound.collect::<BTreeSet<PodLabels>>()));
    for (model, variant) in MODELS.into_iter().flat_map(|model| VARIANTS.map(|variant| (model, variant))) {
        let (object, variant) = (ObjectName::new("chat", model), VariantName::from(variant));
        let owned = pods.values().any(|pod| pod.object.as_ref() == Some(&object) && pod.variant == variant);
        prop_assert_eq!(index.has_pods_of(&object, &variant), owned);
        for template in TEMPLATES {
            let pod = testing::pod("chat", "p", model, template);
            let labels = PodLabels::of(&EnginePod { variant: variant.clone(), ..pod });
            let labelled: Vec<&EnginePod> =
                pods.values().filter(|pod| PodLabels::of(pod) == labels).collect();
            prop_assert_eq!(index.has_labelled(&labels), !labelled.is_empty());
            let mut free: Vec<&EnginePod> = labelled.into_iter().filter(|pod| pod.is_free()).collect();
            free.sort_by_key(|pod| (pod.created, pod.name.clone()));
            prop_assert_eq!(index.free_count(&labels), free.len());
            prop_assert_eq!(index.free(&labels).map(|pod| &**pod).collect::<Vec<_>>(), free);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn each_lookup_finds_what_a_scan_finds(changes in prop::collection::vec(change(), 1..40)) {
        let mut index = PodIndex::default();
        let mut pods: BTreeMap<ObjectName, EnginePod> = BTreeMap::new();
        // The uid of each Pod that was given up: another Pod of its name was not.
        let mut surplus: BTreeMap<ObjectName, String> = BTreeMap::new();
        for change in changes {
            match change {
                EnginePodChange::Insert(pod) => {
                    pods.insert(pod.name.clone(), (*pod).clone());
                    index.insert(Arc::from(pod));
                }
                EnginePodChange::Remove(name) => {
                    let removed = index.remove(&name).map(|pod| (*pod).clone());
                    prop_assert_eq!(removed, pods.remove(&name));
                }
                EnginePodChange::GiveUp(name) => {
                    if let Some(pod) = pods.get(&name) {
                        let first = surplus.insert(name.clone(), pod.uid.clone()).is_none();
                        prop_assert_eq!(index.give_up(&name), first);
                    }
                }
            }
            surplus.retain(|name, uid| pods.get(name).is_some_and(|pod| pod.uid == *uid));
            check(&index, &pods, &surplus)?;
        }
    }
}
