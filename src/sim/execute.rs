//! Executes the fleet's commands as the gateway's platform does, and reports those that must not be ordered.

use std::borrow::Cow;

use super::{
    client::ExchangeEnd,
    gate::SimulatedGate,
    machine::SimulatedReservation,
    platform_defect::PlatformDefect,
    process::{ProcessStep, SimulatedProcess, SimulatedProcessPhase},
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    driver::{GateClosing, GrantOutcome, LeaseGrant},
    engine::{SLEEP_DENIAL_TIMEOUT, turn_clients::TurnClients},
    fault::{FailureCause, Fault},
    fleet::{
        command::{CloseReason, Command},
        event::{CanaryVerdict, Event, OperationId, WaiterId},
    },
    model::{AcceleratorId, EngineId, EngineMemory, SleepLevel},
    units::{Bytes, Generation, Millis},
};

impl SimulatedWorld {
    /// Starts the work of a command to the platform.
    pub(super) fn start_work(&mut self, command: Command) {
        match command {
            Command::Reserve { engine, generation, accelerators, bytes, .. } => {
                self.reserve(engine, generation, accelerators, bytes)
            }
            Command::Shrink { engine, generation, bytes, .. } => self.shrink(&engine, generation, bytes),
            Command::Launch { engine, generation, accelerators, bytes } => {
                self.launch(engine, generation, accelerators, bytes)
            }
            Command::Probe { engine, generation } => {
                let after = self.random_duration(self.scenario.hardware.first_byte);
                self.event_queue
                    .schedule(self.now + after, WorldEvent::ProbeCompletes { engine, generation });
            }
            Command::Sleep { engine, generation, level } => self.sleep(&engine, generation, level),
            Command::Wake { engine, generation, level } => self.wake(&engine, generation, level),
            Command::Stop { engine, generation, grace, .. } => self.stop(engine, generation, grace),
            Command::ReadMeter { accelerator, after } => {
                self.event_queue.schedule(self.now + after, WorldEvent::ReadMeter(accelerator));
            }
            // The gate polls the stub from the moment at which it was closed.
            Command::AwaitStub { .. } => {}
            Command::OpenGate { .. }
            | Command::CloseGate { .. }
            | Command::RevokeLeases { .. }
            | Command::Grant { .. }
            | Command::Refuse { .. }
            | Command::FinishOperation { .. } => {
                self.record_violation(format!("the driver leaves its own work to the platform: {command}"));
            }
        }
    }

    /// Checks and counts a close before the gate closes.
    pub(super) fn check_close(&mut self, closing: &GateClosing<'_>) {
        let GateClosing { engine, reason, successor, .. } = *closing;
        self.check_kept_awake(engine, reason);
        self.note_optional_close(engine, reason);
        if let Some(successor) = successor {
            self.check_eviction_needed(engine, successor);
        }
        if reason == CloseReason::Turn && self.gates.get(engine).is_some_and(|gate| gate.open) {
            self.tally.add("swaps");
        }
        if reason == CloseReason::Rehearsal {
            self.tally.add("rehearsals");
        }
    }

    pub(super) fn finish_order(&mut self, operation: OperationId, is_ok: bool) {
        self.tally.add(if is_ok { "operations done" } else { "operations failed" });
        match self.operations.get_mut(&operation) {
            Some(done @ false) => *done = true,
            Some(true) => self.record_violation(format!("operation {} finished twice", operation.0)),
            None => self.record_violation(format!("operation {} finished without an order", operation.0)),
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
        let after = self.random_duration(self.scenario.hardware.placement_time);
        let conflict = self.random.chance(self.scenario.fault_rates.reservation_conflict);
        let units = self.units_of(&engine);
        let event = if conflict {
            self.tally.add("fault: conflict");
            Event::Conflict { engine, generation }
        } else {
            let accelerators = accelerators.clone();
            let booking = SimulatedReservation {
                generation,
                accelerators: accelerators.clone(),
                bytes,
                units,
                confirmed: false,
            };
            self.machine.reservations.insert(engine.clone(), booking);
            Event::Placed { engine, generation, accelerators }
        };
        if after == Millis::ZERO {
            self.send_event(event);
        } else {
            self.event_queue.schedule(self.now + after, WorldEvent::FleetEvent(event));
        }
    }

    fn shrink(&mut self, engine: &EngineId, generation: Generation, bytes: Bytes) {
        self.check_shrink(engine, generation, bytes);
        let Some(booking) = self.machine.reservations.get_mut(engine) else {
            return;
        };
        if booking.generation != generation {
            return;
        }
        // A running engine keeps the accelerators of its pool, even if it keeps no memory.
        if bytes == Bytes::ZERO && !self.machine.processes.contains_key(engine) {
            self.machine.reservations.remove(engine);
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
        self.check_dependencies(&engine, "launched");
        if !self.check_launch(&engine, generation, &accelerators, bytes) {
            return;
        }
        let Some(mut spec) = self.spec_of(&engine).map(Cow::into_owned) else {
            self.record_violation(format!("{engine} is launched, but its model is not configured"));
            return;
        };
        // The process counts the memory of all its accelerators in a pool as one sum, as its reservation does.
        let EngineMemory { awake, asleep, host } = spec.memory;
        let [awake, asleep, host] =
            [awake, asleep, host].map(|each| spec.accelerators.bytes_per_account(each));
        spec.memory = EngineMemory { awake, asleep, host };
        let faults = self.scenario.fault_rates;
        let metered = self.machine.are_metered(&accelerators);
        let mut residue = spec.memory.asleep;
        if metered && self.random.chance(faults.oversized_residue) {
            self.tally.add("fault: residue larger than declared");
            residue = Bytes((residue.0 * 2).min(spec.memory.awake.0));
        }
        let limit = spec.max_concurrency;
        let profiling = spec.profiles_memory();
        let process = SimulatedProcess {
            engine: engine.clone(),
            generation,
            accelerators,
            phase: SimulatedProcessPhase::Loading,
            serial: 0,
            memory_held: Bytes::ZERO,
            residue: Bytes(residue.0.min(spec.memory.awake.0)),
            spec,
            started: self.now,
            hung: false,
            corrupt: false,
            stub_gate_closed: false,
            ignores_term: self.random.chance(faults.ignores_term),
            refuse_wake: false,
            release_delay: None,
            sleep_denied: false,
            adopted_bytes: None,
            profiling,
            allocations_at_profiling_start: 0,
        };
        self.machine.processes.insert(engine.clone(), process);
        self.gates.insert(engine.clone(), SimulatedGate::new(generation, limit));
        self.schedule_startup(&engine);
    }

    /// Schedules a new process's start-up, including its faults.
    fn schedule_startup(&mut self, engine: &EngineId) {
        let faults = self.scenario.fault_rates;
        let total = self.random_duration(self.scenario.hardware.start_time);
        let part = |tenths: u64| Millis(total.0 / 10 * tenths + 1);
        let some_way = Millis(self.random.between(2, total.0.max(3)));
        let spawn = Millis(self.random.between(1, 10));
        self.schedule_step(engine, spawn, ProcessStep::Spawned);
        if self.random.chance(faults.start_failed) {
            self.tally.add("fault: start failed");
            return self.schedule_step(
                engine,
                some_way,
                ProcessStep::StartFails(FailureCause::CommandNotFound),
            );
        }
        if self.random.chance(faults.exit_at_start) {
            self.tally.add("fault: exit at start");
            self.schedule_step(engine, some_way, ProcessStep::Exits(FailureCause::Exited(1)));
        } else if self.random.chance(faults.out_of_memory_at_start) {
            self.tally.add("fault: out of memory at start");
            self.schedule_step(engine, some_way, ProcessStep::Exits(FailureCause::OutOfMemory));
        }
        self.schedule_step(engine, part(4), ProcessStep::WeightsLoaded);
        self.schedule_step(engine, part(7), ProcessStep::CacheAllocated);
        if self.random.chance(faults.hang_at_start) {
            self.tally.add("fault: hang at start");
            return;
        }
        self.schedule_step(engine, part(10), ProcessStep::Ready);
        if self.random.chance(faults.canary_fails)
            && let Some(process) = self.machine.processes.get_mut(engine)
        {
            self.tally.add("fault: corrupt after start");
            process.corrupt = true;
        }
    }

    fn sleep(&mut self, engine: &EngineId, generation: Generation, level: SleepLevel) {
        self.tally.add("sleeps");
        if !self.check_drained(engine, generation, "sleep") || !self.check_sleep(engine, generation, level) {
            return;
        }
        let takes = self.random_duration(self.scenario.hardware.sleep_time);
        let faults = self.scenario.fault_rates;
        let refused = self.random.chance(faults.sleep_refused);
        let hangs = self.random.chance(faults.sleep_hangs);
        let denied = self.random.chance(faults.sleep_denied);
        let Some(process) = self.machine.process(engine, generation) else {
            return;
        };
        process.enter_phase(SimulatedProcessPhase::FallingAsleep(level));
        if hangs {
            process.hung = true;
            self.tally.add("fault: sleep hangs");
        } else if refused {
            self.tally.add("fault: sleep refused");
            self.schedule_step(engine, takes, ProcessStep::SleepFails(FailureCause::Refused));
        } else if denied {
            self.tally.add("fault: sleep denied");
            self.schedule_step(
                engine,
                SLEEP_DENIAL_TIMEOUT,
                ProcessStep::SleepFails(FailureCause::SleepDenied),
            );
        } else {
            self.schedule_step(engine, takes, ProcessStep::Slept);
        }
    }

    fn wake(&mut self, engine: &EngineId, generation: Generation, level: SleepLevel) {
        self.tally.add("wakes");
        self.check_dependencies(engine, "woken");
        if !self.check_wake(engine, generation, level) {
            return;
        }
        let takes = self.random_duration(self.scenario.hardware.wake_time);
        let faults = self.scenario.fault_rates;
        let refused = self.random.chance(faults.wake_refused);
        let hangs = self.random.chance(faults.wake_hangs);
        let corrupt = self.random.chance(faults.canary_fails);
        let Some(process) = self.machine.process(engine, generation) else {
            return;
        };
        process.enter_phase(SimulatedProcessPhase::Waking(level));
        process.adopted_bytes = None;
        if std::mem::take(&mut process.refuse_wake) || refused {
            self.tally.add("fault: wake refused");
            return self.schedule_step(engine, Millis(takes.0 / 2), ProcessStep::WakeRefused);
        }
        process.corrupt |= corrupt;
        process.hung |= hangs;
        if hangs {
            self.tally.add("fault: wake hangs");
        }
        if corrupt {
            self.tally.add("fault: corrupt after wake");
        }
        self.schedule_step(engine, Millis(takes.0 / 3), ProcessStep::WakeWeightsLoaded);
        self.schedule_step(engine, takes, ProcessStep::Woken);
    }

    fn stop(&mut self, engine: EngineId, generation: Generation, grace: Millis) {
        self.tally.add("stops");
        let takes = self.random_duration(self.scenario.hardware.stop_time);
        if self.machine.process(&engine, generation).is_none() {
            if !self.machine.unreported_exits.contains(&(engine.clone(), generation)) {
                self.send_event(Event::Gone { engine, generation, cause: FailureCause::Stopped });
            }
            return;
        }
        if !self.check_drained(&engine, generation, "stop") {
            return;
        }
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        process.enter_phase(SimulatedProcessPhase::Exiting);
        process.profiling = false;
        if process.hung || process.ignores_term {
            self.tally.add("fault: ended by force");
            self.schedule_step(&engine, grace, ProcessStep::Killed);
        } else {
            self.schedule_step(&engine, Millis(takes.0.min(grace.0)), ProcessStep::Killed);
        }
    }

    pub(super) fn open_simulated_gate(&mut self, engine: &EngineId, generation: Generation, public: bool) {
        self.check_traffic(engine, generation);
        if public {
            self.check_routed(engine, generation);
        }
        if self
            .machine
            .process(engine, generation)
            .is_some_and(|process| std::mem::take(&mut process.sleep_denied))
        {
            self.tally.add("called back from a sleep that was denied");
        }
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return self
                .record_violation(format!("the gate of {engine} {generation} is opened but does not exist"));
        };
        gate.open = true;
        gate.awaiting_stub = false;
        gate.public = public;
        gate.was_opened = true;
        gate.drained_sent = false;
        gate.drained_delivered = false;
    }

    pub(super) fn close_simulated_gate(&mut self, engine: &EngineId, generation: Generation) {
        self.closed_in_turn.insert(engine.clone());
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return self
                .record_violation(format!("the gate of {engine} {generation} is closed but does not exist"));
        };
        gate.open = false;
        gate.awaiting_stub = false;
        gate.public = false;
        gate.clients = TurnClients::default();
        // Each close reports its own drain, also one on top of another.
        gate.drained_sent = false;
        if gate.leases.is_empty() {
            self.send_drained(engine);
        }
    }

    /// Closes the gate to new requests and keeps the leases. Polls the stub until it opens its own gate. Each gate has
    /// at most one poll scheduled.
    pub(super) fn hold_for_stub(&mut self, engine: &EngineId, generation: Generation) {
        self.closed_in_turn.insert(engine.clone());
        self.tally.add("holds");
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return self
                .record_violation(format!("the gate of {engine} {generation} is held but does not exist"));
        };
        (gate.open, gate.public) = (false, false);
        gate.awaiting_stub = true;
        // A drain of an earlier closing does not count for the closing that ends this wait.
        (gate.drained_sent, gate.drained_delivered) = (false, false);
        if !std::mem::replace(&mut gate.stub_gate_watched, true) {
            self.event_queue
                .schedule(self.now, WorldEvent::PollStubGate { engine: engine.clone(), generation });
        }
    }

    pub(super) fn revoke_leases(&mut self, engine: &EngineId, generation: Generation) {
        self.tally.add("revocations");
        let Some(gate) = self.gates.get(engine).filter(|g| g.generation == generation) else {
            return self.record_violation(format!(
                "the gate of {engine} {generation} is revoked but does not exist"
            ));
        };
        if gate.open {
            self.record_violation(format!("the leases of {engine} are revoked while its gate is open"));
        }
        for client in self.lease_holders(engine, generation) {
            self.end_exchange(client, ExchangeEnd::Revoked);
        }
        self.send_drained(engine);
    }

    /// Grants a lease, unless the plan that grants it also closes the gate.
    pub(super) fn grant_lease(&mut self, grant: &LeaseGrant<'_>) -> GrantOutcome {
        let LeaseGrant { waiter, engine, generation, canary } = *grant;
        let none_succeeds = self.has_defect(PlatformDefect::NoGrantSucceeds);
        if (none_succeeds || self.closed_in_turn.contains(engine))
            && let Some(gate) = self.gates.get_mut(engine).filter(|gate| none_succeeds || !gate.open)
            && let Some(returned) = self.waiters.get(&waiter).and_then(|id| self.clients.get(id))
        {
            if !none_succeeds {
                self.tally.add("grants on a gate that the same plan closed");
            }
            gate.invalidate_sample();
            let priority = self.priority(&returned.request.model);
            return GrantOutcome::NoPlace(returned.as_waiter(waiter, priority));
        }
        self.begin_lease(waiter, engine.clone(), generation, canary);
        GrantOutcome::Granted
    }

    fn begin_lease(&mut self, waiter: WaiterId, engine: EngineId, generation: Generation, canary: bool) {
        self.tally.add("grants");
        if let Some(since) = self.waiting_since.remove(&engine.model) {
            self.longest_wait = self.longest_wait.max(self.now.since(since));
        }
        let unparked = self.unpark(waiter);
        if self.parked.get(&engine.model).is_some_and(|n| *n > 0) {
            self.waiting_since.insert(engine.model.clone(), self.now);
        }
        let Some(id) = unparked else {
            if self.inbox.has_departure_of(waiter) {
                return self.drop_undelivered_lease(engine, generation, canary);
            }
            return self
                .record_violation(format!("waiter {} is granted a lease but does not exist", waiter.0));
        };
        if !self.check_grant(id, &engine, generation) {
            return;
        }
        if self.random.chance(self.scenario.fault_rates.leaves_at_grant) {
            self.tally.add("fault: left at its grant");
            self.clients.remove(&id);
            self.send_event(Event::Left { waiter });
            return self.drop_undelivered_lease(engine, generation, canary);
        }
        if let Some(client) = self.clients.get(&id) {
            let (key, wait) = (client.request.key.clone(), self.now.since(client.arrived));
            if self.now > client.deadline {
                self.record_violation(format!("waiter {} is granted a lease after its deadline", waiter.0));
            }
            self.record_wait(&key, wait);
        }
        if !canary {
            self.end_quoted_wait(id);
        }
        // The fleet counts the lease from now on, so its end must cause a turn even if no turn samples the gate before.
        if let Some(gate) = self.gates.get_mut(&engine) {
            gate.seen_busy = true;
        }
        self.begin_exchange(id, engine, generation, canary);
    }

    /// Takes and ends a lease whose waiter has left.
    fn drop_undelivered_lease(&mut self, engine: EngineId, generation: Generation, canary: bool) {
        if let Some(gate) = self.gates.get_mut(&engine) {
            gate.last_lease_end = self.now;
            gate.invalidate_sample();
        }
        if canary {
            let verdict = CanaryVerdict::Inconclusive;
            self.send_event(Event::Canary { engine, generation, verdict });
        }
    }

    pub(super) fn refuse_waiter(&mut self, waiter: WaiterId, fault: &Fault) {
        let Some(id) = self.unpark(waiter) else {
            if !self.inbox.has_departure_of(waiter) {
                self.record_violation(format!("waiter {} is refused but does not exist", waiter.0));
            }
            return;
        };
        if let Some(client) = self.clients.remove(&id) {
            self.repeat_request(client.request);
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
            self.record_violation(format!("waiter {} is refused with an internal error", waiter.0));
        }
    }
}
