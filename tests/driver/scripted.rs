//! A platform in memory with gates, routes and leases as the gateway has them, and engines that always succeed.

use std::{
    cell::Cell,
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    rc::Rc,
};

use rouse::{
    driver::{
        DriverCore, DriverPlatform, EventQueues, GateClosing, GrantOutcome, LeaseGrant,
        MAX_REQUESTS_PER_TURN, TurnChain, UnsettledWork, fill_batch,
    },
    engine::{Admission, turn_clients::TurnClients},
    fault::{FailureCause, Fault},
    fleet::{
        Fleet, RoutingChanges,
        command::Command,
        event::{AdoptedEngine, CanaryVerdict, Event, OperationId, Waiter, WaiterId},
    },
    model::{Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelSpec, ProtectionPolicy},
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

pub(crate) const START: Tick = Tick(1_000_000);
pub(crate) const GPU: &str = "gpu-0";

/// How long the driver is busy with a turn.
const TURN_TIME: Millis = Millis(1);
/// How long each step of an engine takes.
const ENGINE_STEP: Millis = Millis(50);
const EXCHANGE: Millis = Millis(20);
/// Turns that an outcome may wait for: it may come while one is under way.
const MAX_TURNS_IN_QUEUE: u32 = 1;
/// How long a waiter may wait beside an engine whose last lease ended unheard.
const MAX_UNHEARD: Millis = Millis::secs(1);

/// A fault that this platform commits on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PutBackFault {
    None,
    /// Requests are taken first, and fill the turn if there are enough.
    ArrivalsFirst,
    /// The end of a lease wakes the driver only for requests that wait for the same engine.
    UnheardLeaseEnd,
    /// Routes and new gates are published at the end of the turn, behind the opens.
    OpensBeforeRoutes,
    /// Each granted lease was taken by a newcomer at the same moment.
    NoGrantSucceeds,
}

/// The driver's loop in virtual time.
pub(crate) struct ScriptedLoop {
    core: DriverCore,
    platform: ScriptedPlatform,
    batch: Vec<Event>,
    chain: TurnChain,
    pub(crate) now: Tick,
    waiters: u64,
}

struct ScriptedPlatform {
    fault: PutBackFault,
    now: Tick,
    /// Events of the platform, each with the number of turns that it has waited.
    events: VecDeque<(u32, Event)>,
    requests: VecDeque<Event>,
    changes_due: BTreeMap<(Tick, u64), ScriptedChange>,
    next_change: u64,
    gates: BTreeMap<EngineId, Rc<ScriptedGate>>,
    /// What requests read: the gates of public engines.
    routes: BTreeMap<EngineId, Rc<ScriptedGate>>,
    /// The generation of each engine, as the fleet knows it in this turn.
    generations: BTreeMap<EngineId, Generation>,
    parked: BTreeMap<WaiterId, Waiter>,
    granted: BTreeMap<WaiterId, Tick>,
    is_woken: bool,
    findings: Vec<String>,
}

enum ScriptedChange {
    Event(Box<Event>),
    LeaseEnds(Rc<ScriptedGate>),
}

/// The gate of one generation.
struct ScriptedGate {
    engine: EngineId,
    generation: Generation,
    is_open: Cell<bool>,
    is_closing: Cell<bool>,
    is_revoked: Cell<bool>,
    leases: Cell<u32>,
    last_end: Cell<Tick>,
    /// The driver has seen leases, so their end must wake it.
    is_watched: Cell<bool>,
    last_sample: Cell<Option<(u32, Tick)>>,
}

pub(crate) fn address(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

impl ScriptedLoop {
    /// A gateway alone, with these models and an accelerator that holds one of them.
    pub(crate) fn new(fault: PutBackFault, models: &[&str]) -> Self {
        let mut settings = FleetSettings::default();
        settings.turns.protection = ProtectionPolicy::Never;
        let accelerators = vec![Accelerator::new(GPU.into(), Bytes::gib(24))];
        let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::gib(1), host: Bytes::gib(1) };
        let spec =
            |name: &&str| ModelSpec { explicit_memory: true, ..simulated_model((*name).to_owned(), memory) };
        let models = models.iter().map(spec).collect();
        let configuration = Box::new(FleetConfig { settings, accelerators, models });
        let mut driver = Self {
            core: DriverCore::new(),
            platform: ScriptedPlatform::new(fault),
            batch: Vec::new(),
            chain: TurnChain::default(),
            now: START,
            waiters: 0,
        };
        driver.send(Event::Configured { configuration });
        driver
    }

    pub(crate) fn send(&mut self, event: Event) {
        if let Event::Configured { .. } = event {
            self.platform.send(event);
            return self.platform.send(Event::AdoptionDone);
        }
        self.platform.send(event);
    }

    /// Adds an awake engine of this model, as if it had run before.
    pub(crate) fn adopt(&mut self, model: &str) {
        let found = AdoptedEngine {
            address: address(1),
            accelerators: vec![GPU.into()],
            asleep: None,
            ready: true,
            fingerprint: 1,
            last_lease_end: Tick(0),
            started: START,
        };
        let engine = EngineId::new(model.into(), 0);
        // Adoption ends behind the engines that were found.
        let done = self.platform.events.pop_back();
        self.platform.send(Event::Adopted { engine, generation: Generation(1), found });
        self.platform.events.extend(done);
    }

    /// Adds a request that waits until it is granted.
    pub(crate) fn park(&mut self, model: &str) -> WaiterId {
        let waiter = self.new_waiter(model);
        let id = waiter.id;
        self.platform.parked.insert(id, waiter.clone());
        self.platform.requests.push_back(Event::Arrived { waiter });
        id
    }

    pub(crate) fn arrive_and_leave(&mut self, model: &str) {
        let waiter = self.new_waiter(model);
        let id = waiter.id;
        self.platform.requests.extend([Event::Arrived { waiter }, Event::Left { waiter: id }]);
    }

    fn new_waiter(&mut self, model: &str) -> Waiter {
        self.waiters += 1;
        Waiter {
            id: WaiterId(self.waiters),
            model: model.into(),
            band: 0,
            key: String::new(),
            client: 0,
            arrived: self.now,
            deadline: self.now + Millis::secs(60),
            stream: true,
            required_engine: None,
        }
    }

    /// Sends a request that finds the model in the routes, and holds its lease for so long.
    pub(crate) fn enter(&mut self, model: &str, exchange: Millis) {
        let gate = &self.platform.routes[&EngineId::new(model.into(), 0)];
        assert!(gate.is_open.get(), "the gate of {model} is closed");
        let gate = Rc::clone(gate);
        self.platform.take_lease(&gate, exchange);
        // The first turn sees the gate in use.
        self.platform.is_woken = true;
    }

    pub(crate) fn granted_at(&self, waiter: WaiterId) -> Option<Tick> {
        self.platform.granted.get(&waiter).copied()
    }

    pub(crate) fn routed_generation(&self, model: &str) -> Option<Generation> {
        let gate = self.platform.routes.get(&EngineId::new(model.into(), 0))?;
        gate.is_open.get().then_some(gate.generation)
    }

    /// From now on the platform commits this fault.
    pub(crate) fn put_back(&mut self, fault: PutBackFault) {
        self.platform.fault = fault;
    }

    /// Runs to this moment. Returns the first finding.
    pub(crate) fn run_until(&mut self, end: Tick) -> Result<(), String> {
        while self.now < end {
            self.platform.now = self.now;
            self.platform.apply_due_changes();
            let deadline = self.core.fleet().next_deadline();
            let is_due = deadline.is_some_and(|at| at <= self.now);
            if is_due || self.platform.has_work() || !self.batch.is_empty() {
                self.turn();
                self.now = self.now + TURN_TIME;
            } else {
                let change = self.platform.changes_due.keys().next().map(|(at, _)| *at);
                let next = change.into_iter().chain(deadline).fold(end, Tick::min);
                self.check_idle_engines(next);
                self.now = next;
            }
            self.first_finding()?;
        }
        Ok(())
    }

    fn turn(&mut self) {
        let own_events = self.batch.len();
        self.platform.is_woken = false;
        fill_batch(&mut self.platform, &mut self.batch);
        if own_events == 0 || self.batch.len() > own_events {
            self.chain.begin();
        } else if let Some(work) = self.chain.extend(&self.batch) {
            self.platform.gave_up(&work);
        }
        self.core.turn(&mut self.platform, &mut self.batch, self.now);
        self.platform.check_queue();
        self.check_gates();
    }

    /// A gate is as the fleet counts it after each turn.
    fn check_gates(&mut self) {
        for engine in self.core.fleet().engines().filter(|engine| engine.address.is_some()) {
            let counts_as_open = matches!(engine.admission, Admission::Public | Admission::WaitersOnly);
            let is_open = self.platform.gates.get(&engine.id).is_some_and(|gate| gate.is_open.get());
            if counts_as_open != is_open {
                let id = &engine.id;
                let finding =
                    format!("the gate of {id} is open: {is_open}; the fleet has it {counts_as_open}");
                self.platform.findings.push(finding);
            }
        }
    }

    /// No request waits for long beside an engine that the driver believes in use and no request uses.
    fn check_idle_engines(&mut self, until: Tick) {
        let Some(waiter) = self.platform.parked.keys().next() else { return };
        for gate in self.platform.gates.values().filter(|gate| gate.leases.get() == 0) {
            let counted = self.core.fleet().engine(&gate.engine).map_or(0, |engine| engine.leases);
            let unheard = until.since(gate.last_end.get());
            if counted > 0 && unheard > MAX_UNHEARD {
                let (waiter, engine) = (waiter.0, &gate.engine);
                self.platform.findings.push(format!(
                    "waiter {waiter} waits beside {engine}, whose last lease ended {unheard} ago unheard"
                ));
                return;
            }
        }
    }

    fn first_finding(&self) -> Result<(), String> {
        self.platform.findings.first().map_or(Ok(()), |finding| Err(format!("at {}: {finding}", self.now)))
    }
}

impl ScriptedPlatform {
    fn new(fault: PutBackFault) -> Self {
        Self {
            fault,
            now: START,
            events: VecDeque::new(),
            requests: VecDeque::new(),
            changes_due: BTreeMap::new(),
            next_change: 0,
            gates: BTreeMap::new(),
            routes: BTreeMap::new(),
            generations: BTreeMap::new(),
            parked: BTreeMap::new(),
            granted: BTreeMap::new(),
            is_woken: false,
            findings: Vec::new(),
        }
    }

    fn send(&mut self, event: Event) {
        self.events.push_back((0, event));
    }

    fn has_work(&self) -> bool {
        self.is_woken || !self.events.is_empty() || !self.requests.is_empty()
    }

    fn schedule(&mut self, after: Millis, change: ScriptedChange) {
        self.next_change += 1;
        self.changes_due.insert((self.now + after, self.next_change), change);
    }

    fn schedule_event(&mut self, steps: u64, event: Event) {
        self.schedule(Millis(steps * ENGINE_STEP.0), ScriptedChange::Event(Box::new(event)));
    }

    fn apply_due_changes(&mut self) {
        while let Some(first) = self.changes_due.first_entry().filter(|first| first.key().0 <= self.now) {
            match first.remove() {
                ScriptedChange::Event(event) => self.send(*event),
                ScriptedChange::LeaseEnds(gate) => self.end_lease(&gate),
            }
        }
    }

    fn take_lease(&mut self, gate: &Rc<ScriptedGate>, exchange: Millis) {
        gate.leases.set(gate.leases.get() + 1);
        self.schedule(exchange, ScriptedChange::LeaseEnds(Rc::clone(gate)));
    }

    fn end_lease(&mut self, gate: &ScriptedGate) {
        gate.leases.set(gate.leases.get() - 1);
        gate.last_end.set(self.now);
        let is_wanted = self.parked.values().any(|waiter| waiter.model == gate.engine.model);
        let is_last = gate.leases.get() == 0;
        self.is_woken |= is_wanted || (is_last && (gate.is_watched.take() || gate.is_closing.get()));
    }

    /// Outcomes do not wait behind requests.
    fn check_queue(&mut self) {
        for (turns, event) in &mut self.events {
            *turns += 1;
            if *turns > MAX_TURNS_IN_QUEUE {
                self.findings.push(format!("an outcome waited {turns} turns behind requests: {event}"));
            }
        }
    }

    /// Makes gates for engines with an address, and the routes to public engines.
    fn update_routes(&mut self, fleet: &Fleet) {
        for engine in fleet.engines().filter(|engine| engine.address.is_some()) {
            let stale = |gate: &Rc<ScriptedGate>| {
                gate.generation != engine.generation
                    || (gate.is_revoked.get() && engine.admission != Admission::Closed)
            };
            if self.gates.get(&engine.id).is_none_or(stale) {
                let gate = ScriptedGate::new(engine.id.clone(), engine.generation);
                self.gates.insert(engine.id.clone(), Rc::new(gate));
            }
        }
        let is_public = |(id, gate): &(&EngineId, &Rc<ScriptedGate>)| {
            let engine = fleet.engine(id).filter(|engine| engine.generation == gate.generation);
            engine.is_some_and(|engine| engine.admission == Admission::Public)
        };
        let public = self.gates.iter().filter(is_public);
        self.routes = public.map(|(id, gate)| (id.clone(), Rc::clone(gate))).collect();
    }

    /// Lets a request come at this moment of a turn whose closes are done. It reads the routes that are published.
    fn newcomer(&mut self) {
        for (engine, gate) in self.routes.iter().filter(|(_, gate)| gate.is_open.get()) {
            if self.generations.get(engine).is_some_and(|current| *current != gate.generation) {
                let generation = gate.generation;
                self.findings.push(format!(
                    "a request with the routes from before the turn enters {engine} {generation}, which has ended"
                ));
            }
        }
    }

    fn gate(&self, engine: &EngineId, generation: Generation) -> Option<&Rc<ScriptedGate>> {
        self.gates.get(engine).filter(|gate| gate.generation == generation)
    }
}

impl ScriptedGate {
    fn new(engine: EngineId, generation: Generation) -> Self {
        Self {
            engine,
            generation,
            is_open: Cell::new(false),
            is_closing: Cell::new(false),
            is_revoked: Cell::new(false),
            leases: Cell::new(0),
            last_end: Cell::new(Tick(0)),
            is_watched: Cell::new(false),
            last_sample: Cell::new(Some((0, Tick(0)))),
        }
    }
}

impl EventQueues for ScriptedPlatform {
    fn take_platform_event(&mut self, batch: &mut Vec<Event>) -> bool {
        if self.fault == PutBackFault::ArrivalsFirst && self.requests.len() >= MAX_REQUESTS_PER_TURN {
            return false;
        }
        let event = self.events.pop_front();
        let is_taken = event.is_some();
        batch.extend(event.map(|(_, event)| event));
        is_taken
    }

    fn take_request(&mut self, batch: &mut Vec<Event>) -> bool {
        let event = self.requests.pop_front();
        let is_taken = event.is_some();
        batch.extend(event);
        is_taken
    }
}

impl DriverPlatform for ScriptedPlatform {
    fn sample(&mut self, _: &Fleet, batch: &mut Vec<Event>, now: Tick) {
        for (engine, gate) in &self.gates {
            let (leases, last_end, generation) = (gate.leases.get(), gate.last_end.get(), gate.generation);
            gate.is_watched.set(leases > 0 && self.fault != PutBackFault::UnheardLeaseEnd);
            if gate.last_sample.replace(Some((leases, last_end))) != Some((leases, last_end)) {
                batch.push(Event::GateSampled {
                    engine: engine.clone(),
                    generation,
                    leases,
                    last_lease_end: last_end,
                    last_byte: now,
                    clients: TurnClients::default(),
                    idle_gap: None,
                });
            }
            if gate.is_closing.get() && leases == 0 {
                gate.is_closing.set(false);
                batch.push(Event::Drained { engine: engine.clone(), generation });
            }
        }
    }

    fn journal(&mut self, fleet: &Fleet, _: &[Event], _: Tick) {
        self.generations = fleet.engines().map(|engine| (engine.id.clone(), engine.generation)).collect();
    }

    fn decided(&mut self, core: &DriverCore, _: &[Event], now: Tick) {
        self.findings.extend(core.defects(now));
    }

    fn gave_up(&mut self, work: &UnsettledWork) {
        self.findings.push(work.to_string());
    }

    fn close_gate(&mut self, closing: &GateClosing<'_>) -> Option<Event> {
        let GateClosing { engine, generation, .. } = *closing;
        let Some(gate) = self.gate(engine, generation) else {
            return Some(Event::Drained { engine: engine.clone(), generation });
        };
        gate.is_open.set(false);
        gate.is_closing.set(true);
        // The next sample reports the drain.
        self.is_woken = true;
        None
    }

    fn revoke(&mut self, engine: &EngineId, generation: Generation, _: &Fault) {
        if let Some(gate) = self.gate(engine, generation) {
            gate.is_revoked.set(true);
        }
    }

    fn await_stub(&mut self, engine: &EngineId, generation: Generation) {
        if let Some(gate) = self.gate(engine, generation) {
            gate.is_open.set(false);
        }
    }

    fn publish(&mut self, core: &DriverCore, _: &RoutingChanges, _: Tick) {
        if self.fault != PutBackFault::OpensBeforeRoutes {
            self.update_routes(core.fleet());
        }
        self.newcomer();
    }

    fn open_gate(&mut self, engine: &EngineId, _: Generation, _: bool) {
        // As in the gateway, the engine's gate of now, whichever generation that has.
        if let Some(gate) = self.gates.get(engine) {
            gate.is_closing.set(false);
            gate.is_open.set(true);
        }
        self.newcomer();
    }

    fn grant(&mut self, _: &Fleet, grant: &LeaseGrant<'_>, now: Tick) -> GrantOutcome {
        let Some(waiter) = self.parked.get(&grant.waiter).cloned() else { return GrantOutcome::Granted };
        let gate = self.gate(grant.engine, grant.generation).cloned();
        gate.iter().for_each(|gate| gate.last_sample.set(None));
        let has_place = |gate: &Rc<ScriptedGate>| gate.is_open.get();
        let Some(gate) = gate.filter(has_place).filter(|_| self.fault != PutBackFault::NoGrantSucceeds)
        else {
            return GrantOutcome::NoPlace(waiter);
        };
        self.parked.remove(&grant.waiter);
        self.granted.insert(grant.waiter, now);
        self.take_lease(&gate, EXCHANGE);
        if grant.canary {
            let (engine, generation) = (grant.engine.clone(), grant.generation);
            self.send(Event::Canary { engine, generation, verdict: CanaryVerdict::Passed });
        }
        GrantOutcome::Granted
    }

    fn refuse(&mut self, _: &Fleet, waiter: WaiterId, fault: Fault, _: Tick) {
        if self.parked.remove(&waiter).is_some() {
            self.findings.push(format!("waiter {} is refused: {fault}", waiter.0));
        }
    }

    fn finish_operation(&mut self, _: OperationId, _: Result<(), String>) {}

    fn submit(&mut self, command: Command) {
        match command {
            Command::Reserve { engine, generation, accelerators, .. } => {
                self.send(Event::Placed { engine, generation, accelerators });
            }
            Command::Launch { engine, generation, .. } => {
                let started = Event::Started { engine: engine.clone(), generation, address: address(2) };
                self.schedule_event(1, started);
                self.schedule_event(2, Event::Ready { engine, generation });
            }
            Command::Wake { engine, generation, .. } => {
                self.schedule_event(1, Event::Ready { engine, generation });
            }
            Command::Sleep { engine, generation, level } => {
                self.schedule_event(1, Event::Slept { engine, generation, level });
            }
            Command::Stop { engine, generation, .. } => {
                self.schedule_event(1, Event::Gone { engine, generation, cause: FailureCause::Stopped });
            }
            Command::Probe { engine, generation } => {
                let verdict = CanaryVerdict::Passed;
                self.schedule_event(1, Event::Canary { engine, generation, verdict });
            }
            _ => {}
        }
    }

    fn turn_ended(&mut self, core: &DriverCore, _: &mut Vec<Event>, _: Tick) {
        if self.fault == PutBackFault::OpensBeforeRoutes {
            self.update_routes(core.fleet());
        }
    }
}
