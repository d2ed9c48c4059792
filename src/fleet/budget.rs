//! The ledger: what is booked on every accelerator and of host RAM, beside what the meter last saw.
//!
//! Two truths are kept apart on purpose. A *reservation* is a right: it is what we promised, and the sum of rights
//! never exceeds the capacity. An *observation* is a fact: memory may come back late, an engine may take more than it
//! declared, and somebody else may use the accelerator. Room exists only where both agree.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    accounts::Accounts,
    bookings::{Bookings, Taken},
    portion::Portion,
};
use crate::{
    model::{Accelerator, AcceleratorId, EngineId},
    units::{Bytes, Millis, Tick, count},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ledger {
    pub(super) accelerators: Accounts,
    pub(super) host: HostAccount,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Account {
    pub(super) capacity: Bytes,
    pub(super) metered: bool,
    pub(super) healthy: bool,
    /// In the configuration.
    #[serde(default = "listed", skip_serializing_if = "Clone::clone")]
    pub(super) listed: bool,
    /// Of a pool: how many accelerators are in it, where that counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) units: Option<u32>,
    /// Booked, by engine.
    pub(super) booked: Bookings,
    #[serde(default, skip_serializing_if = "Taken::is_empty")]
    pub(super) taken: Taken,
    pub(super) reading: Option<Reading>,
    /// A reading is under way, ordered at this moment.
    pub(super) asked: Option<Tick>,
    /// When a reading was last ordered, or the accelerator lost.
    pub(super) tried: Tick,
    /// Readings since memory was last given back here or seen to come back: the next one is asked for later.
    pub(super) misses: u32,
    /// The first of them.
    pub(super) first: Option<Bytes>,
    /// When something here last changed hands: a reading from before says nothing.
    pub(super) changed: Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reading {
    pub(super) used: Bytes,
    pub(super) by_engine: Option<BTreeMap<EngineId, Bytes>>,
    pub(super) at: Tick,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostAccount {
    pub(super) capacity: Bytes,
    pub(super) booked: Bookings,
}

/// Journals from before it was recorded had no others.
const fn listed() -> bool {
    true
}

/// A reading older than this is taken again before memory is granted on its word.
const FRESH: Millis = Millis(1000);
/// An unanswered reading is asked for again after this.
const LOST: Millis = Millis(3000);
/// A lost accelerator is asked so often whether it is back.
const AGAIN: Millis = Millis(5000);
/// Readings that show no less in use, at up to 100 ms each: about two seconds.
const PATIENCE: u32 = 20;
/// What falls by less may be an engine's caches breathing, or somebody's desktop.
const MATERIAL: Bytes = Bytes::mib(64);

impl Account {
    #[must_use]
    pub(super) fn new(spec: &Accelerator) -> Self {
        Self {
            capacity: spec.capacity,
            metered: spec.metered,
            healthy: true,
            units: spec.units,
            listed: true,
            booked: Bookings::default(),
            taken: Taken::default(),
            reading: None,
            asked: None,
            tried: Tick(0),
            misses: 0,
            first: None,
            changed: Tick(0),
        }
    }

    #[must_use]
    pub(super) fn reserved(&self) -> Bytes {
        self.booked.sum()
    }

    /// What may still be booked.
    #[must_use]
    pub(super) fn free(&self) -> Bytes {
        self.capacity.saturating_sub(self.reserved())
    }

    /// How many of its accelerators may still be taken: any number where they are not counted.
    #[must_use]
    pub(super) fn free_units(&self) -> u32 {
        self.units.map_or(u32::MAX, |units| units.saturating_sub(self.taken.sum()))
    }

    /// It would hold this much, were it empty.
    #[must_use]
    pub(super) fn could_hold(&self, takes: Portion) -> bool {
        self.capacity >= takes.bytes && self.units.is_none_or(|units| units >= takes.units)
    }

    /// What the engine has booked and taken here.
    #[must_use]
    pub(super) fn part_of(&self, engine: &EngineId) -> Portion {
        Portion { bytes: self.booked_by(engine), units: self.taken.of(engine) }
    }

    /// It is configured, also where there is nothing of it at present, or somebody is still there.
    fn stays(&self) -> bool {
        self.listed || !self.booked.is_empty()
    }

    #[must_use]
    pub(super) fn booked_by(&self, engine: &EngineId) -> Bytes {
        self.booked.of(engine).unwrap_or_default()
    }

    /// The meter has been read since the last change, and lately.
    #[must_use]
    pub(super) fn is_fresh(&self, now: Tick) -> bool {
        !self.metered || self.reading.as_ref().is_some_and(|r| r.at >= self.changed && r.at + FRESH > now)
    }

    /// What will be in use beside `engine` once everybody has taken what is theirs: the larger of right and fact for
    /// each engine we can tell apart, and all that is nobody's of ours.
    #[must_use]
    pub(super) fn used_beside(&self, engine: &EngineId) -> Bytes {
        let booked = self.booked.beside(engine);
        let Some(reading) = &self.reading else {
            return booked;
        };
        let Some(by_engine) = &reading.by_engine else {
            return booked.max(reading.used.saturating_sub(self.booked_by(engine)));
        };
        let ours: Bytes = by_engine.values().copied().sum();
        let larger: Bytes = self
            .booked
            .iter()
            .filter(|(e, _)| *e != engine)
            .map(|(e, b)| b.max(by_engine.get(e).copied().unwrap_or_default()))
            .sum();
        larger + reading.used.saturating_sub(ours)
    }

    /// Memory in use here, by a fresh reading of a meter that names no processes. `None` if another engine has a booking here, or if
    /// the meter tells processes apart.
    #[must_use]
    pub(super) fn used_by_one(&self, engine: &EngineId, now: Tick) -> Option<Bytes> {
        let reading = self.reading.as_ref().filter(|r| r.by_engine.is_none() && r.at + FRESH > now)?;
        let alone = self.booked.iter().all(|(other, _)| other == engine);
        (self.metered && alone).then_some(reading.used)
    }

    /// No reading is under way, or the one that is has been lost.
    #[must_use]
    pub(super) fn may_ask(&self, now: Tick) -> bool {
        self.asked.is_none_or(|at| at + LOST <= now)
    }

    /// Nothing says that its meter does not: no reading was asked for and lost.
    #[must_use]
    pub(super) fn answers(&self, now: Tick) -> bool {
        self.asked.is_none_or(|at| at + LOST > now)
    }

    /// It could be read, was not since this moment, and nobody is about to.
    #[must_use]
    pub(super) fn is_unread_since(&self, moment: Tick) -> bool {
        self.metered && self.asked.is_none() && self.reading.as_ref().is_none_or(|r| r.at < moment)
    }

    /// When a lost accelerator is next looked for: only a reading can tell that it is back.
    #[must_use]
    pub(super) fn sought_at(&self) -> Option<Tick> {
        (self.metered && !self.healthy).then(|| self.tried + AGAIN)
    }

    /// When a reading that was asked for counts as lost.
    #[must_use]
    pub(super) fn lost_at(&self) -> Option<Tick> {
        self.asked.map(|at| at + LOST)
    }

    /// Takes note of a reading. Only memory that comes back is news to those who wait for it: a meter that moves up and
    /// down all the time must not keep them waiting for ever.
    pub(super) fn read(&mut self, reading: Reading) {
        match self.first {
            Some(first) if reading.used + MATERIAL > first => self.misses = self.misses.saturating_add(1),
            _ => (self.misses, self.first) = (0, Some(reading.used)),
        }
        self.asked = None;
        self.reading = Some(reading);
    }

    /// Memory here is on its way back: what was seen before says nothing of how long that takes.
    pub(super) const fn begin_anew(&mut self) {
        (self.misses, self.first) = (0, None);
    }

    /// The meter has shown the shortage for so long that what it shows is no lag: it is somebody's memory.
    #[must_use]
    pub(super) const fn is_settled(&self) -> bool {
        self.misses >= PATIENCE
    }

    /// Why nothing is granted here, if so.
    #[must_use]
    pub(super) fn trouble(&self) -> Option<String> {
        if !self.healthy {
            return Some("lost: it no longer answers; its engines are replaced elsewhere".to_owned());
        }
        if self.reserved() > self.capacity {
            return Some(format!(
                "{} reserved of {}: more than there is, nothing new is granted here",
                self.reserved(),
                self.capacity
            ));
        }
        let units = self.units.filter(|units| self.taken.sum() > *units)?;
        let taken = count(self.taken.sum(), "accelerator");
        Some(format!("{taken} taken of {units}: more than there are, nothing new is granted here"))
    }

    /// Observed bytes of one engine, where that can be told or inferred.
    #[must_use]
    pub(super) fn observed_of(&self, engine: &EngineId) -> Option<Bytes> {
        let reading = self.reading.as_ref()?;
        Some(match &reading.by_engine {
            Some(by_engine) => by_engine.get(engine).copied().unwrap_or_default(),
            None => {
                let others = self.booked.beside(engine);
                reading.used.saturating_sub(others)
            }
        })
    }

    /// The pause before the next reading: 10 ms at first, doubling to 100 ms while it shows nothing new.
    #[must_use]
    pub(super) fn pause(&self) -> Millis {
        Millis((10 << self.misses.min(4)).min(100))
    }
}

impl HostAccount {
    #[must_use]
    pub(super) fn reserved(&self) -> Bytes {
        self.booked.sum()
    }

    #[must_use]
    pub(super) fn free(&self) -> Bytes {
        self.capacity.saturating_sub(self.reserved())
    }
}

impl Ledger {
    /// Takes over a new list of accelerators; bookings on those that stay are kept, and so are accounts that are no
    /// longer listed but still hold something (they grant nothing: their capacity is zero).
    pub(super) fn configure(&mut self, accelerators: &[Accelerator], host: Bytes) {
        self.host.capacity = host;
        self.accelerators.rewrite(|all| {
            for account in all.values_mut() {
                let account = Arc::make_mut(account);
                account.capacity = Bytes::ZERO;
                account.listed = false;
                account.units = account.units.map(|_| 0);
            }
            for spec in accelerators {
                let account = all.entry(spec.id.clone()).or_insert_with(|| Arc::new(Account::new(spec)));
                let account = Arc::make_mut(account);
                account.capacity = spec.capacity;
                account.units = spec.units;
                account.listed = true;
                account.metered = spec.metered;
            }
            all.retain(|_, account| account.stays());
        });
    }

    /// Books exactly so much for the engine on each of these, in place of what it had there. `units`: what it takes of a
    /// pool, unless it has that already.
    pub(super) fn book(
        &mut self,
        engine: &EngineId,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
        units: Option<u32>,
    ) {
        for id in accelerators {
            self.accelerators.book(id, engine, Some(bytes));
            let taken = |account: &Account| units.or_else(|| account.units.map(|_| 1));
            if let Some(units) = self.accelerators.get(id).and_then(taken) {
                self.accelerators.change(id, |account| account.taken.take(engine, units));
            }
        }
    }

    /// Sets the engine's bookings to so much wherever it has any; zero ends them, unless the engine is still there
    /// (`stays`) and has accelerators of a pool.
    pub(super) fn shrink(&mut self, engine: &EngineId, bytes: Bytes, stays: bool, now: Tick) {
        for id in self.accelerators.place_ids(engine) {
            let part = self.accelerators.change(&id, |account| {
                account.changed = now;
                account.part_of(engine)
            });
            let part = part.unwrap_or_default();
            let keeps = bytes > Bytes::ZERO || (stays && part.units > 0);
            self.accelerators.book(&id, engine, keeps.then(|| bytes.min(part.bytes)));
            if self.accelerators.get(&id).is_some_and(|account| !account.stays()) {
                self.accelerators.rewrite(|all| all.retain(|_, account| account.stays()));
            }
        }
    }

    /// The most the engine has booked on any accelerator.
    #[must_use]
    pub(super) fn held(&self, engine: &EngineId) -> Bytes {
        self.part(engine).bytes
    }

    /// The most the engine has booked and taken anywhere.
    #[must_use]
    pub(super) fn part(&self, engine: &EngineId) -> Portion {
        let parts = self.accelerators.places(engine).map(|(_, account)| account.part_of(engine));
        parts.max_by_key(|part| (part.bytes, part.units)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account::new(&Accelerator {
            id: "gpu-0".into(),
            capacity: Bytes::gib(24),
            metered: true,
            units: None,
        })
    }

    fn reading(used: Bytes, at: u64) -> Reading {
        Reading { used, by_engine: None, at: Tick(at) }
    }

    #[test]
    fn a_meter_that_never_rests_settles_all_the_same() {
        let mut account = account();
        for at in 0..=u64::from(PATIENCE) {
            assert!(!account.is_settled() && account.pause() >= Millis(10));
            account.read(reading(Bytes::gib(20) + Bytes::mib(at % 3), at));
        }
        assert!(account.is_settled());
    }

    #[test]
    fn memory_that_comes_back_slowly_is_waited_for() {
        let mut account = account();
        for at in 0..100 {
            account.read(reading(Bytes::mib(20_000 - at * 32), at));
            assert!(!account.is_settled());
        }
    }
}
