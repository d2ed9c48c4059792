//! What must hold, judged by what is physically true. Each message says what was broken, by whom.

mod needs;
mod reservations;

use super::{
    client::{ClientId, End, State},
    gate::Gate,
    process::Phase,
    scenario::Deed,
    world::{Failure, World},
};
use crate::{
    fault::Cause,
    fleet::{
        Plan,
        command::Why,
        event::{Event, Verdict},
    },
    model::{AcceleratorId, Accelerators, EngineId, Eviction, Level, ModelSpec},
    units::{Bytes, Generation, Millis},
};

impl World {
    /// What the fleet has just been told, which is what it may act upon.
    pub(super) fn delivered(&mut self, event: &Event) {
        match event {
            Event::Placed { engine, generation, .. } => {
                if let Some(booking) = self.machine.bookings.get_mut(engine)
                    && booking.generation == *generation
                {
                    booking.placed = true;
                }
            }
            Event::Drained { engine, generation } => {
                if let Some(gate) = self.gates.get_mut(engine)
                    && gate.generation == *generation
                    && !gate.open
                {
                    gate.drained = true;
                }
            }
            Event::Profiled { engine, generation } | Event::Ready { engine, generation } => {
                if let Some(process) = self.machine.process(engine, *generation) {
                    process.profiling = false;
                }
            }
            Event::Gone { engine, generation, .. } => {
                self.machine.going.remove(&(engine.clone(), *generation));
                // A booking ends with the process it was for, unless its successor has booked already.
                if self.machine.bookings.get(engine).is_some_and(|b| b.generation == *generation) {
                    self.machine.bookings.remove(engine);
                }
            }
            _ => {}
        }
    }

    /// False when nothing can come of it.
    pub(super) fn check_launch(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
    ) -> bool {
        if let Some(process) = self.machine.processes.get(engine) {
            let running = process.generation;
            self.violation(format!("{engine} {generation} is launched while {running} still runs"));
            return false;
        }
        self.check_booked(engine, generation, accelerators, bytes, "launched");
        let measures = self.measures(engine);
        for id in accelerators {
            let Some(other) = self.machine.on(id).find(|p| {
                p.profiling
                    || (measures && matches!(p.phase, Phase::Waking(_) | Phase::Loading) && !p.has_taken())
            }) else {
                continue;
            };
            let message =
                format!("{engine} is launched on {id} beside {}, which is {:?}", other.engine, other.phase);
            self.violation(message);
        }
        true
    }

    fn measures(&self, engine: &EngineId) -> bool {
        let models = &self.scenario.configuration.models;
        models.iter().any(|spec| spec.name == engine.model && spec.measures())
    }

    fn check_booked(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
        what: &str,
    ) {
        let covered = self.machine.bookings.get(engine).is_some_and(|booking| {
            booking.placed
                && booking.generation == generation
                && booking.bytes >= bytes
                && accelerators.iter().all(|id| booking.accelerators.contains(id))
        });
        if !covered {
            let booking = self.machine.bookings.get(engine).cloned();
            self.violation(format!(
                "{engine} {generation} is {what} with {bytes} on {accelerators:?}, but its booking is {booking:?}"
            ));
        }
    }

    /// Sleep and stop need a drained gate, unless it never was open.
    pub(super) fn check_put_away(&mut self, engine: &EngineId, generation: Generation, what: &str) -> bool {
        let Some(gate) = self.gates.get(engine).filter(|g| g.generation == generation) else {
            self.violation(format!("{what} for {engine} {generation}, which has no gate"));
            return false;
        };
        if gate.open || !gate.leases.is_empty() || (gate.served && !gate.drained) {
            let message = format!(
                "{what} for {engine} {generation} before it was drained: gate open {}, {} leases, drained {}",
                gate.open,
                gate.leases.len(),
                gate.drained
            );
            self.violation(message);
        }
        true
    }

    fn spec_of(&self, engine: &EngineId) -> Option<&ModelSpec> {
        self.scenario.configuration.models.iter().find(|spec| spec.name == engine.model)
    }

    /// It is configured, or ordered, to be awake whoever asks for it.
    fn is_kept(&self, engine: &EngineId) -> bool {
        let pin = self.pins.get(&engine.model).copied();
        let pinned = pin.unwrap_or_else(|| self.spec_of(engine).is_some_and(|spec| spec.pinned));
        pinned || self.is_counted_on(engine)
    }

    /// It is one of those that its model is never to have fewer of.
    fn is_counted_on(&self, engine: &EngineId) -> bool {
        let least = self.spec_of(engine).map_or(0, |spec| spec.min_replicas);
        engine.replica < least && self.pins.get(&engine.model) != Some(&false)
    }

    /// What is to be awake in any case goes for nobody and for no idleness.
    pub(super) fn check_kept(&mut self, engine: &EngineId, why: Why) {
        let open = self.gates.get(engine).is_some_and(|gate| gate.open);
        if open && matches!(why, Why::Turn | Why::Idle) && self.is_kept(engine) {
            self.violation(format!("{engine} is put away ({why:?}), and is to be awake in any case"));
        }
    }

    /// For a model that is served already nobody else's gate closes, and none in use while a spare of its model is only
    /// starting where the other could go as well.
    pub(super) fn check_spare(&mut self, engine: &EngineId, to: &EngineId) {
        let serves = |(id, gate): (&EngineId, &Gate)| id.model == to.model && gate.open && gate.public;
        if self.gates.iter().any(serves) && !self.is_counted_on(to) {
            self.violation(format!("{engine} is put away for {to}, beside which its model is served"));
        }
        let busy = self.gates.get(engine).is_some_and(|gate| gate.open && !gate.leases.is_empty());
        if let Some(spare) = self.spare_that_would_do(engine, to).filter(|_| busy) {
            self.violation(format!(
                "{engine} is put away for {to}, though {spare} is of no use to anybody yet"
            ));
        }
    }

    fn spare_that_would_do(&self, engine: &EngineId, to: &EngineId) -> Option<EngineId> {
        let configuration = &self.scenario.configuration;
        let spec = configuration.models.iter().find(|spec| spec.name == to.model)?;
        let own = configuration.models.iter().find(|spec| spec.name == engine.model)?;
        let eviction = configuration.settings.eviction_of(own);
        if eviction != Eviction::Residency || self.machine.processes.contains_key(to) {
            return None;
        }
        let free_for_it = |id: &AcceleratorId| {
            let listed = match &spec.accelerators {
                Accelerators::Ids(ids) => *ids == std::slice::from_ref(id),
                Accelerators::Count(n) => *n == 1,
                Accelerators::Of { pool, .. } => pool == id,
            };
            let well = self.machine.devices.get(id).is_some_and(|d| !d.lost && d.foreign == Bytes::ZERO);
            listed && well && self.machine.on(id).filter(|p| p.profiling).count() <= 1
        };
        let mut siblings =
            self.machine.processes.values().filter(|p| {
                p.engine.model == engine.model && p.engine != *engine && p.phase == Phase::Loading
            });
        let spare = siblings.find(|p| {
            let untouched = self.gates.get(&p.engine).is_some_and(|gate| !gate.served);
            let holds = self.machine.bookings.get(&p.engine).map_or((Bytes::ZERO, 0), |b| (b.bytes, b.units));
            let bytes = spec.accelerators.in_one_place(spec.memory.awake);
            let enough = holds.0 >= bytes && holds.1 >= self.units_of(to);
            untouched && enough && p.accelerators.iter().any(free_for_it)
        });
        spare.map(|p| p.engine.clone())
    }

    pub(super) fn check_sleep(&mut self, engine: &EngineId, generation: Generation, level: Level) -> bool {
        let (host, room) = (self.machine.host_held(), self.scenario.configuration.settings.host_memory);
        let Some(process) = self.machine.process(engine, generation) else {
            return self.gone_or_unknown(engine, generation, "sleep");
        };
        let (phase, can, needs) = (process.phase, process.spec.can_sleep, process.host());
        if !can {
            self.violation(format!("{engine} is told to sleep, which it cannot"));
        }
        if phase != Phase::Awake {
            self.violation(format!("{engine} is told to sleep while it is {phase:?}"));
            return false;
        }
        if level == Level::One && host + needs > room {
            self.violation(format!(
                "{engine} sleeps at level 1 with {needs} in host memory, where others hold {host} of {room}"
            ));
        }
        true
    }

    pub(super) fn check_wake(&mut self, engine: &EngineId, generation: Generation, level: Level) -> bool {
        let Some(process) = self.machine.process(engine, generation) else {
            return self.gone_or_unknown(engine, generation, "wake");
        };
        let (phase, needs, accelerators) =
            (process.phase, process.spec.memory.awake, process.accelerators.clone());
        if phase != Phase::Asleep(level) {
            self.violation(format!("{engine} is woken from {level:?} while it is {phase:?}"));
            return false;
        }
        self.check_booked(engine, generation, &accelerators, needs, "woken");
        for id in &accelerators {
            let profiling = self.machine.on(id).find(|p| p.profiling);
            if let Some(other) = profiling {
                let message = format!("{engine} is woken on {id} while {} measures its memory", other.engine);
                self.violation(message);
            }
        }
        true
    }

    /// A command to a process that is gone is an error only when the fleet knew.
    fn gone_or_unknown(&mut self, engine: &EngineId, generation: Generation, what: &str) -> bool {
        if !self.machine.going.contains(&(engine.clone(), generation)) {
            self.violation(format!("{what} for {engine} {generation}, which is known to be gone"));
        }
        false
    }

    /// Only an awake engine may get requests. One that died an instant ago, or hangs, is nobody's fault yet.
    pub(super) fn check_traffic(&mut self, engine: &EngineId, generation: Generation) {
        match self.machine.process(engine, generation).map(|p| p.phase) {
            Some(Phase::Awake) => {}
            Some(phase) => {
                self.violation(format!("{engine} {generation} gets traffic while it is {phase:?}"))
            }
            None => {
                self.gone_or_unknown(engine, generation, "traffic");
            }
        }
    }

    pub(super) fn check_grant(
        &mut self,
        client: ClientId,
        engine: &EngineId,
        generation: Generation,
    ) -> bool {
        let model = self.clients.get(&client).map(|c| c.request.model.clone());
        if model.is_some_and(|model| model != engine.model) {
            self.violation(format!("a waiter for another model is granted a lease on {engine}"));
        }
        let Some(gate) = self.gates.get(engine).filter(|g| g.generation == generation) else {
            self.violation(format!("a lease is granted on {engine} {generation}, which has no gate"));
            return false;
        };
        let (open, full) = (gate.open, gate.full());
        if !open {
            self.violation(format!("a lease is granted on the closed gate of {engine}"));
        }
        if full {
            self.violation(format!("a lease is granted on {engine}, which is full"));
        }
        open && !full
    }

    /// A deadline passed and the client still waits.
    pub(super) fn overdue(&mut self, id: ClientId, serial: u32) {
        if let Some(client) = self.clients.get(&id).filter(|c| c.serial == serial)
            && let State::Parked(waiter) = client.state
        {
            let message = format!(
                "waiter {} for {} waits past its deadline {}",
                waiter.0, client.request.model, client.deadline
            );
            self.violation(message);
        }
    }

    pub(super) fn silent(&mut self, id: ClientId, serial: u32) {
        if self.clients.get(&id).is_some_and(|c| c.serial == serial) {
            self.end_exchange(id, End::Broken);
        }
    }

    /// Every model has a line, and every line a reason.
    pub(super) fn check_report(&mut self, plan: &Plan) {
        let report = self.fleet.report(plan);
        for (model, line) in &report.models {
            if line.reason.is_empty() {
                self.violations.push(format!("the report gives no reason for {model}"));
            }
        }
        if report.models.len() < self.scenario.configuration.models.len() && self.deadline.is_some() {
            self.violation("the report leaves models out".to_owned());
        }
    }

    pub(super) fn check_view(&mut self, plan: &Plan) {
        let report = self.fleet.report(plan);
        let view = self.fleet.view(&report);
        for accelerator in &view.accelerators {
            // What was adopted in excess is allowed, but must be reported.
            let reported = report.accelerators.contains_key(&accelerator.id);
            if let (Some(units), Some(taken)) = (accelerator.units, accelerator.units_taken)
                && taken > units
                && !reported
            {
                self.violations.push(format!(
                    "{} has {taken} of {units} units taken, and nobody says so",
                    accelerator.id
                ));
            }
            if accelerator.reserved > accelerator.capacity && !reported {
                self.violation(format!(
                    "the reservations on {} are {}, more than {}",
                    accelerator.id, accelerator.reserved, accelerator.capacity
                ));
            }
        }
        if view.host.reserved > view.host.capacity && !self.excess {
            self.violation(format!(
                "the reservations of host memory are {}, more than {}",
                view.host.reserved, view.host.capacity
            ));
        }
    }

    pub(super) fn probed(&mut self, engine: EngineId, generation: Generation) {
        let verdict = match self.machine.process(&engine, generation) {
            Some(process) if process.gated => {
                self.tell(Event::Gated { engine: engine.clone(), generation });
                Verdict::Inconclusive
            }
            None => Verdict::Failed(Cause::Unreachable),
            Some(process) if process.hung => Verdict::Failed(Cause::Timeout),
            Some(process) if process.corrupt => Verdict::Failed(Cause::Unhealthy),
            Some(_) => Verdict::Passed,
        };
        self.tell(Event::Canary { engine, generation, verdict });
    }

    /// Demand and faults end; time goes on until everything should have come to rest, and has.
    pub(super) fn rest(&mut self) -> Result<(), Failure> {
        self.calm();
        let end = self.now + self.rest_time();
        let mut steps = 0;
        while self.step_until(end)? {
            steps += 1;
            if steps > 50_000 {
                self.violation("the world does not come to rest".to_owned());
                break;
            }
        }
        self.check_rest();
        // One more turn reports what was found.
        self.notified = true;
        self.step().map(|_| ())
    }

    /// The gateway is told to shut down: every waiter is refused, every lease ends, and the engines stop or stay.
    pub(super) fn end_by_shutdown(&mut self) -> Result<(), Failure> {
        self.calm();
        let stop_engines = self.random.chance(0.5);
        self.tally.add("shutdowns");
        self.deed(Deed::Shutdown { stop_engines });
        let end = self.now + Millis::secs(120);
        while self.step_until(end)? {}
        self.now = end;
        if !self.fleet.is_finished() {
            self.violation("the shutdown does not end".to_owned());
        }
        if let Some(left) = self.machine.processes.keys().next().filter(|_| stop_engines) {
            let message = format!("{left} still runs after a shutdown that stops engines");
            self.violation(message);
        }
        for (engine, booking) in &self.machine.bookings {
            if !self.machine.processes.contains_key(engine) {
                let bytes = booking.bytes;
                self.violations.push(format!("{engine} holds {bytes} without a process after the shutdown"));
            }
        }
        if !self.clients.is_empty() {
            self.violation(format!("{} clients are left after the shutdown", self.clients.len()));
        }
        self.notified = true;
        self.step().map(|_| ())
    }

    fn rest_time(&self) -> Millis {
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

    fn check_rest(&mut self) {
        if let Some((waiter, _)) = self.waiters.iter().next() {
            let message = format!("waiter {} is still parked at the end", waiter.0);
            self.violation(message);
        }
        for (engine, gate) in &self.gates {
            if !gate.leases.is_empty() {
                self.violations.push(format!("{engine} has {} leases at the end", gate.leases.len()));
            }
            let awake = self.machine.processes.get(engine).is_some_and(|p| p.phase == Phase::Awake);
            let gated = self.machine.processes.get(engine).is_some_and(|p| p.gated);
            if gate.held && awake && !gated {
                self.violations
                    .push(format!("{engine} is held at the end, and its stub would let everybody in"));
            }
            if gate.open && !awake {
                self.violations.push(format!("the gate of {engine} is open at the end, but it is not awake"));
            }
        }
        for (engine, booking) in &self.machine.bookings {
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

    /// Whoever should have been put away for idleness was.
    fn check_idle(&mut self) {
        for process in self.machine.processes.values() {
            let configured =
                self.scenario.configuration.models.iter().find(|spec| spec.name == process.engine.model);
            let Some(spec) = configured else {
                self.violations
                    .push(format!("{} runs at the end, but its model is not configured", process.engine));
                continue;
            };
            let kept = self.is_kept(&process.engine) || self.stays_for_others(&process.engine);
            let sleeps = spec.idle.sleep_after.or(spec.idle.stop_after);
            if !kept && sleeps.is_some() && !matches!(process.phase, Phase::Asleep(_)) {
                self.violations.push(format!(
                    "{} is {:?} at the end, though nobody used it",
                    process.engine, process.phase
                ));
            }
        }
    }
}
