//! The end of a simulated world: demand and faults stop, and nothing may be left over.

use crate::{
    driver::UnsettledWork,
    sim::{
        process::SimulatedProcessPhase,
        scenario::ScenarioAction,
        world::{InvariantViolation, SimulatedWorld},
    },
    units::Millis,
};

/// Limit on the turns until the world is at rest.
const MAX_QUIESCENCE_TURNS: u32 = 50_000;

impl SimulatedWorld {
    /// Stops demand and faults, and checks that the world comes to rest in time.
    pub(in crate::sim) fn run_until_quiescent(&mut self) -> Result<(), InvariantViolation> {
        self.stop_demand_and_faults();
        let end = self.now + self.quiescence_timeout();
        let mut steps = 0;
        while self.step_until(end)? {
            steps += 1;
            if steps > MAX_QUIESCENCE_TURNS {
                let work = "turns since the end of all demand";
                let work = UnsettledWork::new(work, MAX_QUIESCENCE_TURNS, &self.last_events, &[]);
                self.record_violation(format!("the world does not become quiescent: {work}"));
                break;
            }
        }
        self.check_quiescent();
        // One more turn raises the violations found.
        self.wakeup_pending = true;
        self.step().map(|_| ())
    }

    /// Shuts the gateway down: every waiter is refused, every lease ends, and engines stop or stay.
    pub(in crate::sim) fn run_shutdown(&mut self) -> Result<(), InvariantViolation> {
        self.stop_demand_and_faults();
        let stop_engines = self.random.chance(0.5);
        self.tally.add("shutdowns");
        self.apply_action(ScenarioAction::Shutdown { stop_engines });
        let end = self.now + Millis::secs(120);
        // A loop of turns at one moment is a violation, so this ends.
        while self.step_until(end)? {}
        self.now = end;
        if !self.core.fleet().is_finished() {
            self.record_violation("the shutdown does not end".to_owned());
        }
        if let Some(left) = self.machine.processes.keys().next().filter(|_| stop_engines) {
            let message = format!("{left} still runs after a shutdown that stops engines");
            self.record_violation(message);
        }
        for (engine, booking) in &self.machine.reservations {
            if !self.machine.processes.contains_key(engine) {
                let bytes = booking.bytes;
                self.violations.push(format!("{engine} holds {bytes} without a process after the shutdown"));
            }
        }
        if !self.clients.is_empty() {
            self.record_violation(format!("{} clients are left after the shutdown", self.clients.len()));
        }
        self.wakeup_pending = true;
        self.step().map(|_| ())
    }

    fn quiescence_timeout(&self) -> Millis {
        let configuration = &self.scenario.configuration;
        let idle = configuration.models.iter().map(|spec| {
            let sleep = spec.idle.sleep_after.unwrap_or_default();
            sleep + spec.idle.stop_after.unwrap_or_default() + spec.start_timeout
        });
        let settings = &configuration.settings;
        let waits = configuration.models.iter().map(|spec| settings.max_wait_of(spec));
        settings.queue.max_wait.max(waits.max().unwrap_or_default())
            + idle.max().unwrap_or_default()
            + Millis::secs(300)
    }

    fn check_quiescent(&mut self) {
        if let Some((waiter, _)) = self.waiters.iter().next() {
            let message = format!("waiter {} is still parked at the end", waiter.0);
            self.record_violation(message);
        }
        for (engine, gate) in &self.gates {
            if !gate.leases.is_empty() {
                self.violations.push(format!("{engine} has {} leases at the end", gate.leases.len()));
            }
            let awake =
                self.machine.processes.get(engine).is_some_and(|p| p.phase == SimulatedProcessPhase::Awake);
            let gated = self.machine.processes.get(engine).is_some_and(|p| p.stub_gate_closed);
            if gate.awaiting_stub && awake && !gated {
                self.violations.push(format!("{engine} is held at the end although its stub's gate is open"));
            }
            if gate.open && !awake {
                self.violations.push(format!("the gate of {engine} is open at the end, but it is not awake"));
            }
        }
        for (engine, booking) in &self.machine.reservations {
            if !self.machine.processes.contains_key(engine) {
                self.violations
                    .push(format!("{engine} holds a reservation of {} without a process", booking.bytes));
            }
        }
        for (operation, done) in &self.operations {
            if !done {
                self.violations.push(format!("operation {} never finished", operation.0));
            }
        }
        self.check_idle();
    }

    /// Checks that every idle engine that should sleep or stop has done so.
    fn check_idle(&mut self) {
        for process in self.machine.processes.values() {
            let configured =
                self.scenario.configuration.models.iter().find(|spec| spec.name == process.engine.model);
            let Some(spec) = configured else {
                self.violations
                    .push(format!("{} runs at the end, but its model is not configured", process.engine));
                continue;
            };
            let must_stay =
                self.is_kept_awake(&process.engine) || self.is_needed_by_dependents(&process.engine);
            let sleeps = spec.idle.sleep_after.or(spec.idle.stop_after);
            if !must_stay && sleeps.is_some() && !matches!(process.phase, SimulatedProcessPhase::Asleep(_)) {
                self.violations.push(format!(
                    "{} is {:?} at the end although no request used it",
                    process.engine, process.phase
                ));
            }
        }
    }
}
