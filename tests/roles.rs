//! One gateway leads and the others follow: what each decides, and what happens when that changes.

use rouse::{
    engine::{Admission, Engine, state::LifecycleState, turn_clients::TurnClients},
    fault::{FailureCause, Fault},
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::{
            AdoptedEngine, CanaryVerdict, Event, OperationId, OperatorAction, PublishedEngine,
            PublishedEngineState, PublishedFailure, Waiter, WaiterId,
        },
    },
    model::{
        Accelerator, AcceleratorRequirement, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy,
        ModelSpec, QueueOverrides, QueuePolicy, SleepLevel, SleepLevelPolicy,
    },
    sim::journal,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000);
const ONE: Generation = Generation(1);
const TWO: Generation = Generation(2);

fn model(name: &str) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: AcceleratorRequirement::Count(1),
        memory: EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        idle: IdlePolicy {
            sleep_after: Some(Millis::secs(60)),
            stop_after: None,
            level: SleepLevelPolicy::One,
        },
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
        queue: QueueOverrides::default(),
    }
}

/// One of several gateways, with one accelerator that holds one model at a time.
struct LeadershipHarness {
    fleet: Fleet,
    now: Tick,
    waiters: u64,
}

impl LeadershipHarness {
    /// A leader without running engines.
    fn leader(policy: QueuePolicy) -> Self {
        let mut large = model("large");
        large.memory.awake = Bytes::gib(90);
        Self::of_models(vec![model("a"), model("b"), large], policy)
    }

    fn of_models(models: Vec<ModelSpec>, policy: QueuePolicy) -> Self {
        let mut world = Self { fleet: Fleet::new(), now: START, waiters: 0 };
        let accelerators =
            vec![Accelerator { id: "gpu-0".into(), capacity: Bytes::gib(24), metered: false, units: None }];
        let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
        settings.queue.policy = policy;
        let configuration = FleetConfig { settings, accelerators, models };
        world.send(&Event::Configured { configuration: Box::new(configuration) });
        world.send(&Event::AdoptionDone);
        assert_eq!(world.turn(), []);
        world
    }

    fn follower(policy: QueuePolicy) -> Self {
        let mut world = Self::leader(policy);
        world.send(&Event::LeadershipChanged { leads: false });
        assert_eq!(world.turn(), []);
        world
    }

    /// A follower that serves `a` with this many leases.
    fn serving(leases: u32) -> Self {
        let mut world = Self::follower(QueuePolicy::Wait);
        assert_eq!(world.publish("a", ONE, PublishedEngineState::Awake), [opens("a", ONE)]);
        world.report_use("a", ONE, leases);
        world
    }

    fn send(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    fn after(&mut self, secs: u64) -> &mut Self {
        self.now = self.now + Millis::secs(secs);
        self
    }

    fn reason(&self, model: &str) -> String {
        let plan = self.fleet.plan(self.now);
        self.fleet.report(&plan).models[model].reason.clone()
    }

    fn turn(&mut self) -> Vec<Command> {
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
        assert_eq!(self.fleet.broken_invariants(), [""; 0]);
        assert!(self.fleet.next_deadline().is_none_or(|at| at > self.now));
        plan.commands
    }

    fn publish(&mut self, model: &str, generation: Generation, state: PublishedEngineState) -> Vec<Command> {
        let published = Some(PublishedEngine {
            state,
            address: (state != PublishedEngineState::Launching).then(address),
            fingerprint: 1,
            accelerators: vec!["gpu-0".into()],
            since: self.now,
            failure: None,
        });
        self.send(&Event::Published { engine: engine(model), generation, published });
        self.turn()
    }

    /// Publishes `fruitless` failed starts in a row: the last one at `since`, the next one `pause` seconds later.
    fn publish_failed(&mut self, model: &str, fruitless: u32, since: Tick, pause: u64) -> Vec<Command> {
        let until = since + Millis::secs(pause);
        let failure = PublishedFailure {
            cause: FailureCause::Exited(3),
            failures: fruitless,
            failures_since_serving: fruitless,
            until,
        };
        let (state, accelerators) = (PublishedEngineState::Backoff, Vec::new());
        let published = PublishedEngine {
            state,
            address: None,
            fingerprint: 1,
            accelerators,
            since,
            failure: Some(failure),
        };
        let generation = Generation(u64::from(fruitless));
        self.send(&Event::Published { engine: engine(model), generation, published: Some(published) });
        self.turn()
    }

    fn adopt(&mut self, model: &str, generation: Generation, asleep: Option<SleepLevel>, ready: bool) {
        let (accelerators, last_end) = (vec!["gpu-0".into()], Tick(0));
        let found = AdoptedEngine {
            address: address(),
            accelerators,
            asleep,
            ready,
            fingerprint: 1,
            last_lease_end: last_end,
            started: START,
        };
        self.send(&Event::Adopted { engine: engine(model), generation, found });
    }

    fn report_use(&mut self, model: &str, generation: Generation, leases: u32) {
        let (engine, last_end, last_byte) = (engine(model), self.now, self.now);
        self.send(&Event::GateSampled {
            engine,
            generation,
            leases,
            last_lease_end: last_end,
            last_byte,
            clients: TurnClients::default(),
            idle_gap: None,
        });
    }

    fn arrive(&mut self, model: &str) -> Vec<Command> {
        self.waiters += 1;
        let waiter = Waiter {
            id: WaiterId(self.waiters),
            model: model.into(),
            band: 0,
            key: String::new(),
            arrived: self.now,
            deadline: self.now + Millis::secs(540),
            stream: true,
            client: 0,
            required_engine: None,
        };
        self.send(&Event::Arrived { waiter });
        self.turn()
    }

    fn of(&self, model: &str) -> &Engine {
        self.fleet.engine(&engine(model)).expect("it is configured")
    }
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

fn address() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 1).into()
}

fn opens(model: &str, generation: Generation) -> Command {
    Command::OpenGate { engine: engine(model), generation, public: true }
}

fn grants(waiter: u64, model: &str, generation: Generation) -> Command {
    Command::Grant { waiter: WaiterId(waiter), engine: engine(model), generation, canary: false }
}

/// Returns the closed generations, each with the reason and whether its leases are revoked.
fn closes(commands: &[Command]) -> Vec<(Generation, CloseReason, bool)> {
    let revoked = |of: Generation| {
        commands.iter().any(|c| matches!(c, Command::RevokeLeases { generation, .. } if *generation == of))
    };
    let closed = commands.iter().filter_map(|command| match command {
        Command::CloseGate { generation, reason: why, .. } => Some((*generation, *why, revoked(*generation))),
        _ => None,
    });
    closed.collect()
}

fn refused(commands: &[Command]) -> &Fault {
    match commands {
        [Command::Refuse { fault, .. }] => fault,
        other => panic!("nobody is refused: {other:?}"),
    }
}

#[test]
fn a_follower_orders_nothing_and_grants_what_is_published_awake() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    assert_eq!(world.arrive("a"), []);
    assert_eq!(world.fleet.next_deadline(), Some(world.now + Millis::secs(540)));
    for state in [PublishedEngineState::Launching, PublishedEngineState::Loading] {
        assert_eq!(world.publish("a", ONE, state), []);
    }
    // Reports about its start are for the leader.
    world.send(&Event::Ready { engine: engine("a"), generation: ONE });
    assert_eq!(world.turn(), []);
    let commands = world.publish("a", ONE, PublishedEngineState::Awake);
    assert_eq!(commands, [opens("a", ONE), grants(1, "a", ONE)]);
    world.report_use("a", ONE, 0);
    world.after(3600);
    assert_eq!(world.turn(), [], "to put it away is for the leader");
    assert!(!world.fleet.leads() && world.fleet.is_ready());
}

#[test]
fn a_gate_is_open_while_its_engine_is_published_awake() {
    let mut world = LeadershipHarness::serving(1);
    let turn = world.of("a").turn_start;
    let commands = world.after(5).publish("a", ONE, PublishedEngineState::Draining);
    assert_eq!(closes(&commands), [(ONE, CloseReason::PublishedNotAwake, false)]);
    assert!(matches!(world.of("a").state, LifecycleState::Draining { .. }) && world.of("a").leases == 1);
    assert_eq!(world.arrive("a"), []);
    let commands = world.publish("a", ONE, PublishedEngineState::Awake);
    assert_eq!(commands, [opens("a", ONE), grants(1, "a", ONE)]);
    assert_eq!(world.of("a").turn_start, turn, "its turn was not over");
    let commands = world.publish("a", ONE, PublishedEngineState::Asleep(SleepLevel::One));
    assert_eq!(closes(&commands), [(ONE, CloseReason::PublishedNotAwake, false)]);
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Waking), []);
}

#[test]
fn the_life_that_is_published_replaces_the_one_that_was_known() {
    let mut world = LeadershipHarness::serving(2);
    let commands = world.publish("a", TWO, PublishedEngineState::Awake);
    assert_eq!(closes(&commands), [(ONE, CloseReason::Fault, true)], "whoever used the other is told");
    assert!(commands.contains(&opens("a", TWO)) && world.of("a").leases == 0);
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Asleep(SleepLevel::One)), [], "that is over");
    world.send(&Event::Published { engine: engine("a"), generation: ONE, published: None });
    assert_eq!(world.turn(), []);
    world.send(&Event::Published { engine: engine("a"), generation: TWO, published: None });
    assert_eq!(closes(&world.turn()), [(TWO, CloseReason::Fault, true)]);
    assert_eq!(world.of("a").state, LifecycleState::Cold);
}

#[test]
fn who_uses_an_engine_that_is_published_failing_is_told() {
    let mut world = LeadershipHarness::serving(1);
    assert_eq!(
        closes(&world.publish("a", ONE, PublishedEngineState::Failing)),
        [(ONE, CloseReason::Fault, true)]
    );
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Backoff), []);
    assert_eq!(world.arrive("a"), []);
    world.after(300);
    assert_eq!(world.turn(), [], "when it is tried again is for the leader");
}

#[test]
fn a_follower_holds_what_its_stub_lets_nobody_into() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::StubGateClosed { engine: engine("a"), generation: ONE });
    assert_eq!(world.turn(), [Command::AwaitStub { engine: engine("a"), generation: ONE }]);
    assert_eq!(world.arrive("a"), []);
    world.send(&Event::StubGateOpened { engine: engine("a"), generation: ONE });
    assert_eq!(world.turn(), [opens("a", ONE), grants(1, "a", ONE)]);
}

#[test]
fn a_follower_refuses_what_the_leader_would_and_waits_when_in_doubt() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Reject);
    let Fault::InsufficientMemory(shortage) = refused(&world.arrive("large")).clone() else {
        panic!("it fits nowhere");
    };
    assert!(shortage.permanent);
    world.publish("a", ONE, PublishedEngineState::Awake);
    world.report_use("a", ONE, 1);
    let Fault::InsufficientMemory(shortage) = refused(&world.arrive("b")).clone() else {
        panic!("it has no memory");
    };
    assert!(!shortage.permanent);
    let holders: Vec<_> = shortage.wait.holders.iter().map(|held| held.model.as_str()).collect();
    assert_eq!(holders, ["a"]);
    world.publish("a", ONE, PublishedEngineState::Draining);
    assert_eq!(world.arrive("b"), [], "its memory may be for this one");
    world.publish("b", ONE, PublishedEngineState::Backoff);
    assert_eq!(world.turn(), [], "what becomes of it only the leader knows");
}

#[test]
fn who_waits_at_a_follower_is_told_of_a_start_that_failed_as_at_the_leader() {
    for ahead in [0, 3600] {
        let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
        world.arrive("a");
        let leaders_now = world.now + Millis::secs(ahead);
        assert_eq!(world.publish_failed("a", 1, leaders_now, 0), [], "the leader tries it once more");
        let told = refused(&world.publish_failed("a", 2, leaders_now, 4)).to_string();
        assert!(told.starts_with("Model 'a' failed to become ready: last start failed at "), "{told}");
        assert!(told.contains("(exited:3), 2 failures in a row; next attempt at "), "{told}");
        assert!(world.reason("a").starts_with("failed"), "{}", world.reason("a"));
        let Fault::ModelNotReady { wait, .. } = refused(&world.after(1).arrive("a")).clone() else {
            panic!("it is left alone");
        };
        assert_eq!(wait.retry_after, Some(Millis::secs(3)), "as long as the leader leaves it alone");
        // It may have been started by now without a report: a new request waits, and gets the known reason.
        world.after(3);
        assert_eq!(world.arrive("a"), []);
        assert!(world.reason("a").contains("exited:3"), "{}", world.reason("a"));
        world.publish("a", Generation(3), PublishedEngineState::Loading);
        assert!(world.fleet.last_failure(&"a".into()).is_some(), "it has not served since");
        assert_eq!(
            world.publish("a", Generation(3), PublishedEngineState::Awake).len(),
            2,
            "open, and granted"
        );
        assert_eq!(world.fleet.last_failure(&"a".into()), None);
    }
}

#[test]
fn what_was_said_of_a_failure_long_ago_refuses_nobody_for_long() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.after(3600).publish_failed("a", 5, START, 8);
    assert_eq!(world.after(1).arrive("a"), [], "no gateway leads, and the next that does may have more luck");
}

#[test]
fn a_refusal_that_hangs_on_what_is_about_to_be_decided_is_none() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Reject);
    // Each would fit alone, and the leader may have chosen either.
    assert_eq!(world.arrive("a"), []);
    assert_eq!(world.arrive("b"), []);
}

#[test]
fn orders_are_for_the_gateway_that_leads() {
    let mut world = LeadershipHarness::serving(0);
    let forbidden = world.fleet.validate_action(&"a".into(), OperatorAction::Stop).expect_err("it follows");
    assert!(forbidden.contains("another gateway leads"), "{forbidden}");
    world.send(&Event::OperatorRequest {
        operation: OperationId(1),
        model: "b".into(),
        action: OperatorAction::Pin,
    });
    let commands = world.turn();
    assert!(
        matches!(&commands[..], [Command::FinishOperation { outcome: Err(why), .. }] if *why == forbidden)
    );
    world.send(&Event::LeadershipChanged { leads: true });
    world.send(&Event::AdoptionDone);
    assert!(world.turn().iter().all(|c| !matches!(c, Command::Reserve { .. })), "it was never pinned");
}

#[test]
fn a_follower_that_shuts_down_tells_its_own_and_stops_nothing() {
    let mut world = LeadershipHarness::serving(1);
    world.arrive("b");
    world.send(&Event::Shutdown { stop_engines: true });
    let commands = world.turn();
    assert_eq!(closes(&commands), [(ONE, CloseReason::Shutdown, true)]);
    assert!(commands.iter().any(|c| matches!(c, Command::Refuse { fault: Fault::ShuttingDown, .. })));
    assert_eq!(commands.len(), 3, "{commands:?}");
    assert!(!world.fleet.is_finished());
    world.report_use("a", ONE, 0);
    assert_eq!(world.turn(), []);
    assert!(world.fleet.is_finished() && world.of("a").state == LifecycleState::Awake);
}

#[test]
fn who_comes_to_lead_goes_on_serving_and_decides_once_it_knows_what_runs() {
    let mut world = LeadershipHarness::serving(2);
    let (turn, last_end) = (world.of("a").turn_start, world.of("a").last_lease_end);
    world.after(10).send(&Event::LeadershipChanged { leads: true });
    assert_eq!(world.turn(), []);
    assert_eq!(world.arrive("a"), [grants(1, "a", ONE)], "without a gap");
    assert_eq!(world.arrive("b"), []);
    assert!(world.fleet.is_ready() && world.fleet.leads());
    world.publish("a", TWO, PublishedEngineState::Stopping);
    assert_eq!(world.of("a").generation, ONE, "nobody else is listened to");
    world.adopt("a", ONE, None, true);
    assert_eq!(world.turn(), []);
    let a = world.of("a");
    assert_eq!(
        (a.admission, a.leases, a.turn_start, a.last_lease_end),
        (Admission::Public, 3, turn, last_end)
    );
    world.send(&Event::AdoptionDone);
    assert_eq!(world.turn(), []);
    world.after(300);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Turn, false)], "its turn is over, and it decides");
}

#[test]
fn what_is_not_found_running_is_gone() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::LeadershipChanged { leads: true });
    world.send(&Event::AdoptionDone);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)]);
    assert_eq!(world.of("a").state, LifecycleState::Cold);
    let commands = world.arrive("a");
    assert!(matches!(commands[..], [Command::Reserve { generation: TWO, .. }]), "{commands:?}");
}

#[test]
fn what_is_found_asleep_is_shut_and_whoever_is_in_it_is_told() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, Some(SleepLevel::One), true);
    world.send(&Event::AdoptionDone);
    world.report_use("a", ONE, 1);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)]);
    let commands = world.arrive("a");
    assert!(matches!(commands[..], [Command::Reserve { generation: ONE, .. }]), "{commands:?}");
}

/// The previous leader ordered the sleep and may not have received its outcome.
#[test]
fn what_was_told_to_sleep_has_all_its_memory_until_it_says_that_it_sleeps() {
    let taken_over = || {
        let mut world = LeadershipHarness::serving(1);
        world.send(&Event::LeadershipChanged { leads: true });
        world.adopt("a", ONE, Some(SleepLevel::One), false);
        world.send(&Event::AdoptionDone);
        assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)]);
        assert_eq!(world.of("a").state, LifecycleState::FallingAsleep { level: SleepLevel::One });
        for model in ["a", "b"] {
            assert_eq!(world.arrive(model), [], "nothing is known of it yet");
        }
        world
    };
    let (engine, generation, level) = (engine("a"), ONE, SleepLevel::One);
    let mut world = taken_over();
    world.send(&Event::Slept { engine: engine.clone(), generation, level });
    let commands = world.turn();
    assert!(
        matches!(commands[..], [Command::Shrink { .. }, Command::Reserve { generation: ONE, .. }]),
        "{commands:?}"
    );

    let mut world = taken_over();
    world.send(&Event::SleepFailed { engine: engine.clone(), generation, cause: FailureCause::SleepDenied });
    assert_eq!(world.turn(), [opens("a", ONE), grants(1, "a", ONE)]);

    // Refused, or unanswered until the timeout.
    let mut refused = taken_over();
    refused.send(&Event::SleepFailed { engine, generation, cause: FailureCause::Refused });
    let mut silent = taken_over();
    silent.after(30 + 20);
    for mut world in [refused, silent] {
        let commands = world.turn();
        assert!(matches!(commands[..], [Command::Stop { generation: ONE, .. }]), "{commands:?}");
    }
}

#[test]
fn one_that_does_not_answer_for_a_moment_keeps_its_requests_and_is_watched() {
    let mut world = LeadershipHarness::serving(1);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, None, false);
    world.send(&Event::AdoptionDone);
    assert_eq!(world.turn(), []);
    assert_eq!((world.of("a").admission, world.of("a").leases), (Admission::Public, 1));
    world.after(11);
    assert_eq!(closes(&world.turn()), [(ONE, CloseReason::Fault, true)], "it hangs");
}

#[test]
fn who_no_longer_leads_gives_up_what_it_had_begun() {
    let mut world = LeadershipHarness::leader(QueuePolicy::Wait);
    world.send(&Event::OperatorRequest {
        operation: OperationId(1),
        model: "a".into(),
        action: OperatorAction::Wake,
    });
    assert!(matches!(world.turn()[..], [Command::Reserve { .. }]));
    world.send(&Event::LeadershipChanged { leads: false });
    let commands = world.turn();
    assert!(
        matches!(&commands[..], [Command::FinishOperation { outcome: Err(why), .. }] if why.contains("another gateway"))
    );
    world.send(&Event::Placed { engine: engine("a"), generation: ONE, accelerators: vec!["gpu-0".into()] });
    assert_eq!(world.turn(), []);
    assert!(world.of("a").pending_reservation.is_none());
}

#[test]
fn a_start_under_way_stays_as_it_is_until_it_is_published() {
    let mut world = LeadershipHarness::leader(QueuePolicy::Wait);
    world.arrive("a");
    world.send(&Event::Placed { engine: engine("a"), generation: ONE, accelerators: vec!["gpu-0".into()] });
    assert!(matches!(world.turn()[..], [Command::Launch { .. }]));
    world.send(&Event::Started { engine: engine("a"), generation: ONE, address: address() });
    world.send(&Event::Ready { engine: engine("a"), generation: ONE });
    let commands = world.turn();
    assert!(matches!(
        commands[..],
        [Command::OpenGate { public: false, .. }, Command::Grant { canary: true, .. }]
    ));
    world.send(&Event::LeadershipChanged { leads: false });
    assert_eq!(world.turn(), []);
    assert_eq!(world.arrive("a"), [], "no second one is sent to prove it");
    let verdict = CanaryVerdict::Failed(FailureCause::Unhealthy);
    world.send(&Event::Canary { engine: engine("a"), generation: ONE, verdict });
    world.after(3600);
    assert!(matches!(refused(&world.turn()), Fault::ModelNotReady { cause: FailureCause::Deadline, .. }));
    assert_eq!(world.of("a").state, LifecycleState::Loading);
    assert_eq!(world.publish("a", ONE, PublishedEngineState::Awake), [opens("a", ONE)]);
}

#[test]
fn what_is_ready_when_this_gateway_no_longer_leads_is_for_another_to_prove() {
    let mut world = LeadershipHarness::leader(QueuePolicy::Wait);
    world.arrive("a");
    world.send(&Event::Placed { engine: engine("a"), generation: ONE, accelerators: vec!["gpu-0".into()] });
    world.turn();
    world.send(&Event::Started { engine: engine("a"), generation: ONE, address: address() });
    world.send(&Event::Ready { engine: engine("a"), generation: ONE });
    world.send(&Event::LeadershipChanged { leads: false });
    assert_eq!(world.turn(), [], "neither by the request that waits");
    world.send(&Event::Left { waiter: WaiterId(1) });
    assert_eq!(world.turn(), [], "nor by a probe");
}

#[test]
fn a_role_survives_in_a_journal_and_older_journals_do_without() {
    let mut world = LeadershipHarness::serving(1);
    world.arrive("b");
    let mut text = journal::write(&journal::JournalLine::header("0", world.now)).expect("a line");
    text = text + "\n" + &journal::write_turn(world.now, &world.fleet.snapshot()).expect("a line") + "\n";
    let draining = PublishedEngine {
        state: PublishedEngineState::Draining,
        ..PublishedEngine::of(world.of("a")).expect("it runs")
    };
    let events = [Event::Published { engine: engine("a"), generation: ONE, published: Some(draining) }];
    text = text + &journal::write_turn(world.now, &events).expect("a line") + "\n";
    let mut plans = Vec::new();
    journal::replay(&journal::read(&text).expect("a journal"), |_, _, plan, _| {
        plans.push(plan.commands.clone())
    });
    assert_eq!(plans[0], []);
    assert_eq!(closes(&plans[1]), [(ONE, CloseReason::PublishedNotAwake, false)]);

    let alone = LeadershipHarness::leader(QueuePolicy::Wait);
    let text = journal::write_turn(START, &alone.fleet.snapshot()).expect("a line");
    assert!(!text.contains("role") && !text.contains("unfound") && !text.contains("forsaken"), "{text}");
}

/// A new leader has not seen every earlier generation, and other gateways have. So it numbers its engines' generations
/// above all of them.
#[test]
fn lives_under_a_new_leader_are_later_than_any_before() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.send(&Event::LeadershipChanged { leads: true });
    let from = Generation(7 << 16);
    world.send(&Event::GenerationFloor { generation: from });
    world.send(&Event::AdoptionDone);
    let generation = |world: &LeadershipHarness| world.fleet.engine(&engine("a")).unwrap().generation;
    assert_eq!(generation(&world), from);
    world.send(&Event::GenerationFloor { generation: ONE });
    assert_eq!(generation(&world), from, "never back");
}

/// A running engine has a generation of a previous leader, which this leader may not know.
#[test]
fn an_engine_of_which_nobody_told_is_adopted_in_the_life_that_it_has() {
    let mut world = LeadershipHarness::follower(QueuePolicy::Wait);
    world.send(&Event::LeadershipChanged { leads: true });
    world.send(&Event::GenerationFloor { generation: Generation(7 << 16) });
    world.adopt("a", ONE, None, true);
    world.send(&Event::AdoptionDone);
    let e = world.of("a");
    assert_eq!((e.generation, &e.state), (ONE, &LifecycleState::Awake));
}

/// A cold model cannot start, and its waiters get that reason. Awake models are not affected.
#[test]
fn who_waits_while_the_clusters_api_is_silent_is_told_so_by_whoever_decides() {
    for mut world in [LeadershipHarness::leader(QueuePolicy::Wait), LeadershipHarness::serving(1)] {
        world.arrive("b");
        world.send(&Event::ApiServerChanged { answers: false });
        let told = world.after(5).reason("b");
        assert!(told.contains("the cluster's API server has not answered since"), "{told}");
        let told = world.reason("large");
        assert!(told.contains("the cluster's API server"), "nobody waits for it: {told}");
        let told = world.reason("a");
        assert_eq!(told.contains("API server"), !world.of("a").serves(), "{told}");
        world.send(&Event::ApiServerChanged { answers: true });
        let told = world.reason("b");
        assert!(!told.contains("API server"), "{told}");
    }
}

/// Other gateways may use the engine and could not report it yet.
#[test]
fn nothing_is_put_away_as_idle_before_every_other_gateway_could_be_heard() {
    let idle = |commands: &[Command]| closes(commands).iter().any(|(_, why, _)| *why == CloseReason::Idle);
    let mut world = LeadershipHarness::serving(0);
    world.after(600).send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, None, true);
    world.send(&Event::AdoptionDone);
    assert!(!idle(&world.turn()) && !idle(&world.after(14).turn()));
    assert!(world.fleet.next_deadline().is_some_and(|at| at <= world.now + Millis::secs(1)));
    assert!(idle(&world.after(1).turn()), "it has been unused for ten minutes");

    let mut world = LeadershipHarness::serving(0);
    world.send(&Event::LeadershipChanged { leads: true });
    world.adopt("a", ONE, None, true);
    world.send(&Event::AdoptionDone);
    world.turn();
    world.after(30).send(&Event::ApiServerChanged { answers: false });
    assert!(!idle(&world.after(600).turn()), "nobody can say anything");
    world.send(&Event::ApiServerChanged { answers: true });
    assert!(!idle(&world.turn()) && !idle(&world.after(14).turn()));
    assert!(idle(&world.after(1).turn()));
}

/// The leader may have reserved its dependencies, or be about to: a follower refuses only what can never fit.
#[test]
fn a_follower_refuses_nobody_for_what_is_needed_and_may_be_coming() {
    let needs = |name: &str, other: &str| {
        let mut spec = model(name);
        (spec.memory.awake, spec.dependencies) = (Bytes::gib(8), vec![other.into()]);
        spec
    };
    let mut small = model("small");
    small.memory.awake = Bytes::gib(8);
    let models = vec![model("a"), needs("never", "a"), small, needs("top", "small")];
    let mut world = LeadershipHarness::of_models(models, QueuePolicy::Reject);
    world.send(&Event::LeadershipChanged { leads: false });
    assert_eq!(world.turn(), []);
    assert_eq!(world.arrive("top"), [], "both could be reserved for");
    for state in
        [PublishedEngineState::Launching, PublishedEngineState::Loading, PublishedEngineState::Failing]
    {
        assert_eq!(world.publish("small", ONE, state), []);
    }
    assert_eq!(world.publish("small", ONE, PublishedEngineState::Backoff), []);
    let Fault::InsufficientMemory(shortage) = refused(&world.arrive("never")).clone() else {
        panic!("it would be served");
    };
    assert!(shortage.permanent, "{shortage:?}");
    assert!(shortage.wait.waited_for.contains("a needs 20Gi on one accelerator"), "{shortage:?}");
}
