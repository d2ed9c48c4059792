//! A follower's platform in memory: gates and routes as the gateway has them, and engines that another gateway leads.

use std::{cell::Cell, collections::BTreeMap, net::SocketAddr, rc::Rc};

use rouse::{
    driver::{DriverCore, DriverPlatform, GateClosing, GrantOutcome, LeaseGrant, UnsettledWork},
    engine::Admission,
    fault::Fault,
    fleet::{
        Fleet, RoutingChanges,
        command::Command,
        event::{Event, OperationId, PublishedEngine, PublishedEngineState, WaiterId},
    },
    model::{Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings},
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

const MODEL: &str = "served";
const GPU: &str = "gpu-0";
/// How long the driver is busy with a turn.
const TURN_TIME: Millis = Millis(1);

/// A follower's driver in virtual time, and its platform. Its findings are what no request may meet.
pub(crate) struct ScriptedFollower {
    core: DriverCore,
    platform: FollowerPlatform,
    events: Vec<Event>,
    now: Tick,
}

struct FollowerPlatform {
    /// A defect: routes and new gates are published at the end of the turn, behind the opens.
    opens_before_routes: bool,
    gates: BTreeMap<EngineId, Rc<FollowerGate>>,
    /// What requests read: the gates of public engines.
    routes: BTreeMap<EngineId, Rc<FollowerGate>>,
    /// The generation of each engine, as the fleet knows it in this turn.
    generations: BTreeMap<EngineId, Generation>,
    findings: Vec<String>,
}

/// The gate of one generation.
struct FollowerGate {
    generation: Generation,
    is_open: Cell<bool>,
    is_revoked: Cell<bool>,
}

fn engine() -> EngineId {
    EngineId::new(MODEL.into(), 0)
}

fn address(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

impl ScriptedFollower {
    /// A follower with one model and one accelerator.
    pub(crate) fn new() -> Self {
        let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::gib(1), host: Bytes::gib(1) };
        let configuration = Box::new(FleetConfig {
            settings: FleetSettings::default(),
            accelerators: vec![Accelerator::new(GPU.into(), Bytes::gib(24))],
            models: vec![simulated_model(MODEL, memory)],
        });
        let platform = FollowerPlatform {
            opens_before_routes: false,
            gates: BTreeMap::new(),
            routes: BTreeMap::new(),
            generations: BTreeMap::new(),
            findings: Vec::new(),
        };
        let events = vec![
            Event::Configured { configuration },
            Event::AdoptionDone,
            Event::LeadershipChanged { leads: false },
        ];
        Self { core: DriverCore::new(), platform, events, now: Tick(1_000_000) }
    }

    /// From now on, turns open gates before they publish the routes.
    pub(crate) fn open_before_routes(&mut self) {
        self.platform.opens_before_routes = true;
    }

    /// The leader publishes that this generation serves, and a second passes. Returns the first finding.
    pub(crate) fn receive_published(&mut self, generation: u64) -> Result<(), String> {
        self.events.push(Event::Published {
            engine: engine(),
            generation: Generation(generation),
            published: Some(PublishedEngine {
                state: PublishedEngineState::Awake,
                address: Some(address(u16::try_from(generation).expect("a small number"))),
                fingerprint: 1,
                accelerators: vec![GPU.into()],
                since: self.now,
                failure: None,
            }),
        });
        self.run_until(self.now + Millis::secs(1))
    }

    /// The generation that requests reach.
    pub(crate) fn routed_generation(&self) -> Option<Generation> {
        let gate = self.platform.routes.get(&engine())?;
        gate.is_open.get().then_some(gate.generation)
    }

    fn run_until(&mut self, end: Tick) -> Result<(), String> {
        while self.now < end {
            let deadline = self.core.fleet().next_deadline();
            if !self.events.is_empty() || deadline.is_some_and(|at| at <= self.now) {
                self.core.turn(&mut self.platform, &mut self.events, self.now);
                self.check_gates();
                self.now = self.now + TURN_TIME;
            } else {
                self.now = deadline.map_or(end, |at| at.min(end));
            }
            if let Some(finding) = self.platform.findings.first() {
                return Err(format!("at {}: {finding}", self.now));
            }
        }
        Ok(())
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
}

impl FollowerPlatform {
    /// Makes gates for engines with an address, and the routes to public engines.
    fn update_routes(&mut self, fleet: &Fleet) {
        for engine in fleet.engines().filter(|engine| engine.address.is_some()) {
            let stale = |gate: &Rc<FollowerGate>| {
                gate.generation != engine.generation
                    || (gate.is_revoked.get() && engine.admission != Admission::Closed)
            };
            if self.gates.get(&engine.id).is_none_or(stale) {
                let gate = FollowerGate {
                    generation: engine.generation,
                    is_open: Cell::new(false),
                    is_revoked: Cell::new(false),
                };
                self.gates.insert(engine.id.clone(), Rc::new(gate));
            }
        }
        let is_public = |(id, gate): &(&EngineId, &Rc<FollowerGate>)| {
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

    fn gate(&self, engine: &EngineId, generation: Generation) -> Option<&Rc<FollowerGate>> {
        self.gates.get(engine).filter(|gate| gate.generation == generation)
    }
}

impl DriverPlatform for FollowerPlatform {
    fn sample(&mut self, _: &Fleet, _: &mut Vec<Event>, _: Tick) {}

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
        match self.gate(engine, generation) {
            Some(gate) => gate.is_open.set(false),
            None => return Some(Event::Drained { engine: engine.clone(), generation }),
        }
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
        if !self.opens_before_routes {
            self.update_routes(core.fleet());
        }
        self.newcomer();
    }

    fn open_gate(&mut self, engine: &EngineId, _: Generation, _: bool) {
        // As in the gateway, the engine's gate of now, whichever generation that has.
        if let Some(gate) = self.gates.get(engine) {
            gate.is_open.set(true);
        }
        self.newcomer();
    }

    /// No request waits here.
    fn grant(&mut self, _: &Fleet, _: &LeaseGrant<'_>, _: Tick) -> GrantOutcome {
        GrantOutcome::Granted
    }

    fn refuse(&mut self, _: &Fleet, _: WaiterId, _: Fault, _: Tick) {}

    fn finish_operation(&mut self, _: OperationId, _: Result<(), String>) {}

    fn submit(&mut self, _: Command) {}

    fn turn_ended(&mut self, core: &DriverCore, _: &mut Vec<Event>, _: Tick) {
        if self.opens_before_routes {
            self.update_routes(core.fleet());
        }
    }
}
