//! Random interleavings of claims, ends, reclaims, lost nodes and capacities, with agents that see objects late.

use proptest::prelude::*;
use rouse::slots::{ClaimKind, InstanceName};

use crate::{
    harness::{START, instance_with, slots, usages},
    world::{SharingStep, SharingWorld},
};

fn step() -> impl Strategy<Value = SharingStep> {
    let node = || 0..3_usize;
    prop_oneof![
        4 => node().prop_map(|node| SharingStep::Watch { node }),
        8 => (node(), 0..2_usize, 0..4_u32)
            .prop_map(|(node, instance, from)| SharingStep::Start { node, instance, from }),
        8 => (node(), 1..3_usize).prop_map(|(node, devices)| SharingStep::StartVirtual { node, devices }),
        8 => (node(), 0..4_usize).prop_map(|(node, container)| SharingStep::End { node, container }),
        4 => (1..12_u32).prop_map(|rounds| SharingStep::Pass { rounds }),
        1 => (28..40_u32).prop_map(|rounds| SharingStep::Pass { rounds }),
        2 => node().prop_map(|node| SharingStep::RestartAgent { node }),
        1 => node().prop_map(|node| SharingStep::Lose { node }),
        2 => (1..5_u32).prop_map(|capacity| SharingStep::SetCapacity { capacity }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// The world checks after each step that each container has its slot alone, and at its end that no slot is lost.
    #[test]
    fn no_slot_is_used_twice_and_none_is_lost(
        nodes in 2..4_usize,
        devices in 1..3_usize,
        capacity in 1..5_u32,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut world = SharingWorld::new(nodes, devices, capacity);
        steps.iter().for_each(|step| world.step(step));
        world.drain();
    }

    /// Agents that have read the same object claim the same slot. The order in which they write decides.
    #[test]
    fn of_agents_that_claim_the_same_slot_exactly_one_wins(
        claimants in prop::collection::vec(any::<bool>(), 2..6),
        is_marked in any::<bool>(),
    ) {
        let mut instance = instance_with("cam", &[""], &["n0", "n1", "n2", "n3", "n4", "n5"]);
        if is_marked {
            // Left over from a claim that another writer cleared by half.
            instance.unused_since.insert("cam-0".into(), START);
        }
        let stale = instance.clone();
        let mut winners = Vec::new();
        for (number, is_virtual) in claimants.iter().enumerate() {
            let kind = if *is_virtual {
                ClaimKind::Configuration("cams-0".into())
            } else {
                ClaimKind::Instance
            };
            let name = format!("n{number}");
            let claim = stale.claim(&slots(&["cam-0"]), &name.as_str().into(), &kind).unwrap();
            let before = instance.clone();
            if instance.apply(&claim).is_ok() {
                winners.push(number);
            } else {
                prop_assert_eq!(&instance, &before);
            }
        }
        prop_assert_eq!(winners, [0]);
        let expected = if claimants[0] { "C:cams-0:n0" } else { "n0" };
        prop_assert_eq!(usages(&instance), [expected]);
        prop_assert!(instance.unused_since.is_empty());
    }

    /// Whatever the capacities were, used slots stay, and the rest follows the last one.
    #[test]
    fn capacities_follow_each_other_and_drop_no_used_slot(
        changes in prop::collection::vec((0..9_u32, 0..9_usize), 1..20),
    ) {
        let name = InstanceName::from("cam");
        let mut instance = instance_with("cam", &[], &["a"]);
        for (capacity, claimed) in changes {
            let used = instance.used();
            let layout = instance.layout(&name, capacity);
            instance.apply_layout(&layout);
            prop_assert_eq!(instance.used(), used);
            prop_assert!(instance.layout(&name, capacity).is_empty());
            let free = u32::try_from(instance.free_slots().count()).unwrap();
            prop_assert!(free <= capacity && free + used >= capacity, "{:?}", instance);
            let free: Vec<_> = instance.free_slots().take(claimed).cloned().collect();
            let claim = instance.claim(&free, &"a".into(), &ClaimKind::Instance).unwrap();
            instance.apply(&claim).unwrap();
        }
        let freed = instance.freed_of(&"a".into());
        instance.apply(&freed).unwrap();
        let layout = instance.layout(&name, 3);
        instance.apply_layout(&layout);
        prop_assert_eq!(usages(&instance), ["", "", ""]);
    }
}

/// The random worlds are no proof unless agents collide and containers run in them.
#[test]
fn agents_that_see_late_lose_races_and_win_others() {
    let mut world = SharingWorld::new(3, 2, 2);
    for node in 0..3 {
        world.step(&SharingStep::Start { node, instance: 0, from: 0 });
        world.step(&SharingStep::StartVirtual { node, devices: 2 });
    }
    assert!(
        world.lost_races >= 2 && world.started >= 2,
        "{} lost, {} started",
        world.lost_races,
        world.started
    );
    world.drain();
}
