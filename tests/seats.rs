//! Several engines of one model, and who that waits is given which.

use rouse::{
    engine::clients::Clients,
    fault::Cause,
    fleet::{
        Fleet,
        command::Command,
        event::{Event, Found, Waiter, WaiterId},
    },
    model::{
        Accelerator, Accelerators, Configuration, EngineId, Idle, LevelPolicy, Memory, ModelSpec, OwnQueue,
        Settings,
    },
    sim::journal,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000);
const LIFE: Generation = Generation(1);

/// A fleet that found so many engines of one model awake, and the moment.
struct World {
    fleet: Fleet,
    now: Tick,
    waiters: u64,
}

fn engine(replica: u32) -> EngineId {
    EngineId::new("m".into(), replica)
}

fn configuration(replicas: u32, max_concurrency: u32) -> Configuration {
    let model = ModelSpec {
        name: "m".into(),
        aliases: Vec::new(),
        accelerators: Accelerators::Count(1),
        memory: Memory { awake: Bytes::gib(1), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Auto },
        replicas,
        pinned: false,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: 0,
        max_concurrency: Some(max_concurrency),
        start_timeout: Millis::secs(60),
        explicit_memory: true,
        can_sleep: true,
        fingerprint: 1,
        eviction: None,
        queue: OwnQueue::default(),
    };
    let gpu = Accelerator { id: "gpu-0".into(), capacity: Bytes::gib(24), metered: false, units: None };
    let settings = Settings { host_memory: Bytes::gib(64), ..Settings::default() };
    Configuration { settings, accelerators: vec![gpu], models: vec![model] }
}

impl World {
    fn new(replicas: u32, max_concurrency: u32) -> Self {
        let mut world = Self { fleet: Fleet::new(), now: START, waiters: 0 };
        let configuration = Box::new(configuration(replicas, max_concurrency));
        world.tell(&Event::Configured { configuration });
        for replica in 0..replicas {
            let found = Found {
                address: ([127, 0, 0, 1], 1).into(),
                accelerators: vec!["gpu-0".into()],
                asleep: None,
                ready: true,
                fingerprint: 1,
                last_end: Tick(0),
                started: START,
            };
            world.tell(&Event::Adopted { engine: engine(replica), generation: LIFE, found });
        }
        world.tell(&Event::AdoptionDone);
        assert_eq!(world.grants(), []);
        assert!(world.fleet.engines().all(rouse::engine::Engine::serves));
        world
    }

    fn tell(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    fn left_out(&mut self, replica: u32, until: Option<Tick>) {
        self.tell(&Event::LeftOut { engine: engine(replica), generation: LIFE, until });
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
                only: only.clone(),
            };
            self.tell(&Event::Arrived { waiter });
        }
    }

    /// All that hold a lease are answered.
    fn end(&mut self, replica: u32) {
        let (last_end, last_byte) = (self.now, self.now);
        let engine = engine(replica);
        self.tell(&Event::Used {
            engine,
            generation: LIFE,
            leases: 0,
            last_end,
            last_byte,
            clients: Clients::default(),
            pause: None,
        });
    }

    /// What is given now: waiter and replica.
    fn grants(&mut self) -> Vec<(u64, u32)> {
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
        assert_eq!(self.fleet.check(), [""; 0]);
        let granted = plan.commands.iter().filter_map(|command| match command {
            Command::Grant { waiter, engine, .. } => Some((waiter.0, engine.replica)),
            _ => None,
        });
        granted.collect()
    }

    /// How many that wait are given each of the engines now.
    fn shares(&mut self) -> Vec<usize> {
        let replicas = self.fleet.engines().count();
        let grants = self.grants();
        (0..replicas).map(|n| grants.iter().filter(|(_, replica)| *replica as usize == n).count()).collect()
    }
}

#[test]
fn an_engine_that_is_left_out_gets_nobody_until_its_pause_is_over_and_then_one() {
    let mut world = World::new(2, 3);
    let until = world.now + Millis::secs(10);
    world.left_out(0, Some(until));
    world.arrive(20, None);
    assert_eq!(world.shares(), [0, 3]);
    world.end(0);
    assert_eq!(world.shares(), [0, 0]);
    assert_eq!(world.fleet.next_deadline(), Some(until), "somebody waits for that moment");

    world.now = until;
    assert_eq!(world.shares(), [1, 0]);
    // Its lease has ended, and nobody has said how it went.
    world.end(0);
    assert_eq!(world.shares(), [0, 0]);
    world.left_out(0, Some(until + Millis::secs(20)));
    assert_eq!(world.shares(), [0, 0], "it failed");
    world.left_out(0, None);
    assert_eq!(world.shares(), [3, 0], "it is back");
}

#[test]
fn at_most_half_are_left_out_and_only_for_the_life_that_failed() {
    for (replicas, shares) in [(1, vec![2]), (2, vec![0, 2]), (3, vec![0, 2, 2]), (4, vec![0, 0, 2, 2])] {
        let mut world = World::new(replicas, 2);
        for replica in 0..replicas {
            world.left_out(replica, Some(world.now + Millis::secs(10)));
        }
        world.arrive(20, None);
        assert_eq!(world.shares(), shares);
    }
    let mut world = World::new(2, 2);
    let until = Some(world.now + Millis::secs(10));
    world.tell(&Event::LeftOut { engine: engine(0), generation: Generation(9), until });
    world.arrive(20, None);
    assert_eq!(world.shares(), [2, 2]);
}

#[test]
fn a_journal_that_starts_over_knows_who_is_left_out_and_who_waits_for_whom() {
    let mut world = World::new(2, 1);
    world.left_out(1, Some(world.now + Millis::secs(10)));
    world.arrive(1, Some((engine(0), LIFE)));
    world.arrive(3, Some((engine(0), LIFE)));
    world.arrive(2, None);
    let header = journal::write(&journal::Line::header("1", world.now)).unwrap();
    let turn = journal::write_turn(world.now, &world.fleet.snapshot()).unwrap();
    let mut again = Fleet::new();
    for line in journal::read(&format!("{header}\n{turn}\n")).unwrap() {
        let journal::Line::Turn { at, events } = line else { continue };
        events.iter().for_each(|event| again.on(event, at));
    }
    let grants = |fleet: &Fleet| fleet.plan(world.now).commands;
    assert!(grants(&world.fleet).iter().any(|command| matches!(command, Command::Grant { .. })));
    assert_eq!(grants(&again).last(), grants(&world.fleet).last());
    assert_eq!(again.engine(&engine(1)).unwrap().left_out, world.fleet.engine(&engine(1)).unwrap().left_out);
}

#[test]
fn who_can_be_answered_by_one_engine_waits_for_it_and_keeps_nobody_else_from_the_others() {
    let mut world = World::new(2, 1);
    world.arrive(3, Some((engine(1), LIFE)));
    world.arrive(2, None);
    assert_eq!(world.grants(), [(4, 0), (1, 1)]);
    world.end(0);
    assert_eq!(world.grants(), [(5, 0)]);
    world.end(0);
    assert_eq!(world.grants(), [], "a free engine, and nobody who could be answered there");
    world.end(1);
    assert_eq!(world.grants(), [(2, 1)]);
    // Its life ends: nobody can answer the last one, and any engine may say so.
    let cause = Cause::Exited(1);
    world.tell(&Event::Gone { engine: engine(1), generation: LIFE, cause });
    assert_eq!(world.grants(), [(3, 0)]);
}
