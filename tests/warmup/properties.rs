//! Properties of every run, with faults at random and leaders that are killed.

use std::sync::Arc;

use proptest::prelude::*;
use rouse::{
    pairing::ids::NodeName,
    sim::warmup::{WarmupFaults, WarmupScenario, WarmupWorld},
    units::{Millis, Tick},
    warmup::{
        ItemState, WarmPodName, WarmupCause, WarmupEvent, WarmupItem, WarmupLimits, WarmupPhase, WarmupPlan,
        WarmupPod, WarmupPodState, WarmupProgress, WarmupRequest, WarmupTargets, Warmups,
    },
};

use crate::harness::{SET, START, image, items, ready};

const DAY: Millis = Millis::secs(24 * 3600);

fn plan(warmups: &mut Warmups, now: Tick) -> WarmupPlan {
    let plan = warmups.plan(now);
    // Without a record of the commands, the same plan comes again, and the same commands with another report at most.
    assert_eq!(warmups.plan(now).commands, plan.commands);
    plan
}

fn scenarios() -> impl Strategy<Value = WarmupScenario> {
    let shape = (any::<u64>(), 1..12_u32, 1..4_u32, any::<bool>());
    let targets = (any::<bool>(), any::<bool>());
    let disturbances = (prop::sample::select(vec![0.0, 0.05, 0.2]), 0..3_u32, prop::option::of(0..200_u64));
    (shape, targets, disturbances, prop::option::of(1..4_u32)).prop_map(
        |(shape, (has_overlap, has_names), (refused_pod, edits, kill_leader_after), parallelism)| {
            let (seed, nodes, images, has_action) = shape;
            WarmupScenario {
                seed,
                nodes,
                images,
                has_action,
                limits: WarmupLimits { parallelism, max_failed_nodes: u32::MAX, ..WarmupLimits::default() },
                faults: WarmupFaults { refused_pod, ..WarmupFaults::frequent() },
                has_overlap,
                has_names,
                edits,
                kill_leader_after,
            }
        },
    )
}

/// A pull that was counted as failed succeeds before its Pod is deleted: the kubelet goes on trying.
#[test]
fn a_pod_whose_pull_succeeds_after_a_failure_is_not_deleted() {
    let limits = WarmupLimits { max_failed_nodes: u32::MAX, ..WarmupLimits::default() };
    let scenario = WarmupScenario {
        seed: 9_702_000_310_583_808_045,
        nodes: 3,
        images: 2,
        limits,
        faults: WarmupFaults::frequent(),
        ..WarmupScenario::default()
    };
    let tally = WarmupWorld::new(scenario).run(DAY, &mut plan).unwrap();
    assert_eq!((tally.succeeded, tally.failed), (3, 0));
}

#[test]
fn pods_are_refused_nodes_are_deleted_and_the_warmup_is_edited_all_in_one_run() {
    let mut sums = [0; 4];
    for seed in 0..20 {
        let limits =
            WarmupLimits { parallelism: Some(2), max_failed_nodes: u32::MAX, ..WarmupLimits::default() };
        let faults = WarmupFaults { refused_pod: 0.05, deleted_node: 0.05, ..WarmupFaults::frequent() };
        let scenario = WarmupScenario {
            seed,
            nodes: 6,
            images: 2,
            limits,
            faults,
            has_overlap: true,
            has_names: seed % 2 == 0,
            edits: 2,
            ..WarmupScenario::default()
        };
        let tally = WarmupWorld::new(scenario).run(DAY, &mut plan).unwrap();
        let counts = [tally.refused_pods, tally.deleted_nodes, tally.edits, tally.overlap_succeeded];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [refused_pods, deleted_nodes, edits, overlap_succeeded] = sums;
    assert_eq!(edits, 40);
    assert!(refused_pods > 0 && deleted_nodes > 0 && overlap_succeeded > 0, "{sums:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// The world itself checks that no more nodes are active than may be, and that no success is thrown away.
    #[test]
    fn every_node_is_warmed_in_the_end_whatever_fails(scenario in scenarios()) {
        let (nodes, has_overlap) = (scenario.nodes, scenario.has_overlap);
        let mut world = WarmupWorld::new(scenario);
        let tally = world.run(DAY, &mut plan);
        let tally = tally.map_err(|broken| TestCaseError::fail(broken.join("\n")))?;
        prop_assert_eq!(tally.ended.map(|(phase, _)| phase), Some(WarmupPhase::Completed), "{:?}", tally);
        prop_assert_eq!((tally.succeeded, tally.failed), (nodes, 0));
        for image in world.wanted_images() {
            prop_assert_eq!(world.nodes_with(image), usize::try_from(nodes).unwrap());
        }
        prop_assert_eq!(world.labelled_nodes(), usize::try_from(nodes).unwrap());
        prop_assert_eq!(world.labelled_without_images(), 0);
        prop_assert_eq!(world.pod_count(), 0);
        prop_assert_eq!(tally.overlap_succeeded, if has_overlap { nodes - nodes / 2 } else { 0 });
        // The second Warmup finds what the first one has pulled, and the other way round.
        prop_assert_eq!(tally.max_pulls_per_image, 1);
    }

    /// A node that was deleted is warmed again if another comes in time. No label is that of a deleted node.
    #[test]
    fn every_node_ends_and_no_label_is_wrong_while_nodes_come_and_go(scenario in scenarios()) {
        let faults = WarmupFaults { deleted_node: 0.05, ..scenario.faults };
        let mut world = WarmupWorld::new(WarmupScenario { edits: 0, faults, ..scenario });
        let tally = world.run(DAY, &mut plan);
        let tally = tally.map_err(|broken| TestCaseError::fail(broken.join("\n")))?;
        prop_assert_eq!(tally.ended.map(|(phase, _)| phase), Some(WarmupPhase::Completed), "{:?}", tally);
        prop_assert_eq!(tally.succeeded + tally.failed, tally.desired, "{:?}", tally);
        prop_assert!(tally.failed <= tally.deleted_nodes, "{:?}", tally);
        prop_assert_eq!(world.labelled_without_images(), 0);
    }

    #[test]
    fn every_node_ends_if_failures_are_limited(scenario in scenarios(), limit in 0..3_u32) {
        let nodes = scenario.nodes;
        let limits = WarmupLimits { backoff_limit: Some(limit), ..scenario.limits };
        let faults = WarmupFaults { failed_pull: 0.5, missing_image: 0.2, ..scenario.faults };
        let mut world = WarmupWorld::new(WarmupScenario { limits, faults, ..scenario });
        let tally = world.run(DAY, &mut plan);
        let tally = tally.map_err(|broken| TestCaseError::fail(broken.join("\n")))?;
        prop_assert_eq!(tally.succeeded + tally.failed, nodes, "{:?}", tally);
        prop_assert_eq!(tally.ended.map(|(phase, _)| phase), Some(WarmupPhase::Completed));
    }

    /// What a new leader finds, it finds in any order.
    #[test]
    fn the_order_of_what_a_leader_finds_does_not_matter(
        (states, order) in found().prop_flat_map(|states| {
            let events = events(&states);
            (Just(states), Just(events).prop_shuffle())
        }),
    ) {
        let decide = |events: Vec<WarmupEvent>| {
            let mut warmups = Warmups::new();
            warmups.on(WarmupEvent::LeadershipGained, START);
            events.into_iter().for_each(|event| warmups.on(event, START));
            warmups.on(WarmupEvent::Listed, START);
            let plan = warmups.plan(START);
            (plan.commands, plan.reports)
        };
        prop_assert_eq!(decide(events(&states)), decide(order));
    }

    /// Nodes whose image was seen get no Pod, whatever else is the case.
    #[test]
    fn a_node_that_is_done_gets_no_pod(states in found()) {
        let mut warmups = Warmups::new();
        warmups.on(WarmupEvent::LeadershipGained, START);
        events(&states).into_iter().for_each(|event| warmups.on(event, START));
        warmups.on(WarmupEvent::Listed, START);
        let plan = warmups.plan(START);
        let begun = crate::harness::created(&plan.commands);
        for (number, found) in states.iter().enumerate() {
            let is_done = found.lists_image || matches!(found.pod, Some(WarmupPodState::Present { .. }));
            let name = format!("n{number}");
            prop_assert!(!is_done || !begun.contains(&name.as_str()), "{} of {:?}", name, states);
        }
        let report = plan.reports.values().next().unwrap();
        let sum: u32 = report.items.values().sum();
        prop_assert_eq!(sum, u32::try_from(states.len()).unwrap());
        let present = report.items.get(&ItemState::Present).copied().unwrap_or_default();
        prop_assert_eq!(present, report.succeeded);
    }
}

/// What a new leader finds of one node.
#[derive(Clone, Debug)]
struct FoundNode {
    is_cordoned: bool,
    lists_image: bool,
    engines_pulling: u32,
    pod: Option<WarmupPodState>,
    attempt: u32,
}

fn found() -> impl Strategy<Value = Vec<FoundNode>> {
    let pod = prop::option::of(prop::sample::select(vec![
        WarmupPodState::Pending { cause: None },
        WarmupPodState::Pending { cause: Some(WarmupCause::Network) },
        WarmupPodState::Pending { cause: Some(WarmupCause::NodeFull) },
        WarmupPodState::Pulling,
        WarmupPodState::Present { digest: None, note: None, at: START },
        WarmupPodState::Failed { cause: WarmupCause::Auth, at: START },
    ]));
    let node = (any::<bool>(), any::<bool>(), 0..2_u32, pod, 0..3_u32);
    let node = node.prop_map(|(is_cordoned, lists_image, engines_pulling, pod, attempt)| FoundNode {
        is_cordoned,
        lists_image,
        engines_pulling,
        pod,
        attempt,
    });
    prop::collection::vec(node, 1..8)
}

fn events(states: &[FoundNode]) -> Vec<WarmupEvent> {
    let wanted = items(&["app:1"], false);
    let request = WarmupRequest {
        generation: 1,
        spec_hash: "generation 1".into(),
        created: START,
        paused: false,
        limits: WarmupLimits {
            parallelism: Some(3),
            max_failed_nodes: 2,
            retry_delay: Millis::secs(40),
            ..WarmupLimits::default()
        },
        keep_warm: false,
        set: SET.into(),
        tolerations: Vec::new(),
    };
    let progress = WarmupProgress {
        phase: WarmupPhase::InProgress,
        generation: 1,
        start: Some(START),
        ..WarmupProgress::default()
    };
    let name = |number: usize| NodeName::from(format!("n{number}"));
    let targets = (0..states.len()).map(|number| (name(number), Arc::clone(&wanted))).collect();
    let mut events = vec![
        WarmupEvent::Warmup { id: "ns/w".into(), request: Arc::new(request), stored: Arc::new(progress) },
        WarmupEvent::Targets { id: "ns/w".into(), targets: WarmupTargets::Nodes(targets) },
    ];
    for (number, found) in states.iter().enumerate() {
        let mut facts = ready();
        facts.cordoned = found.is_cordoned;
        if let WarmupItem::Image(image) = image("app:1")
            && found.lists_image
        {
            facts.images.insert(image);
        }
        events.push(WarmupEvent::Node { name: name(number), facts: Some(facts) });
        events.push(WarmupEvent::EnginesPulling { node: name(number), pods: found.engines_pulling });
        if let Some(state) = &found.pod {
            let pod = WarmupPod {
                warmup: "ns/w".into(),
                node: name(number),
                item: image("app:1"),
                generation: 1,
                items_hash: wanted.hash(),
                attempt: found.attempt,
                created: START,
                terminating: false,
                state: state.clone(),
            };
            events.push(WarmupEvent::Pod { name: WarmPodName::from(format!("p{number}")), pod: Some(pod) });
        }
    }
    events
}
