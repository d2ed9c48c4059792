//! What befalls the world from outside: faults by chance, deeds by script, operators, the gateway's own end.

use std::collections::BTreeMap;

use super::{
    client::{End, State},
    gate::Gate,
    journal::Line,
    process::Phase,
    scenario::{Deed, chance},
    world::{Happening, World},
};
use crate::{
    fault::Cause,
    fleet::event::{Event, Found, Learned, OperationId, Order},
    model::{AcceleratorId, Configuration, EngineId, Level, ModelName},
    units::{Bytes, Millis, Tick},
};

/// Faults that strike at random moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Injection {
    Die,
    Hang,
    Lose,
    Foreign,
    Reload,
    Order,
    Restart,
    Gate,
}

impl World {
    /// The gateway starts on a machine where nothing runs.
    pub(super) fn begin(&mut self) {
        let configuration = self.scenario.configuration.clone();
        self.machine.configure(&configuration.accelerators);
        self.tell(Event::Configured { configuration: Box::new(configuration) });
        self.tell(Event::AdoptionDone);
        self.read_all();
        for number in 0..self.scenario.sources.len() {
            let at = self.now + self.scenario.sources[number].offset;
            self.agenda.add(at, Happening::Demand(number));
        }
        for (after, deed) in std::mem::take(&mut self.scenario.deeds) {
            self.agenda.add(self.now + after, Happening::Deed(deed));
        }
        for injection in [
            Injection::Die,
            Injection::Hang,
            Injection::Lose,
            Injection::Foreign,
            Injection::Reload,
            Injection::Order,
            Injection::Restart,
            Injection::Gate,
        ] {
            self.plan_injection(injection);
        }
    }

    fn plan_injection(&mut self, injection: Injection) {
        let faults = &self.scenario.faults;
        let mean = match injection {
            Injection::Die => faults.dies,
            Injection::Hang => faults.hangs,
            Injection::Lose => faults.accelerator_lost,
            Injection::Foreign => faults.foreign_memory,
            Injection::Reload => faults.reload,
            Injection::Order => faults.order,
            Injection::Restart => faults.restart,
            Injection::Gate => faults.gated,
        };
        if let Some(mean) = mean {
            let after = Millis(self.random.exponential(mean.0) + 1);
            self.agenda.add(self.now + after, Happening::Inject(injection));
        }
    }

    pub(super) fn inject(&mut self, injection: Injection) {
        if self.calm {
            return;
        }
        self.plan_injection(injection);
        match injection {
            Injection::Die => {
                if let Some(engine) = self.some_engine() {
                    self.deed(Deed::Die(engine));
                }
            }
            Injection::Hang => {
                if let Some(engine) = self.some_engine() {
                    self.deed(Deed::Hang(engine));
                }
            }
            Injection::Lose => {
                if let Some(id) = self.some_accelerator() {
                    let back = Millis(self.random.between(1000, 60_000));
                    self.agenda.add(self.now + back, Happening::Deed(Deed::Return(id.clone())));
                    self.deed(Deed::Lose(id));
                }
            }
            Injection::Foreign => {
                if let Some(id) = self.some_accelerator() {
                    let free = self.machine.devices.get(&id).map_or(Bytes::ZERO, |d| d.capacity);
                    let free = free.saturating_sub(self.machine.used(&id));
                    let takes = Bytes(self.random.between(0, free.0));
                    let back = Millis(self.random.between(1000, 20_000));
                    let end = Deed::Foreign(id.clone(), Bytes::ZERO);
                    self.agenda.add(self.now + back, Happening::Deed(end));
                    self.deed(Deed::Foreign(id, takes));
                }
            }
            Injection::Reload => self.reload_by_chance(),
            Injection::Order => self.order_by_chance(),
            Injection::Restart => self.deed(Deed::Restart),
            Injection::Gate => {
                if let Some(engine) = self.some_engine() {
                    // Now and then for ever.
                    if self.random.chance(0.9) {
                        let opens = Millis(self.random.between(1, 20_000));
                        let deed = Deed::Gate(engine.clone(), false);
                        self.agenda.add(self.now + opens, Happening::Deed(deed));
                    }
                    self.deed(Deed::Gate(engine, true));
                }
            }
        }
    }

    fn some_engine(&mut self) -> Option<EngineId> {
        let engines: Vec<_> = self.machine.processes.keys().cloned().collect();
        self.random.pick(&engines).cloned()
    }

    fn some_accelerator(&mut self) -> Option<AcceleratorId> {
        let ids: Vec<_> = self.machine.devices.keys().cloned().collect();
        self.random.pick(&ids).cloned()
    }

    pub(super) fn deed(&mut self, deed: Deed) {
        match deed {
            Deed::Ask(request) => self.ask(request),
            Deed::Order(model, order) => self.order(model, order),
            Deed::RefuseWake(engine) => {
                if let Some(process) = self.machine.processes.get_mut(&engine) {
                    process.refuse_wake = true;
                }
            }
            Deed::LateMemory(engine, late) => {
                if let Some(process) = self.machine.processes.get_mut(&engine) {
                    process.late = Some(late);
                }
            }
            Deed::Die(engine) => {
                self.tally.add("fault: engine died");
                self.die(&engine, Cause::Killed(9));
            }
            Deed::Hang(engine) => {
                if let Some(process) = self.machine.processes.get_mut(&engine)
                    && process.phase != Phase::Exiting
                {
                    self.tally.add("fault: engine hung");
                    process.hung = true;
                }
            }
            Deed::Gate(engine, closed) => {
                if let Some(process) = self.machine.processes.get_mut(&engine) {
                    process.gated = closed;
                    self.tally.add(if closed {
                        "fault: a stub's gate closed"
                    } else {
                        "a stub's gate opened"
                    });
                }
            }
            Deed::Lose(id) => self.lose(id),
            Deed::Return(id) => {
                if let Some(device) = self.machine.devices.get_mut(&id)
                    && std::mem::take(&mut device.lost)
                {
                    device.back = device.metered;
                    if device.back {
                        return;
                    }
                    self.tell(Event::AcceleratorBack { accelerator: id });
                }
            }
            Deed::Foreign(id, bytes) => {
                let free = self.machine.used(&id);
                if let Some(device) = self.machine.devices.get_mut(&id) {
                    let ours = free.saturating_sub(device.foreign);
                    device.foreign = Bytes(bytes.0.min(device.capacity.saturating_sub(ours).0));
                    if device.foreign > Bytes::ZERO {
                        self.tally.add("fault: foreign memory");
                    }
                }
            }
            Deed::Reload(configuration) => self.reload(*configuration),
            Deed::Restart => self.restart(),
            Deed::Shutdown { stop_engines } => {
                self.shutdown = true;
                self.tell(Event::Shutdown { stop_engines });
            }
        }
    }

    fn lose(&mut self, id: AcceleratorId) {
        let Some(device) = self.machine.devices.get_mut(&id).filter(|d| !d.lost) else {
            return;
        };
        device.lost = true;
        self.tally.add("fault: accelerator lost");
        let engines: Vec<_> = self.machine.on(&id).map(|p| p.engine.clone()).collect();
        self.tell(Event::AcceleratorLost { accelerator: id });
        for engine in engines {
            if self.random.chance(0.5) {
                self.die(&engine, Cause::AcceleratorLost);
            } else if let Some(process) = self.machine.processes.get_mut(&engine) {
                process.hung = true;
            }
        }
    }

    fn order(&mut self, model: ModelName, order: Order) {
        if self.fleet.forbids(&model, order).is_err() {
            self.tally.add("operator orders forbidden");
            return;
        }
        self.tally.add("operator orders");
        match order {
            Order::Pin | Order::Unpin => {
                self.pins.insert(model.clone(), order == Order::Pin);
            }
            _ => {}
        }
        self.next_operation += 1;
        let operation = OperationId(self.next_operation);
        self.operations.insert(operation, false);
        self.tell(Event::Operator { operation, model, order });
    }

    fn order_by_chance(&mut self) {
        let models = self.scenario.configuration.models.clone();
        let Some(spec) = self.random.pick(&models) else {
            return;
        };
        let order = match self.random.between(0, 5) {
            0 => Order::Wake,
            1 => Order::Sleep { level: None },
            2 => Order::Sleep { level: Some(if self.random.chance(0.5) { Level::One } else { Level::Two }) },
            3 => Order::Stop,
            4 => Order::Pin,
            _ => Order::Unpin,
        };
        self.order(spec.name.clone(), order);
    }

    fn reload_by_chance(&mut self) {
        let mut next = self.scenario.configuration.clone();
        let last = next.models.len().saturating_sub(1) as u64;
        let which = self.random.between(0, last) as usize;
        let size = next.accelerators.first().map_or(20, |a| a.capacity.0 >> 30);
        self.next_model += 1;
        match self.random.between(0, 4) {
            0 if next.models.len() > 1 => {
                next.models.remove(which);
            }
            1 => {
                let name = format!("late-{}", self.next_model);
                let spec = chance::model(&name, size, &next.accelerators, &mut self.random);
                next.models.push(spec);
            }
            2 => {
                if let Some(spec) = next.models.get_mut(which) {
                    spec.replicas = self.random.between(1, 3) as u32;
                }
            }
            3 => {
                if let Some(spec) = next.models.get_mut(which) {
                    spec.fingerprint = self.random.draw() >> 1;
                }
            }
            _ => {
                if let Some(spec) = next.models.get_mut(which) {
                    spec.idle.sleep_after = Some(Millis(self.random.between(1000, 30_000)));
                    (spec.pinned, spec.min_replicas) = (false, 0);
                    spec.dependencies.clear();
                }
            }
        }
        let each = next.accelerators.first().map_or(Bytes::ZERO, |a| a.capacity);
        if let Some(pool) = next.accelerators.iter_mut().find(|a| a.units.is_some())
            && self.random.chance(0.5)
        {
            self.tally.add("pools resized");
            let units = self.random.between(0, 8);
            (pool.capacity, pool.units) = (Bytes(each.0 * units), u32::try_from(units).ok());
        }
        self.reload(next);
    }

    fn reload(&mut self, configuration: Configuration) {
        self.tally.add("reloads");
        self.machine.configure(&configuration.accelerators);
        self.scenario.configuration = configuration.clone();
        self.tell(Event::Configured { configuration: Box::new(configuration) });
    }

    /// The gateway is killed: its clients lose their connections, the engines live on; then it starts again.
    fn restart(&mut self) {
        self.tally.add("gateway restarts");
        self.settle_processes();
        let ids: Vec<_> = self.clients.keys().copied().collect();
        for id in ids {
            match self.clients.get(&id).map(|client| client.state.clone()) {
                Some(State::Parked(waiter)) => {
                    self.unpark(waiter);
                    self.clients.remove(&id);
                }
                _ => self.end_exchange(id, End::Left),
            }
        }
        self.waiters.clear();
        self.parked.clear();
        self.operations.clear();
        self.pins.clear();
        self.inbox.clear();
        // What was on its way to the dead gateway never arrives; processes and clients go on.
        // Of processes that are gone nothing is to come either: their engine's next life may have the same number.
        let lives = &self.machine.processes;
        self.agenda.retain(|happening| match happening {
            Happening::Tell(_)
            | Happening::Probed { .. }
            | Happening::AskStub { .. }
            | Happening::Read(_)
            | Happening::ReadAll => false,
            Happening::Process { engine, generation, .. } | Happening::Health { engine, generation, .. } => {
                lives.get(engine).is_some_and(|process| process.generation == *generation)
            }
            _ => true,
        });
        self.machine.going.clear();
        self.machine.bookings.clear();
        let learned = std::mem::take(&mut self.fleet).learned();
        self.deadline = None;
        self.notified = false;
        if let Some(journal) = &mut self.journal {
            journal.push(Line::header(env!("CARGO_PKG_VERSION"), self.now));
        }
        self.adopt(&learned);
    }

    /// Half-done calls end with the gateway that made them; what they began is finished by the time it is back.
    fn settle_processes(&mut self) {
        let mut awake = Vec::new();
        let mut broken = Vec::new();
        for (engine, process) in &mut self.machine.processes {
            match process.phase {
                Phase::FallingAsleep(level) if !process.hung => {
                    process.enter(Phase::Asleep(level));
                    process.held = process.residue;
                }
                Phase::Waking(level) if !process.hung => {
                    process.enter(Phase::Asleep(level));
                    process.held = process.residue;
                }
                Phase::Asleep(_) if !process.hung => process.held = process.residue,
                Phase::Awake if !process.hung => awake.push(engine.clone()),
                Phase::Loading | Phase::Awake => {}
                _ => broken.push(engine.clone()),
            }
        }
        for engine in broken {
            self.machine.processes.remove(&engine);
        }
        for engine in awake {
            self.watch(&engine);
        }
    }

    fn adopt(&mut self, learned: &BTreeMap<ModelName, Learned>) {
        let configuration = self.scenario.configuration.clone();
        self.tell(Event::Configured { configuration: Box::new(configuration) });
        for (model, learned) in learned {
            self.tell(Event::Recalled { model: model.clone(), learned: *learned });
        }
        let mut found = Vec::new();
        // Those of engines that are gone went with the gateway.
        let gates = std::mem::take(&mut self.gates);
        for (engine, process) in &mut self.machine.processes {
            let booking = super::machine::Booking {
                generation: process.generation,
                accelerators: process.accelerators.clone(),
                bytes: match process.phase {
                    // What is kept beyond that was not seen before the gateway died.
                    Phase::Asleep(_) => {
                        let known = learned.get(&engine.model).and_then(|l| l.residue).unwrap_or_default();
                        let known = process.spec.accelerators.in_one_place(known);
                        process.spec.memory.asleep.max(known).min(process.spec.memory.awake)
                    }
                    _ => process.spec.memory.awake,
                },
                units: process.spec.accelerators.units().unwrap_or(1),
                placed: true,
            };
            process.adopted_with = matches!(process.phase, Phase::Asleep(_)).then_some(booking.bytes);
            self.machine.bookings.insert(engine.clone(), booking);
            let mut gate = Gate::new(process.generation, process.spec.max_concurrency);
            let old = gates.get(engine);
            gate.last_end = old.map_or(Tick(0), |gate| gate.last_end);
            let last_end = gate.last_end;
            self.gates.insert(engine.clone(), gate);
            found.push(Event::Adopted {
                engine: engine.clone(),
                generation: process.generation,
                found: Found {
                    address: std::net::SocketAddr::from(([127, 0, 0, 1], 40_000)),
                    accelerators: process.accelerators.clone(),
                    asleep: match process.phase {
                        Phase::Asleep(level) => Some(level),
                        _ => None,
                    },
                    ready: match process.phase {
                        Phase::Asleep(_) => true,
                        phase => phase == Phase::Awake && !process.hung,
                    },
                    fingerprint: process.spec.fingerprint,
                    last_end,
                    started: process.started,
                },
            });
        }
        for event in found {
            self.tally.add("engines adopted");
            self.tell(event);
        }
        for (id, device) in self.machine.devices.clone() {
            if device.lost {
                self.tell(Event::AcceleratorLost { accelerator: id });
            }
        }
        self.tell(Event::AdoptionDone);
        self.read_all();
    }

    /// A meter is read.
    pub(super) fn read(&mut self, id: &AcceleratorId) {
        let Some(device) = self.machine.devices.get_mut(id) else {
            return;
        };
        if device.lost || !device.metered {
            return;
        }
        if std::mem::take(&mut device.back) {
            self.tell(Event::AcceleratorBack { accelerator: id.clone() });
        }
        let by_engine = self.scenario.nature.per_process.then(|| self.machine.reading(id));
        self.tell(Event::Memory { accelerator: id.clone(), used: self.machine.used(id), by_engine });
    }

    pub(super) fn read_all(&mut self) {
        let ids: Vec<_> = self.machine.devices.keys().cloned().collect();
        for id in &ids {
            self.read(id);
        }
        if let Some(period) = self.scenario.nature.meter_period {
            self.agenda.add(self.now + period, Happening::ReadAll);
        }
    }

    /// No more demand, no more faults; what is broken stays broken until the fleet deals with it.
    pub(super) fn calm(&mut self) {
        self.calm = true;
        self.scenario.faults = super::Faults::default();
        self.agenda.retain(|happening| {
            !matches!(happening, Happening::Ask(_) | Happening::Demand(_) | Happening::Inject(_))
        });
    }
}
