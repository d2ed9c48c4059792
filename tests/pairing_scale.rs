//! Dual pods on five thousand nodes with eight accelerators each: how long one event takes, and how much memory they all do. A test
//! binary of its own, so that nobody else's memory is measured.
//!
//! Times are medians of many events without the wait for a core, and are compared with those of a tenth of the nodes, so that a slow or
//! busy machine fails nothing.

use std::time::{Duration, Instant};

use rouse::{
    model::{Level, LevelPolicy},
    pairing::{
        Pairing,
        command::{OfRequester, Order, Step},
        event::{
            AcceleratorFacts, Answer, Ask, Condition, Epoch, Event, NodeFacts, Record, SeenProvider,
            SeenRequester, Sizes, Stage,
        },
        ids::{EngineId, Fingerprint, Mode, NodeName, ProviderId},
        settings::Settings,
    },
    units::{Bytes, Generation, Tick},
};
use rouse_testing::run_queue;

const NOW: Tick = Tick(1_000_000_000);
/// Within this an event is decided.
const BOUND: Duration = Duration::from_millis(10);
const SLEEPERS: u64 = 12;

fn name(node: usize) -> NodeName {
    format!("node-{node}").into()
}

fn ask(fingerprint: u64) -> Ask {
    let sizes = Sizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(20) };
    Ask {
        mode: Mode::Sleep,
        fingerprint: Fingerprint(fingerprint),
        build: None,
        sizes,
        level: LevelPolicy::One,
        stop_after: None,
    }
}

fn requester(node: usize, id: String, fingerprint: u64, on: &[u32]) -> Event {
    let seen = SeenRequester {
        ask: ask(fingerprint),
        created: NOW,
        stub: Some("stub".into()),
        accelerators: on.iter().map(|index| format!("gpu-{index}").into()).collect(),
        deleting: None,
        grace: None,
        ended: false,
        finalizer: false,
    };
    Event::SeenRequester { node: name(node), requester: id.into(), seen }
}

/// A node whose accelerators are all in use, but for those of the first `idle` nodes, on which twelve engines sleep.
fn node(pairing: &mut Pairing, node: usize, idle: usize) {
    let facts = NodeFacts { cordoned: false, host: Bytes::gib(2000) };
    pairing.on(&Event::Node { node: name(node), facts }, NOW);
    for index in 0..8 {
        let (capacity, sleeping) = (Bytes::gib(80), Some(Bytes::gib(8)));
        let facts = AcceleratorFacts { index, capacity, healthy: true, sleeping, launcher: false };
        let accelerator = format!("gpu-{index}").into();
        pairing.on(&Event::Accelerator { node: name(node), accelerator, facts }, NOW);
        if node >= idle {
            pairing.on(&requester(node, format!("{node}-{index}"), 1, &[index]), NOW);
        }
    }
    for fingerprint in (0..SLEEPERS).filter(|_| node < idle) {
        pairing.on(&sleeper(node, fingerprint), NOW);
    }
}

/// On six of the eight accelerators, so that each has nine of them.
fn sleeper(node: usize, fingerprint: u64) -> Event {
    let on = (0..8).filter(|index| !(index + fingerprint).is_multiple_of(4));
    let engine = EngineId {
        mode: Mode::Sleep,
        accelerators: on.map(|index| format!("gpu-{index}").into()).collect(),
        fingerprint: Fingerprint(100 + fingerprint),
    };
    let Ask { sizes, level, .. } = ask(0);
    let record = Record {
        engine: engine.clone(),
        generation: Generation(1),
        sizes,
        level,
        stop_after: None,
        requester: None,
        last_used: Tick(fingerprint),
    };
    let seen = SeenProvider {
        uid: format!("{node}-{fingerprint}").into(),
        stage: Stage::Ready,
        deleting: false,
        restarts: 0,
        build: None,
        host: None,
        records: vec![record],
    };
    Event::SeenProvider { node: name(node), provider: ProviderId::direct(&engine), seen }
}

/// Plans and records, and answers: gates are closed, and those that are asked how they are sleep.
fn settle(pairing: &mut Pairing) {
    let plan = pairing.plan(NOW);
    pairing.issued(&plan, NOW);
    for command in plan.commands {
        let condition = Condition::Asleep { level: Level::One, residue: None };
        let answer = match command.order {
            Order::Engine { step: Step::Query, .. } => Answer::Condition(condition),
            Order::Requester { step: OfRequester::Gate, .. } => Answer::Done,
            _ => continue,
        };
        let (target, result) = (command.order.target(), Ok(answer));
        pairing.on(&Event::Outcome { node: command.node, target, serial: command.serial, result }, NOW);
    }
    let plan = pairing.plan(NOW);
    pairing.issued(&plan, NOW);
}

fn cluster(nodes: usize, idle: usize) -> Pairing {
    let mut pairing = Pairing::new(Settings::default());
    pairing.on(&Event::Led { epoch: Epoch(1) }, NOW);
    (0..nodes).for_each(|number| node(&mut pairing, number, idle));
    pairing.on(&Event::Listed, NOW);
    settle(&mut pairing);
    pairing
}

/// From the event until what is to be done is recorded; the half of them took no longer.
#[expect(clippy::disallowed_methods, reason = "what is measured is how long it really takes")]
fn median(pairing: &mut Pairing, now: Tick, events: Vec<Event>) -> Duration {
    let mut took: Vec<Duration> = Vec::new();
    for event in events {
        let waited = run_queue::of_this_thread();
        let begin = Instant::now();
        pairing.on(&event, now);
        let plan = pairing.plan(now);
        pairing.issued(&plan, now);
        let passed = begin.elapsed();
        took.push(passed.saturating_sub(run_queue::of_this_thread().saturating_sub(waited)));
        assert_eq!(plan.looked.len(), 1, "nothing but its node");
        assert!(!plan.commands.is_empty());
    }
    took.sort();
    took[took.len() / 2]
}

/// Requesters that are deleted, on nodes here and there.
fn deletions(nodes: usize) -> Vec<Event> {
    let some = (0..200).map(|i| i * nodes / 200);
    some.map(|node| {
        let mut event = requester(node, format!("{node}-0"), 1, &[0]);
        if let Event::SeenRequester { seen, .. } = &mut event {
            seen.deleting = Some(NOW);
        }
        event
    })
    .collect()
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux says it");
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4096
}

/// One after the other, and memory first: what one has takes part in the other's figures.
#[test]
fn five_thousand_nodes() {
    an_event_takes_no_longer_on_more_nodes_and_each_node_as_much_memory_as_the_last();
    twelve_sleepers_on_eight_accelerators_are_weighed_in_that_time_as_well();
}

fn an_event_takes_no_longer_on_more_nodes_and_each_node_as_much_memory_as_the_last() {
    let few = median(&mut cluster(500, 0), NOW, deletions(500));
    let mut pairing = cluster(500, 0);
    let mut sizes = Vec::new();
    for nodes in [500..1500, 1500..3250, 3250..5000] {
        nodes.for_each(|number| node(&mut pairing, number, 0));
        settle(&mut pairing);
        sizes.push(resident());
    }
    let many = median(&mut pairing, NOW, deletions(5000));
    println!("{few:?} on 500 nodes, {many:?} on 5,000; {sizes:?} bytes");
    assert!(many <= BOUND, "{many:?}");
    assert!(many <= few * 5 + Duration::from_micros(50), "{many:?} with ten times the nodes, else {few:?}");
    let (first, second) = (sizes[1] - sizes[0], sizes[2] - sizes[1]);
    assert!(first > 1 << 20, "it was measured");
    assert!(second * 2 <= first * 3, "as many nodes took {first} bytes, and then {second}");
}

fn twelve_sleepers_on_eight_accelerators_are_weighed_in_that_time_as_well() {
    let mut pairing = cluster(5000, 50);
    // 18 GiB are kept of each accelerator, and 8 may be.
    let all = [0, 1, 2, 3, 4, 5, 6, 7];
    let newcomers = (0..50).map(|node| requester(node, format!("new-{node}"), 7, &all)).collect();
    // Their sleep is no longer recent; everything that was due meanwhile is done.
    let later = Tick(NOW.0 + 10 * 60 * 1000);
    let plan = pairing.plan(later);
    pairing.issued(&plan, later);
    let took = median(&mut pairing, later, newcomers);
    println!("{took:?}");
    let ended = pairing.node(&name(0)).expect("it is known").engines.values().filter(|e| e.state.is_over());
    assert!(ended.count() > 4, "sleepers go");
    assert!(took <= BOUND, "{took:?}");
}
