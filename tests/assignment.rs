//! Several engines of one model, and the assignment of waiters to them.

use rouse::{
    engine::{
        saturation_limit::{MAX_LIMIT_AGE, SaturationLimit},
        turn_clients::TurnClients,
    },
    fault::{FailureCause, Fault},
    fleet::{
        Fleet,
        command::Command,
        event::{AdoptedEngine, Event, Waiter, WaiterId},
    },
    journal,
    model::{Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelSpec},
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000);
const GENERATION: Generation = Generation(1);

/// A fleet that adopted this many awake engines of one model, and the current time.
struct AssignmentHarness {
    fleet: Fleet,
    now: Tick,
    waiters: u64,
}

fn engine(replica: u32) -> EngineId {
    EngineId::new("m".into(), replica)
}

fn configuration(replicas: u32, max_concurrency: u32) -> FleetConfig {
    let model = ModelSpec {
        replicas,
        max_concurrency: Some(max_concurrency),
        explicit_memory: true,
        ..simulated_model(
            "m",
            EngineMemory { awake: Bytes::gib(1), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        )
    };
    let gpu = Accelerator::new("gpu-0".into(), Bytes::gib(24));
    let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    FleetConfig { settings, accelerators: vec![gpu], models: vec![model] }
}

impl AssignmentHarness {
    fn new(replicas: u32, max_concurrency: u32) -> Self {
        let mut world = Self { fleet: Fleet::new(), now: START, waiters: 0 };
        let configuration = Box::new(configuration(replicas, max_concurrency));
        world.send(&Event::Configured { configuration });
        for replica in 0..replicas {
            let found = AdoptedEngine {
                address: ([127, 0, 0, 1], 1).into(),
                accelerators: vec!["gpu-0".into()],
                asleep: None,
                ready: true,
                fingerprint: 1,
                last_lease_end: Tick(0),
                started: START,
            };
            world.send(&Event::Adopted { engine: engine(replica), generation: GENERATION, found });
        }
        world.send(&Event::AdoptionDone);
        assert_eq!(world.grants(), []);
        assert!(world.fleet.engines().all(rouse::engine::Engine::serves));
        world
    }

    fn send(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    fn set_ejected(&mut self, replica: u32, until: Option<Tick>) {
        self.send(&Event::EjectionChanged { engine: engine(replica), generation: GENERATION, until });
    }

    /// Reports a saturated engine that may have this many leases.
    fn set_saturated(&mut self, replica: u32, leases: Option<u32>) {
        let until = self.now + MAX_LIMIT_AGE;
        let limit = leases.map(|leases| {
            let leases = Some(leases);
            SaturationLimit { leases, until, kv_percent: Some(91), waiting: Some(12) }
        });
        self.send_saturation(replica, limit);
    }

    fn send_saturation(&mut self, replica: u32, limit: Option<SaturationLimit>) {
        self.send(&Event::SaturationChanged { engine: engine(replica), generation: GENERATION, limit });
    }

    /// Returns the model's reason, as `explain` shows it.
    fn reason(&self) -> String {
        let report = self.fleet.report(&self.fleet.plan(self.now));
        report.models.values().map(|model| model.reason.clone()).collect()
    }

    fn arrive(&mut self, number: u32, only: Option<(EngineId, Generation)>) {
        for _ in 0..number {
            self.waiters += 1;
            let waiter = Waiter {
                id: WaiterId(self.waiters),
                model: "m".into(),
                band: 0,
                key: String::new(),
                client: 0,
                arrived: self.now,
                deadline: self.now + Millis::secs(3600),
                stream: true,
                required_engine: only.clone(),
            };
            self.send(&Event::Arrived { waiter });
        }
    }

    /// Ends all leases of this replica.
    fn end(&mut self, replica: u32) {
        let (last_end, last_byte) = (self.now, self.now);
        let engine = engine(replica);
        self.send(&Event::GateSampled {
            engine,
            generation: GENERATION,
            leases: 0,
            last_lease_end: last_end,
            last_byte,
            clients: TurnClients::default(),
            idle_gap: None,
        });
    }

    /// Returns the current grants: waiter and replica.
    fn grants(&mut self) -> Vec<(u64, u32)> {
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
        assert_eq!(self.fleet.broken_invariants(), [""; 0]);
        let granted = plan.commands.iter().filter_map(|command| match command {
            Command::Grant { waiter, engine, .. } => Some((waiter.0, engine.replica)),
            _ => None,
        });
        granted.collect()
    }

    /// Returns the number of current grants for each engine.
    fn grant_counts(&mut self) -> Vec<usize> {
        let replicas = self.fleet.engines().count();
        let grants = self.grants();
        (0..replicas).map(|n| grants.iter().filter(|(_, replica)| *replica as usize == n).count()).collect()
    }
}

#[test]
fn an_ejected_engine_gets_no_waiter_until_its_pause_is_over_and_then_one() {
    let mut world = AssignmentHarness::new(2, 3);
    let until = world.now + Millis::secs(10);
    world.set_ejected(0, Some(until));
    world.arrive(20, None);
    assert_eq!(world.grant_counts(), [0, 3]);
    world.end(0);
    assert_eq!(world.grant_counts(), [0, 0]);
    assert_eq!(world.fleet.next_deadline(), Some(until), "somebody waits for that moment");

    world.now = until;
    assert_eq!(world.grant_counts(), [1, 0]);
    // Its lease has ended, and its outcome is not reported yet.
    world.end(0);
    assert_eq!(world.grant_counts(), [0, 0]);
    world.set_ejected(0, Some(until + Millis::secs(20)));
    assert_eq!(world.grant_counts(), [0, 0], "it failed");
    world.set_ejected(0, None);
    assert_eq!(world.grant_counts(), [3, 0], "it is back");
}

#[test]
fn at_most_half_are_ejected_and_only_for_the_generation_that_failed() {
    for (replicas, shares) in [(1, vec![2]), (2, vec![0, 2]), (3, vec![0, 2, 2]), (4, vec![0, 0, 2, 2])] {
        let mut world = AssignmentHarness::new(replicas, 2);
        for replica in 0..replicas {
            world.set_ejected(replica, Some(world.now + Millis::secs(10)));
        }
        world.arrive(20, None);
        assert_eq!(world.grant_counts(), shares);
    }
    let mut world = AssignmentHarness::new(2, 2);
    let until = Some(world.now + Millis::secs(10));
    world.send(&Event::EjectionChanged { engine: engine(0), generation: Generation(9), until });
    world.arrive(20, None);
    assert_eq!(world.grant_counts(), [2, 2]);
}

#[test]
fn a_journal_that_starts_over_has_ejections_and_the_engine_of_each_waiter() {
    let mut world = AssignmentHarness::new(2, 1);
    world.set_ejected(1, Some(world.now + Millis::secs(10)));
    world.arrive(1, Some((engine(0), GENERATION)));
    world.arrive(3, Some((engine(0), GENERATION)));
    world.arrive(2, None);
    let header = journal::write(&journal::JournalLine::header("1", world.now)).unwrap();
    let turn = journal::write_turn(world.now, &world.fleet.snapshot()).unwrap();
    let mut again = Fleet::new();
    for line in journal::read(&format!("{header}\n{turn}\n")).unwrap() {
        let journal::JournalLine::Turn { at, events } = line else { continue };
        events.iter().for_each(|event| again.on(event, at));
    }
    let grants = |fleet: &Fleet| fleet.plan(world.now).commands;
    assert!(grants(&world.fleet).iter().any(|command| matches!(command, Command::Grant { .. })));
    assert_eq!(grants(&again).last(), grants(&world.fleet).last());
    assert_eq!(
        again.engine(&engine(1)).unwrap().ejected_until,
        world.fleet.engine(&engine(1)).unwrap().ejected_until
    );
}

#[test]
fn a_waiter_for_one_engine_waits_for_it_and_blocks_no_other_waiter() {
    let mut world = AssignmentHarness::new(2, 1);
    world.arrive(3, Some((engine(1), GENERATION)));
    world.arrive(2, None);
    assert_eq!(world.grants(), [(4, 0), (1, 1)]);
    world.end(0);
    assert_eq!(world.grants(), [(5, 0)]);
    world.end(0);
    assert_eq!(world.grants(), [], "a free engine, and nobody who could be answered there");
    world.end(1);
    assert_eq!(world.grants(), [(2, 1)]);
    // The required generation ends, so its requirement is ignored and any engine may serve the last waiter.
    let cause = FailureCause::Exited(1);
    world.send(&Event::Gone { engine: engine(1), generation: GENERATION, cause });
    assert_eq!(world.grants(), [(3, 0)]);
}

#[test]
fn a_saturated_engine_gets_waiters_last_and_only_up_to_its_limit() {
    let mut world = AssignmentHarness::new(2, 4);
    world.set_saturated(0, Some(2));
    world.arrive(20, None);
    assert_eq!(world.grants().iter().map(|(_, replica)| *replica).collect::<Vec<_>>(), [0, 0, 1, 1, 1, 1]);
    assert_eq!(
        world.reason(),
        "2 of 2 engines awake; saturated: m#0 (KV cache 91 % used, 12 requests in its queue)"
    );
    world.set_saturated(0, Some(3));
    assert_eq!(world.grant_counts(), [1, 0], "the engine reports a lower load");
    world.end(0);
    assert_eq!(world.grant_counts(), [3, 0], "a lease that ends leaves its place to a waiter");
    world.set_saturated(0, None);
    assert_eq!(world.grant_counts(), [1, 0]);
    assert_eq!(world.reason(), "2 of 2 engines awake; at maxConcurrency");
}

#[test]
fn while_all_are_saturated_requests_wait_and_an_old_report_holds_nothing_back() {
    let mut world = AssignmentHarness::new(2, 4);
    for replica in 0..2 {
        world.set_saturated(replica, Some(1));
    }
    world.arrive(4, None);
    assert_eq!(world.grant_counts(), [1, 1], "an engine without requests always gets one");
    assert_eq!(world.grant_counts(), [0, 0]);
    let until = world.now + MAX_LIMIT_AGE;
    assert_eq!(world.fleet.next_deadline(), Some(until), "somebody waits for that moment");
    world.now = until;
    assert_eq!(world.grant_counts(), [1, 1]);
}

#[test]
fn an_engine_with_a_full_cache_and_no_queue_gets_waiters_last_and_as_many_as_it_may_have() {
    let mut world = AssignmentHarness::new(2, 4);
    let until = world.now + MAX_LIMIT_AGE;
    let limit = SaturationLimit { leases: None, until, kv_percent: Some(91), waiting: Some(0) };
    world.send_saturation(0, Some(limit));
    world.arrive(5, None);
    assert_eq!(world.grant_counts(), [1, 4]);
    world.arrive(20, None);
    assert_eq!(world.grant_counts(), [3, 0]);
    assert_eq!(world.reason(), "2 of 2 engines awake; at maxConcurrency");
}

#[test]
fn a_refused_waiter_learns_that_the_engines_are_saturated() {
    let mut world = AssignmentHarness::new(1, 4);
    world.set_saturated(0, Some(1));
    world.arrive(2, None);
    assert_eq!(world.grant_counts(), [1]);
    world.now = world.now + Millis::secs(3600);
    world.set_saturated(0, Some(1));
    let plan = world.fleet.plan(world.now);
    let [Command::Refuse { fault: Fault::QueueFull { message, wait }, .. }] = &plan.commands[..] else {
        panic!("{:?}", plan.commands)
    };
    assert_eq!(message, "every awake engine of 'm' is saturated");
    assert_eq!(
        wait.waited_for,
        "every awake engine is saturated: m#0 (KV cache 91 % used, 12 requests in its queue)"
    );
}

/// A response that only one engine knows waits for that engine, saturated or not.
#[test]
fn a_continued_response_waits_for_its_saturated_engine() {
    let mut world = AssignmentHarness::new(2, 4);
    world.set_saturated(0, Some(1));
    world.arrive(2, Some((engine(0), GENERATION)));
    assert_eq!(world.grants(), [(1, 0)]);
    world.end(0);
    assert_eq!(world.grants(), [(2, 0)]);
}
