//! Tests that the result depends neither on the order of different objects' updates nor on when it is read.

use proptest::prelude::*;

use super::*;

/// An update of one object.
#[derive(Clone, Debug)]
enum ObjectUpdate {
    Apply(Box<IndexedObject>),
    Unreadable(ObjectKind, &'static str),
    Delete(ObjectKey),
}

/// An update of one of a few objects per kind, valid or invalid, that compete for names, nodes and pools.
fn object_update() -> impl Strategy<Value = (usize, ObjectUpdate)> {
    let pick = |kind: &'static str| {
        prop::sample::select(vec![format!("{kind}0"), format!("{kind}1"), format!("{kind}2")])
    };
    let labels =
        || prop::sample::select(vec![json!({"a": "1"}), json!({"b": "1"}), json!({"a": "1", "b": "1"})]);
    let word = || prop::sample::select(vec!["m0", "m1", "x", ""]);
    let model = (pick("m"), word(), labels(), 0..4_usize).prop_map(|(name, called, labels, which)| {
        let more = match which {
            0 => json!({"memory": "junk"}),
            1 => json!({"dependencies": ["m0"]}),
            2 => json!({"aliases": ["m2"], "pinned": true}),
            _ => json!({}),
        };
        let fields = with(json!({"modelName": called, "nodeSelector": labels}), more);
        ObjectUpdate::Apply(Box::new(model_at(&name, fields.clone(), generation(&fields)).into()))
    });
    let pool = (pick("p"), labels(), 0..4_usize).prop_map(|(name, labels, which)| {
        let more = [json!({}), json!({"memory": "90Gi"}), json!({"memory": "?"}), json!({"pinnable": false})];
        let fields = with(json!({"nodeSelector": labels}), more[which].clone());
        ObjectUpdate::Apply(Box::new(pool_at(&name, fields.clone(), generation(&fields)).into()))
    });
    let node = (pick("n"), labels(), prop::sample::select(vec!["0", "2", "?"])).prop_map(
        |(name, mut labels, units)| {
            labels["nvidia.com/gpu.memory"] = json!("81920");
            ObjectUpdate::Apply(Box::new(labelled(&name, labels, json!(units))))
        },
    );
    let stub = (pick("n"), prop::sample::select(vec!["70Gi", "?"])).prop_map(|(name, capacity)| {
        ObjectUpdate::Apply(Box::new(stub(&name, &[(capacity, true), ("10Gi", false)])))
    });
    let kinds = || {
        prop::sample::select(vec![
            (ObjectKind::Model, ["m0", "m1"]),
            (ObjectKind::Pool, ["p0", "p1"]),
            (ObjectKind::AcceleratorNode, ["n0", "n1"]),
            (ObjectKind::Node, ["n0", "n1"]),
        ])
    };
    let bad =
        (kinds(), 0..2_usize).prop_map(|((kind, names), which)| ObjectUpdate::Unreadable(kind, names[which]));
    let gone = (kinds(), 0..2_usize).prop_map(|((kind, names), which)| {
        ObjectUpdate::Delete(ObjectKey::of(kind, &of(kind, names[which])))
    });
    let told = prop_oneof![4 => model, 3 => pool, 3 => node, 2 => stub, 1 => bad, 2 => gone];
    (any::<prop::sample::Index>().prop_map(|place| place.index(1 << 20)), told)
}

/// Derives a generation from the spec: different specs get different generations, as from an API server.
fn generation(spec: &Value) -> i64 {
    let mut hash = std::hash::DefaultHasher::new();
    std::hash::Hash::hash(&spec.to_string(), &mut hash);
    (std::hash::Hasher::finish(&hash) >> 1) as i64
}

fn of(kind: ObjectKind, name: &str) -> ObjectMeta {
    let namespace = (kind == ObjectKind::Model).then(|| "chat".to_owned());
    ObjectMeta { name: Some(name.to_owned()), namespace, ..ObjectMeta::default() }
}

impl ObjectUpdate {
    fn key(&self) -> ObjectKey {
        match self {
            Self::Unreadable(kind, name) => ObjectKey::of(*kind, &of(*kind, name)),
            Self::Delete(key) => key.clone(),
            Self::Apply(object) => match &**object {
                IndexedObject::Model(model) => ObjectKey::of(ObjectKind::Model, &model.metadata),
                IndexedObject::Pool(pool) => ObjectKey::of(ObjectKind::Pool, &pool.metadata),
                IndexedObject::AcceleratorNode(node) => {
                    ObjectKey::of(ObjectKind::AcceleratorNode, &node.metadata)
                }
                IndexedObject::Node(node) => ObjectKey::of(ObjectKind::Node, &node.metadata),
            },
        }
    }

    fn apply_to(&self, index: &mut ClusterIndex) {
        match self {
            Self::Apply(object) => index.apply((**object).clone()),
            Self::Unreadable(kind, name) => index.unreadable(*kind, &of(*kind, name), "it is torn"),
            Self::Delete(key) => index.delete(key),
        }
    }
}

/// Reorders updates of different objects by their numbers, and keeps the order within each object.
fn shuffled(updates: &[(usize, ObjectUpdate)]) -> Vec<ObjectUpdate> {
    let mut places: BTreeMap<ObjectKey, Vec<usize>> = BTreeMap::new();
    updates.iter().for_each(|(place, told)| places.entry(told.key()).or_default().push(*place));
    places.values_mut().for_each(|places| places.sort_unstable_by(|a, b| b.cmp(a)));
    let place =
        |(_, told): &(usize, ObjectUpdate)| (places.get_mut(&told.key()).and_then(Vec::pop), told.clone());
    let mut all: Vec<_> = updates.iter().map(place).collect();
    all.sort_by_key(|(place, _)| *place);
    all.into_iter().map(|(_, told)| told).collect()
}

/// Keeps only the updates that matter in the end: for each object, those since it was last readable or deleted.
fn latest(updates: &[(usize, ObjectUpdate)]) -> Vec<ObjectUpdate> {
    let mut last: BTreeMap<ObjectKey, Vec<ObjectUpdate>> = BTreeMap::new();
    for (_, update) in updates {
        let known = last.entry(update.key()).or_default();
        if !matches!(update, ObjectUpdate::Unreadable(..)) {
            known.clear();
        }
        known.push(update.clone());
    }
    last.into_values().rev().flatten().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_order_settles_to_the_same(told in prop::collection::vec(object_update(), 1..40)) {
        let mut asked_often = ClusterIndex::new(SCOPE);
        for (_, told) in &told {
            told.apply_to(&mut asked_often);
            asked_often.resolved();
        }
        let mut other_order = ClusterIndex::new(SCOPE);
        shuffled(&told).iter().for_each(|told| told.apply_to(&mut other_order));
        let mut at_once = ClusterIndex::new(SCOPE);
        latest(&told).iter().for_each(|told| told.apply_to(&mut at_once));
        let settled = asked_often.resolved();
        prop_assert_eq!(&settled, &other_order.resolved());
        prop_assert_eq!(&settled, &at_once.resolved());
        // Every object is in exactly one of the maps.
        prop_assert_eq!(settled.served.len() + settled.rejected.len(), asked_often.models.len());
        prop_assert_eq!(settled.objects.len(), settled.served.len());
        for (object, served) in &settled.served {
            prop_assert_eq!(&settled.objects[&served.spec.name], object);
            for variant in &served.variants {
                let pool = variant.pool.as_ref().map(|pool| &settled.pools[pool]);
                let is_blocked = variant.blocked_by.is_some();
                prop_assert_eq!(pool.is_some_and(|pool| pool.total.is_none()), is_blocked);
            }
        }
    }
}
