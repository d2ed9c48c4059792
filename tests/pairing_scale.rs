//! Dual pods on five thousand nodes with eight accelerators each: the time per event, and the memory of all nodes. A
//! separate test binary, so that the measured memory is its own.
//!
//! Times are medians of many events without the wait for a core. They are compared with those on a tenth of the nodes,
//! so that a slow or busy machine fails no test.

use std::time::{Duration, Instant};

use rouse::{
    model::{SleepLevel, SleepLevelPolicy},
    pairing::{
        Pairing,
        command::{EngineStep, PairingAction, RequesterStep},
        event::{
            AcceleratorFacts, CommandReply, EngineRecord, LeaderEpoch, MemorySizes, ObservedProvider,
            ObservedRequester, PairingEvent, PairingNodeFacts, ProviderPhase, QueriedCondition,
            RequestedEngine,
        },
        ids::{EngineFingerprint, NodeName, PairingEngineId, ProviderId, ProviderMode},
        settings::PairingSettings,
    },
    units::{Bytes, Generation, Tick},
};
use rouse_testing::run_queue;

const NOW: Tick = Tick(1_000_000_000);
/// Time limit for handling an event.
const MAX_EVENT_TIME: Duration = Duration::from_millis(10);
const SLEEPERS_PER_NODE: u64 = 12;

fn node_name(node: usize) -> NodeName {
    format!("node-{node}").into()
}

fn requested_engine(fingerprint: u64) -> RequestedEngine {
    let sizes = MemorySizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(20) };
    RequestedEngine {
        mode: ProviderMode::Sleep,
        fingerprint: EngineFingerprint(fingerprint),
        build: None,
        sizes,
        level: SleepLevelPolicy::One,
        stop_after: None,
    }
}

fn requester_event(node: usize, id: String, fingerprint: u64, on: &[u32]) -> PairingEvent {
    let observed = ObservedRequester {
        requested: requested_engine(fingerprint),
        created: NOW,
        stub_container: Some("stub".into()),
        accelerators: on.iter().map(|index| format!("gpu-{index}").into()).collect(),
        deleting_since: None,
        grace: None,
        terminated: false,
        finalizer: false,
        actuated: false,
    };
    PairingEvent::RequesterObserved { node: node_name(node), requester: id.into(), observed }
}

/// Adds a node with all accelerators in use. On the first `idle` nodes twelve engines sleep instead.
fn add_node(pairing: &mut Pairing, node: usize, idle: usize) {
    let facts = PairingNodeFacts { cordoned: false, host_sleep_memory: Bytes::gib(2000) };
    pairing.on(&PairingEvent::Node { node: node_name(node), facts }, NOW);
    for index in 0..8 {
        let (capacity, sleeping) = (Bytes::gib(80), Some(Bytes::gib(8)));
        let facts = AcceleratorFacts {
            index,
            capacity,
            healthy: true,
            sleeping_memory: sleeping,
            wants_launcher: false,
        };
        let accelerator = format!("gpu-{index}").into();
        pairing.on(&PairingEvent::Accelerator { node: node_name(node), accelerator, facts }, NOW);
        if node >= idle {
            pairing.on(&requester_event(node, format!("{node}-{index}"), 1, &[index]), NOW);
        }
    }
    for fingerprint in (0..SLEEPERS_PER_NODE).filter(|_| node < idle) {
        pairing.on(&sleeper_event(node, fingerprint), NOW);
    }
}

/// A sleeper on six of the eight accelerators, so that each accelerator has nine sleepers.
fn sleeper_event(node: usize, fingerprint: u64) -> PairingEvent {
    let on = (0..8).filter(|index| !(index + fingerprint).is_multiple_of(4));
    let engine = PairingEngineId {
        mode: ProviderMode::Sleep,
        accelerators: on.map(|index| format!("gpu-{index}").into()).collect(),
        fingerprint: EngineFingerprint(100 + fingerprint),
    };
    let RequestedEngine { sizes, level, .. } = requested_engine(0);
    let record = EngineRecord {
        engine: engine.clone(),
        generation: Generation(1),
        sizes,
        level,
        stop_after: None,
        requester: None,
        last_used: Tick(fingerprint),
    };
    let observed = ObservedProvider {
        uid: format!("{node}-{fingerprint}").into(),
        phase: ProviderPhase::Ready,
        deleting: false,
        restarts: 0,
        build: None,
        memory_limit: None,
        records: vec![record],
    };
    PairingEvent::ProviderObserved { node: node_name(node), provider: ProviderId::direct(&engine), observed }
}

/// Plans, records and answers the commands: gates close, and queried engines report that they sleep.
fn answer_commands(pairing: &mut Pairing) {
    let plan = pairing.plan(NOW);
    pairing.issued(&plan, NOW);
    for command in plan.commands {
        let condition = QueriedCondition::Asleep { level: SleepLevel::One, residue: None };
        let answer = match command.action {
            PairingAction::Engine { step: EngineStep::Query, .. } => CommandReply::Condition(condition),
            PairingAction::Requester { step: RequesterStep::CloseGate, .. } => CommandReply::Done,
            _ => continue,
        };
        let (target, result) = (command.action.target(), Ok(answer));
        pairing
            .on(&PairingEvent::Outcome { node: command.node, target, serial: command.serial, result }, NOW);
    }
    let plan = pairing.plan(NOW);
    pairing.issued(&plan, NOW);
}

fn cluster(nodes: usize, idle: usize) -> Pairing {
    let mut pairing = Pairing::new(PairingSettings::default());
    pairing.on(&PairingEvent::LeadershipGained { epoch: LeaderEpoch(1) }, NOW);
    (0..nodes).for_each(|number| add_node(&mut pairing, number, idle));
    pairing.on(&PairingEvent::Listed, NOW);
    answer_commands(&mut pairing);
    pairing
}

/// The median time from an event until its commands are recorded.
#[expect(clippy::disallowed_methods, reason = "what is measured is how long it really takes")]
fn median_event_time(pairing: &mut Pairing, now: Tick, events: Vec<PairingEvent>) -> Duration {
    let mut durations: Vec<Duration> = Vec::new();
    for event in events {
        let waited = run_queue::current_thread_wait();
        let begin = Instant::now();
        pairing.on(&event, now);
        let plan = pairing.plan(now);
        pairing.issued(&plan, now);
        let passed = begin.elapsed();
        durations.push(passed.saturating_sub(run_queue::current_thread_wait().saturating_sub(waited)));
        assert_eq!(plan.planned_nodes.len(), 1, "nothing but its node");
        assert!(!plan.commands.is_empty());
    }
    durations.sort();
    durations[durations.len() / 2]
}

/// Deletions of requesters on nodes spread over the cluster.
fn deletions(nodes: usize) -> Vec<PairingEvent> {
    let some = (0..200).map(|i| i * nodes / 200);
    some.map(|node| {
        let mut event = requester_event(node, format!("{node}-0"), 1, &[0]);
        if let PairingEvent::RequesterObserved { observed: seen, .. } = &mut event {
            seen.deleting_since = Some(NOW);
        }
        event
    })
    .collect()
}

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux says it");
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4096
}

/// In sequence, with memory first, because each part would affect the other's figures.
#[test]
fn five_thousand_nodes() {
    an_event_takes_no_longer_on_more_nodes_and_each_node_as_much_memory_as_the_last();
    twelve_sleepers_on_eight_accelerators_are_weighed_in_that_time_as_well();
}

fn an_event_takes_no_longer_on_more_nodes_and_each_node_as_much_memory_as_the_last() {
    let few = median_event_time(&mut cluster(500, 0), NOW, deletions(500));
    let mut pairing = cluster(500, 0);
    let mut sizes = Vec::new();
    for nodes in [500..1500, 1500..3250, 3250..5000] {
        nodes.for_each(|number| add_node(&mut pairing, number, 0));
        answer_commands(&mut pairing);
        sizes.push(resident_bytes());
    }
    let many = median_event_time(&mut pairing, NOW, deletions(5000));
    println!("{few:?} on 500 nodes, {many:?} on 5,000; {sizes:?} bytes");
    assert!(many <= MAX_EVENT_TIME, "{many:?}");
    assert!(many <= few * 5 + Duration::from_micros(50), "{many:?} with ten times the nodes, else {few:?}");
    let (first, second) = (sizes[1] - sizes[0], sizes[2] - sizes[1]);
    assert!(first > 1 << 20, "it was measured");
    assert!(second * 2 <= first * 3, "as many nodes took {first} bytes, and then {second}");
}

fn twelve_sleepers_on_eight_accelerators_are_weighed_in_that_time_as_well() {
    let mut pairing = cluster(5000, 50);
    // Sleepers keep 18 GiB on each accelerator, of 8 allowed.
    let all = [0, 1, 2, 3, 4, 5, 6, 7];
    let newcomers = (0..50).map(|node| requester_event(node, format!("new-{node}"), 7, &all)).collect();
    // Their sleep is no longer recent, and everything due meanwhile is done.
    let later = Tick(NOW.0 + 10 * 60 * 1000);
    let plan = pairing.plan(later);
    pairing.issued(&plan, later);
    let took = median_event_time(&mut pairing, later, newcomers);
    println!("{took:?}");
    let ended = pairing
        .node(&node_name(0))
        .expect("it is known")
        .engines
        .values()
        .filter(|e| e.state.is_stopping_or_gone());
    assert!(ended.count() > 4, "sleepers go");
    assert!(took <= MAX_EVENT_TIME, "{took:?}");
}
