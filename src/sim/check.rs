//! Checks the invariants against the physical truth. Each message names what was broken, and by which engine.

mod dependencies;
mod idle_driver;
mod quiescence;
mod reservations;

use std::borrow::Cow;

use super::{
    client::{ExchangeEnd, SimulatedClientId, SimulatedClientState},
    gate::SimulatedGate,
    process::SimulatedProcessPhase,
    world::SimulatedWorld,
};
use crate::{
    driver::DriverCore,
    fault::FailureCause,
    fleet::{
        command::{CloseReason, Command},
        event::{CanaryVerdict, Event},
    },
    model::{
        AcceleratorId, AcceleratorRequirement, EngineId, EvictionPolicy, ModelName, ModelSpec, SleepLevel,
    },
    units::{Bytes, Generation},
};

impl SimulatedWorld {
    /// Applies an event that the fleet has just received and may act on.
    pub(super) fn record_delivery(&mut self, event: &Event) {
        match event {
            Event::Placed { engine, generation, .. } => {
                if let Some(booking) = self.machine.reservations.get_mut(engine)
                    && booking.generation == *generation
                {
                    booking.confirmed = true;
                }
            }
            Event::Drained { engine, generation } => {
                if let Some(gate) = self.gates.get_mut(engine)
                    && gate.generation == *generation
                    && !gate.open
                {
                    gate.drained_delivered = true;
                }
            }
            Event::Profiled { engine, generation } | Event::Ready { engine, generation } => {
                if let Some(process) = self.machine.process(engine, *generation) {
                    process.profiling = false;
                }
            }
            Event::Gone { engine, generation, .. } => {
                self.machine.unreported_exits.remove(&(engine.clone(), *generation));
                // A reservation ends with its process, unless the next generation has already reserved.
                if self.machine.reservations.get(engine).is_some_and(|b| b.generation == *generation) {
                    self.machine.reservations.remove(engine);
                }
            }
            _ => {}
        }
    }

    /// Returns false if the launch has no effect.
    pub(super) fn check_launch(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
    ) -> bool {
        if let Some(process) = self.machine.processes.get(engine) {
            let running = process.generation;
            self.record_violation(format!("{engine} {generation} is launched while {running} still runs"));
            return false;
        }
        self.check_reserved(engine, generation, accelerators, bytes, "launched");
        let measures = self.profiles_memory(engine);
        for id in accelerators {
            let Some(other) = self.machine.processes_on(id).find(|p| {
                p.profiling
                    || (measures
                        && matches!(
                            p.phase,
                            SimulatedProcessPhase::Waking(_) | SimulatedProcessPhase::Loading
                        )
                        && !p.has_full_memory())
            }) else {
                continue;
            };
            let message =
                format!("{engine} is launched on {id} beside {}, which is {:?}", other.engine, other.phase);
            self.record_violation(message);
        }
        true
    }

    fn profiles_memory(&self, engine: &EngineId) -> bool {
        self.spec_of(engine).is_some_and(|spec| spec.profiles_memory())
    }

    fn check_reserved(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
        state: &str,
    ) {
        let covered = self.machine.reservations.get(engine).is_some_and(|booking| {
            booking.confirmed
                && booking.generation == generation
                && booking.bytes >= bytes
                && accelerators.iter().all(|id| booking.accelerators.contains(id))
        });
        if !covered {
            let booking = self.machine.reservations.get(engine).cloned();
            self.record_violation(format!(
                "{engine} {generation} is {state} with {bytes} on {accelerators:?}, but its booking is {booking:?}"
            ));
        }
    }

    /// Sleep and stop require a drained gate, unless the gate never was open.
    pub(super) fn check_drained(&mut self, engine: &EngineId, generation: Generation, action: &str) -> bool {
        let Some(gate) = self.gates.get(engine).filter(|g| g.generation == generation) else {
            self.record_violation(format!("{action} for {engine} {generation}, which has no gate"));
            return false;
        };
        if gate.open || !gate.leases.is_empty() || (gate.was_opened && !gate.drained_delivered) {
            let message = format!(
                "{action} for {engine} {generation} before it was drained: gate open {}, {} leases, drained {}",
                gate.open,
                gate.leases.len(),
                gate.drained_delivered
            );
            self.record_violation(message);
        }
        true
    }

    /// The configuration of the engine's variant.
    pub(super) fn spec_of(&self, engine: &EngineId) -> Option<Cow<'_, ModelSpec>> {
        let mut models = self.scenario.configuration.models.iter();
        models.find(|spec| spec.name == engine.model)?.for_variant(&engine.variant)
    }

    fn is_scaled(&self, model: &ModelName) -> bool {
        self.scenario.configuration.models.iter().any(|spec| spec.name == *model && spec.scaled)
    }

    /// Whether configuration or an operator's pin keeps the engine awake without requests.
    fn is_kept_awake(&self, engine: &EngineId) -> bool {
        let pin = self.pins.get(&engine.model).copied();
        let pinned = pin.unwrap_or_else(|| self.spec_of(engine).is_some_and(|spec| spec.pinned));
        // Targets say how many engines run, and a pin keeps one of them.
        let pin_holds = engine.replica == 0 || !self.is_scaled(&engine.model);
        (pinned && pin_holds) || self.is_min_replica(engine)
    }

    /// Whether the engine is one of its model's `min_replicas`.
    fn is_min_replica(&self, engine: &EngineId) -> bool {
        let least = self.spec_of(engine).map_or(0, |spec| spec.min_replicas);
        engine.replica < least && self.pins.get(&engine.model) != Some(&false)
    }

    /// An engine that is kept awake must not close for another model's turn, for idleness or for a lower target.
    pub(super) fn check_kept_awake(&mut self, engine: &EngineId, reason: CloseReason) {
        let open = self.gates.get(engine).is_some_and(|gate| gate.open);
        let is_optional = matches!(
            reason,
            CloseReason::Turn | CloseReason::Idle | CloseReason::ScaledDown | CloseReason::Rehearsal
        );
        if open && is_optional && self.is_kept_awake(engine) {
            self.record_violation(format!(
                "{engine} is deactivated ({reason:?}) although it must stay awake"
            ));
        }
    }

    /// No gate may close for a model that is already served, except that of an unused engine for a replica that a target
    /// asks for. No engine in use may close if a spare of its model that is still loading holds enough memory for the
    /// other model.
    pub(super) fn check_eviction_needed(&mut self, engine: &EngineId, successor: &EngineId) {
        let serves =
            |(id, gate): (&EngineId, &SimulatedGate)| id.model == successor.model && gate.open && gate.public;
        let is_unused = self.gates.get(engine).is_none_or(|gate| gate.leases.is_empty());
        let may_replace = is_unused && self.is_scaled(&successor.model);
        if self.gates.iter().any(serves) && !self.is_min_replica(successor) && !may_replace {
            self.record_violation(format!(
                "{engine} is evicted for {successor}, whose model is already served"
            ));
        }
        let busy = self.gates.get(engine).is_some_and(|gate| gate.open && !gate.leases.is_empty());
        if let Some(spare) = self.sufficient_spare(engine, successor).filter(|_| busy) {
            self.record_violation(format!(
                "{engine} is evicted for {successor} although the loading spare {spare} holds enough memory"
            ));
        }
    }

    /// Gates close before the platform gets any command, so a close is judged as if the stops before it had begun.
    pub(super) fn note_stops_before_closes(&mut self, commands: &[Command]) {
        self.stops_before_close.clear();
        let mut stops: Vec<EngineId> = Vec::new();
        for command in commands {
            match command {
                Command::Stop { engine, .. } => stops.push(engine.clone()),
                Command::CloseGate { engine, .. } if !stops.is_empty() => {
                    self.stops_before_close.insert(engine.clone(), stops.clone());
                }
                _ => {}
            }
        }
    }

    fn sufficient_spare(&self, engine: &EngineId, successor: &EngineId) -> Option<EngineId> {
        let configuration = &self.scenario.configuration;
        let (spec, victim_spec) = (self.spec_of(successor)?, self.spec_of(engine)?);
        let eviction = configuration.settings.eviction_of(&victim_spec);
        if eviction != EvictionPolicy::Residency || self.machine.processes.contains_key(successor) {
            return None;
        }
        let free_for_it = |id: &AcceleratorId| {
            let listed = match &spec.accelerators {
                AcceleratorRequirement::Ids(ids) => *ids == std::slice::from_ref(id),
                AcceleratorRequirement::Count(n) => *n == 1,
                AcceleratorRequirement::InPool { pool, .. } => pool == id,
                AcceleratorRequirement::Slots { pool, count } => {
                    let device = self.machine.accelerators.get(id);
                    let is_twin = |other: &EngineId| {
                        (&other.model, &other.variant) == (&successor.model, &successor.variant)
                    };
                    *count == 1
                        && device.is_some_and(|device| device.pool.as_ref() == Some(pool))
                        && !self.machine.reservations_on(id).any(|(other, _)| is_twin(other))
                }
            };
            // Where more is booked than a faulty accelerator has, the end of the spare makes no room.
            let well = self.machine.accelerators.get(id).is_some_and(|d| {
                !d.lost
                    && d.foreign_bytes == Bytes::ZERO
                    && (d.pool.is_none() || d.configured_capacity > Bytes::ZERO)
            });
            listed && well && self.machine.processes_on(id).filter(|p| p.profiling).count() <= 1
        };
        let mut other_replicas = self.machine.processes.values().filter(|p| {
            let is_other = p.engine.model == engine.model && p.engine != *engine;
            let stops = self.stops_before_close.get(engine);
            let is_stopped = stops.is_some_and(|stopped| stopped.contains(&p.engine));
            is_other && !is_stopped && p.phase == SimulatedProcessPhase::Loading
        });
        let spare = other_replicas.find(|p| {
            let untouched = self.gates.get(&p.engine).is_some_and(|gate| !gate.was_opened);
            let holds =
                self.machine.reservations.get(&p.engine).map_or((Bytes::ZERO, 0), |b| (b.bytes, b.units));
            let bytes = spec.accelerators.bytes_per_account(spec.memory.awake);
            let enough = holds.0 >= bytes && holds.1 >= self.units_of(successor);
            untouched && enough && p.accelerators.iter().any(free_for_it)
        });
        spare.map(|p| p.engine.clone())
    }

    pub(super) fn check_sleep(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        level: SleepLevel,
    ) -> bool {
        let (host, room) =
            (self.machine.host_memory_held(), self.scenario.configuration.settings.host_memory);
        let of_node = self.machine.host_memory_of_node(engine);
        let Some(process) = self.machine.process(engine, generation) else {
            return self.check_exit_unreported(engine, generation, "sleep");
        };
        let (phase, can, needs) = (process.phase, process.spec.can_sleep, process.host_bytes());
        if !can {
            self.record_violation(format!("{engine} is ordered to sleep but cannot sleep"));
        }
        if phase != SimulatedProcessPhase::Awake {
            self.record_violation(format!("{engine} is ordered to sleep while it is {phase:?}"));
            return false;
        }
        if level == SleepLevel::One && host + needs > room {
            self.record_violation(format!(
                "{engine} sleeps at level 1 with {needs} in host memory, where others hold {host} of {room}"
            ));
        }
        if let Some((limit, held)) = of_node.filter(|_| level == SleepLevel::One)
            && held + needs > limit
        {
            self.record_violation(format!(
                "{engine} sleeps at level 1 with {needs} in the memory of its node, where others hold {held} of {limit}"
            ));
        }
        true
    }

    pub(super) fn check_wake(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        level: SleepLevel,
    ) -> bool {
        let Some(process) = self.machine.process(engine, generation) else {
            return self.check_exit_unreported(engine, generation, "wake");
        };
        let (phase, needs, accelerators) =
            (process.phase, process.spec.memory.awake, process.accelerators.clone());
        if phase != SimulatedProcessPhase::Asleep(level) {
            self.record_violation(format!("{engine} is woken from {level:?} while it is {phase:?}"));
            return false;
        }
        self.check_reserved(engine, generation, &accelerators, needs, "woken");
        for id in &accelerators {
            let profiling = self.machine.processes_on(id).find(|p| p.profiling);
            if let Some(other) = profiling {
                let message = format!("{engine} is woken on {id} while {} measures its memory", other.engine);
                self.record_violation(message);
            }
        }
        true
    }

    /// A command to a gone process is an error only if the fleet knows that it is gone.
    fn check_exit_unreported(&mut self, engine: &EngineId, generation: Generation, action: &str) -> bool {
        if !self.machine.unreported_exits.contains(&(engine.clone(), generation)) {
            self.record_violation(format!("{action} for {engine} {generation}, which is known to be gone"));
        }
        false
    }

    /// Only an awake engine may get requests. An engine that died an instant ago, or hangs, is no violation.
    pub(super) fn check_traffic(&mut self, engine: &EngineId, generation: Generation) {
        match self.machine.process(engine, generation).map(|p| p.phase) {
            Some(SimulatedProcessPhase::Awake) => {}
            Some(phase) => {
                self.record_violation(format!("{engine} {generation} gets traffic while it is {phase:?}"))
            }
            None => {
                self.check_exit_unreported(engine, generation, "traffic");
            }
        }
    }

    pub(super) fn check_grant(
        &mut self,
        client: SimulatedClientId,
        engine: &EngineId,
        generation: Generation,
    ) -> bool {
        let model = self.clients.get(&client).map(|c| c.request.model.clone());
        if model.is_some_and(|model| model != engine.model) {
            self.record_violation(format!("a waiter for another model is granted a lease on {engine}"));
        }
        let Some(gate) = self.gates.get(engine).filter(|g| g.generation == generation) else {
            self.record_violation(format!("a lease is granted on {engine} {generation}, which has no gate"));
            return false;
        };
        let (open, full) = (gate.open, gate.is_full());
        if !open {
            self.record_violation(format!("a lease is granted on the closed gate of {engine}"));
        }
        if full {
            self.record_violation(format!("a lease is granted on {engine}, which is full"));
        }
        open && !full
    }

    /// Reports a client that still waits after its deadline.
    pub(super) fn check_wait_deadline(&mut self, id: SimulatedClientId, serial: u32) {
        if let Some(client) = self.clients.get(&id).filter(|c| c.serial == serial)
            && let SimulatedClientState::Parked(waiter) = client.state
        {
            let message = format!(
                "waiter {} for {} waits past its deadline {}",
                waiter.0, client.request.model, client.deadline
            );
            self.record_violation(message);
        }
    }

    pub(super) fn silence_timeout(&mut self, id: SimulatedClientId, serial: u32) {
        if self.clients.get(&id).is_some_and(|c| c.serial == serial) {
            self.end_exchange(id, ExchangeEnd::EngineFailed);
        }
    }

    /// Every model has a line in the report, and every line a reason.
    pub(super) fn check_report(&mut self, core: &DriverCore) {
        let report = core.fleet().report(core.plan());
        for (model, model_report) in &report.models {
            if model_report.reason.is_empty() {
                self.violations.push(format!("the report gives no reason for {model}"));
            }
        }
        if report.models.len() < self.scenario.configuration.models.len() && self.deadline.is_some() {
            self.record_violation("the report leaves models out".to_owned());
        }
    }

    pub(super) fn check_view(&mut self, core: &DriverCore) {
        let report = core.fleet().report(core.plan());
        let view = core.fleet().view(&report);
        for accelerator in &view.accelerators {
            // An excess from adoption is allowed, but must be reported.
            let reported = report.accelerators.contains_key(&accelerator.id);
            if let (Some(units), Some(units_taken)) = (accelerator.units, accelerator.units_taken)
                && units_taken > units
                && !reported
            {
                self.violations.push(format!(
                    "{} has {units_taken} of {units} units taken, and the report does not say so",
                    accelerator.id
                ));
            }
            if accelerator.reserved > accelerator.capacity && !reported {
                self.record_violation(format!(
                    "the reservations on {} are {}, more than {}",
                    accelerator.id, accelerator.reserved, accelerator.capacity
                ));
            }
        }
        if view.host.reserved > view.host.capacity {
            self.record_violation(format!(
                "the reservations of host memory are {}, more than {}",
                view.host.reserved, view.host.capacity
            ));
        }
    }

    pub(super) fn complete_probe(&mut self, engine: EngineId, generation: Generation) {
        let verdict = match self.machine.process(&engine, generation) {
            Some(process) if process.stub_gate_closed => {
                self.send_event(Event::StubGateClosed { engine: engine.clone(), generation });
                CanaryVerdict::Inconclusive
            }
            None => CanaryVerdict::Failed(FailureCause::Unreachable),
            Some(process) if process.hung => CanaryVerdict::Failed(FailureCause::Timeout),
            Some(process) if process.corrupt => CanaryVerdict::Failed(FailureCause::Unhealthy),
            Some(_) => CanaryVerdict::Passed,
        };
        self.send_event(Event::Canary { engine, generation, verdict });
    }
}
