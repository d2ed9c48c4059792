//! Checks what surrounds the driver's turn: which events a turn takes, and what the driver knows while it rests.

use crate::{
    driver::{MAX_PLATFORM_EVENTS_PER_TURN, fill_batch},
    fleet::event::Event,
    sim::world::SimulatedWorld,
};

impl SimulatedWorld {
    /// Takes the events of a turn. No event of the platform waits for another turn unless this one is full of them.
    pub(in crate::sim) fn take_turn_events(&mut self) -> Vec<Event> {
        let waiting = self.inbox.platform_events();
        let mut batch = Vec::new();
        fill_batch(&mut self.inbox, &mut batch);
        let left = self.inbox.platform_events();
        if left > waiting.saturating_sub(MAX_PLATFORM_EVENTS_PER_TURN) {
            let first = self.inbox.next_platform_event().map(ToString::to_string).unwrap_or_default();
            self.record_violation(format!(
                "a turn leaves {left} of {waiting} platform events behind requests; the first: {first}"
            ));
        }
        batch
    }

    /// While the driver rests, it knows the end of every last lease that it saw, and requests find the open gates.
    pub(in crate::sim) fn check_idle_driver(&mut self) {
        let fleet = self.core.fleet();
        for (engine, gate) in &self.gates {
            let generation = gate.generation;
            let (is_public, is_routed) =
                (gate.open && gate.public, self.routes.get(engine) == Some(&generation));
            if is_public != is_routed {
                self.violations.push(format!(
                    "{engine} {generation} is open for every request: {is_public}, in the routes: {is_routed}"
                ));
            }
            if !gate.leases.is_empty() {
                continue;
            }
            let known = fleet.engine(engine).filter(|known| known.generation == generation);
            if let Some(leases) = known.map(|known| known.leases).filter(|leases| *leases > 0) {
                let (since, waiters) = (gate.last_lease_end, self.waiters.len());
                self.violations.push(format!(
                    "{engine} {generation} is idle since {since}, but the driver counts {leases} of its leases; \
                     waiters beside it: {waiters}"
                ));
            }
        }
    }
}
