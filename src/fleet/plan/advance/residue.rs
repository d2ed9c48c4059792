//! Residue of asleep engines: a reservation shrinks to the observed memory, and only after the observation.

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        command::Command,
        plan::{PlanBuilder, Planner},
    },
    model::{AcceleratorId, EngineId, ModelSpec},
    units::{Bytes, Millis, Tick},
};

/// What the meters show of a sleeping engine.
pub(in crate::fleet) enum ResidueReading {
    /// The engine keeps this much on each accelerator, or in its pool.
    Complete(Bytes),
    /// The meters of these accelerators are to be read again, each after its pause.
    Unread(Vec<(AcceleratorId, Millis)>),
}

/// A release counts as complete while at most one part in this many is missing.
const MISSING_PART: u64 = 16;

/// Whether the meter shows almost all of what a sleep releases.
///
/// The little that an engine keeps beyond its known residue (a grown CUDA context, say) is most likely a residue, too,
/// and need not hold up the next model. If it is released late after all, [`PlanBuilder::correct_residue`] sees that.
const fn is_mostly_released(used: Bytes, residue: Bytes, booked: Bytes) -> bool {
    let expected = booked.saturating_sub(residue);
    used.saturating_sub(residue).0.saturating_mul(MISSING_PART) <= expected.0
}

impl PlanBuilder<'_> {
    /// Shrinks the reservation of a sleeping engine to what the meter shows.
    ///
    /// Without a meter, that happens as soon as the sleep is confirmed.
    pub(in crate::fleet) fn shrink_to_residue(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id) else { return };
        if !matches!(e.state, LifecycleState::Asleep { .. }) {
            return;
        }
        if e.releasing_since.is_none() {
            return self.correct_residue(id);
        }
        if self.wakes_from_rehearsal(e) {
            // The engine needs all of its reservation in a moment.
            return;
        }
        let (engine, generation) = (id.clone(), e.generation);
        match self.planner.residue_reading(e, self.now) {
            ResidueReading::Complete(bytes) => {
                let host = self.planner.ledger.host.booked.of(id).unwrap_or_default();
                self.emit(Command::Shrink { engine, generation, bytes, host });
            }
            ResidueReading::Unread(accelerators) => {
                for (accelerator, after) in accelerators {
                    self.request_reading(&accelerator, after);
                }
            }
        }
    }

    /// Releases memory that came back late and was taken for a residue.
    ///
    /// Only a meter that names engines can show that. The learned residue is corrected with it.
    fn correct_residue(&mut self, id: &EngineId) {
        let Some(e) = self.engine(id).filter(|e| e.pending_reservation.is_none()) else {
            return;
        };
        let declared = |s: &ModelSpec| s.accelerators.bytes_per_account(s.memory.asleep);
        let Some(declared) = self.planner.engine_spec(id).map(declared) else {
            return;
        };
        let booked = self.planner.ledger.booked_bytes(id);
        if booked <= declared {
            return;
        }
        let accounts = e.accelerators.iter().map(|a| self.planner.ledger.accelerators.get(a));
        let readings = accounts.map(|account| {
            let reading = account?.reading.as_ref().filter(|r| r.at > e.since)?;
            Some(reading.by_engine.as_ref()?.get(id).copied().unwrap_or_default())
        });
        let Some(largest) =
            readings.collect::<Option<Vec<_>>>().and_then(|readings| readings.into_iter().max())
        else {
            return;
        };
        let bytes = largest.max(declared);
        if bytes < booked {
            let (engine, generation) = (id.clone(), e.generation);
            let host = self.planner.ledger.host.booked.of(id).unwrap_or_default();
            self.emit(Command::Shrink { engine, generation, bytes, host });
        }
    }
}

impl Planner {
    /// What the meters show of the memory that this engine has kept since it fell asleep.
    pub(in crate::fleet) fn residue_reading(&self, e: &Engine, now: Tick) -> ResidueReading {
        let id = &e.id;
        let residue = self.residue_of(id);
        let Some(since) = e.releasing_since else { return ResidueReading::Complete(residue) };
        let meter_lag = self.settings.timeouts.meter_lag;
        let patient = since + meter_lag > now;
        // A meter that never answers must not block the memory forever: then the engine's own report counts.
        let silent = since + Millis(meter_lag.0 * 5) <= now;
        let accounts = e.accelerators.iter().filter_map(|a| Some((a, self.ledger.accelerators.get(a)?)));
        let mut measured = residue;
        let mut unread: Vec<(AcceleratorId, Millis)> = Vec::new();
        for (accelerator, account) in accounts.filter(|(_, a)| a.metered) {
            // Without names, usage counts as this engine's only if no neighbour is still growing into its reservation.
            let names_engines = account.reading.as_ref().is_some_and(|r| r.by_engine.is_some());
            let reading = account.reading.as_ref().filter(|r| r.at >= since);
            let observed = reading
                .filter(|r| names_engines || !self.has_rising_neighbour(id, accelerator, r.at))
                .and_then(|r| account.observed_of(id, self.unused_reservations(accelerator, r.at)));
            match observed {
                Some(bytes) if bytes <= residue => {}
                Some(bytes)
                    if !patient
                        || (names_engines && is_mostly_released(bytes, residue, account.booked_by(id))) =>
                {
                    measured = measured.max(bytes)
                }
                None if silent && reading.is_none() => {}
                _ => unread.push((accelerator.clone(), account.reading_delay())),
            }
        }
        if unread.is_empty() {
            // A meter without names may show another program's late memory; more than the reservation is never the
            // engine's own.
            ResidueReading::Complete(measured.min(self.ledger.booked_bytes(id)))
        } else {
            ResidueReading::Unread(unread)
        }
    }

    /// Whether, at the reading, another engine here held less than its reservation and was growing towards it.
    ///
    /// An engine that became awake since the reading was still growing then.
    fn has_rising_neighbour(&self, id: &EngineId, accelerator: &AcceleratorId, read: Tick) -> bool {
        self.engines.on_accelerators(std::slice::from_ref(accelerator)).into_iter().any(|e| {
            let is_growing =
                e.state.is_starting() || (e.state == LifecycleState::Awake && e.turn_start > read);
            // An engine that became cold or asleep since then may have used more.
            let booked = Self::used_before_start(e, read).is_none()
                && e.pending_reservation.as_ref().is_some_and(|p| p.accelerators.contains(accelerator));
            e.id != *id && (booked || (is_growing && e.accelerators.contains(accelerator)))
        })
    }

    /// Memory reserved here that was not in use at the reading, because its engines had not begun to start or to wake.
    ///
    /// Such an engine may wait for this very reading: it, or a dependency that starts before it, measures free memory.
    pub(in crate::fleet) fn unused_reservations(&self, accelerator: &AcceleratorId, read: Tick) -> Bytes {
        let Some(account) = self.ledger.accelerators.get(accelerator) else { return Bytes::ZERO };
        let unused = |e: &Engine| {
            let used = Self::used_before_start(e, read)?;
            Some(account.booked_by(&e.id).saturating_sub(used))
        };
        let here = self.engines.on_accelerators(std::slice::from_ref(accelerator)).into_iter();
        here.filter_map(unused).sum()
    }

    /// What an engine used on each accelerator at the reading if it has not begun to use its reservation.
    ///
    /// `None`: it may have used all that it has booked.
    fn used_before_start(e: &Engine, read: Tick) -> Option<Bytes> {
        match e.state {
            _ if e.since > read => None,
            LifecycleState::Asleep { .. } if e.releasing_since.is_none() => {
                e.pending_reservation.as_ref().map(|pending| pending.booked_before)
            }
            ref state if !state.has_process() => Some(Bytes::ZERO),
            _ => None,
        }
    }
}
