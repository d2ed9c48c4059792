//! What is physically true of engines, whoever leads.

use rouse::{
    fault::Cause,
    fleet::event::{Event, Verdict},
    model::EngineId,
    units::{Bytes, Generation, Millis, Tick},
};

use super::{Lease, Phase, Process, World, address};

impl World {
    pub(super) fn die(&mut self) {
        let engines: Vec<EngineId> = self.processes.keys().cloned().collect();
        let Some(engine) = self.random.pick(&engines).cloned() else { return };
        self.count("processes died");
        self.gone(&engine, Cause::Killed(9));
    }

    /// With it the connections of all that use it break.
    pub(super) fn gone(&mut self, engine: &EngineId, cause: Cause) {
        let Some(process) = self.processes.remove(engine) else { return };
        let generation = process.generation;
        self.end_leases(|lease| lease.engine == *engine && lease.generation == generation);
        self.outcome(Event::Gone { engine: engine.clone(), generation, cause });
    }

    /// Only a leader that knows what runs hears of it; one that does not yet will find out.
    pub(super) fn outcome(&mut self, event: Event) {
        if self.adopts_at.is_none() {
            self.tell(self.leader, event);
        }
    }

    pub(super) fn end_leases(&mut self, which: impl Fn(&Lease) -> bool) {
        let (over, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.leases).into_iter().partition(which);
        self.leases = left;
        for lease in over {
            let gateway = &mut self.gateways[lease.gateway];
            if let Some(gate) = gateway.gates.get_mut(&lease.engine)
                && gate.generation == lease.generation
            {
                gate.last_end = self.now;
            }
            if lease.canary {
                // Its last byte proves as much as its first.
                let (engine, generation, verdict) = (lease.engine, lease.generation, Verdict::Passed);
                gateway.inbox.push(Event::Canary { engine, generation, verdict });
            }
        }
    }

    pub(super) fn move_processes(&mut self) {
        let due: Vec<EngineId> = self
            .processes
            .iter()
            .filter(|(_, process)| process.due.is_some_and(|at| at <= self.now))
            .map(|(engine, _)| engine.clone())
            .collect();
        for engine in due {
            self.move_process(engine);
        }
    }

    pub(super) fn move_process(&mut self, engine: EngineId) {
        let next = self.now + Millis(self.random.between(10, 1500));
        let Some(process) = self.processes.get_mut(&engine) else { return };
        let generation = process.generation;
        process.due = None;
        let event = match process.phase {
            Phase::Launching => {
                (process.phase, process.due) = (Phase::Loading, Some(next));
                Event::Started { engine, generation, address: address() }
            }
            Phase::Loading | Phase::Waking => {
                process.phase = Phase::Up;
                Event::Ready { engine, generation }
            }
            Phase::FallingAsleep(level) => {
                (process.phase, process.small) = (Phase::Asleep(level), true);
                Event::Slept { engine, generation, level }
            }
            Phase::Stopping => return self.gone(&engine, Cause::Stopped),
            Phase::Up | Phase::Asleep(_) => return,
        };
        self.outcome(event);
    }

    pub(super) fn process(&mut self, engine: &EngineId, generation: Generation) -> Option<&mut Process> {
        self.processes.get_mut(engine).filter(|process| process.generation == generation)
    }

    pub(super) fn enter(&mut self, engine: &EngineId, generation: Generation, phase: Phase, due: Tick) {
        // It may have just died, and the leader has not heard.
        if let Some(process) = self.process(engine, generation) {
            process.small &= phase != Phase::Waking;
            (process.phase, process.due) = (phase, Some(due));
        }
    }

    pub(super) fn stop(&mut self, engine: EngineId, generation: Generation, soon: Tick) {
        let Some(phase) = self.process(&engine, generation).map(|process| process.phase) else {
            return self.outcome(Event::Gone { engine, generation, cause: Cause::Stopped });
        };
        if phase == Phase::Up {
            self.check_unused(&engine, generation, "stopped");
        }
        self.enter(&engine, generation, Phase::Stopping, soon);
    }

    pub(super) fn check_unused(&mut self, engine: &EngineId, generation: Generation, what: &str) {
        let used = self.leases.iter().filter(|l| l.engine == *engine && l.generation == generation).count();
        if used > 0 {
            self.violation(format!("{engine} is {what} with {used} leases"));
        }
    }

    pub(super) fn check_memory(&mut self, engine: &EngineId) {
        let Some(process) = self.processes.get(engine) else { return };
        for accelerator in process.accelerators.clone() {
            let on = self.processes.iter().filter(|(_, p)| p.accelerators.contains(&accelerator));
            let takes = |(engine, process): (&EngineId, &Process)| {
                let spec = self.configuration.models.iter().find(|m| m.name == engine.model);
                let memory = spec.expect("it is configured").memory;
                if process.small { memory.asleep } else { memory.awake }
            };
            let used: Bytes = on.map(takes).sum();
            if used > Bytes::gib(24) {
                self.violation(format!("{engine} makes it {used} on {accelerator}: {:?}", self.processes));
            }
        }
    }
}
