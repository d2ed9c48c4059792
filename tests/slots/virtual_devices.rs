//! Virtual devices of a configuration: which are offered, and which slots they become.

use std::collections::BTreeSet;

use rouse::slots::{ClaimError, InstanceName, SlotUsage, VirtualClaim, VirtualId, virtual_devices};

use crate::harness::{Instances, START, instance_with, usages};

/// Instances with the usages of their slots.
type UsageTable = [(&'static str, &'static [&'static str])];

/// Instances that node a and node b see.
fn instances(all: &UsageTable) -> Instances {
    all.iter().map(|(name, usages)| ((*name).into(), instance_with(name, usages, &["a", "b"]))).collect()
}

fn all_healthy(instances: &Instances) -> BTreeSet<InstanceName> {
    instances.keys().cloned().collect()
}

fn offered_by_a(instances: &Instances, healthy: &BTreeSet<InstanceName>) -> Vec<String> {
    let offered = virtual_devices::offered(&"cams".into(), instances, &"a".into(), healthy);
    offered.iter().map(VirtualId::to_string).collect()
}

fn choose_on_a(ids: &[&str], instances: &Instances) -> Result<Vec<VirtualClaim>, ClaimError> {
    let ids: Vec<VirtualId> = ids.iter().map(|id| VirtualId::from(*id)).collect();
    virtual_devices::choose(&ids, instances, &"a".into(), &all_healthy(instances))
}

/// The slot of each id, in the order of the ids.
fn slots_of(claims: &[VirtualClaim]) -> Vec<&str> {
    claims.iter().map(|claim| claim.slot.as_str()).collect()
}

/// Writes the claims, then the releases.
fn apply(instances: &mut Instances, claims: &[VirtualClaim]) {
    for claim in claims {
        let changes: Vec<_> = claim.change.iter().cloned().collect();
        instances.get_mut(&claim.instance).unwrap().apply(&changes).unwrap();
    }
    for (name, release) in claims.iter().flat_map(|claim| &claim.releases) {
        instances.get_mut(name).unwrap().apply(std::slice::from_ref(release)).unwrap();
    }
}

#[test]
fn a_node_offers_by_the_state_of_the_instances() {
    let cases: [(&str, &UsageTable, &[&str]); 10] = [
        ("no instance", &[], &[]),
        ("an instance without slots", &[("x", &[])], &[]),
        ("all taken by another node", &[("x", &["b", "C:cams-0:b"])], &[]),
        ("all taken by the resource of the instance", &[("x", &["a", "a"])], &[]),
        ("all free", &[("x", &["", ""]), ("y", &[""])], &["cams-0", "cams-1"]),
        ("taken by the same virtual device", &[("x", &["C:cams-0:a", ""])], &["cams-0", "cams-1"]),
        ("full, of virtual devices", &[("x", &["C:cams-0:a", "C:cams-3:a"])], &["cams-0", "cams-3"]),
        (
            "one free id below and one above",
            &[("x", &["C:cams-1:a", ""]), ("y", &["", "b"])],
            &["cams-0", "cams-1", "cams-2"],
        ),
        ("the same id on another node", &[("x", &["C:cams-0:b", ""])], &["cams-0"]),
        ("partly taken by others", &[("x", &["a", "b", ""]), ("y", &["b"])], &["cams-0"]),
    ];
    for (case, all, expected) in cases {
        let instances = instances(all);
        assert_eq!(offered_by_a(&instances, &all_healthy(&instances)), expected, "{case}");
    }
}

#[test]
fn a_device_that_is_faulty_or_not_seen_is_offered_by_no_id() {
    let mut instances = instances(&[("x", &["C:cams-0:a", ""]), ("y", &["", ""])]);
    let healthy = BTreeSet::from([InstanceName::from("y")]);
    // The id of the device in use is not given to another one.
    assert_eq!(offered_by_a(&instances, &healthy), ["cams-1"]);
    assert_eq!(offered_by_a(&instances, &BTreeSet::new()), [""; 0]);
    instances.get_mut("y").unwrap().nodes.remove("a");
    assert_eq!(offered_by_a(&instances, &healthy), [""; 0]);
}

#[test]
fn ids_in_use_stay_while_others_come_and_go() {
    let mut instances = instances(&[("x", &["", ""]), ("y", &["", ""])]);
    let offered = |instances: &Instances| offered_by_a(instances, &all_healthy(instances));
    assert_eq!(offered(&instances), ["cams-0", "cams-1"]);
    for id in ["cams-1", "cams-0", "cams-2"] {
        let claims = choose_on_a(&[id], &instances).unwrap();
        apply(&mut instances, &claims);
    }
    assert_eq!(offered(&instances), ["cams-0", "cams-1", "cams-2", "cams-3"]);
    // The container of one has ended, and its slot was reclaimed.
    let freed = instances["y"].freed_of(&"a".into());
    instances.get_mut("y").unwrap().apply(&freed).unwrap();
    assert_eq!(usages(&instances["x"]), ["C:cams-1:a", "C:cams-2:a"]);
    assert_eq!(offered(&instances), ["cams-0", "cams-1", "cams-2"]);
}

#[test]
fn a_choice_follows_the_state_of_the_instances() {
    let insufficient = |free: usize| ClaimError::Insufficient { wanted: 1, free };
    let cases: [(&str, &UsageTable, Result<&str, ClaimError>); 8] = [
        ("no instance", &[], Err(insufficient(0))),
        ("all taken by another node", &[("x", &["b", "C:cams-0:b"])], Err(insufficient(0))),
        ("all taken by the resource of the instance", &[("x", &["a", "a"])], Err(insufficient(0))),
        ("full, of other virtual devices", &[("x", &["C:cams-1:a", "C:cams-2:a"])], Err(insufficient(0))),
        ("all free", &[("x", &["", ""]), ("y", &["", ""])], Ok("x-0")),
        ("the most free slots", &[("x", &["", "b"]), ("y", &["", ""])], Ok("y-0")),
        ("the same virtual device", &[("x", &["", ""]), ("y", &["b", "C:cams-0:a"])], Ok("y-1")),
        ("partly taken", &[("x", &["b", "a", ""])], Ok("x-2")),
    ];
    for (case, all, expected) in cases {
        let mut instances = instances(all);
        let claims = choose_on_a(&["cams-0"], &instances);
        match expected {
            Ok(slot) => {
                let claims = claims.unwrap();
                assert_eq!(slots_of(&claims), [slot], "{case}");
                apply(&mut instances, &claims);
                let usage = &instances[&claims[0].instance].slots[slot];
                let held = SlotUsage::Configuration { virtual_id: "cams-0".into(), node: "a".into() };
                assert_eq!(*usage, held, "{case}");
            }
            Err(error) => assert_eq!(claims, Err(error), "{case}"),
        }
    }
}

#[test]
fn an_id_that_is_allocated_again_keeps_its_slot() {
    let mut instances = instances(&[("x", &["", "C:cams-0:a"]), ("y", &["", "", ""])]);
    let claims = choose_on_a(&["cams-0"], &instances).unwrap();
    assert_eq!(slots_of(&claims), ["x-1"]);
    assert_eq!((&claims[0].change, claims[0].releases.len()), (&None, 0), "nothing to write");
    // It counts as unused: a write ends that.
    instances.get_mut("x").unwrap().unused_since.insert("x-1".into(), START);
    let claims = choose_on_a(&["cams-0"], &instances).unwrap();
    assert!(claims[0].change.as_ref().is_some_and(|change| change.from == change.to));
    apply(&mut instances, &claims);
    assert!(instances["x"].unused_since.is_empty());
    // Node b has the same id for another slot.
    let on_b = virtual_devices::choose(
        &["cams-0".into()],
        &instances,
        &"b".into(),
        &BTreeSet::from([InstanceName::from("y")]),
    );
    assert_eq!(slots_of(&on_b.unwrap()), ["y-0"]);
}

#[test]
fn a_container_that_requests_two_devices_gets_two_different_ones() {
    let two = instances(&[("x", &["", "", ""]), ("y", &["", "b"]), ("z", &["b"])]);
    assert_eq!(slots_of(&choose_on_a(&["cams-0", "cams-1"], &two).unwrap()), ["x-0", "y-0"]);
    let refused = ClaimError::Insufficient { wanted: 3, free: 2 };
    assert_eq!(choose_on_a(&["cams-0", "cams-1", "cams-2"], &two), Err(refused));
    // The device of an id that the node has counts, too.
    let held = instances(&[("x", &["C:cams-1:a", "", ""]), ("y", &[""])]);
    assert_eq!(slots_of(&choose_on_a(&["cams-0", "cams-1"], &held).unwrap()), ["y-0", "x-0"]);
    // An id that is named twice is one device.
    assert_eq!(slots_of(&choose_on_a(&["cams-1", "cams-1"], &held).unwrap()), ["x-0"]);
}

#[test]
fn ids_that_are_on_one_device_are_parted_if_one_container_requests_both() {
    let mut instances = instances(&[("x", &["C:cams-0:a", "C:cams-1:a"]), ("y", &[""])]);
    let claims = choose_on_a(&["cams-0", "cams-1"], &instances).unwrap();
    assert_eq!(slots_of(&claims), ["x-0", "y-0"]);
    assert!(claims[0].change.is_none() && claims[0].releases.is_empty());
    apply(&mut instances, &claims);
    assert_eq!(usages(&instances["x"]), ["C:cams-0:a", ""]);
    assert_eq!(usages(&instances["y"]), ["C:cams-1:a"]);
    // Without another device they cannot be.
    instances.remove("y");
    let both = instances.get_mut("x").unwrap();
    both.slots.insert("x-1".into(), "C:cams-1:a".parse().unwrap());
    let refused = ClaimError::Insufficient { wanted: 2, free: 1 };
    assert_eq!(choose_on_a(&["cams-0", "cams-1"], &instances), Err(refused));
}

#[test]
fn an_id_leaves_a_device_that_is_faulty_and_frees_its_slot_there() {
    let mut all = instances(&[("x", &["C:cams-0:a"]), ("y", &["", "C:cams-0:a"]), ("z", &[""])]);
    let healthy = BTreeSet::from([InstanceName::from("y"), InstanceName::from("z")]);
    let choose = |all: &Instances| virtual_devices::choose(&["cams-0".into()], all, &"a".into(), &healthy);
    // A release has failed before: of the two slots the healthy one is kept.
    let claims = choose(&all).unwrap();
    assert_eq!(slots_of(&claims), ["y-1"]);
    apply(&mut all, &claims);
    assert_eq!(usages(&all["x"]), [""]);
    assert_eq!(usages(&all["y"]), ["", "C:cams-0:a"]);
    // Now its only device is faulty.
    let mut all = instances(&[("x", &["C:cams-0:a"]), ("z", &[""])]);
    let claims = choose(&all).unwrap();
    assert_eq!(slots_of(&claims), ["z-0"]);
    apply(&mut all, &claims);
    assert_eq!(usages(&all["x"]), [""]);
    assert_eq!(usages(&all["z"]), ["C:cams-0:a"]);
}

#[test]
fn a_slot_above_a_lowered_capacity_is_neither_offered_nor_chosen() {
    let mut instances = instances(&[("x", &["", "b", "C:cams-0:a", ""]), ("y", &["b", "", ""])]);
    instances.get_mut("x").unwrap().capacity = 2;
    instances.get_mut("y").unwrap().capacity = 1;
    let offered = |instances: &Instances| offered_by_a(instances, &all_healthy(instances));
    // The container that has the slot keeps it, and no other device gets its id.
    assert_eq!(offered(&instances), ["cams-1"]);
    assert_eq!(slots_of(&choose_on_a(&["cams-1"], &instances).unwrap()), ["x-0"]);
    instances.get_mut("y").unwrap().capacity = 3;
    assert_eq!(offered(&instances), ["cams-1", "cams-2"]);
    assert_eq!(slots_of(&choose_on_a(&["cams-1"], &instances).unwrap()), ["y-1"], "the most free slots");
}
