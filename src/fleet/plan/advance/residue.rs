//! What an asleep engine keeps: its booking shrinks to what is seen of it, never before.

use crate::{
    engine::state::LifecycleState,
    fleet::{command::Command, plan::PlanBuilder},
    model::{AcceleratorId, EngineId, ModelSpec},
    units::{Millis, Tick},
};

impl PlanBuilder<'_> {
    /// After a confirmed sleep the booking shrinks to what the meter shows, or at once where there is none.
    pub(in crate::fleet) fn shrink_to_residue(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        if !matches!(e.state, LifecycleState::Asleep { .. }) {
            return;
        }
        let Some(since) = e.releasing_since else {
            return self.correct_residue(id);
        };
        let (engine, generation) = (id.clone(), e.generation);
        let residue = self.planner.residue_of(id);
        let settle = self.planner.settings.timeouts.meter_lag;
        let patient = since + settle > self.now;
        // A meter that never answers must not hold the memory for ever: then the engine's own word counts.
        let silent = since + Millis(settle.0 * 5) <= self.now;
        let accounts =
            e.accelerators.iter().filter_map(|a| Some((a, self.planner.ledger.accelerators.get(a)?)));
        let mut measured = residue;
        let mut unread: Vec<(AcceleratorId, Millis)> = Vec::new();
        for (accelerator, account) in accounts.filter(|(_, a)| a.metered) {
            // What is nobody's by name is this engine's only while no other is still taking what it has booked.
            let told = account.reading.as_ref().is_some_and(|r| r.by_engine.is_some());
            let reading = account.reading.as_ref().filter(|r| r.at >= since);
            let seen = reading
                .filter(|r| told || !self.has_rising_neighbour(id, accelerator, r.at))
                .and_then(|_| account.observed_of(id));
            match seen {
                Some(bytes) if bytes <= residue => {}
                Some(bytes) if !patient => measured = measured.max(bytes),
                None if silent && reading.is_none() => {}
                _ => unread.push((accelerator.clone(), account.reading_delay())),
            }
        }
        if unread.is_empty() {
            let host = self.planner.ledger.host.booked.of(id).unwrap_or_default();
            // A meter that knows no names may show somebody else's late memory; more than was booked is never its own.
            let bytes = measured.min(self.planner.ledger.booked_bytes(id));
            return self.emit(Command::Shrink { engine, generation, bytes, host });
        }
        for (accelerator, after) in unread {
            self.request_reading(&accelerator, after);
        }
    }

    /// Memory that came back later than anyone waited was taken for a residue; once it is seen free by its owner's name,
    /// it is given back, and forgotten as a residue.
    fn correct_residue(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id).filter(|e| e.pending_reservation.is_none()) else {
            return;
        };
        let declared = |s: &ModelSpec| s.accelerators.bytes_per_account(s.memory.asleep);
        let Some(declared) = self.planner.spec(&id.model).map(declared) else {
            return;
        };
        let booked = self.planner.ledger.booked_bytes(id);
        if booked <= declared {
            return;
        }
        let accounts = e.accelerators.iter().map(|a| self.planner.ledger.accelerators.get(a));
        let seen = accounts.map(|account| {
            let reading = account?.reading.as_ref().filter(|r| r.at > e.since)?;
            Some(reading.by_engine.as_ref()?.get(id).copied().unwrap_or_default())
        });
        let Some(most) = seen.collect::<Option<Vec<_>>>().and_then(|seen| seen.into_iter().max()) else {
            return;
        };
        let bytes = most.max(declared);
        if bytes < booked {
            let (engine, generation) = (id.clone(), e.generation);
            let host = self.planner.ledger.host.booked.of(id).unwrap_or_default();
            self.emit(Command::Shrink { engine, generation, bytes, host });
        }
    }

    /// When the meter was read, another engine on this accelerator held less than it has booked, and was on its way up to
    /// it. One that has come up since was still rising then.
    fn has_rising_neighbour(&self, id: &EngineId, accelerator: &AcceleratorId, read: Tick) -> bool {
        self.planner.engines.on_accelerators(std::slice::from_ref(accelerator)).into_iter().any(|e| {
            let rises = e.state.is_starting() || (e.state == LifecycleState::Awake && e.turn_start > read);
            // So does one that has only booked it.
            let booked = e.pending_reservation.as_ref().is_some_and(|p| p.accelerators.contains(accelerator));
            e.id != *id && (booked || (rises && e.accelerators.contains(accelerator)))
        })
    }
}
