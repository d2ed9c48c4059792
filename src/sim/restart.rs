//! Restarts the simulated gateway, which then adopts the engines that run.

use std::{collections::BTreeMap, net::SocketAddr};

use super::{
    client::{ExchangeEnd, SimulatedClientState},
    gate::SimulatedGate,
    machine::SimulatedReservation,
    process::SimulatedProcessPhase,
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    fleet::event::{AdoptedEngine, Event, LearnedMeasurements},
    journal::JournalLine,
    model::{ModelName, VariantName},
    units::Tick,
};

impl SimulatedWorld {
    /// Kills the gateway and starts it again. Clients lose their connections; the engines continue.
    pub(super) fn restart_gateway(&mut self) {
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
        let core = std::mem::take(&mut self.core);
        let fleet = core.fleet();
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
        self.routes.clear();
        for (engine, process) in &mut self.machine.processes {
            let booking = SimulatedReservation {
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
                    address: SocketAddr::from(([127, 0, 0, 1], 40_000)),
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
}
