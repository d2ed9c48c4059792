//! Tests the capacity of pools and its sources.

use rouse::units::Bytes;

use super::*;

fn of(objects: impl IntoIterator<Item = IndexedObject>) -> ResolvedPool {
    settled(objects).pools["p"].clone()
}

#[test]
fn a_stub_is_believed_before_labels_and_labels_before_the_pool() {
    let with_stub = of([
        pool("p", json!({})),
        node("a", "p", json!("8")),
        stub("a", &[("79Gi", true), ("79Gi", false), ("78Gi", true)]),
        node("b", "p", json!("2")),
    ]);
    assert_eq!((with_stub.nodes, with_stub.accelerators, with_stub.units), (2, 4, Some(10)));
    assert_eq!(with_stub.total, Some(Bytes::gib(79 + 78 + 2 * 80)));
    assert!(with_stub.problem.is_none() && with_stub.warnings.is_empty(), "{with_stub:?}");

    let mut some = stub("a", &[("79Gi", true)]);
    let IndexedObject::AcceleratorNode(listed) = &mut some else { panic!("{some:?}") };
    listed.status.as_mut().unwrap().partial = true;
    let all = settled([pool("p", json!({})), node("a", "p", json!("8")), some]);
    assert_eq!((all.pools["p"].accelerators, all.pools["p"].total), (8, Some(Bytes::gib(8 * 80))));
    assert!(all.nodes["a"].capacities.by_uuid.is_empty(), "an accelerator that is not listed is not gone");

    let bare = || labelled("a", json!({"inference-pool": "p"}), json!(null));
    let only_memory = of([pool("p", json!({"memory": "128Gi"})), bare()]);
    assert_eq!((only_memory.total, only_memory.units), (Some(Bytes::gib(128)), None));
    let nothing = settled([pool("p", json!({})), bare()]);
    assert_eq!(trouble(&nothing, "p").0, "NoCapacity");
}

#[test]
fn the_type_of_a_nodes_accelerators_is_in_the_label_that_its_pool_names() {
    let kind = |more: Value| {
        let labels = json!({"inference-pool": "p", "nvidia.com/gpu.product": "NVIDIA-H200", "own": "h200"});
        settled([pool("p", more), labelled("a", labels, json!("1"))]).nodes["a"].kind.clone()
    };
    assert_eq!(kind(json!({})).as_deref(), Some("NVIDIA-H200"));
    assert_eq!(kind(json!({"acceleratorTypeLabel": "own"})).as_deref(), Some("h200"));
    assert_eq!(kind(json!({"acceleratorTypeLabel": "missing"})), None);
}

#[test]
fn the_pools_memory_is_a_cap_and_no_more() {
    let total = |memory: &str| of([pool("p", json!({"memory": memory})), node("a", "p", json!("2"))]).total;
    assert_eq!(total("100Gi"), Some(Bytes::gib(100)));
    assert_eq!(total("1Ti"), Some(Bytes::gib(160)));
}

#[test]
fn units_of_a_shared_accelerator_are_not_accelerators() {
    let labels =
        json!({"inference-pool": "p", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.count": "2"});
    let shared = of([pool("p", json!({})), labelled("a", labels, json!("20"))]);
    assert_eq!((shared.accelerators, shared.units, shared.total), (2, Some(20), Some(Bytes::gib(160))));
}

#[test]
fn where_nodes_cannot_be_read_a_pool_is_what_it_says() {
    let mut index = ClusterIndex::new(WatchScope { nodes: false, ..SCOPE });
    index.apply(pool("p", json!({"memory": "128Gi"})));
    index.apply(pool("q", json!({})));
    let resolved = index.resolved();
    assert_eq!((resolved.pools["p"].total, resolved.pools["p"].units), (Some(Bytes::gib(128)), None));
    assert!(resolved.pools["p"].problem.is_none());
    assert_eq!(trouble(&resolved, "q").0, "NoCapacity");
    for kind in [ObjectKind::Model, ObjectKind::Pool] {
        assert!(!index.is_complete());
        index.apply_list(kind, None, &BTreeSet::from([ObjectKey::Pool("p".into())]));
    }
    assert!(index.is_complete(), "nodes are not waited for");
    assert_eq!(index.resolved().pools.len(), 1, "what is not listed is gone");
}

#[test]
fn what_means_nothing_is_left_out_and_said() {
    let fine = || node("fine", "p", json!("1"));
    let memory = |text: &str| json!({"inference-pool": "p", "nvidia.com/gpu.memory": text});
    let deep = json!({"inference-pool": "p", "nvidia.com/gpu.memory": "1024", "nvidia.com/gpu.count": "-1"});
    for (bad, accelerators, gib, units, says) in [
        (vec![node("bad", "p", json!("lots"))], 1, 80, 1, "allocatable nvidia.com/gpu is 'lots'"),
        (vec![node("bad", "p", json!("-1"))], 1, 80, 1, "'-1'"),
        (vec![node("bad", "p", json!("5000000k"))], 1, 80, 1, "'5000000k'"),
        (vec![labelled("bad", memory("80Gi"), json!("1"))], 1, 80, 2, "nvidia.com/gpu.memory is '80Gi'"),
        (vec![labelled("bad", deep, json!("1"))], 1, 80, 2, "nvidia.com/gpu.count is '-1'"),
        (
            vec![node("bad", "p", json!("2")), stub("bad", &[("junk", true), ("70Gi", true)])],
            2,
            150,
            3,
            "GPU-0: capacity: 'junk' is not a size",
        ),
    ] {
        let found = of(bad.into_iter().chain([pool("p", json!({})), fine()]));
        let has = (found.accelerators, found.total, found.units);
        assert_eq!(has, (accelerators, Some(Bytes::gib(gib)), Some(units)), "{says}");
        let [doubt] = found.warnings.as_slice() else { panic!("{says}: {:?}", found.warnings) };
        assert!(doubt.starts_with("node bad: ") && doubt.contains(says), "{doubt}");
        assert!(found.problem.is_none(), "{says}: {found:?}");
    }
    // A sum beyond 64 bits must not panic.
    let huge = labelled("bad", memory("18446744073709551615"), json!("4k"));
    assert_eq!(of([pool("p", json!({})), huge]).total, Some(Bytes(u64::MAX)));
}

#[test]
fn a_stub_that_cannot_be_read_is_not_replaced_by_labels() {
    let mut index = ClusterIndex::new(SCOPE);
    for object in [pool("p", json!({})), node("a", "p", json!("8")), node("b", "p", json!("1"))] {
        index.apply(object);
    }
    let metadata = ObjectMeta { name: Some("a".into()), ..ObjectMeta::default() };
    index.unreadable(ObjectKind::AcceleratorNode, &metadata, "capacity is missing");
    let resolved = index.resolved();
    assert_eq!(resolved.pools["p"].total, Some(Bytes::gib(80)));
    let doubt = resolved.nodes["a"].warning.as_deref().unwrap();
    assert!(doubt.contains("capacity is missing"), "{doubt}");
    assert_eq!((resolved.nodes["a"].accelerators, resolved.nodes["b"].accelerators), (0, 1));
    index.delete(&ObjectKey::AcceleratorNode("a".into()));
    assert_eq!(index.resolved().pools["p"].total, Some(Bytes::gib(720)));
}

#[test]
fn a_node_in_two_pools_is_in_neither_and_both_say_so() {
    let by = |key: &str| json!({"nodeSelector": {key: "yes"}});
    let fast =
        |name: &str| labelled(name, json!({"fast": "yes", "nvidia.com/gpu.memory": "81920"}), json!("1"));
    let both = labelled("n2", json!({"fast": "yes", "large": "yes"}), json!("1"));
    let mut index = ClusterIndex::new(SCOPE);
    for object in [pool("fast", by("fast")), pool("large", by("large")), fast("n1")] {
        index.apply(object);
    }
    assert_eq!(index.resolved().pools["fast"].total, Some(Bytes::gib(80)));
    assert_eq!(trouble(&index.resolved(), "large").0, "NoNodes");
    index.apply(both);
    let resolved = index.resolved();
    for (pool, other) in [("fast", "large"), ("large", "fast")] {
        let (reason, text) = trouble(&resolved, pool);
        assert_eq!(reason, "Overlap");
        assert!(text.contains(&format!("'{other}' (node n2)")), "{text}");
        assert_eq!(resolved.pools[pool].total, None);
    }
    assert_eq!((&resolved.nodes["n1"].pool, &resolved.nodes["n2"].pool), (&Some("fast".into()), &None));
    index.delete(&ObjectKey::Node("n2".into()));
    assert!(index.resolved().pools["fast"].problem.is_none(), "it is over when the node is");
}

#[test]
fn selectors_of_which_one_contains_the_other_overlap_without_any_node() {
    let resolved = settled([
        pool("all", json!({"nodeSelector": {"a": "1"}, "memory": "1Gi"})),
        pool("same", json!({"nodeSelector": {"a": "1"}})),
        pool("some", json!({"nodeSelector": {"a": "1", "b": "2"}})),
        pool("other", json!({"nodeSelector": {"b": "2", "c": "3"}})),
    ]);
    for (pool, others) in [("all", "'same', 'some'"), ("same", "'all', 'some'"), ("some", "'all', 'same'")] {
        let (reason, text) = trouble(&resolved, pool);
        assert_eq!(reason, "Overlap");
        assert!(text.contains(&format!("shares nodes with {others}:")), "{pool}: {text}");
    }
    // A node could be in both pools, though none is.
    assert_eq!(trouble(&resolved, "other").0, "NoNodes");
}

#[test]
fn a_pool_that_means_nothing_says_what_and_keeps_its_nodes_from_others() {
    for (fields, reason, says) in [
        (json!({"memory": "lots"}), "InvalidQuantity", "memory: 'lots'"),
        (json!({"memory": "99999999Pi"}), "InvalidQuantity", "memory"),
        (json!({"hostSleepMemory": "x"}), "InvalidQuantity", "hostSleepMemory"),
        (json!({"sleepingMemory": true}), "InvalidQuantity", "sleepingMemory"),
        (json!({"namespaceQuota": {"chat": "1x"}}), "InvalidQuantity", "namespaceQuota 'chat'"),
        (json!({"meterLag": "soon"}), "InvalidDuration", "meterLag"),
        (json!({"slots": 0}), "InvalidSpec", "slots"),
        (json!({"nodeSelector": {}}), "InvalidSpec", "nodeSelector is empty"),
    ] {
        let resolved = settled([pool("p", fields.clone()), pool("q", json!({})), node("n", "q", json!("1"))]);
        let (found, text) = trouble(&resolved, "p");
        assert_eq!(found, reason, "{fields}: {text}");
        assert!(text.contains(says), "{fields}: {text}");
        assert_eq!(resolved.pools["q"].total, Some(Bytes::gib(80)), "{fields}: another is affected");
    }
    let twin = pool("twin", json!({"nodeSelector": {"inference-pool": "p"}}));
    let settled = settled([pool("p", json!({"memory": "x"})), twin]);
    assert_eq!(trouble(&settled, "twin").0, "Overlap");
}
