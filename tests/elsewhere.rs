//! Requests at other gateways: they start engines, keep them, and take their turns like those that wait here.

use std::collections::BTreeMap;

use rouse::{
    engine::{clients::Clients, state::State},
    fleet::{
        Fleet, Plan,
        command::{Command, Why},
        event::{Elsewhere, Event, Found, Verdict, Waiter, WaiterId},
    },
    model::{
        Accelerator, Accelerators, Configuration, EngineId, Idle, Level, LevelPolicy, Memory, ModelSpec,
        OwnQueue, Settings,
    },
    sim::journal,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000);
const LIFE: Generation = Generation(1);

fn model(name: &str) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: Accelerators::Count(1),
        memory: Memory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        idle: Idle { sleep_after: Some(Millis::secs(60)), stop_after: None, level: LevelPolicy::One },
        replicas: 1,
        pinned: false,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: 0,
        max_concurrency: None,
        start_timeout: Millis::secs(600),
        explicit_memory: true,
        can_sleep: true,
        fingerprint: 1,
        eviction: None,
        queue: OwnQueue::default(),
    }
}

/// The leader of a cluster, with one accelerator that holds one model at a time.
struct World {
    fleet: Fleet,
    now: Tick,
    plan: Plan,
}

impl World {
    fn new(models: Vec<ModelSpec>, awake: &[&str]) -> Self {
        let mut world = Self { fleet: Fleet::new(), now: START, plan: Plan::default() };
        let gpu = Accelerator { id: "gpu-0".into(), capacity: Bytes::gib(24), metered: false, units: None };
        let settings = Settings { host_memory: Bytes::gib(64), ..Settings::default() };
        let configuration = Configuration { settings, accelerators: vec![gpu], models };
        world.tell(&Event::Configured { configuration: Box::new(configuration) });
        for name in awake {
            world.tell(&Event::Adopted { engine: engine(name), generation: LIFE, found: found(None) });
        }
        world.tell(&Event::AdoptionDone);
        world.turn();
        world
    }

    fn tell(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    fn after(&mut self, secs: u64) -> &mut Self {
        self.now = self.now + Millis::secs(secs);
        self
    }

    /// What another gateway has of one model: waiting, in flight.
    fn says(&mut self, gateway: &str, model: &str, waiting: u32, in_flight: u32) {
        let demand = Elsewhere { waiting, in_flight, last_request: self.now };
        self.say(gateway, Some(BTreeMap::from([(model.into(), demand)])));
    }

    fn say(&mut self, gateway: &str, demand: Option<BTreeMap<rouse::model::ModelName, Elsewhere>>) {
        self.tell(&Event::Elsewhere { gateway: gateway.to_owned(), demand });
    }

    fn turn(&mut self) -> Vec<Command> {
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
        assert_eq!(self.fleet.check(), [""; 0]);
        assert!(self.fleet.next_deadline().is_none_or(|at| at > self.now));
        self.plan = plan.clone();
        plan.commands
    }

    fn line(&self, model: &str) -> String {
        let report = self.fleet.report(&self.plan).to_string();
        report.lines().find(|line| line.starts_with(model)).expect("every model has a line").to_owned()
    }

    fn state(&self, model: &str) -> State {
        self.fleet.engine(&engine(model)).expect("it is configured").state.clone()
    }

    fn arrive(&mut self, id: u64, model: &str) {
        let waiter = Waiter {
            id: WaiterId(id),
            model: model.into(),
            band: 0,
            key: String::new(),
            arrived: self.now,
            deadline: self.now + Millis::secs(3600),
            stream: true,
            client: 0,
            only: None,
        };
        self.tell(&Event::Arrived { waiter });
    }

    /// A closed gate is empty, and whatever is ordered of an engine is done.
    fn drained(&mut self, model: &str) -> Vec<Command> {
        self.tell(&Event::Drained { engine: engine(model), generation: LIFE });
        self.turn()
    }
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

fn found(asleep: Option<Level>) -> Found {
    Found {
        address: ([127, 0, 0, 1], 1).into(),
        accelerators: vec!["gpu-0".into()],
        asleep,
        ready: true,
        fingerprint: 1,
        last_end: Tick(0),
        started: START,
    }
}

fn closes(commands: &[Command], model: &str) -> Option<Why> {
    commands.iter().find_map(|command| match command {
        Command::CloseGate { engine: closed, why, .. } if *closed == engine(model) => Some(*why),
        _ => None,
    })
}

fn reserves(commands: &[Command]) -> Vec<&str> {
    let reserved = commands.iter().filter_map(|command| match command {
        Command::Reserve { engine, .. } => Some(engine.model.as_str()),
        _ => None,
    });
    reserved.collect()
}

#[test]
fn who_waits_at_another_gateway_has_an_engine_started_and_probed() {
    let mut world = World::new(vec![model("m")], &[]);
    world.says("gw-2", "m", 3, 0);
    assert_eq!(reserves(&world.turn()), ["m"]);
    assert!(world.line("m").contains("3 waiting, 3 of them at other gateways"), "{}", world.line("m"));
    let (engine, accelerators) = (engine("m"), vec!["gpu-0".into()]);
    world.tell(&Event::Placed { engine: engine.clone(), generation: LIFE, accelerators });
    assert!(matches!(world.turn()[..], [Command::Launch { .. }]));
    let address = ([127, 0, 0, 1], 1).into();
    world.tell(&Event::Started { engine: engine.clone(), generation: LIFE, address });
    assert!(world.turn().is_empty());
    world.tell(&Event::Ready { engine: engine.clone(), generation: LIFE });
    assert!(matches!(world.turn()[..], [Command::Probe { .. }]), "nobody is here to prove it with");
    world.tell(&Event::Canary { engine, generation: LIFE, verdict: Verdict::Passed });
    assert!(matches!(world.turn()[..], [Command::OpenGate { public: true, .. }]));
    world.says("gw-2", "m", 0, 3);
    assert!(world.turn().is_empty());
    assert!(world.line("m").contains("0 waiting, 0 leases: awake; in use"), "{}", world.line("m"));
}

#[test]
fn numbers_that_only_change_move_nobody_in_line() {
    let mut world = World::new(vec![model("first"), model("second"), model("held")], &["held"]);
    world.tell(&Event::Used {
        engine: engine("held"),
        generation: LIFE,
        leases: 1,
        last_end: world.now,
        last_byte: world.now,
        clients: Clients::default(),
        pause: None,
    });
    world.after(1).says("gw-2", "first", 1, 0);
    world.after(1).arrive(1, "second");
    world.after(1).says("gw-2", "first", 5, 0);
    world.turn();
    world.after(300);
    assert_eq!(closes(&world.turn(), "held"), Some(Why::Turn));
    world.drained("held");
    world.tell(&Event::Slept { engine: engine("held"), generation: LIFE, level: Level::One });
    assert_eq!(reserves(&world.turn()), ["first"], "it was heard of before the other came");
}

#[test]
fn who_began_to_wait_anew_stands_behind() {
    let mut world = World::new(vec![model("first"), model("second"), model("held")], &["held"]);
    world.tell(&Event::Used {
        engine: engine("held"),
        generation: LIFE,
        leases: 1,
        last_end: world.now,
        last_byte: world.now,
        clients: Clients::default(),
        pause: None,
    });
    world.after(1).says("gw-2", "first", 1, 0);
    world.after(1).arrive(1, "second");
    world.says("gw-2", "first", 0, 0);
    world.after(1).says("gw-2", "first", 1, 0);
    world.after(300);
    assert_eq!(closes(&world.turn(), "held"), Some(Why::Turn));
    world.drained("held");
    world.tell(&Event::Slept { engine: engine("held"), generation: LIFE, level: Level::One });
    assert_eq!(reserves(&world.turn()), ["second"]);
}

#[test]
fn what_is_in_flight_elsewhere_is_not_idle_and_rests_from_its_end() {
    let mut world = World::new(vec![model("m")], &["m"]);
    world.says("gw-2", "m", 0, 1);
    assert!(world.turn().is_empty());
    world.after(3600);
    assert_eq!(world.turn(), [], "a long answer is not idle");
    world.says("gw-2", "m", 0, 0);
    assert_eq!(world.turn(), []);
    assert_eq!(world.fleet.next_deadline(), Some(world.now + Millis::secs(60)));
    world.after(59);
    assert_eq!(world.turn(), []);
    world.after(1);
    assert_eq!(closes(&world.turn(), "m"), Some(Why::Idle));
}

#[test]
fn a_gateway_that_is_gone_uses_nothing_and_waits_for_nothing() {
    let mut world = World::new(vec![model("m"), model("n")], &["m"]);
    world.says("gw-2", "m", 0, 1);
    world.says("gw-3", "n", 1, 0);
    world.turn();
    world.after(3600);
    world.say("gw-2", None);
    world.say("gw-3", None);
    assert_eq!(world.turn(), [], "used until a moment ago");
    world.after(60);
    assert_eq!(closes(&world.turn(), "m"), Some(Why::Idle));
    assert!(world.line("n").contains("n: cold, 0 waiting, 0 leases"));
}

#[test]
fn the_idle_clock_counts_from_the_last_request_anywhere_and_never_from_the_future() {
    let mut world = World::new(vec![model("m")], &["m"]);
    world.after(50);
    let ahead = Elsewhere { waiting: 0, in_flight: 0, last_request: world.now + Millis::secs(10_000) };
    world.say("gw-2", Some(BTreeMap::from([("m".into(), ahead)])));
    world.after(59);
    assert_eq!(world.turn(), []);
    world.after(1);
    assert_eq!(closes(&world.turn(), "m"), Some(Why::Idle));
    world.says("gw-2", "m", 1, 0);
    assert!(matches!(world.turn()[..], [Command::OpenGate { .. }]), "a drain by idleness is cancelled");
}

#[test]
fn an_engine_that_others_use_has_its_turn_before_it_goes() {
    let mut world = World::new(vec![model("m"), model("n")], &["m"]);
    world.says("gw-2", "m", 0, 2);
    world.after(60).arrive(1, "n");
    assert_eq!(world.turn(), [], "it is used, and its turn is not over");
    assert!(world.line("n").contains("held by m, 2 leases, its turn ends"), "{}", world.line("n"));
    world.says("gw-2", "m", 0, 0);
    assert_eq!(closes(&world.turn(), "m"), Some(Why::Turn));
}

#[test]
fn a_sleeper_is_not_stopped_while_others_wait_for_it() {
    let mut spec = model("m");
    spec.idle.stop_after = Some(Millis::secs(60));
    let mut world = World::new(vec![spec, model("n")], &["n"]);
    world.tell(&Event::Used {
        engine: engine("n"),
        generation: LIFE,
        leases: 1,
        last_end: world.now,
        last_byte: world.now,
        clients: Clients::default(),
        pause: None,
    });
    world.tell(&Event::Adopted { engine: engine("m"), generation: LIFE, found: found(Some(Level::One)) });
    world.turn();
    world.after(59).says("gw-2", "m", 1, 0);
    world.turn();
    world.after(1);
    world.turn();
    assert!(matches!(world.state("m"), State::Asleep { .. }));
    world.says("gw-2", "m", 0, 0);
    world.turn();
    assert!(matches!(world.state("m"), State::Asleep { .. }), "it was asked for a moment ago");
    world.after(60);
    assert!(matches!(world.turn()[..], [Command::Stop { .. }]));
}

#[test]
fn what_others_said_survives_in_a_journal_and_older_journals_do_without() {
    let mut world = World::new(vec![model("m")], &["m"]);
    world.says("gw-2", "m", 2, 1);
    world.turn();
    let mut text = journal::write(&journal::Line::header("0", world.now)).expect("a line");
    text = text + "\n" + &journal::write_turn(world.now, &world.fleet.snapshot()).expect("a line") + "\n";
    let told = Event::Elsewhere { gateway: "gw-2".to_owned(), demand: None };
    text = text + &journal::write_turn(world.now + Millis::secs(3600), &[told]).expect("a line") + "\n";
    let lines = journal::read(&text).expect("a journal");
    let mut reports = Vec::new();
    journal::replay(&lines, |_, _, plan, fleet| {
        reports.push((plan.commands.clone(), fleet.report(plan).to_string()))
    });
    assert_eq!(reports[0].1, world.fleet.report(&world.plan).to_string());
    assert!(reports[0].1.contains("2 waiting, 2 of them at other gateways"));
    assert_eq!(reports[1].0, [], "used until that gateway went");

    let alone = World::new(vec![model("m")], &[]);
    let text = journal::write_turn(START, &alone.fleet.snapshot()).expect("a line");
    assert!(!text.contains("elsewhere"), "{text}");
}
