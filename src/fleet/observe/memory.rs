//! Records the meters' readings, and learns from them how much memory an engine takes.
//!
//! Apart from the other observations, because a reading is of an accelerator, which several engines may share.

use std::collections::BTreeMap;

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{command::CloseReason, plan::Planner, state::ledger::MeterReading},
    model::{AcceleratorId, EngineId},
    units::{Bytes, Tick},
};

/// Whether the engine holds all its memory: it is awake, or is about to rehearse its sleep.
fn holds_awake_memory(e: &Engine) -> bool {
    e.state == LifecycleState::Awake
        || matches!(e.state, LifecycleState::Draining { reason: CloseReason::Rehearsal, .. })
}

impl Planner {
    pub(super) fn record_reading(&mut self, accelerator: &AcceleratorId, reading: MeterReading, now: Tick) {
        if self.ledger.accelerators.get(accelerator).is_none() {
            return;
        }
        for (id, bytes) in reading.by_engine.iter().flatten() {
            let is_awake = self.engines.get(id).is_some_and(holds_awake_memory);
            let each =
                self.engine_spec(id).map_or(*bytes, |spec| spec.accelerators.bytes_per_accelerator(*bytes));
            if is_awake {
                self.update_learned(id, |learned| {
                    learned.peak = Some(learned.peak.unwrap_or_default().max(each));
                });
            }
        }
        self.ledger.accelerators.change(accelerator, |account| account.record_reading(reading));
        self.learn_peak_from_growth(accelerator, now);
    }

    /// Learns the peak of an engine that started alone, from the first reading after it serves.
    ///
    /// Later readings may include memory that another program has allocated since.
    fn learn_peak_from_growth(&mut self, accelerator: &AcceleratorId, now: Tick) {
        let Some(account) = self.ledger.accelerators.get(accelerator) else { return };
        let found = account.booked.iter().find_map(|(id, _)| {
            let e = self.engines.get(id).filter(|e| holds_awake_memory(e) && e.turn_start <= now)?;
            let (_, before) = e.memory_baseline.iter().find(|(on, _)| on == accelerator)?;
            Some((id.clone(), *before))
        });
        let Some((id, before)) = found else { return };
        let used = account.used_if_alone(&id, now);
        self.engines.change(&id, |e| e.memory_baseline.retain(|(on, _)| on != accelerator));
        let Some(used_by_engine) = used.map(|used| used.saturating_sub(before)) else { return };
        let each = self
            .engine_spec(&id)
            .map_or(used_by_engine, |spec| spec.accelerators.bytes_per_accelerator(used_by_engine));
        self.update_learned(&id, |learned| {
            learned.peak = Some(learned.peak.unwrap_or_default().max(each));
        });
    }

    pub(super) fn record_usage(&mut self, id: &EngineId, used: Bytes) {
        let asleep = |e: &Engine| {
            matches!(e.state, LifecycleState::FallingAsleep { .. } | LifecycleState::Asleep { .. })
        };
        if self.engines.get(id).is_some_and(|e| e.state.has_process() && !asleep(e)) {
            self.update_learned(id, |measurements| {
                measurements.observed = measurements.observed.max(Some(used))
            });
        }
    }

    /// Learns what the engine keeps asleep. It counts from the `Slept` that follows.
    pub(super) fn record_residue(&mut self, id: &EngineId, bytes: Bytes) {
        let falls_asleep = |e: &&Engine| matches!(e.state, LifecycleState::FallingAsleep { .. });
        if self.engines.get(id).filter(falls_asleep).is_none() {
            return;
        }
        if let Some(declared) = self.engine_spec(id).map(|spec| spec.memory.asleep) {
            let residue = (bytes > declared).then_some(bytes);
            self.update_learned(id, |learned| learned.residue = residue);
        }
    }

    /// Learns what the engine keeps asleep from what is in use beside the reservations of the others there.
    ///
    /// The others may use less than they reserve, so beside them the engine is known to keep no less than before.
    /// Without a reading of each of its accelerators nothing is learned. More than its own reservation is never the
    /// engine's own.
    pub(super) fn record_usage_after_sleep(
        &mut self,
        id: &EngineId,
        used: &BTreeMap<AcceleratorId, Bytes>,
        now: Tick,
    ) {
        let Some(e) = self.engines.get(id) else { return };
        let known = self.residue_of(id);
        let kept_on = |accelerator: &AcceleratorId| {
            let booked = self.ledger.accelerators.get(accelerator)?.booked.sum_without(id);
            let others = booked.saturating_sub(self.unused_reservations(accelerator, now));
            let kept = used.get(accelerator)?.saturating_sub(others);
            Some(if others == Bytes::ZERO { kept } else { kept.max(known) })
        };
        let kept = e.accelerators.iter().map(kept_on).collect::<Option<Vec<Bytes>>>();
        if let Some(most) = kept.and_then(|kept| kept.into_iter().max()) {
            self.record_residue(id, most.min(self.ledger.booked_bytes(id)));
        }
    }

    /// Forgets a residue as large as an awake engine once none of the variant sleeps.
    ///
    /// With such a residue no engine of the variant is put to sleep, so a single misreading (another program's memory)
    /// would end its sleep for ever. The next engine may sleep again, and is measured anew. The residue is not ignored
    /// at once: the engine may really keep so much, and the pairing controller reserves as much until it is gone.
    pub(super) fn forget_useless_residue(&mut self, gone: &EngineId) {
        let Some(awake) = self.engine_spec(gone).map(|spec| spec.memory.awake) else { return };
        let learned = self.models.get(&gone.model).map(|model| model.learned_of(&gone.variant));
        let residue = learned.and_then(|learned| learned.residue);
        if residue.is_none_or(|residue| residue < awake) {
            return;
        }
        let sleeps = |e: &Engine| {
            matches!(e.state, LifecycleState::FallingAsleep { .. } | LifecycleState::Asleep { .. })
        };
        let any_sleeps =
            self.engines.of_model(&gone.model).any(|e| e.id.variant == gone.variant && sleeps(e));
        if !any_sleeps {
            self.update_learned(gone, |learned| learned.residue = None);
        }
    }

    pub(super) fn set_accelerator_health(&mut self, accelerator: &AcceleratorId, healthy: bool, now: Tick) {
        self.ledger.accelerators.change(accelerator, |account| {
            account.healthy = healthy;
            (account.reading_requested, account.last_attempt) = (None, now);
        });
    }
}
