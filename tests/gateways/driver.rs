//! The platform under each gateway's turn, and the delivery of events and published state between gateways.

use std::collections::BTreeMap;

use rouse::{
    driver::{DriverCore, DriverPlatform, GateClosing, GrantOutcome, LeaseGrant, UnsettledWork},
    engine::turn_clients::TurnClients,
    fault::{FailureCause, Fault},
    fleet::{
        Fleet, RoutingChanges,
        command::Command,
        event::{CanaryVerdict, Event, GatewayDemand, OperationId, PublishedEngine, Waiter, WaiterId},
    },
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

use super::{FakeGate, FakeGateway, FakeLease, FakeProcess, FakeProcessPhase, GATEWAYS, MultiGatewayHarness};

/// One gateway of the world, while its driver takes a turn.
struct GatewayInTurn<'w> {
    world: &'w mut MultiGatewayHarness,
    number: usize,
}

impl DriverPlatform for GatewayInTurn<'_> {
    fn has_stub_gates(&self) -> bool {
        true
    }

    fn sample(&mut self, _: &Fleet, batch: &mut Vec<Event>, _: Tick) {
        batch.extend(self.world.sample(self.number));
    }

    fn decided(&mut self, core: &DriverCore, events: &[Event], now: Tick) {
        let (number, world) = (self.number, &mut *self.world);
        let defects = core.defects(now).into_iter();
        world.violations.extend(defects.map(|text| format!("gateway {number}: {text}")));
        let commands = &core.plan().commands;
        if let Some(transcript) = &mut world.transcript {
            transcript.extend(events.iter().map(|event| format!("{now} {number} < {event}")));
            transcript.extend(commands.iter().map(|command| format!("{now} {number} > {command}")));
        }
        if world.settling {
            world.last_events = events.to_vec();
        }
        world.check_role(number, commands);
    }

    fn gave_up(&mut self, work: &UnsettledWork) {
        self.world.violation(format!("gateway {}: {work}", self.number));
    }

    fn close_gate(&mut self, closing: &GateClosing<'_>) -> Option<Event> {
        self.world.close(self.number, closing.engine, closing.generation)
    }

    fn revoke(&mut self, engine: &EngineId, generation: Generation, _: &Fault) {
        let number = self.number;
        self.world.end_leases(|l| l.gateway == number && l.engine == *engine && l.generation == generation);
    }

    fn await_stub(&mut self, engine: &EngineId, generation: Generation) {
        self.world.closed_in_turn.insert(engine.clone());
        if let Some(gate) = self.world.gate(self.number, engine, generation) {
            (gate.open, gate.awaiting_stub) = (false, true);
        }
    }

    fn publish(&mut self, core: &DriverCore, _: &RoutingChanges, _: Tick) {
        self.world.make_gates(self.number, core.fleet());
    }

    fn open_gate(&mut self, engine: &EngineId, generation: Generation, _: bool) {
        let number = self.number;
        match self.world.gate(number, engine, generation) {
            Some(gate) => (gate.open, gate.awaiting_stub, gate.closing) = (true, false, false),
            None => self.world.violation(format!("gateway {number} opens no gate of {engine}")),
        }
    }

    fn grant(&mut self, _: &Fleet, grant: &LeaseGrant<'_>, _: Tick) -> GrantOutcome {
        self.world.grant(self.number, grant)
    }

    fn refuse(&mut self, _: &Fleet, waiter: WaiterId, fault: Fault, _: Tick) {
        self.world.gateways[self.number].parked.remove(&waiter);
        // Only an engine that dies repeatedly is a valid reason.
        if !matches!(fault, Fault::ModelNotReady { .. }) {
            self.world.violation(format!("waiter {} is refused: {fault}", waiter.0));
        }
    }

    fn finish_operation(&mut self, _: OperationId, _: Result<(), String>) {}

    fn submit(&mut self, command: Command) {
        self.world.start_work(self.number, command);
    }
}

impl MultiGatewayHarness {
    /// Delivers part of the published state and of the other gateways' demand. The rest follows later.
    pub(super) fn deliver(&mut self, gateway: usize) {
        for engine in std::mem::take(&mut self.gateways[gateway].unseen_engines) {
            if self.settling || self.random.chance(0.3) {
                self.deliver_published(gateway, &engine);
            } else {
                self.gateways[gateway].unseen_engines.insert(engine);
            }
        }
        for other in std::mem::take(&mut self.gateways[gateway].unseen_gateways) {
            if self.settling || self.random.chance(0.3) {
                let demand = Some(self.gateways[other].published_demand.clone());
                self.send(gateway, Event::RemoteDemand { gateway: other.to_string(), demand });
            } else {
                self.gateways[gateway].unseen_gateways.insert(other);
            }
        }
        let gates = self.gateways[gateway].gates.iter().filter(|(_, gate)| gate.awaiting_stub);
        let opened = gates.filter(|(engine, gate)| {
            self.processes.get(engine).is_some_and(|p| p.stub_gate_open && p.generation == gate.generation)
        });
        let opened: Vec<_> = opened.map(|(engine, gate)| (engine.clone(), gate.generation)).collect();
        for (engine, generation) in opened {
            if let Some(gate) = self.gateways[gateway].gates.get_mut(&engine) {
                gate.awaiting_stub = false;
            }
            self.send(gateway, Event::StubGateOpened { engine, generation });
        }
    }

    pub(super) fn deliver_published(&mut self, gateway: usize, engine: &EngineId) {
        let known_generation =
            self.gateways[gateway].core.fleet().engine(engine).map(|e| e.generation).unwrap_or_default();
        let (generation, published) = match self.published.get(engine) {
            Some((generation, Some(published))) => (*generation, Some(published.clone())),
            Some((generation, None)) => (known_generation.max(*generation), None),
            None => (known_generation, None),
        };
        self.send(gateway, Event::Published { engine: engine.clone(), generation, published });
    }

    /// Runs one turn of the driver.
    pub(super) fn turn(&mut self, number: usize) {
        let now = self.now;
        self.closed_in_turn.clear();
        let gateway = &mut self.gateways[number];
        let (mut core, mut batch) = (std::mem::take(&mut gateway.core), std::mem::take(&mut gateway.inbox));
        core.turn(&mut GatewayInTurn { world: self, number }, &mut batch, now);
        let gateway = &mut self.gateways[number];
        gateway.core = core;
        gateway.inbox.extend(batch);
        self.publish(number);
    }

    /// Checks that only a leader that has adopted the running engines orders engines.
    pub(super) fn check_role(&mut self, number: usize, commands: &[Command]) {
        if number == self.leader && self.adopts_at.is_none() {
            return;
        }
        let orders = commands.iter().filter(|command| {
            !matches!(
                command,
                Command::OpenGate { public: true, .. }
                    | Command::CloseGate { .. }
                    | Command::RevokeLeases { .. }
                    | Command::AwaitStub { .. }
                    | Command::Grant { canary: false, .. }
                    | Command::Refuse { .. }
            )
        });
        let orders: Vec<String> =
            orders.map(|command| format!("gateway {number} orders: {command}")).collect();
        self.violations.extend(orders);
    }

    pub(super) fn sample(&mut self, number: usize) -> Vec<Event> {
        let mut events = Vec::new();
        let leader = number == self.leader;
        for (engine, gate) in &mut self.gateways[number].gates {
            let generation = gate.generation;
            let at = |lease: &&FakeLease| lease.engine == *engine && lease.generation == generation;
            let all = self.leases.iter().filter(at).count();
            let own_leases = self.leases.iter().filter(at).filter(|lease| lease.gateway == number).count();
            let sample = (own_leases as u32, gate.last_lease_end);
            if sample != gate.last_sample {
                gate.last_sample = sample;
                let (leases, last_end, last_byte) = (sample.0, sample.1, self.now);
                let clients = TurnClients::default();
                let engine = engine.clone();
                events.push(Event::GateSampled {
                    engine,
                    generation,
                    leases,
                    last_lease_end: last_end,
                    last_byte,
                    clients,
                    idle_gap: None,
                });
            }
            // The leader's count comes from the stub, which knows all gateways' requests.
            let left = if leader { all } else { own_leases };
            if gate.closing && left == 0 {
                gate.closing = false;
                events.push(Event::Drained { engine: engine.clone(), generation });
            }
        }
        events
    }

    /// Makes a gate for each engine with an address, and a new one for each new generation.
    fn make_gates(&mut self, number: usize, fleet: &Fleet) {
        let gates = &mut self.gateways[number].gates;
        for engine in fleet.engines().filter(|e| e.address.is_some()) {
            let generation = engine.generation;
            if gates.get(&engine.id).is_none_or(|gate| gate.generation != generation) {
                let gate = FakeGate {
                    generation,
                    open: false,
                    awaiting_stub: false,
                    closing: false,
                    last_sample: (0, Tick(0)),
                    last_lease_end: Tick(0),
                };
                gates.insert(engine.id.clone(), gate);
            }
        }
    }

    pub(super) fn gate(
        &mut self,
        number: usize,
        engine: &EngineId,
        generation: Generation,
    ) -> Option<&mut FakeGate> {
        self.gateways[number].gates.get_mut(engine).filter(|gate| gate.generation == generation)
    }

    /// Closes a gate. Returns the drain if there is no gate.
    fn close(&mut self, number: usize, engine: &EngineId, generation: Generation) -> Option<Event> {
        self.closed_in_turn.insert(engine.clone());
        if number != self.leader {
            self.count("gates closed by followers");
        }
        match self.gate(number, engine, generation) {
            Some(gate) => {
                (gate.open, gate.awaiting_stub, gate.closing) = (false, false, true);
                None
            }
            None => Some(Event::Drained { engine: engine.clone(), generation }),
        }
    }

    fn set_stub_gate(&mut self, engine: &EngineId, generation: Generation, open: bool) {
        if let Some(process) = self.process(engine, generation) {
            process.stub_gate_open = open;
        }
    }

    fn start_work(&mut self, number: usize, command: Command) {
        let soon = self.now + Millis(self.random.between(10, 1000));
        match command {
            Command::OpenGate { engine, generation, .. } => self.set_stub_gate(&engine, generation, true),
            Command::CloseGate { engine, generation, .. } => self.set_stub_gate(&engine, generation, false),
            Command::Reserve { engine, generation, accelerators, .. } => {
                self.delayed_events.push((soon, number, Event::Placed { engine, generation, accelerators }));
            }
            Command::Launch { engine, generation, accelerators, .. } => {
                self.count("launches");
                if let Some(process) = self.processes.get(&engine) {
                    self.violations.push(format!("{engine} is launched, and runs: {process:?}"));
                }
                let (phase, due, stub, small) = (FakeProcessPhase::Launching, Some(soon), false, false);
                self.processes.insert(
                    engine.clone(),
                    FakeProcess {
                        generation,
                        phase,
                        due,
                        accelerators,
                        stub_gate_open: stub,
                        memory_released: small,
                    },
                );
                self.check_memory(&engine);
            }
            Command::Wake { engine, generation, .. } => {
                self.count("wakes");
                self.set_phase(&engine, generation, FakeProcessPhase::Waking, soon);
                self.check_memory(&engine);
            }
            Command::Sleep { engine, generation, level } => {
                self.count("sleeps");
                self.check_unused(&engine, generation, "put to sleep");
                self.set_phase(&engine, generation, FakeProcessPhase::FallingAsleep(level), soon);
            }
            Command::Stop { engine, generation, .. } => self.stop(engine, generation, soon),
            Command::Probe { engine, generation } => {
                let verdict = CanaryVerdict::Passed;
                self.delayed_events.push((soon, number, Event::Canary { engine, generation, verdict }));
            }
            _ => {}
        }
    }

    fn grant(&mut self, number: usize, grant: &LeaseGrant<'_>) -> GrantOutcome {
        let LeaseGrant { waiter: id, engine, generation, canary } = *grant;
        let Some(waiter) = self.gateways[number].parked.get(&id).cloned() else {
            self.violation(format!("waiter {} is granted a lease but does not wait", id.0));
            return GrantOutcome::Granted;
        };
        let was_closed = self.closed_in_turn.contains(engine);
        if let Some(gate) = self.gate(number, engine, generation) {
            // Report the next sample even if it equals the last.
            gate.last_sample = (u32::MAX, Tick(0));
            if was_closed && !gate.open {
                return GrantOutcome::NoPlace(waiter);
            }
        }
        self.gateways[number].parked.remove(&id);
        self.begin_lease(number, waiter, engine.clone(), generation, canary);
        GrantOutcome::Granted
    }

    fn begin_lease(
        &mut self,
        number: usize,
        waiter: Waiter,
        engine: EngineId,
        generation: Generation,
        canary: bool,
    ) {
        if self.gate(number, &engine, generation).is_none_or(|gate| !gate.open) {
            return self.violation(format!("gateway {number} grants a lease on {engine} with a closed gate"));
        }
        self.count(if number == self.leader { "grants by leaders" } else { "grants by followers" });
        let (ends, gateway) = (self.now + Millis(self.random.between(10, 3000)), number);
        match self.process(&engine, generation).map(|process| (process.phase, process.stub_gate_open)) {
            Some((FakeProcessPhase::Up, true)) => {
                self.leases.push(FakeLease { gateway, engine, generation, ends, canary });
            }
            Some((_, false)) => {
                self.count("turned away");
                self.send(number, Event::StubGateClosed { engine: engine.clone(), generation });
                if canary {
                    let verdict = CanaryVerdict::Inconclusive;
                    self.send(number, Event::Canary { engine, generation, verdict });
                }
                self.park(number, waiter.model, waiter.arrived, waiter.stream);
            }
            Some((phase, true)) => self.violation(format!("a request reaches {engine}, which is {phase:?}")),
            // The process is gone, and this gateway has not received that yet.
            None => {
                self.count("broken connections");
                if canary {
                    let verdict = CanaryVerdict::Failed(FailureCause::Unreachable);
                    self.send(number, Event::Canary { engine, generation, verdict });
                }
            }
        }
    }

    /// Publishes this gateway's state for the others.
    pub(super) fn publish(&mut self, number: usize) {
        let demand = self.gateways[number].demand();
        if demand != self.gateways[number].published_demand {
            self.gateways[number].published_demand = demand;
            for other in (0..GATEWAYS).filter(|other| *other != number) {
                self.gateways[other].unseen_gateways.insert(number);
            }
        }
        // Before its adoption the leader knows no more than the others.
        if number != self.leader || !self.gateways[number].core.fleet().leads() || self.adopts_at.is_some() {
            return;
        }
        for engine in self.known_engines(number) {
            let now = match self.gateways[number].core.fleet().engine(&engine) {
                Some(e) => (e.generation, PublishedEngine::of(e)),
                None => (self.published[&engine].0, None),
            };
            if self.published.get(&engine) != Some(&now) {
                self.published.insert(engine.clone(), now);
                for other in (0..GATEWAYS).filter(|other| *other != number) {
                    self.gateways[other].unseen_engines.insert(engine.clone());
                }
            }
        }
    }
}

impl FakeGateway {
    /// This gateway's own demand, with the last ends of requests that its gates know.
    fn demand(&self) -> BTreeMap<ModelName, GatewayDemand> {
        let fleet = self.core.fleet();
        let mut demand = fleet.demand();
        for (engine, gate) in self.gates.iter().filter(|(engine, _)| fleet.spec(&engine.model).is_some()) {
            let of_model = demand.entry(engine.model.clone()).or_default();
            of_model.last_request = of_model.last_request.max(gate.last_lease_end);
        }
        demand.retain(|_, of_model| *of_model != GatewayDemand::default());
        demand
    }
}
