//! One simulated engine process: its phases, its memory over time, its end.

use super::{
    client::End,
    machine::OutOfMemory,
    world::{Happening, World},
};
use crate::{
    fault::Cause,
    fleet::event::Event,
    model::{AcceleratorId, EngineId, Level, ModelSpec},
    units::{Bytes, Generation, Millis, Tick},
};

#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) engine: EngineId,
    pub(super) generation: Generation,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) phase: Phase,
    /// Grows with every phase: what was planned for an earlier one no longer happens.
    pub(super) serial: u32,
    /// On each of its accelerators.
    pub(super) held: Bytes,
    /// As configured when it was launched, with the memory that it takes in one place.
    pub(super) spec: ModelSpec,
    /// What an asleep engine really keeps.
    pub(super) residue: Bytes,
    pub(super) started: Tick,
    /// Answers nothing and does nothing.
    pub(super) hung: bool,
    /// Health answers, requests fail.
    pub(super) corrupt: bool,
    pub(super) ignores_term: bool,
    /// The stub in front of it lets nobody in.
    pub(super) gated: bool,
    /// The next wake is refused, or the next sleep late, by a scenario's order.
    pub(super) refuse_wake: bool,
    pub(super) late: Option<Millis>,
    /// It took the last order to sleep and stayed awake.
    pub(super) denied: bool,
    /// Bytes that a gateway booked which found the process asleep at its start. The process may keep more, which that gateway has not
    /// seen.
    pub(super) adopted_with: Option<Bytes>,
    /// It measures free memory at its start, and the fleet has not been told that this is over.
    pub(super) profiling: bool,
    /// The devices' counts when it began to measure.
    pub(super) measured_from: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Loading,
    Awake,
    FallingAsleep(Level),
    Asleep(Level),
    Waking(Level),
    Exiting,
}

/// What happens to a process by itself, once it has been set going.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Spawned,
    Weights,
    Cache,
    Ready,
    Fails(Cause),
    Exits(Cause),
    /// The kernel ends it, whatever it does.
    Killed,
    Slept,
    SleepFails(Cause),
    Freed,
    WokenWeights,
    Woken,
    WakeRefused,
}

impl Process {
    /// Weights are what is loaded first; the rest is the cache.
    const fn weights(&self) -> Bytes {
        Bytes(self.spec.memory.awake.0 / 10 * 6)
    }

    /// Host memory it keeps its weights in while it sleeps at level 1.
    pub(super) fn host(&self) -> Bytes {
        Bytes(self.spec.memory.host.0 * self.accelerators.len() as u64)
    }

    /// It holds all that it will.
    pub(super) fn has_taken(&self) -> bool {
        self.held >= self.spec.memory.awake
    }

    pub(super) const fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.serial += 1;
    }
}

impl World {
    pub(super) fn plan_step(&mut self, engine: &EngineId, after: Millis, step: Step) {
        let Some(process) = self.machine.processes.get(engine) else {
            return;
        };
        let happening = Happening::Process {
            engine: engine.clone(),
            generation: process.generation,
            serial: process.serial,
            step,
        };
        self.agenda.add(self.now + after, happening);
    }

    pub(super) fn process_step(&mut self, engine: EngineId, generation: Generation, serial: u32, step: Step) {
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        if process.serial != serial {
            return;
        }
        // A hung process goes on only by being killed.
        if process.hung && !matches!(step, Step::Killed | Step::Freed | Step::Spawned) {
            return;
        }
        match step {
            Step::Spawned => self.spawned(engine, generation),
            Step::Weights => {
                let (weights, measured_from) = (process.weights(), self.machine.taken(&engine));
                if self.allocate(&engine, weights)
                    && let Some(p) = self.machine.process(&engine, generation)
                {
                    p.measured_from = measured_from + p.accelerators.len() as u64;
                }
            }
            Step::Cache => self.cached(engine, generation),
            Step::Ready => {
                process.enter(Phase::Awake);
                self.watch(&engine);
                self.tell(Event::Ready { engine, generation });
            }
            Step::Fails(cause) => {
                process.hung = true;
                process.profiling = false;
                self.tell(Event::StartFailed { engine, generation, cause });
            }
            Step::Exits(cause) => self.die(&engine, cause),
            Step::Killed => self.die(&engine, Cause::Stopped),
            Step::Slept => self.slept(engine, generation),
            Step::SleepFails(cause) => {
                process.enter(Phase::Awake);
                process.denied = cause == Cause::StaysAwake;
                self.watch(&engine);
                self.tell(Event::SleepFailed { engine, generation, cause });
            }
            Step::Freed => process.held = process.residue,
            Step::WokenWeights => {
                let weights = process.weights();
                let _ = self.allocate(&engine, weights);
            }
            Step::Woken => {
                let awake = process.spec.memory.awake;
                if self.allocate(&engine, awake)
                    && let Some(p) = self.machine.process(&engine, generation)
                {
                    p.enter(Phase::Awake);
                    self.watch(&engine);
                    self.tell(Event::Ready { engine, generation });
                }
            }
            Step::WakeRefused => {
                if let Phase::Waking(level) = process.phase {
                    process.enter(Phase::Asleep(level));
                }
                self.tell(Event::WakeFailed { engine, generation, cause: Cause::Refused });
            }
        }
    }

    fn spawned(&mut self, engine: EngineId, generation: Generation) {
        let explicit = self.machine.process(&engine, generation).is_some_and(|p| !p.spec.measures());
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 40_000));
        self.tell(Event::Started { engine: engine.clone(), generation, address });
        if explicit {
            self.tell(Event::Profiled { engine, generation });
        }
    }

    /// The cache is taken from what was measured free, which is wrong when somebody else took memory meanwhile.
    fn cached(&mut self, engine: EngineId, generation: Generation) {
        let taken = self.machine.taken(&engine);
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        let (awake, explicit, from) =
            (process.spec.memory.awake, !process.spec.measures(), process.measured_from);
        if !explicit && taken != from {
            self.violation(format!("{engine} measured free memory while another engine took some"));
        }
        if self.allocate(&engine, awake) && !explicit {
            self.tell(Event::Profiled { engine, generation });
        }
    }

    /// False when the process died of it.
    fn allocate(&mut self, engine: &EngineId, bytes: Bytes) -> bool {
        match self.machine.hold(engine, bytes) {
            Ok(()) => true,
            Err(OutOfMemory { accelerator, excused }) => {
                if excused || self.excess {
                    self.tally.add("excused out-of-memory");
                } else {
                    let holders: Vec<_> = self
                        .machine
                        .on(&accelerator)
                        .map(|p| format!("{} {:?} {}", p.engine, p.phase, p.held))
                        .collect();
                    self.violation(format!(
                        "out of memory: {engine} wants {bytes} on {accelerator}, which has {}",
                        holders.join(", ")
                    ));
                }
                self.die(engine, Cause::OutOfMemory);
                false
            }
        }
    }

    fn slept(&mut self, engine: EngineId, generation: Generation) {
        let late = self.random.chance(self.scenario.faults.late_memory);
        let freeing = self.draw(self.scenario.nature.freeing);
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        let Phase::FallingAsleep(level) = process.phase else {
            return;
        };
        process.enter(Phase::Asleep(level));
        let (ordered, accelerators) = (process.late.take(), process.accelerators.clone());
        let freeing = if !self.machine.metered(&accelerators) {
            // Nobody could see it late: there a confirmed sleep counts.
            None
        } else if let Some(late) = ordered {
            self.tally.add("fault: late memory");
            Some(late)
        } else if late {
            self.tally.add("fault: late memory");
            Some(Millis(self.random.between(100, 5000)))
        } else {
            Some(freeing)
        };
        if let Some(after) = freeing {
            self.plan_step(&engine, after, Step::Freed);
        } else if let Some(process) = self.machine.process(&engine, generation) {
            process.held = process.residue;
        }
        self.tell(Event::Slept { engine, generation, level });
    }

    /// The process is gone, with its memory and everybody's exchange on it.
    pub(super) fn die(&mut self, engine: &EngineId, cause: Cause) {
        let Some(process) = self.machine.processes.remove(engine) else {
            return;
        };
        let generation = process.generation;
        self.machine.going.insert((engine.clone(), generation));
        let gone = Event::Gone { engine: engine.clone(), generation, cause };
        // Seen at once, or a little after the first broken connection.
        let after = Millis(self.random.between(0, 3));
        self.agenda.add(self.now + after, Happening::Tell(gone));
        for client in self.holders(engine, generation) {
            self.end_exchange(client, End::Broken);
        }
    }

    /// Begins the probes of an engine that is awake.
    pub(super) fn watch(&mut self, engine: &EngineId) {
        if let Some(process) = self.machine.processes.get(engine) {
            let happening = Happening::Health {
                engine: engine.clone(),
                generation: process.generation,
                serial: process.serial,
            };
            self.agenda.add(self.now + self.scenario.nature.health, happening);
        }
    }

    pub(super) fn health(&mut self, engine: EngineId, generation: Generation, serial: u32) {
        let leases = self.leases(&engine, generation);
        let Some(process) = self.machine.process(&engine, generation) else {
            return;
        };
        if process.serial != serial || process.phase != Phase::Awake {
            return;
        }
        let (ok, gated) = (!process.hung, process.gated);
        self.watch(&engine);
        if gated {
            return self.tell(Event::Gated { engine, generation });
        }
        self.tell(Event::Health { engine, generation, ok, progressed: ok && leases > 0 });
    }
}
