//! A gateway's driver, and the delivery of events and published state between gateways.

use rouse::{
    engine::{Admission, turn_clients::TurnClients},
    fault::{FailureCause, Fault},
    fleet::{
        command::Command,
        event::{CanaryVerdict, Event, PublishedEngine, WaiterId},
    },
    model::EngineId,
    units::{Generation, Millis, Tick},
};

use super::{FakeGate, FakeLease, FakeProcess, FakeProcessPhase, GATEWAYS, MultiGatewayHarness};

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
            self.gateways[gateway].fleet.engine(engine).map(|e| e.generation).unwrap_or_default();
        let (generation, published) = match self.published.get(engine) {
            Some((generation, Some(published))) => (*generation, Some(published.clone())),
            Some((generation, None)) => (known_generation.max(*generation), None),
            None => (known_generation, None),
        };
        self.send(gateway, Event::Published { engine: engine.clone(), generation, published });
    }

    /// Runs one pass of the driver.
    pub(super) fn turn(&mut self, number: usize) {
        let mut events = std::mem::take(&mut self.gateways[number].inbox);
        events.extend(self.sample(number));
        let now = self.now;
        let gateway = &mut self.gateways[number];
        events.iter().for_each(|event| gateway.fleet.on(event, now));
        let plan = gateway.fleet.plan(now);
        gateway.fleet.issued(&plan.commands, now);
        let again = gateway.fleet.plan(now).commands;
        let mut broken = gateway.fleet.broken_invariants();
        if !again.is_empty() {
            broken.push(format!("planning again gives {again:?}"));
        }
        broken.extend(gateway.fleet.next_deadline().filter(|at| *at <= now).map(|at| format!("due at {at}")));
        self.violations.extend(broken.into_iter().map(|text| format!("gateway {number}: {text}")));
        if let Some(transcript) = &mut self.transcript {
            transcript.extend(events.iter().map(|event| format!("{now} {number} < {event}")));
            transcript.extend(plan.commands.iter().map(|command| format!("{now} {number} > {command}")));
        }
        self.check_role(number, &plan.commands);
        self.execute(number, plan.commands);
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

    pub(super) fn execute(&mut self, number: usize, commands: Vec<Command>) {
        let opened = commands.iter().filter_map(|command| match command {
            Command::OpenGate { engine, .. } => Some(engine),
            _ => None,
        });
        let fleet = &self.gateways[number].fleet;
        let shut = |engine: &&EngineId| fleet.engine(engine).is_none_or(|e| e.admission == Admission::Closed);
        self.skipped_openings = opened.filter(shut).cloned().collect();
        for command in &commands {
            match command {
                Command::CloseGate { engine, generation, .. } => self.close(number, engine, *generation),
                Command::RevokeLeases { engine, generation, .. } => {
                    let (engine, generation) = (engine.clone(), *generation);
                    self.end_leases(|l| {
                        l.gateway == number && l.engine == engine && l.generation == generation
                    });
                }
                Command::AwaitStub { engine, generation } => {
                    if let Some(gate) = self.gate(number, engine, *generation) {
                        (gate.open, gate.awaiting_stub) = (false, true);
                    }
                }
                _ => {}
            }
        }
        let engines: Vec<_> = self.gateways[number].fleet.engines().cloned().collect();
        for engine in engines.iter().filter(|e| e.address.is_some()) {
            let gate = self.gateways[number].gates.get(&engine.id);
            if gate.is_none_or(|gate| gate.generation != engine.generation) {
                let generation = engine.generation;
                let (told, last_end) = ((0, Tick(0)), Tick(0));
                let gate = FakeGate {
                    generation,
                    open: false,
                    awaiting_stub: false,
                    closing: false,
                    last_sample: told,
                    last_lease_end: last_end,
                };
                self.gateways[number].gates.insert(engine.id.clone(), gate);
            }
        }
        for command in commands {
            self.execute_command(number, command);
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

    pub(super) fn close(&mut self, number: usize, engine: &EngineId, generation: Generation) {
        match self.gate(number, engine, generation) {
            Some(gate) => (gate.open, gate.awaiting_stub, gate.closing) = (false, false, true),
            None => self.send(number, Event::Drained { engine: engine.clone(), generation }),
        }
        if number != self.leader {
            self.count("gates closed by followers");
        } else if let Some(process) = self.process(engine, generation) {
            process.stub_gate_open = false;
        }
    }

    pub(super) fn execute_command(&mut self, number: usize, command: Command) {
        let soon = self.now + Millis(self.random.between(10, 1000));
        match command {
            Command::OpenGate { engine, generation, .. } => {
                if self.skipped_openings.contains(&engine) {
                    return;
                }
                if number == self.leader
                    && let Some(process) = self.process(&engine, generation)
                {
                    process.stub_gate_open = true;
                }
                match self.gate(number, &engine, generation) {
                    Some(gate) => (gate.open, gate.awaiting_stub, gate.closing) = (true, false, false),
                    None => self.violation(format!("gateway {number} opens no gate of {engine}")),
                }
            }
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
            Command::Grant { waiter, engine, generation, canary } => {
                self.grant(number, waiter, engine, generation, canary);
            }
            Command::Refuse { waiter, fault } => {
                self.gateways[number].parked.remove(&waiter);
                // Only an engine that dies repeatedly is a valid reason.
                if !matches!(fault, Fault::ModelNotReady { .. }) {
                    self.violation(format!("waiter {} is refused: {fault}", waiter.0));
                }
            }
            _ => {}
        }
    }

    pub(super) fn grant(
        &mut self,
        number: usize,
        id: WaiterId,
        engine: EngineId,
        generation: Generation,
        canary: bool,
    ) {
        let Some(waiter) = self.gateways[number].parked.remove(&id) else {
            return self.violation(format!("waiter {} is granted a lease, and is not there", id.0));
        };
        if self.skipped_openings.contains(&engine) {
            return self.park(number, waiter.model, waiter.arrived, waiter.stream);
        }
        if self.gate(number, &engine, generation).is_none_or(|gate| !gate.open) {
            return self.violation(format!("gateway {number} grants a lease on {engine} with a closed gate"));
        }
        self.count(if number == self.leader { "grants by leaders" } else { "grants by followers" });
        let (ends, gateway) = (self.now + Millis(self.random.between(10, 3000)), number);
        if let Some(gate) = self.gate(number, &engine, generation) {
            // Report the next sample even if it equals the last.
            gate.last_sample = (u32::MAX, Tick(0));
        }
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
        let demand = self.gateways[number].fleet.demand();
        if demand != self.gateways[number].published_demand {
            self.gateways[number].published_demand = demand;
            for other in (0..GATEWAYS).filter(|other| *other != number) {
                self.gateways[other].unseen_gateways.insert(number);
            }
        }
        // Before its adoption the leader knows no more than the others.
        if number != self.leader || !self.gateways[number].fleet.leads() || self.adopts_at.is_some() {
            return;
        }
        for engine in self.known_engines(number) {
            let now = match self.gateways[number].fleet.engine(&engine) {
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
