//! Injects random faults, scripted actions, operator actions, and the gateway's restart.

use std::collections::BTreeMap;

use super::{
    client::{ExchangeEnd, SimulatedClientState},
    gate::SimulatedGate,
    journal::JournalLine,
    process::SimulatedProcessPhase,
    scenario::{ScenarioAction, random_scenario},
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    fault::FailureCause,
    fleet::event::{AdoptedEngine, Event, LearnedMeasurements, OperationId, OperatorAction},
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, SleepLevel, VariantName},
    units::{Bytes, Millis, Tick},
};

/// Faults that strike at random moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultInjection {
    KillEngine,
    HangEngine,
    LoseAccelerator,
    UseForeignMemory,
    ReloadConfig,
    OperatorAction,
    RestartGateway,
    CloseStubGate,
}

impl SimulatedWorld {
    /// Starts the gateway on a machine where no engine runs.
    pub(super) fn begin(&mut self) {
        let configuration = self.scenario.configuration.clone();
        self.machine.configure(&configuration.accelerators);
        self.send_event(Event::Configured { configuration: Box::new(configuration) });
        self.send_event(Event::AdoptionDone);
        self.read_all_meters();
        for number in 0..self.scenario.sources.len() {
            let at = self.now + self.scenario.sources[number].offset;
            self.event_queue.schedule(at, WorldEvent::SourceDue(number));
        }
        for (after, action) in std::mem::take(&mut self.scenario.actions) {
            self.event_queue.schedule(self.now + after, WorldEvent::Action(action));
        }
        for injection in [
            FaultInjection::KillEngine,
            FaultInjection::HangEngine,
            FaultInjection::LoseAccelerator,
            FaultInjection::UseForeignMemory,
            FaultInjection::ReloadConfig,
            FaultInjection::OperatorAction,
            FaultInjection::RestartGateway,
            FaultInjection::CloseStubGate,
        ] {
            self.schedule_injection(injection);
        }
    }

    fn schedule_injection(&mut self, injection: FaultInjection) {
        let faults = &self.scenario.fault_rates;
        let mean = match injection {
            FaultInjection::KillEngine => faults.engine_dies,
            FaultInjection::HangEngine => faults.engine_hangs,
            FaultInjection::LoseAccelerator => faults.accelerator_lost,
            FaultInjection::UseForeignMemory => faults.foreign_memory,
            FaultInjection::ReloadConfig => faults.reload,
            FaultInjection::OperatorAction => faults.operator_action,
            FaultInjection::RestartGateway => faults.gateway_restart,
            FaultInjection::CloseStubGate => faults.stub_gate_closes,
        };
        if let Some(mean) = mean {
            let after = Millis(self.random.exponential(mean.0) + 1);
            self.event_queue.schedule(self.now + after, WorldEvent::InjectFault(injection));
        }
    }

    pub(super) fn inject(&mut self, injection: FaultInjection) {
        if self.quiescing {
            return;
        }
        self.schedule_injection(injection);
        match injection {
            FaultInjection::KillEngine => {
                if let Some(engine) = self.random_engine() {
                    self.apply_action(ScenarioAction::KillEngine(engine));
                }
            }
            FaultInjection::HangEngine => {
                if let Some(engine) = self.random_engine() {
                    self.apply_action(ScenarioAction::HangEngine(engine));
                }
            }
            FaultInjection::LoseAccelerator => {
                if let Some(id) = self.random_accelerator() {
                    let back = Millis(self.random.between(1000, 60_000));
                    self.event_queue.schedule(
                        self.now + back,
                        WorldEvent::Action(ScenarioAction::RestoreAccelerator(id.clone())),
                    );
                    self.apply_action(ScenarioAction::LoseAccelerator(id));
                }
            }
            FaultInjection::UseForeignMemory => {
                if let Some(id) = self.random_accelerator() {
                    let free = self.machine.accelerators.get(&id).map_or(Bytes::ZERO, |d| d.capacity);
                    let free = free.saturating_sub(self.machine.used(&id));
                    let takes = Bytes(self.random.between(0, free.0));
                    let back = Millis(self.random.between(1000, 20_000));
                    let end = ScenarioAction::SetForeignMemory(id.clone(), Bytes::ZERO);
                    self.event_queue.schedule(self.now + back, WorldEvent::Action(end));
                    self.apply_action(ScenarioAction::SetForeignMemory(id, takes));
                }
            }
            FaultInjection::ReloadConfig => self.random_reload(),
            FaultInjection::OperatorAction => self.random_operator_action(),
            FaultInjection::RestartGateway => self.apply_action(ScenarioAction::RestartGateway),
            FaultInjection::CloseStubGate => {
                if let Some(engine) = self.random_engine() {
                    // One closing in ten is permanent.
                    if self.random.chance(0.9) {
                        let opens = Millis(self.random.between(1, 20_000));
                        let action = ScenarioAction::SetStubGateClosed(engine.clone(), false);
                        self.event_queue.schedule(self.now + opens, WorldEvent::Action(action));
                    }
                    self.apply_action(ScenarioAction::SetStubGateClosed(engine, true));
                }
            }
        }
    }

    fn random_engine(&mut self) -> Option<EngineId> {
        let engines: Vec<_> = self.machine.processes.keys().cloned().collect();
        self.random.pick(&engines).cloned()
    }

    fn random_accelerator(&mut self) -> Option<AcceleratorId> {
        let ids: Vec<_> = self.machine.accelerators.keys().cloned().collect();
        self.random.pick(&ids).cloned()
    }

    pub(super) fn apply_action(&mut self, action: ScenarioAction) {
        match action {
            ScenarioAction::SendRequest(request) => self.request_arrives(request),
            ScenarioAction::OperatorAction(model, order) => self.submit_operator_action(model, order),
            ScenarioAction::SetTarget(model, variant, replicas) => {
                let reason = "the scenario says so".to_owned();
                self.send_event(Event::Desired { model, variant, replicas, reason });
            }
            ScenarioAction::RefuseNextWake(engine) => {
                if let Some(process) = self.machine.processes.get_mut(&engine) {
                    process.refuse_wake = true;
                }
            }
            ScenarioAction::DelayNextRelease(engine, delay) => {
                if let Some(process) = self.machine.processes.get_mut(&engine) {
                    process.release_delay = Some(delay);
                }
            }
            ScenarioAction::KillEngine(engine) => {
                self.tally.add("fault: engine died");
                self.process_dies(&engine, FailureCause::Killed(9));
            }
            ScenarioAction::HangEngine(engine) => {
                if let Some(process) = self.machine.processes.get_mut(&engine)
                    && process.phase != SimulatedProcessPhase::Exiting
                {
                    self.tally.add("fault: engine hung");
                    process.hung = true;
                }
            }
            ScenarioAction::SetStubGateClosed(engine, closed) => {
                if let Some(process) = self.machine.processes.get_mut(&engine) {
                    process.stub_gate_closed = closed;
                    self.tally.add(if closed {
                        "fault: a stub's gate closed"
                    } else {
                        "a stub's gate opened"
                    });
                }
            }
            ScenarioAction::LoseAccelerator(id) => self.lose_accelerator(id),
            ScenarioAction::RestoreAccelerator(id) => {
                if let Some(device) = self.machine.accelerators.get_mut(&id)
                    && std::mem::take(&mut device.lost)
                {
                    device.recovered_unnoticed = device.metered;
                    if device.recovered_unnoticed {
                        return;
                    }
                    self.send_event(Event::AcceleratorRecovered { accelerator: id });
                }
            }
            ScenarioAction::SetForeignMemory(id, bytes) => {
                let free = self.machine.used(&id);
                if let Some(device) = self.machine.accelerators.get_mut(&id) {
                    let free_for_models = free.saturating_sub(device.foreign_bytes);
                    device.foreign_bytes =
                        Bytes(bytes.0.min(device.capacity.saturating_sub(free_for_models).0));
                    if device.foreign_bytes > Bytes::ZERO {
                        self.tally.add("fault: foreign memory");
                    }
                }
            }
            ScenarioAction::ReloadConfig(configuration) => self.reload(*configuration),
            ScenarioAction::RestartGateway => self.restart_gateway(),
            ScenarioAction::Shutdown { stop_engines } => {
                self.shutdown = true;
                self.send_event(Event::Shutdown { stop_engines });
            }
        }
    }

    fn lose_accelerator(&mut self, id: AcceleratorId) {
        let Some(device) = self.machine.accelerators.get_mut(&id).filter(|d| !d.lost) else {
            return;
        };
        device.lost = true;
        self.tally.add("fault: accelerator lost");
        let engines: Vec<_> = self.machine.processes_on(&id).map(|p| p.engine.clone()).collect();
        self.send_event(Event::AcceleratorLost { accelerator: id });
        for engine in engines {
            if self.random.chance(0.5) {
                self.process_dies(&engine, FailureCause::AcceleratorLost);
            } else if let Some(process) = self.machine.processes.get_mut(&engine) {
                process.hung = true;
            }
        }
    }

    fn submit_operator_action(&mut self, model: ModelName, order: OperatorAction) {
        if self.fleet.validate_action(&model, order).is_err() {
            self.tally.add("operator orders forbidden");
            return;
        }
        self.tally.add("operator orders");
        match order {
            OperatorAction::Pin | OperatorAction::Unpin => {
                self.pins.insert(model.clone(), order == OperatorAction::Pin);
            }
            _ => {}
        }
        self.next_operation += 1;
        let operation = OperationId(self.next_operation);
        self.operations.insert(operation, false);
        self.send_event(Event::OperatorRequest { operation, model, action: order });
    }

    fn random_operator_action(&mut self) {
        let models = self.scenario.configuration.models.clone();
        let Some(spec) = self.random.pick(&models) else {
            return;
        };
        let order = match self.random.between(0, 5) {
            0 => OperatorAction::Wake,
            1 => OperatorAction::Sleep { level: None },
            2 => OperatorAction::Sleep {
                level: Some(if self.random.chance(0.5) { SleepLevel::One } else { SleepLevel::Two }),
            },
            3 => OperatorAction::Stop,
            4 => OperatorAction::Pin,
            _ => OperatorAction::Unpin,
        };
        self.submit_operator_action(spec.name.clone(), order);
    }

    fn random_reload(&mut self) {
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
                let spec = random_scenario::model(&name, size, &next.accelerators, &mut self.random);
                next.models.push(spec);
            }
            2 => {
                if let Some(spec) = next.models.get_mut(which) {
                    spec.replicas = self.random.between(1, 3) as u32;
                }
            }
            3 => {
                if let Some(spec) = next.models.get_mut(which) {
                    spec.fingerprint = self.random.next_u64() >> 1;
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
        if let Some(pool) = next.accelerators.iter_mut().find(|a| a.units.is_some() && a.pool.is_none())
            && self.random.chance(0.5)
        {
            self.tally.add("pools resized");
            let units = self.random.between(0, 8);
            (pool.capacity, pool.units) = (Bytes(each.0 * units), u32::try_from(units).ok());
        }
        self.toggle_fault(&mut next, each);
        self.reload(next);
    }

    /// Half of the time, one of the accelerators with slots becomes faulty, or is well again.
    fn toggle_fault(&mut self, configuration: &mut FleetConfig, capacity: Bytes) {
        let mut with_slots: Vec<_> =
            configuration.accelerators.iter_mut().filter(|a| a.pool.is_some()).collect();
        if with_slots.is_empty() || self.random.chance(0.5) {
            return;
        }
        let which = self.random.between(0, with_slots.len() as u64 - 1) as usize;
        if let Some(accelerator) = with_slots.get_mut(which) {
            let is_well = accelerator.capacity > Bytes::ZERO;
            accelerator.capacity = if is_well { Bytes::ZERO } else { capacity };
            self.tally.add("accelerators with slots that changed their health");
        }
    }

    fn reload(&mut self, configuration: FleetConfig) {
        self.tally.add("reloads");
        self.machine.configure(&configuration.accelerators);
        self.scenario.configuration = configuration.clone();
        self.send_event(Event::Configured { configuration: Box::new(configuration) });
    }

    /// Kills the gateway and starts it again. Clients lose their connections; the engines continue.
    fn restart_gateway(&mut self) {
        self.tally.add("gateway restarts");
        self.finish_interrupted_calls();
        let ids: Vec<_> = self.clients.keys().copied().collect();
        for id in ids {
            match self.clients.get(&id).map(|client| client.state.clone()) {
                Some(SimulatedClientState::Parked(waiter)) => {
                    self.unpark(waiter);
                    self.clients.remove(&id);
                }
                _ => self.end_exchange(id, ExchangeEnd::ClientLeft),
            }
        }
        self.waiters.clear();
        self.parked.clear();
        self.operations.clear();
        self.pins.clear();
        self.inbox.clear();
        // Messages to the dead gateway never arrive; processes and clients continue. Events of ended processes are
        // dropped, too, since the engine's next generation may have the same number.
        let processes = &self.machine.processes;
        self.event_queue.retain(|event| match event {
            WorldEvent::FleetEvent(_)
            | WorldEvent::ProbeCompletes { .. }
            | WorldEvent::PollStubGate { .. }
            | WorldEvent::ReadMeter(_)
            | WorldEvent::ReadAllMeters => false,
            WorldEvent::ProcessStep { engine, generation, .. }
            | WorldEvent::HealthProbe { engine, generation, .. } => {
                processes.get(engine).is_some_and(|process| process.generation == *generation)
            }
            _ => true,
        });
        self.machine.unreported_exits.clear();
        self.machine.reservations.clear();
        let fleet = std::mem::take(&mut self.fleet);
        let of_default = fleet.learned().into_iter();
        let of_default = of_default.map(|(model, learned)| ((model, VariantName::default()), learned));
        let learned: BTreeMap<_, _> = of_default.chain(fleet.learned_of_variants()).collect();
        self.deadline = None;
        self.wakeup_pending = false;
        if let Some(journal) = &mut self.journal {
            journal.push(JournalLine::header(env!("CARGO_PKG_VERSION"), self.now));
        }
        self.adopt(&learned);
    }

    /// Resolves the calls that the gateway's restart interrupted. Sleeps complete, and wakes fall back to asleep.
    /// Exiting processes end, and so do hung processes in other phases than loading and awake.
    fn finish_interrupted_calls(&mut self) {
        let mut awake = Vec::new();
        let mut broken = Vec::new();
        for (engine, process) in &mut self.machine.processes {
            match process.phase {
                SimulatedProcessPhase::FallingAsleep(level) if !process.hung => {
                    process.enter_phase(SimulatedProcessPhase::Asleep(level));
                    process.memory_held = process.residue;
                }
                SimulatedProcessPhase::Waking(level) if !process.hung => {
                    process.enter_phase(SimulatedProcessPhase::Asleep(level));
                    process.memory_held = process.residue;
                }
                SimulatedProcessPhase::Asleep(_) if !process.hung => process.memory_held = process.residue,
                SimulatedProcessPhase::Awake if !process.hung => awake.push(engine.clone()),
                SimulatedProcessPhase::Loading | SimulatedProcessPhase::Awake => {}
                _ => broken.push(engine.clone()),
            }
        }
        for engine in broken {
            self.machine.processes.remove(&engine);
        }
        for engine in awake {
            self.schedule_health_probe(&engine);
        }
    }

    fn adopt(&mut self, learned: &BTreeMap<(ModelName, VariantName), LearnedMeasurements>) {
        let configuration = self.scenario.configuration.clone();
        self.send_event(Event::Configured { configuration: Box::new(configuration) });
        for ((model, variant), learned) in learned {
            let (model, variant) = (model.clone(), variant.clone());
            self.send_event(Event::MeasurementsRestored { model, variant, learned: *learned });
        }
        let mut found = Vec::new();
        // The gates of engines that are gone went with the gateway.
        let gates = std::mem::take(&mut self.gates);
        for (engine, process) in &mut self.machine.processes {
            let booking = super::machine::SimulatedReservation {
                generation: process.generation,
                accelerators: process.accelerators.clone(),
                bytes: match process.phase {
                    // The residue beyond that was not observed before the gateway died.
                    SimulatedProcessPhase::Asleep(_) => {
                        let of_variant = learned.get(&(engine.model.clone(), engine.variant.clone()));
                        let learned_residue = of_variant.and_then(|l| l.residue).unwrap_or_default();
                        let learned_residue = process.spec.accelerators.bytes_per_account(learned_residue);
                        process.spec.memory.asleep.max(learned_residue).min(process.spec.memory.awake)
                    }
                    _ => process.spec.memory.awake,
                },
                units: process.spec.accelerators.units().unwrap_or(1),
                confirmed: true,
            };
            process.adopted_bytes =
                matches!(process.phase, SimulatedProcessPhase::Asleep(_)).then_some(booking.bytes);
            self.machine.reservations.insert(engine.clone(), booking);
            let mut gate = SimulatedGate::new(process.generation, process.spec.max_concurrency);
            let old = gates.get(engine);
            gate.last_lease_end = old.map_or(Tick(0), |gate| gate.last_lease_end);
            let last_end = gate.last_lease_end;
            self.gates.insert(engine.clone(), gate);
            found.push(Event::Adopted {
                engine: engine.clone(),
                generation: process.generation,
                found: AdoptedEngine {
                    address: std::net::SocketAddr::from(([127, 0, 0, 1], 40_000)),
                    accelerators: process.accelerators.clone(),
                    asleep: match process.phase {
                        SimulatedProcessPhase::Asleep(level) => Some(level),
                        _ => None,
                    },
                    ready: match process.phase {
                        SimulatedProcessPhase::Asleep(_) => true,
                        phase => phase == SimulatedProcessPhase::Awake && !process.hung,
                    },
                    fingerprint: process.spec.fingerprint,
                    last_lease_end: last_end,
                    started: process.started,
                },
            });
        }
        for event in found {
            self.tally.add("engines adopted");
            self.send_event(event);
        }
        for (id, device) in self.machine.accelerators.clone() {
            if device.lost {
                self.send_event(Event::AcceleratorLost { accelerator: id });
            }
        }
        self.send_event(Event::AdoptionDone);
        self.read_all_meters();
    }

    /// Reads a meter.
    pub(super) fn read_meter(&mut self, id: &AcceleratorId) {
        let Some(device) = self.machine.accelerators.get_mut(id) else {
            return;
        };
        if device.lost || !device.metered {
            return;
        }
        if std::mem::take(&mut device.recovered_unnoticed) {
            self.send_event(Event::AcceleratorRecovered { accelerator: id.clone() });
        }
        let by_engine = self.scenario.hardware.meter_per_process.then(|| self.machine.reading_by_engine(id));
        self.send_event(Event::MeterRead { accelerator: id.clone(), used: self.machine.used(id), by_engine });
    }

    pub(super) fn read_all_meters(&mut self) {
        let ids: Vec<_> = self.machine.accelerators.keys().cloned().collect();
        for id in &ids {
            self.read_meter(id);
        }
        if let Some(period) = self.scenario.hardware.meter_period {
            self.event_queue.schedule(self.now + period, WorldEvent::ReadAllMeters);
        }
    }

    /// Ends demand and faults. Broken engines stay broken until the fleet handles them.
    pub(super) fn stop_demand_and_faults(&mut self) {
        self.quiescing = true;
        self.scenario.fault_rates = super::FaultRates::default();
        self.event_queue.retain(|event| {
            !matches!(
                event,
                WorldEvent::RequestArrives(_) | WorldEvent::SourceDue(_) | WorldEvent::InjectFault(_)
            )
        });
    }
}
