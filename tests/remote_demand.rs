//! Requests at other gateways: they start engines, keep them awake, and count for turns like local requests.

use std::collections::BTreeMap;

use rouse::{
    engine::{state::LifecycleState, turn_clients::TurnClients},
    fleet::{
        Fleet, Plan,
        command::{CloseReason, Command},
        event::{AdoptedEngine, CanaryVerdict, Event, GatewayDemand, Waiter, WaiterId},
    },
    journal,
    model::{
        Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy, ModelSpec,
        RehearsalPolicy, SleepLevel, SleepLevelPolicy,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000);
const GENERATION: Generation = Generation(1);

fn model(name: &str) -> ModelSpec {
    ModelSpec {
        idle: IdlePolicy {
            sleep_after: Some(Millis::secs(60)),
            stop_after: None,
            level: SleepLevelPolicy::One,
            rehearse: RehearsalPolicy::Never,
        },
        start_timeout: Millis::secs(600),
        explicit_memory: true,
        ..simulated_model(
            name,
            EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        )
    }
}

/// The leader of a cluster, with one accelerator that holds one model at a time.
struct RemoteDemandHarness {
    fleet: Fleet,
    now: Tick,
    plan: Plan,
}

impl RemoteDemandHarness {
    fn new(models: Vec<ModelSpec>, awake: &[&str]) -> Self {
        let mut world = Self { fleet: Fleet::new(), now: START, plan: Plan::default() };
        let gpu = Accelerator::new("gpu-0".into(), Bytes::gib(24));
        let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
        let configuration = FleetConfig { settings, accelerators: vec![gpu], models };
        world.send(&Event::Configured { configuration: Box::new(configuration) });
        for name in awake {
            world.send(&Event::Adopted { engine: engine(name), generation: GENERATION, found: found(None) });
        }
        world.send(&Event::AdoptionDone);
        world.turn();
        world
    }

    fn send(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    fn advance_secs(&mut self, secs: u64) -> &mut Self {
        self.now = self.now + Millis::secs(secs);
        self
    }

    /// Sets another gateway's demand for one model: waiting and in-flight requests.
    fn set_model_demand(&mut self, gateway: &str, model: &str, waiting: u32, in_flight: u32) {
        let demand = GatewayDemand { waiting, in_flight, last_request: self.now };
        self.set_gateway_demand(gateway, Some(BTreeMap::from([(model.into(), demand)])));
    }

    fn set_gateway_demand(
        &mut self,
        gateway: &str,
        demand: Option<BTreeMap<rouse::model::ModelName, GatewayDemand>>,
    ) {
        self.send(&Event::RemoteDemand { gateway: gateway.to_owned(), demand });
    }

    fn turn(&mut self) -> Vec<Command> {
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
        assert_eq!(self.fleet.broken_invariants(), [""; 0]);
        assert!(self.fleet.next_deadline().is_none_or(|at| at > self.now));
        self.plan = plan.clone();
        plan.commands
    }

    fn reason(&self, model: &str) -> String {
        let report = self.fleet.report(&self.plan).to_string();
        report.lines().find(|line| line.starts_with(model)).expect("every model has a line").to_owned()
    }

    fn state(&self, model: &str) -> LifecycleState {
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
            required_engine: None,
        };
        self.send(&Event::Arrived { waiter });
    }

    /// Reports a closed gate as drained, and returns the next commands.
    fn drained(&mut self, model: &str) -> Vec<Command> {
        self.send(&Event::Drained { engine: engine(model), generation: GENERATION });
        self.turn()
    }
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

fn found(asleep: Option<SleepLevel>) -> AdoptedEngine {
    AdoptedEngine {
        address: ([127, 0, 0, 1], 1).into(),
        accelerators: vec!["gpu-0".into()],
        asleep,
        ready: true,
        fingerprint: 1,
        last_lease_end: Tick(0),
        started: START,
    }
}

fn close_reason(commands: &[Command], model: &str) -> Option<CloseReason> {
    commands.iter().find_map(|command| match command {
        Command::CloseGate { engine: closed, reason: why, .. } if *closed == engine(model) => Some(*why),
        _ => None,
    })
}

fn reserved_models(commands: &[Command]) -> Vec<&str> {
    let reserved = commands.iter().filter_map(|command| match command {
        Command::Reserve { engine, .. } => Some(engine.model.as_str()),
        _ => None,
    });
    reserved.collect()
}

#[test]
fn a_request_at_another_gateway_starts_and_probes_an_engine() {
    let mut world = RemoteDemandHarness::new(vec![model("m")], &[]);
    world.set_model_demand("gw-2", "m", 3, 0);
    assert_eq!(reserved_models(&world.turn()), ["m"]);
    assert!(world.reason("m").contains("3 waiting, 3 of them at other gateways"), "{}", world.reason("m"));
    let (engine, accelerators) = (engine("m"), vec!["gpu-0".into()]);
    world.send(&Event::Placed { engine: engine.clone(), generation: GENERATION, accelerators });
    assert!(matches!(world.turn()[..], [Command::Launch { .. }]));
    let address = ([127, 0, 0, 1], 1).into();
    world.send(&Event::Started { engine: engine.clone(), generation: GENERATION, address });
    assert!(world.turn().is_empty());
    world.send(&Event::Ready { engine: engine.clone(), generation: GENERATION });
    assert!(matches!(world.turn()[..], [Command::Probe { .. }]), "nobody is here to prove it with");
    world.send(&Event::Canary { engine, generation: GENERATION, verdict: CanaryVerdict::Passed });
    assert!(matches!(world.turn()[..], [Command::OpenGate { public: true, .. }]));
    world.set_model_demand("gw-2", "m", 0, 3);
    assert!(world.turn().is_empty());
    assert!(world.reason("m").contains("0 waiting, 0 leases: awake; in use"), "{}", world.reason("m"));
}

#[test]
fn changed_numbers_move_no_model_in_line() {
    let mut world = RemoteDemandHarness::new(vec![model("first"), model("second"), model("held")], &["held"]);
    world.send(&Event::GateSampled {
        engine: engine("held"),
        generation: GENERATION,
        leases: 1,
        last_lease_end: world.now,
        last_byte: world.now,
        clients: TurnClients::default(),
        idle_gap: None,
    });
    world.advance_secs(1).set_model_demand("gw-2", "first", 1, 0);
    world.advance_secs(1).arrive(1, "second");
    world.advance_secs(1).set_model_demand("gw-2", "first", 5, 0);
    world.turn();
    world.advance_secs(300);
    assert_eq!(close_reason(&world.turn(), "held"), Some(CloseReason::Turn));
    world.drained("held");
    world.send(&Event::Slept { engine: engine("held"), generation: GENERATION, level: SleepLevel::One });
    assert_eq!(reserved_models(&world.turn()), ["first"], "it was heard of before the other came");
}

#[test]
fn a_model_that_begins_to_wait_again_goes_behind_the_others() {
    let mut world = RemoteDemandHarness::new(vec![model("first"), model("second"), model("held")], &["held"]);
    world.send(&Event::GateSampled {
        engine: engine("held"),
        generation: GENERATION,
        leases: 1,
        last_lease_end: world.now,
        last_byte: world.now,
        clients: TurnClients::default(),
        idle_gap: None,
    });
    world.advance_secs(1).set_model_demand("gw-2", "first", 1, 0);
    world.advance_secs(1).arrive(1, "second");
    world.set_model_demand("gw-2", "first", 0, 0);
    world.advance_secs(1).set_model_demand("gw-2", "first", 1, 0);
    world.advance_secs(300);
    assert_eq!(close_reason(&world.turn(), "held"), Some(CloseReason::Turn));
    world.drained("held");
    world.send(&Event::Slept { engine: engine("held"), generation: GENERATION, level: SleepLevel::One });
    assert_eq!(reserved_models(&world.turn()), ["second"]);
}

#[test]
fn what_is_in_flight_elsewhere_is_not_idle_and_rests_from_its_end() {
    let mut world = RemoteDemandHarness::new(vec![model("m")], &["m"]);
    world.set_model_demand("gw-2", "m", 0, 1);
    assert!(world.turn().is_empty());
    world.advance_secs(3600);
    assert_eq!(world.turn(), [], "a long answer is not idle");
    world.set_model_demand("gw-2", "m", 0, 0);
    assert_eq!(world.turn(), []);
    assert_eq!(world.fleet.next_deadline(), Some(world.now + Millis::secs(60)));
    world.advance_secs(59);
    assert_eq!(world.turn(), []);
    world.advance_secs(1);
    assert_eq!(close_reason(&world.turn(), "m"), Some(CloseReason::Idle));
}

#[test]
fn a_gateway_that_is_gone_uses_nothing_and_waits_for_nothing() {
    let mut world = RemoteDemandHarness::new(vec![model("m"), model("n")], &["m"]);
    world.set_model_demand("gw-2", "m", 0, 1);
    world.set_model_demand("gw-3", "n", 1, 0);
    world.turn();
    world.advance_secs(3600);
    world.set_gateway_demand("gw-2", None);
    world.set_gateway_demand("gw-3", None);
    assert_eq!(world.turn(), [], "used until a moment ago");
    world.advance_secs(60);
    assert_eq!(close_reason(&world.turn(), "m"), Some(CloseReason::Idle));
    assert!(world.reason("n").contains("n: cold, 0 waiting, 0 leases"));
}

#[test]
fn a_gateway_reports_no_use_but_its_own() {
    let mut world = RemoteDemandHarness::new(vec![model("a"), model("b")], &["a"]);
    world.set_model_demand("other", "a", 0, 1);
    world.advance_secs(5).set_model_demand("other", "a", 0, 0);
    assert_eq!(world.fleet.engine(&engine("a")).unwrap().last_lease_end, world.now, "it is known");
    world.set_model_demand("other", "b", 2, 0);
    assert_eq!(world.fleet.demand(), BTreeMap::new());
}

#[test]
fn the_idle_clock_counts_from_the_last_request_anywhere_and_never_from_the_future() {
    let mut world = RemoteDemandHarness::new(vec![model("m")], &["m"]);
    world.advance_secs(50);
    let ahead = GatewayDemand { waiting: 0, in_flight: 0, last_request: world.now + Millis::secs(10_000) };
    world.set_gateway_demand("gw-2", Some(BTreeMap::from([("m".into(), ahead)])));
    world.advance_secs(59);
    assert_eq!(world.turn(), []);
    world.advance_secs(1);
    assert_eq!(close_reason(&world.turn(), "m"), Some(CloseReason::Idle));
    world.set_model_demand("gw-2", "m", 1, 0);
    assert!(matches!(world.turn()[..], [Command::OpenGate { .. }]), "a drain by idleness is cancelled");
}

#[test]
fn an_engine_that_others_use_has_its_turn_before_it_goes() {
    let mut world = RemoteDemandHarness::new(vec![model("m"), model("n")], &["m"]);
    world.set_model_demand("gw-2", "m", 0, 2);
    world.advance_secs(60).arrive(1, "n");
    assert_eq!(world.turn(), [], "it is used, and its turn is not over");
    assert!(world.reason("n").contains("held by m, 2 leases, its turn ends"), "{}", world.reason("n"));
    world.set_model_demand("gw-2", "m", 0, 0);
    assert_eq!(close_reason(&world.turn(), "m"), Some(CloseReason::Turn));
}

#[test]
fn a_sleeper_is_not_stopped_while_others_wait_for_it() {
    let mut spec = model("m");
    spec.idle.stop_after = Some(Millis::secs(60));
    let mut world = RemoteDemandHarness::new(vec![spec, model("n")], &["n"]);
    world.send(&Event::GateSampled {
        engine: engine("n"),
        generation: GENERATION,
        leases: 1,
        last_lease_end: world.now,
        last_byte: world.now,
        clients: TurnClients::default(),
        idle_gap: None,
    });
    world.send(&Event::Adopted {
        engine: engine("m"),
        generation: GENERATION,
        found: found(Some(SleepLevel::One)),
    });
    world.turn();
    world.advance_secs(59).set_model_demand("gw-2", "m", 1, 0);
    world.turn();
    world.advance_secs(1);
    world.turn();
    assert!(matches!(world.state("m"), LifecycleState::Asleep { .. }));
    world.set_model_demand("gw-2", "m", 0, 0);
    world.turn();
    assert!(matches!(world.state("m"), LifecycleState::Asleep { .. }), "it was asked for a moment ago");
    world.advance_secs(60);
    assert!(matches!(world.turn()[..], [Command::Stop { .. }]));
}

#[test]
fn remote_demand_survives_in_a_journal_and_older_journals_do_without() {
    let mut world = RemoteDemandHarness::new(vec![model("m")], &["m"]);
    world.set_model_demand("gw-2", "m", 2, 1);
    world.turn();
    let mut text = journal::write(&journal::JournalLine::header("0", world.now)).expect("a line");
    text = text + "\n" + &journal::write_turn(world.now, &world.fleet.snapshot()).expect("a line") + "\n";
    let told = Event::RemoteDemand { gateway: "gw-2".to_owned(), demand: None };
    text = text + &journal::write_turn(world.now + Millis::secs(3600), &[told]).expect("a line") + "\n";
    let lines = journal::read(&text).expect("a journal");
    let mut reports = Vec::new();
    journal::replay(&lines, |_, _, plan, fleet| {
        reports.push((plan.commands.clone(), fleet.report(plan).to_string()))
    });
    assert_eq!(reports[0].1, world.fleet.report(&world.plan).to_string());
    assert!(reports[0].1.contains("2 waiting, 2 of them at other gateways"));
    assert_eq!(reports[1].0, [], "used until that gateway went");

    let alone = RemoteDemandHarness::new(vec![model("m")], &[]);
    let text = journal::write_turn(START, &alone.fleet.snapshot()).expect("a line");
    assert!(!text.contains("elsewhere"), "{text}");
}
