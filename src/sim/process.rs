//! One simulated engine process: its phases, its memory over time, its end.

use super::{
    client::ExchangeEnd,
    machine::OutOfMemory,
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    fault::FailureCause,
    fleet::event::Event,
    model::{AcceleratorId, EngineId, ModelSpec, SleepLevel},
    units::{Bytes, Generation, Millis, Tick},
};

#[derive(Clone, Debug)]
pub(super) struct SimulatedProcess {
    pub(super) engine: EngineId,
    pub(super) generation: Generation,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) phase: SimulatedProcessPhase,
    /// Grows with every phase and so invalidates events scheduled for an earlier phase.
    pub(super) serial: u32,
    /// Memory held on each of its accelerators.
    pub(super) memory_held: Bytes,
    /// The model as configured at the launch; memory counts all of its accelerators in a pool as one sum.
    pub(super) spec: ModelSpec,
    /// Memory that it really keeps asleep.
    pub(super) residue: Bytes,
    pub(super) started: Tick,
    /// The process neither answers nor makes progress.
    pub(super) hung: bool,
    /// Health checks pass, requests fail.
    pub(super) corrupt: bool,
    pub(super) ignores_term: bool,
    /// The gate of its stub is closed.
    pub(super) stub_gate_closed: bool,
    /// The next wake is refused, or the next sleep releases its memory late, as a scenario ordered.
    pub(super) refuse_wake: bool,
    pub(super) release_delay: Option<Millis>,
    /// The process accepted the last sleep command and stayed awake.
    pub(super) sleep_denied: bool,
    /// Bytes that a restarted gateway reserved for this process, which it found asleep. The process may keep more,
    /// unseen by that gateway.
    pub(super) adopted_bytes: Option<Bytes>,
    /// The process measures free memory at its start, and the fleet has not received its end.
    pub(super) profiling: bool,
    /// Sum of its accelerators' allocation counts when it began to measure.
    pub(super) allocations_at_profiling_start: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimulatedProcessPhase {
    Loading,
    Awake,
    FallingAsleep(SleepLevel),
    Asleep(SleepLevel),
    Waking(SleepLevel),
    Exiting,
}

/// Steps that a process takes by itself once scheduled.
#[derive(Clone, Debug)]
pub(super) enum ProcessStep {
    Spawned,
    WeightsLoaded,
    CacheAllocated,
    Ready,
    StartFails(FailureCause),
    Exits(FailureCause),
    /// The kernel ends the process in any state.
    Killed,
    Slept,
    SleepFails(FailureCause),
    MemoryFreed,
    WakeWeightsLoaded,
    Woken,
    WakeRefused,
}

impl SimulatedProcess {
    /// Weights are loaded first; the rest is the cache.
    const fn weight_bytes(&self) -> Bytes {
        Bytes(self.spec.memory.awake.0 / 10 * 6)
    }

    /// Host memory for its weights while it sleeps at level 1.
    pub(super) fn host_bytes(&self) -> Bytes {
        Bytes(self.spec.memory.host.0 * self.accelerators.len() as u64)
    }

    /// Whether it holds its full memory.
    pub(super) fn has_full_memory(&self) -> bool {
        self.memory_held >= self.spec.memory.awake
    }

    pub(super) const fn enter_phase(&mut self, phase: SimulatedProcessPhase) {
        self.phase = phase;
        self.serial += 1;
    }
}

impl SimulatedWorld {
    pub(super) fn schedule_step(&mut self, engine: &EngineId, after: Millis, step: ProcessStep) {
        let Some(process) = self.machine.processes.get(engine) else {
            return;
        };
        let step_event = WorldEvent::ProcessStep {
            engine: engine.clone(),
            generation: process.generation,
            serial: process.serial,
            step,
        };
        self.event_queue.schedule(self.now + after, step_event);
    }

    pub(super) fn run_process_step(
        &mut self,
        engine: EngineId,
        generation: Generation,
        serial: u32,
        step: ProcessStep,
    ) {
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        if process.serial != serial {
            return;
        }
        // A hung process can only be killed.
        if process.hung
            && !matches!(step, ProcessStep::Killed | ProcessStep::MemoryFreed | ProcessStep::Spawned)
        {
            return;
        }
        match step {
            ProcessStep::Spawned => self.process_spawned(engine, generation),
            ProcessStep::WeightsLoaded => {
                let (weights, measured_from) =
                    (process.weight_bytes(), self.machine.allocation_count(&engine));
                if self.allocate(&engine, weights)
                    && let Some(p) = self.machine.process(&engine, generation)
                {
                    p.allocations_at_profiling_start = measured_from + p.accelerators.len() as u64;
                }
            }
            ProcessStep::CacheAllocated => self.cache_allocated(engine, generation),
            ProcessStep::Ready => {
                process.enter_phase(SimulatedProcessPhase::Awake);
                self.schedule_health_probe(&engine);
                self.send_event(Event::Ready { engine, generation });
            }
            ProcessStep::StartFails(cause) => {
                process.hung = true;
                process.profiling = false;
                self.send_event(Event::StartFailed { engine, generation, cause });
            }
            ProcessStep::Exits(cause) => self.process_dies(&engine, cause),
            ProcessStep::Killed => self.process_dies(&engine, FailureCause::Stopped),
            ProcessStep::Slept => self.process_slept(engine, generation),
            ProcessStep::SleepFails(cause) => {
                process.enter_phase(SimulatedProcessPhase::Awake);
                process.sleep_denied = cause == FailureCause::SleepDenied;
                self.schedule_health_probe(&engine);
                self.send_event(Event::SleepFailed { engine, generation, cause });
            }
            ProcessStep::MemoryFreed => process.memory_held = process.residue,
            ProcessStep::WakeWeightsLoaded => {
                let weights = process.weight_bytes();
                let _ = self.allocate(&engine, weights);
            }
            ProcessStep::Woken => {
                let awake = process.spec.memory.awake;
                if self.allocate(&engine, awake)
                    && let Some(p) = self.machine.process(&engine, generation)
                {
                    p.enter_phase(SimulatedProcessPhase::Awake);
                    self.schedule_health_probe(&engine);
                    self.send_event(Event::Ready { engine, generation });
                }
            }
            ProcessStep::WakeRefused => {
                if let SimulatedProcessPhase::Waking(level) = process.phase {
                    process.enter_phase(SimulatedProcessPhase::Asleep(level));
                }
                self.send_event(Event::WakeFailed { engine, generation, cause: FailureCause::Refused });
            }
        }
    }

    fn process_spawned(&mut self, engine: EngineId, generation: Generation) {
        let explicit = self.machine.process(&engine, generation).is_some_and(|p| !p.spec.profiles_memory());
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 40_000));
        self.send_event(Event::Started { engine: engine.clone(), generation, address });
        if explicit {
            self.send_event(Event::Profiled { engine, generation });
        }
    }

    /// Allocates the cache from the memory measured free. The measurement is wrong if another engine allocated memory
    /// meanwhile.
    fn cache_allocated(&mut self, engine: EngineId, generation: Generation) {
        let allocations = self.machine.allocation_count(&engine);
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        let (awake, explicit, from) = (
            process.spec.memory.awake,
            !process.spec.profiles_memory(),
            process.allocations_at_profiling_start,
        );
        if !explicit && allocations != from {
            self.record_violation(format!("{engine} measured free memory while another engine allocated"));
        }
        if self.allocate(&engine, awake) && !explicit {
            self.send_event(Event::Profiled { engine, generation });
        }
    }

    /// Returns false if the process died of it.
    fn allocate(&mut self, engine: &EngineId, bytes: Bytes) -> bool {
        match self.machine.set_memory(engine, bytes) {
            Ok(()) => true,
            Err(OutOfMemory { accelerator, excused }) => {
                if excused {
                    self.tally.add("excused out-of-memory");
                } else {
                    let holders: Vec<_> = self
                        .machine
                        .processes_on(&accelerator)
                        .map(|p| format!("{} {:?} {}", p.engine, p.phase, p.memory_held))
                        .collect();
                    self.record_violation(format!(
                        "out of memory: {engine} wants {bytes} on {accelerator}, which has {}",
                        holders.join(", ")
                    ));
                }
                self.process_dies(engine, FailureCause::OutOfMemory);
                false
            }
        }
    }

    fn process_slept(&mut self, engine: EngineId, generation: Generation) {
        let is_late = self.random.chance(self.scenario.fault_rates.late_memory);
        let freeing = self.random_duration(self.scenario.hardware.release_time);
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        let SimulatedProcessPhase::FallingAsleep(level) = process.phase else {
            return;
        };
        process.enter_phase(SimulatedProcessPhase::Asleep(level));
        let (ordered, accelerators) = (process.release_delay.take(), process.accelerators.clone());
        let freeing = if !self.machine.are_metered(&accelerators) {
            // Without a meter, late memory is invisible: a confirmed sleep counts.
            None
        } else if let Some(delay) = ordered {
            self.tally.add("fault: late memory");
            Some(delay)
        } else if is_late {
            self.tally.add("fault: late memory");
            Some(Millis(self.random.between(100, 5000)))
        } else {
            Some(freeing)
        };
        if let Some(after) = freeing {
            self.schedule_step(&engine, after, ProcessStep::MemoryFreed);
        } else if let Some(process) = self.machine.process(&engine, generation) {
            process.memory_held = process.residue;
        }
        self.send_event(Event::Slept { engine, generation, level });
    }

    /// Removes the process with its memory, and ends every exchange on it.
    pub(super) fn process_dies(&mut self, engine: &EngineId, cause: FailureCause) {
        let Some(process) = self.machine.processes.remove(engine) else {
            return;
        };
        let generation = process.generation;
        self.machine.unreported_exits.insert((engine.clone(), generation));
        let gone = Event::Gone { engine: engine.clone(), generation, cause };
        // The exit is seen at once, or shortly after the first broken connection.
        let after = Millis(self.random.between(0, 3));
        self.event_queue.schedule(self.now + after, WorldEvent::FleetEvent(gone));
        for client in self.lease_holders(engine, generation) {
            self.end_exchange(client, ExchangeEnd::EngineFailed);
        }
    }

    /// Schedules the next health probe of an awake engine.
    pub(super) fn schedule_health_probe(&mut self, engine: &EngineId) {
        if let Some(process) = self.machine.processes.get(engine) {
            let probe_event = WorldEvent::HealthProbe {
                engine: engine.clone(),
                generation: process.generation,
                serial: process.serial,
            };
            self.event_queue.schedule(self.now + self.scenario.hardware.health_interval, probe_event);
        }
    }

    pub(super) fn health_probe(&mut self, engine: EngineId, generation: Generation, serial: u32) {
        let leases = self.lease_count(&engine, generation);
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        if process.serial != serial || process.phase != SimulatedProcessPhase::Awake {
            return;
        }
        let (ok, gated) = (!process.hung, process.stub_gate_closed);
        self.schedule_health_probe(&engine);
        if gated {
            return self.send_event(Event::StubGateClosed { engine, generation });
        }
        self.send_event(Event::Health { engine, generation, ok, progressed: ok && leases > 0 });
    }
}
