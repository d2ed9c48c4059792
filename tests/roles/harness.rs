//! One of several gateways: sends it events as its platform would, and takes its commands.
//!
//! Apart from the tests, because followers and leaders are tested with the same gateway.

use rouse::{
    engine::{Engine, turn_clients::TurnClients},
    fault::{FailureCause, Fault},
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::{
            AdoptedEngine, Event, PublishedEngine, PublishedEngineState, PublishedFailure, Waiter, WaiterId,
        },
    },
    model::{
        Accelerator, AcceleratorRequirement, EngineId, EngineMemory, FleetConfig, FleetSettings, IdlePolicy,
        ModelSpec, QueueOverrides, QueuePolicy, RehearsalPolicy, ScaleUpEviction, SleepLevel,
        SleepLevelPolicy,
    },
    saturation::Thresholds,
    units::{Bytes, Generation, Millis, Tick},
};

pub(crate) const START: Tick = Tick(1_000_000);
pub(crate) const ONE: Generation = Generation(1);
pub(crate) const TWO: Generation = Generation(2);

/// One of several gateways, with one accelerator that holds one model at a time.
pub(crate) struct LeadershipHarness {
    pub(crate) fleet: Fleet,
    pub(crate) now: Tick,
    waiters: u64,
}

impl LeadershipHarness {
    /// A leader without running engines.
    pub(crate) fn leader(policy: QueuePolicy) -> Self {
        let mut large = model("large");
        large.memory.awake = Bytes::gib(90);
        Self::of_models(vec![model("a"), model("b"), large], policy)
    }

    pub(crate) fn of_models(models: Vec<ModelSpec>, policy: QueuePolicy) -> Self {
        let mut world = Self::starting();
        world.configure(models, policy);
        world.send(&Event::AdoptionDone);
        assert_eq!(world.turn(), []);
        world
    }

    /// A gateway without a configuration, which may find running engines.
    pub(crate) fn starting() -> Self {
        Self { fleet: Fleet::new(), now: START, waiters: 0 }
    }

    pub(crate) fn configure(&mut self, models: Vec<ModelSpec>, policy: QueuePolicy) {
        self.configure_on(&["gpu-0"], models, policy);
    }

    pub(crate) fn configure_on(&mut self, gpus: &[&str], models: Vec<ModelSpec>, policy: QueuePolicy) {
        let accelerators = gpus.iter().map(|id| Accelerator::new((*id).into(), Bytes::gib(24))).collect();
        let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
        settings.queue.policy = policy;
        let configuration = FleetConfig { settings, accelerators, models };
        self.send(&Event::Configured { configuration: Box::new(configuration) });
    }

    pub(crate) fn follower(policy: QueuePolicy) -> Self {
        let mut world = Self::leader(policy);
        world.send(&Event::LeadershipChanged { leads: false });
        assert_eq!(world.turn(), []);
        world
    }

    /// A follower that serves `a` with this many leases.
    pub(crate) fn serving(leases: u32) -> Self {
        let mut world = Self::follower(QueuePolicy::Wait);
        assert_eq!(world.publish("a", ONE, PublishedEngineState::Awake), [opens("a", ONE)]);
        world.report_use("a", ONE, leases);
        world
    }

    pub(crate) fn send(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    pub(crate) fn after(&mut self, secs: u64) -> &mut Self {
        self.now = self.now + Millis::secs(secs);
        self
    }

    pub(crate) fn reason(&self, model: &str) -> String {
        let plan = self.fleet.plan(self.now);
        self.fleet.report(&plan).models[model].reason.clone()
    }

    pub(crate) fn turn(&mut self) -> Vec<Command> {
        let plan = self.fleet.plan(self.now);
        self.fleet.issued(&plan.commands, self.now);
        assert!(self.fleet.plan(self.now).commands.is_empty(), "once more at the same moment");
        assert_eq!(self.fleet.broken_invariants(), [""; 0]);
        assert!(self.fleet.next_deadline().is_none_or(|at| at > self.now));
        plan.commands
    }

    pub(crate) fn publish(
        &mut self,
        model: &str,
        generation: Generation,
        state: PublishedEngineState,
    ) -> Vec<Command> {
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
    pub(crate) fn publish_failed(
        &mut self,
        model: &str,
        fruitless: u32,
        since: Tick,
        pause: u64,
    ) -> Vec<Command> {
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

    pub(crate) fn adopt(
        &mut self,
        model: &str,
        generation: Generation,
        asleep: Option<SleepLevel>,
        ready: bool,
    ) {
        self.adopt_on("gpu-0", model, generation, asleep, ready);
    }

    pub(crate) fn adopt_on(
        &mut self,
        gpu: &str,
        model: &str,
        generation: Generation,
        asleep: Option<SleepLevel>,
        ready: bool,
    ) {
        let (accelerators, last_end) = (vec![gpu.into()], Tick(0));
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

    pub(crate) fn report_use(&mut self, model: &str, generation: Generation, leases: u32) {
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

    pub(crate) fn arrive(&mut self, model: &str) -> Vec<Command> {
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

    pub(crate) fn of(&self, model: &str) -> &Engine {
        self.fleet.engine(&engine(model)).expect("it is configured")
    }
}

pub(crate) fn model(name: &str) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: AcceleratorRequirement::Count(1),
        memory: EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        idle: IdlePolicy {
            sleep_after: Some(Millis::secs(60)),
            stop_after: None,
            level: SleepLevelPolicy::One,
            rehearse: RehearsalPolicy::Never,
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
        variants: Vec::new(),
        may_evict: ScaleUpEviction::default(),
        scaled: false,
        saturation_thresholds: Thresholds::default(),
    }
}

pub(crate) fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

pub(crate) fn address() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 1).into()
}

pub(crate) fn opens(model: &str, generation: Generation) -> Command {
    Command::OpenGate { engine: engine(model), generation, public: true }
}

pub(crate) fn grants(waiter: u64, model: &str, generation: Generation) -> Command {
    Command::Grant { waiter: WaiterId(waiter), engine: engine(model), generation, canary: false }
}

/// Returns the closed generations, each with the reason and whether its leases are revoked.
pub(crate) fn closes(commands: &[Command]) -> Vec<(Generation, CloseReason, bool)> {
    let revoked = |of: Generation| {
        commands.iter().any(|c| matches!(c, Command::RevokeLeases { generation, .. } if *generation == of))
    };
    let closed = commands.iter().filter_map(|command| match command {
        Command::CloseGate { generation, reason: why, .. } => Some((*generation, *why, revoked(*generation))),
        _ => None,
    });
    closed.collect()
}

pub(crate) fn refused(commands: &[Command]) -> &Fault {
    match commands {
        [Command::Refuse { fault, .. }] => fault,
        other => panic!("nobody is refused: {other:?}"),
    }
}
