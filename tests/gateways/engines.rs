//! The physical state of engines, whichever gateway leads.

use rouse::{
    fault::FailureCause,
    fleet::event::{CanaryVerdict, Event},
    model::EngineId,
    units::{Bytes, Generation, Millis, Tick},
};

use super::{FakeLease, FakeProcess, FakeProcessPhase, MultiGatewayHarness, address};

impl MultiGatewayHarness {
    pub(super) fn kill_random_process(&mut self) {
        let engines: Vec<EngineId> = self.processes.keys().cloned().collect();
        let Some(engine) = self.random.pick(&engines).cloned() else { return };
        self.count("processes died");
        self.end_process(&engine, FailureCause::Killed(9));
    }

    /// Ends a process, which breaks all connections to it.
    pub(super) fn end_process(&mut self, engine: &EngineId, cause: FailureCause) {
        let Some(process) = self.processes.remove(engine) else { return };
        let generation = process.generation;
        self.end_leases(|lease| lease.engine == *engine && lease.generation == generation);
        self.report_outcome(Event::Gone { engine: engine.clone(), generation, cause });
    }

    /// Reports to a leader that has adopted the running engines. A leader before its adoption finds out by itself.
    pub(super) fn report_outcome(&mut self, event: Event) {
        if self.adopts_at.is_none() {
            self.send(self.leader, event);
        }
    }

    pub(super) fn end_leases(&mut self, which: impl Fn(&FakeLease) -> bool) {
        let (over, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.leases).into_iter().partition(which);
        self.leases = left;
        for lease in over {
            let gateway = &mut self.gateways[lease.gateway];
            if let Some(gate) = gateway.gates.get_mut(&lease.engine)
                && gate.generation == lease.generation
            {
                gate.last_lease_end = self.now;
            }
            if lease.canary {
                // The last byte proves as much as the first.
                let (engine, generation, verdict) = (lease.engine, lease.generation, CanaryVerdict::Passed);
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
            FakeProcessPhase::Launching => {
                (process.phase, process.due) = (FakeProcessPhase::Loading, Some(next));
                Event::Started { engine, generation, address: address() }
            }
            FakeProcessPhase::Loading | FakeProcessPhase::Waking => {
                process.phase = FakeProcessPhase::Up;
                Event::Ready { engine, generation }
            }
            FakeProcessPhase::FallingAsleep(level) => {
                (process.phase, process.memory_released) = (FakeProcessPhase::Asleep(level), true);
                Event::Slept { engine, generation, level }
            }
            FakeProcessPhase::Stopping => return self.end_process(&engine, FailureCause::Stopped),
            FakeProcessPhase::Up | FakeProcessPhase::Asleep(_) => return,
        };
        self.report_outcome(event);
    }

    pub(super) fn process(&mut self, engine: &EngineId, generation: Generation) -> Option<&mut FakeProcess> {
        self.processes.get_mut(engine).filter(|process| process.generation == generation)
    }

    pub(super) fn set_phase(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        phase: FakeProcessPhase,
        due: Tick,
    ) {
        // The engine may have just died without the leader's knowledge.
        if let Some(process) = self.process(engine, generation) {
            process.memory_released &= phase != FakeProcessPhase::Waking;
            (process.phase, process.due) = (phase, Some(due));
        }
    }

    pub(super) fn stop(&mut self, engine: EngineId, generation: Generation, soon: Tick) {
        let Some(phase) = self.process(&engine, generation).map(|process| process.phase) else {
            return self.report_outcome(Event::Gone { engine, generation, cause: FailureCause::Stopped });
        };
        if phase == FakeProcessPhase::Up {
            self.check_unused(&engine, generation, "stopped");
        }
        self.set_phase(&engine, generation, FakeProcessPhase::Stopping, soon);
    }

    pub(super) fn check_unused(&mut self, engine: &EngineId, generation: Generation, action: &str) {
        let used = self.leases.iter().filter(|l| l.engine == *engine && l.generation == generation).count();
        if used > 0 {
            self.violation(format!("{engine} is {action} with {used} leases"));
        }
    }

    pub(super) fn check_memory(&mut self, engine: &EngineId) {
        let Some(process) = self.processes.get(engine) else { return };
        for accelerator in process.accelerators.clone() {
            let on = self.processes.iter().filter(|(_, p)| p.accelerators.contains(&accelerator));
            let takes = |(engine, process): (&EngineId, &FakeProcess)| {
                let spec = self.configuration.models.iter().find(|m| m.name == engine.model);
                let memory = spec.expect("it is configured").memory;
                if process.memory_released { memory.asleep } else { memory.awake }
            };
            let used: Bytes = on.map(takes).sum();
            if used > Bytes::gib(24) {
                self.violation(format!("{engine} makes it {used} on {accelerator}: {:?}", self.processes));
            }
        }
    }
}
