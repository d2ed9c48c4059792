//! Begins a world, and strikes it at random moments: faults, operator actions, changed configurations.

use super::{
    scenario::{FaultRates, ScenarioAction, random_scenario},
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    fleet::event::{Event, OperatorAction},
    model::{AcceleratorId, EngineId, FleetConfig, SleepLevel},
    units::{Bytes, Millis},
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

    /// Ends demand and faults. Broken engines stay broken until the fleet handles them.
    pub(super) fn stop_demand_and_faults(&mut self) {
        self.quiescing = true;
        self.scenario.fault_rates = FaultRates::default();
        self.event_queue.retain(|event| {
            !matches!(
                event,
                WorldEvent::RequestArrives(_) | WorldEvent::SourceDue(_) | WorldEvent::InjectFault(_)
            )
        });
    }
}
