//! What the fleet orders happens here, as the platform and the driver would do it; what it may not order is noticed.

use super::{
    client::End,
    gate::Gate,
    machine::Booking,
    process::{Phase, Process, Step},
    world::{Happening, World},
};
use crate::{
    engine::{SLEEP_DENIAL, clients::Clients},
    fault::{Cause, Fault},
    fleet::{
        command::{Command, Why},
        event::{Event, Verdict, WaiterId},
    },
    model::{AcceleratorId, EngineId, Level, Memory},
    units::{Bytes, Generation, Millis},
};

impl World {
    pub(super) fn execute(&mut self, command: Command) {
        match command {
            Command::Reserve { engine, generation, accelerators, bytes, .. } => {
                self.reserve(engine, generation, accelerators, bytes)
            }
            Command::Shrink { engine, generation, bytes, .. } => self.shrink(&engine, generation, bytes),
            Command::Launch { engine, generation, accelerators, bytes } => {
                self.launch(engine, generation, accelerators, bytes)
            }
            Command::Probe { engine, generation } => {
                let after = self.draw(self.scenario.nature.first_byte);
                self.agenda.add(self.now + after, Happening::Probed { engine, generation });
            }
            Command::Sleep { engine, generation, level } => self.sleep(&engine, generation, level),
            Command::Wake { engine, generation, level } => self.wake(&engine, generation, level),
            Command::Stop { engine, generation, grace, .. } => self.stop(engine, generation, grace),
            Command::Meter { accelerator, after } => {
                self.agenda.add(self.now + after, Happening::Read(accelerator));
            }
            Command::OpenGate { engine, generation, public } => self.open_gate(&engine, generation, public),
            Command::CloseGate { engine, generation, why, to, .. } => {
                self.check_kept(&engine, why);
                self.check_needed(&engine, why);
                if let Some(to) = to {
                    self.check_spare(&engine, &to);
                }
                if why == Why::Turn && self.gates.get(&engine).is_some_and(|gate| gate.open) {
                    self.tally.add("swaps");
                }
                self.close_gate(&engine, generation);
            }
            Command::Revoke { engine, generation, .. } => self.revoke(&engine, generation),
            Command::Hold { engine, generation } => self.hold_gate(&engine, generation),
            Command::Grant { waiter, engine, generation, canary } => {
                self.grant(waiter, engine, generation, canary)
            }
            Command::Refuse { waiter, fault } => self.refuse(waiter, &fault),
            Command::Finish { operation, outcome } => {
                self.tally.add(if outcome.is_ok() { "operations done" } else { "operations failed" });
                match self.operations.get_mut(&operation) {
                    Some(done @ false) => *done = true,
                    Some(true) => self.violation(format!("operation {} finished twice", operation.0)),
                    None => {
                        self.violation(format!("operation {} finished, which nobody ordered", operation.0))
                    }
                }
            }
        }
    }

    fn reserve(
        &mut self,
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
        bytes: Bytes,
    ) {
        self.tally.add("reservations");
        self.check_reserve(&engine, generation, &accelerators, bytes);
        let after = self.draw(self.scenario.nature.placing);
        let conflict = self.random.chance(self.scenario.faults.conflict);
        let units = self.units_of(&engine);
        let event = if conflict {
            self.tally.add("fault: conflict");
            Event::Conflict { engine, generation }
        } else {
            let accelerators = accelerators.clone();
            let booking =
                Booking { generation, accelerators: accelerators.clone(), bytes, units, placed: false };
            self.machine.bookings.insert(engine.clone(), booking);
            Event::Placed { engine, generation, accelerators }
        };
        if after == Millis::ZERO {
            self.tell(event);
        } else {
            self.agenda.add(self.now + after, Happening::Tell(event));
        }
    }

    fn shrink(&mut self, engine: &EngineId, generation: Generation, bytes: Bytes) {
        self.check_shrink(engine, generation, bytes);
        let Some(booking) = self.machine.bookings.get_mut(engine) else {
            return;
        };
        if booking.generation != generation {
            return;
        }
        // One that is there keeps the accelerators of its pool, though it may keep no memory.
        if bytes == Bytes::ZERO && !self.machine.processes.contains_key(engine) {
            self.machine.bookings.remove(engine);
        } else {
            booking.bytes = bytes;
        }
    }

    fn launch(
        &mut self,
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
        bytes: Bytes,
    ) {
        self.tally.add("launches");
        self.check_needs(&engine, "launched");
        if !self.check_launch(&engine, generation, &accelerators, bytes) {
            return;
        }
        let models = &self.scenario.configuration.models;
        let Some(mut spec) = models.iter().find(|spec| spec.name == engine.model).cloned() else {
            self.violation(format!("{engine} is launched, but its model is not configured"));
            return;
        };
        // What the process knows of its memory is what it takes in one place.
        let Memory { awake, asleep, host } = spec.memory;
        let [awake, asleep, host] = [awake, asleep, host].map(|each| spec.accelerators.in_one_place(each));
        spec.memory = Memory { awake, asleep, host };
        let faults = self.scenario.faults;
        let metered = self.machine.metered(&accelerators);
        let mut residue = spec.memory.asleep;
        if metered && self.random.chance(faults.fat_residue) {
            self.tally.add("fault: residue larger than declared");
            residue = Bytes((residue.0 * 2).min(spec.memory.awake.0));
        }
        let limit = spec.max_concurrency;
        let profiling = spec.measures();
        let process = Process {
            engine: engine.clone(),
            generation,
            accelerators,
            phase: Phase::Loading,
            serial: 0,
            held: Bytes::ZERO,
            residue: Bytes(residue.0.min(spec.memory.awake.0)),
            spec,
            started: self.now,
            hung: false,
            corrupt: false,
            gated: false,
            ignores_term: self.random.chance(faults.ignores_term),
            refuse_wake: false,
            late: None,
            denied: false,
            adopted_with: None,
            profiling,
            measured_from: 0,
        };
        self.machine.processes.insert(engine.clone(), process);
        self.gates.insert(engine.clone(), Gate::new(generation, limit));
        self.load(&engine);
    }

    /// Sets a new process going: well, or badly.
    fn load(&mut self, engine: &EngineId) {
        let faults = self.scenario.faults;
        let total = self.draw(self.scenario.nature.start);
        let part = |tenths: u64| Millis(total.0 / 10 * tenths + 1);
        let some_way = Millis(self.random.between(2, total.0.max(3)));
        let spawn = Millis(self.random.between(1, 10));
        self.plan_step(engine, spawn, Step::Spawned);
        if self.random.chance(faults.start_failed) {
            self.tally.add("fault: start failed");
            return self.plan_step(engine, some_way, Step::Fails(Cause::CommandNotFound));
        }
        if self.random.chance(faults.exit_at_start) {
            self.tally.add("fault: exit at start");
            self.plan_step(engine, some_way, Step::Exits(Cause::Exited(1)));
        } else if self.random.chance(faults.out_of_memory_at_start) {
            self.tally.add("fault: out of memory at start");
            self.plan_step(engine, some_way, Step::Exits(Cause::OutOfMemory));
        }
        self.plan_step(engine, part(4), Step::Weights);
        self.plan_step(engine, part(7), Step::Cache);
        if self.random.chance(faults.hang_at_start) {
            self.tally.add("fault: hang at start");
            return;
        }
        self.plan_step(engine, part(10), Step::Ready);
        if self.random.chance(faults.canary_fails)
            && let Some(process) = self.machine.processes.get_mut(engine)
        {
            self.tally.add("fault: corrupt after start");
            process.corrupt = true;
        }
    }

    fn sleep(&mut self, engine: &EngineId, generation: Generation, level: Level) {
        self.tally.add("sleeps");
        if !self.check_put_away(engine, generation, "sleep") || !self.check_sleep(engine, generation, level) {
            return;
        }
        let takes = self.draw(self.scenario.nature.sleep);
        let faults = self.scenario.faults;
        let refused = self.random.chance(faults.sleep_refused);
        let hangs = self.random.chance(faults.sleep_hangs);
        let denied = self.random.chance(faults.sleep_denied);
        let Some(process) = self.machine.process(engine, generation) else {
            return;
        };
        process.enter(Phase::FallingAsleep(level));
        if hangs {
            process.hung = true;
            self.tally.add("fault: sleep hangs");
        } else if refused {
            self.tally.add("fault: sleep refused");
            self.plan_step(engine, takes, Step::SleepFails(Cause::Refused));
        } else if denied {
            self.tally.add("fault: sleep denied");
            self.plan_step(engine, SLEEP_DENIAL, Step::SleepFails(Cause::StaysAwake));
        } else {
            self.plan_step(engine, takes, Step::Slept);
        }
    }

    fn wake(&mut self, engine: &EngineId, generation: Generation, level: Level) {
        self.tally.add("wakes");
        self.check_needs(engine, "woken");
        if !self.check_wake(engine, generation, level) {
            return;
        }
        let takes = self.draw(self.scenario.nature.wake);
        let faults = self.scenario.faults;
        let refused = self.random.chance(faults.wake_refused);
        let hangs = self.random.chance(faults.wake_hangs);
        let corrupt = self.random.chance(faults.canary_fails);
        let Some(process) = self.machine.process(engine, generation) else {
            return;
        };
        process.enter(Phase::Waking(level));
        process.adopted_with = None;
        if std::mem::take(&mut process.refuse_wake) || refused {
            self.tally.add("fault: wake refused");
            return self.plan_step(engine, Millis(takes.0 / 2), Step::WakeRefused);
        }
        process.corrupt |= corrupt;
        process.hung |= hangs;
        if hangs {
            self.tally.add("fault: wake hangs");
        }
        if corrupt {
            self.tally.add("fault: corrupt after wake");
        }
        self.plan_step(engine, Millis(takes.0 / 3), Step::WokenWeights);
        self.plan_step(engine, takes, Step::Woken);
    }

    fn stop(&mut self, engine: EngineId, generation: Generation, grace: Millis) {
        self.tally.add("stops");
        let takes = self.draw(self.scenario.nature.stop);
        if self.machine.process(&engine, generation).is_none() {
            if !self.machine.going.contains(&(engine.clone(), generation)) {
                self.tell(Event::Gone { engine, generation, cause: Cause::Stopped });
            }
            return;
        }
        if !self.check_put_away(&engine, generation, "stop") {
            return;
        }
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        process.enter(Phase::Exiting);
        process.profiling = false;
        if process.hung || process.ignores_term {
            self.tally.add("fault: ended by force");
            self.plan_step(&engine, grace, Step::Killed);
        } else {
            self.plan_step(&engine, Millis(takes.0.min(grace.0)), Step::Killed);
        }
    }

    fn open_gate(&mut self, engine: &EngineId, generation: Generation, public: bool) {
        self.check_traffic(engine, generation);
        if self.machine.process(engine, generation).is_some_and(|process| std::mem::take(&mut process.denied))
        {
            self.tally.add("called back from a sleep that was denied");
        }
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return self.violation(format!("a gate is opened that is not there: {engine} {generation}"));
        };
        gate.open = true;
        gate.held = false;
        gate.public = public;
        gate.served = true;
        gate.told = false;
        gate.drained = false;
    }

    fn close_gate(&mut self, engine: &EngineId, generation: Generation) {
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return self.violation(format!("a gate is closed that is not there: {engine} {generation}"));
        };
        gate.open = false;
        gate.held = false;
        gate.public = false;
        gate.clients = Clients::default();
        if gate.leases.is_empty() {
            self.emptied(engine);
        }
    }

    /// Nobody is let in, those inside stay, and one poll at a time asks the stub whether that is over.
    fn hold_gate(&mut self, engine: &EngineId, generation: Generation) {
        self.tally.add("holds");
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return self.violation(format!("a gate is held that is not there: {engine} {generation}"));
        };
        (gate.open, gate.public) = (false, false);
        gate.held = true;
        // What was said of an earlier closing says nothing of the one that ends this.
        (gate.told, gate.drained) = (false, false);
        if !std::mem::replace(&mut gate.watched, true) {
            self.agenda.add(self.now, Happening::AskStub { engine: engine.clone(), generation });
        }
    }

    fn revoke(&mut self, engine: &EngineId, generation: Generation) {
        self.tally.add("revocations");
        let Some(gate) = self.gates.get(engine).filter(|g| g.generation == generation) else {
            return self.violation(format!("a gate is revoked that is not there: {engine} {generation}"));
        };
        if gate.open {
            self.violation(format!("the leases of {engine} are revoked while its gate is open"));
        }
        for client in self.holders(engine, generation) {
            self.end_exchange(client, End::Revoked);
        }
        self.emptied(engine);
    }

    fn grant(&mut self, waiter: WaiterId, engine: EngineId, generation: Generation, canary: bool) {
        self.tally.add("grants");
        if let Some(since) = self.waiting.remove(&engine.model) {
            self.longest_wait = self.longest_wait.max(self.now.since(since));
        }
        let unparked = self.unpark(waiter);
        if self.parked.get(&engine.model).is_some_and(|n| *n > 0) {
            self.waiting.insert(engine.model.clone(), self.now);
        }
        let Some(id) = unparked else {
            return self.violation(format!("waiter {} is granted a lease, but is not there", waiter.0));
        };
        if !self.check_grant(id, &engine, generation) {
            return;
        }
        if self.random.chance(self.scenario.faults.leaves_at_grant) {
            self.tally.add("fault: left at its grant");
            self.clients.remove(&id);
            self.tell(Event::Left { waiter });
            // The lease is taken all the same, and ends with the message that could not be delivered.
            if let Some(gate) = self.gates.get_mut(&engine) {
                gate.last_end = self.now;
                gate.forget_sample();
            }
            if canary {
                let verdict = Verdict::Inconclusive;
                self.tell(Event::Canary { engine, generation, verdict });
            }
            return;
        }
        if let Some(client) = self.clients.get(&id) {
            let (key, wait) = (client.request.key.clone(), self.now.since(client.arrived));
            if self.now > client.deadline {
                self.violation(format!("waiter {} is granted a lease after its deadline", waiter.0));
            }
            self.waited(&key, wait);
        }
        self.hold(id, engine, generation, canary);
    }

    fn refuse(&mut self, waiter: WaiterId, fault: &Fault) {
        let Some(id) = self.unpark(waiter) else {
            return self.violation(format!("waiter {} is refused, but is not there", waiter.0));
        };
        if let Some(client) = self.clients.remove(&id) {
            self.ask_again(client.request);
        }
        self.tally.add(match fault {
            Fault::InsufficientMemory(_) => "refused: insufficient memory",
            Fault::QueueFull { .. } => "refused: queue full",
            Fault::ModelNotReady { .. } => "refused: model not ready",
            Fault::ModelNotFound { .. } => "refused: model not found",
            Fault::ShuttingDown => "refused: shutting down",
            Fault::EngineFailed { .. } => "refused: engine failed",
            _ => "refused: another fault",
        });
        if *fault == Fault::Internal {
            self.violation(format!("waiter {} is refused with an internal error", waiter.0));
        }
    }
}
