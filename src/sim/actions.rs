//! Applies scripted, random and operator actions to the world, and reads its meters.

use super::{
    process::SimulatedProcessPhase,
    scenario::ScenarioAction,
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    fault::FailureCause,
    fleet::event::{Event, OperationId, OperatorAction},
    model::{AcceleratorId, FleetConfig, ModelName},
    units::Bytes,
};

impl SimulatedWorld {
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

    pub(super) fn submit_operator_action(&mut self, model: ModelName, order: OperatorAction) {
        if self.core.validate_action(&model, order).is_err() {
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

    pub(super) fn reload(&mut self, configuration: FleetConfig) {
        self.tally.add("reloads");
        self.machine.configure(&configuration.accelerators);
        self.scenario.configuration = configuration.clone();
        self.send_event(Event::Configured { configuration: Box::new(configuration) });
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
}
