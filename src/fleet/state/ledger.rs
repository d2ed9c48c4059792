//! The ledger: reservations on every accelerator and of host RAM, beside the last meter readings.
//!
//! It keeps two truths apart on purpose. A *reservation* is a right: it is what we promised, and the sum of rights
//! never exceeds the capacity. An *observation* is a fact: memory may come back late, an engine may take more than it
//! declared, and another program may use the accelerator. Room exists only where both agree.

pub(in crate::fleet) mod accounts;
pub(in crate::fleet) mod amount;
pub(in crate::fleet) mod bookings;
pub(in crate::fleet) mod pool_accelerators;

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::state::ledger::{
        accounts::AcceleratorAccounts,
        amount::ResourceAmount,
        bookings::{Bookings, UnitBookings},
    },
    model::{Accelerator, AcceleratorId, EngineId},
    units::{Bytes, Millis, Tick, pluralize},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::fleet) struct MemoryLedger {
    pub(in crate::fleet) accelerators: AcceleratorAccounts,
    pub(in crate::fleet) host: HostAccount,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::fleet) struct AcceleratorAccount {
    pub(in crate::fleet) capacity: Bytes,
    pub(in crate::fleet) metered: bool,
    pub(in crate::fleet) healthy: bool,
    /// Whether the configuration lists the accelerator.
    #[serde(default = "default_configured", skip_serializing_if = "Clone::clone")]
    pub(in crate::fleet) configured: bool,
    /// Limit on the units that engines take, if they are counted: accelerators of a pool, or slots of an accelerator in
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::fleet) units: Option<u32>,
    /// The pool of an accelerator with slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::fleet) pool: Option<AcceleratorId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::fleet) node: Option<String>,
    /// Limit on the host RAM that sleepers of the node hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::fleet) host_memory: Option<Bytes>,
    /// No engine starts here. Those that sleep here may wake.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::fleet) cordoned: bool,
    /// Reserved bytes by engine.
    pub(in crate::fleet) booked: Bookings,
    #[serde(default, skip_serializing_if = "UnitBookings::is_empty")]
    pub(in crate::fleet) units_taken: UnitBookings,
    pub(in crate::fleet) reading: Option<MeterReading>,
    /// When the reading in progress was requested.
    pub(in crate::fleet) reading_requested: Option<Tick>,
    /// When a reading was last requested, or the accelerator's health changed.
    pub(in crate::fleet) last_attempt: Tick,
    /// Readings since memory was last released here or seen to come back; each delays the next one.
    pub(in crate::fleet) readings_without_release: u32,
    /// Usage at the first of these readings.
    pub(in crate::fleet) baseline_used: Option<Bytes>,
    /// When memory here was last released: an earlier reading says nothing.
    pub(in crate::fleet) changed_at: Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::fleet) struct MeterReading {
    pub(in crate::fleet) used: Bytes,
    pub(in crate::fleet) by_engine: Option<BTreeMap<EngineId, Bytes>>,
    pub(in crate::fleet) at: Tick,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::fleet) struct HostAccount {
    pub(in crate::fleet) capacity: Bytes,
    pub(in crate::fleet) booked: Bookings,
}

/// Journals from before this field had only configured accelerators.
const fn default_configured() -> bool {
    true
}

/// A reading older than this is repeated before memory is granted.
const MAX_READING_AGE: Millis = Millis(1000);
/// An unanswered reading is requested again after this time.
const READING_TIMEOUT: Millis = Millis(3000);
/// Interval of checks whether a lost accelerator is back.
const LOST_RETRY_INTERVAL: Millis = Millis(5000);
/// Limit on readings that show no release: at up to 100 ms each, about two seconds.
const MAX_READINGS_WITHOUT_RELEASE: u32 = 20;
/// A smaller decrease may be an engine's caches, or a desktop.
const MIN_RELEASED_BYTES: Bytes = Bytes::mib(64);

impl AcceleratorAccount {
    #[must_use]
    pub(in crate::fleet) fn new(spec: &Accelerator) -> Self {
        Self {
            capacity: spec.capacity,
            metered: spec.metered,
            healthy: true,
            units: spec.units,
            pool: spec.pool.clone(),
            node: spec.node.clone(),
            host_memory: spec.host_memory,
            cordoned: spec.cordoned,
            configured: true,
            booked: Bookings::default(),
            units_taken: UnitBookings::default(),
            reading: None,
            reading_requested: None,
            last_attempt: Tick(0),
            readings_without_release: 0,
            baseline_used: None,
            changed_at: Tick(0),
        }
    }

    /// Whether the account has this configuration.
    fn is_configured_as(&self, spec: &Accelerator) -> bool {
        let Accelerator { id: _, capacity, metered, units, pool, node, host_memory, cordoned } = spec;
        self.configured
            && (self.capacity, self.metered, self.units) == (*capacity, *metered, *units)
            && (&self.pool, &self.node) == (pool, node)
            && (self.host_memory, self.cordoned) == (*host_memory, *cordoned)
    }

    #[must_use]
    pub(in crate::fleet) fn reserved(&self) -> Bytes {
        self.booked.sum()
    }

    /// Bytes that may still be reserved.
    #[must_use]
    pub(in crate::fleet) fn free(&self) -> Bytes {
        self.capacity.saturating_sub(self.reserved())
    }

    /// How many of its units may still be taken; unlimited if they are not counted.
    #[must_use]
    pub(in crate::fleet) fn free_units(&self) -> u32 {
        self.units.map_or(u32::MAX, |units| units.saturating_sub(self.units_taken.sum()))
    }

    /// What a unit is, for texts.
    #[must_use]
    pub(in crate::fleet) const fn unit_noun(&self) -> &'static str {
        if self.pool.is_some() { "slot" } else { "accelerator" }
    }

    /// Whether it would hold this much if it were empty.
    #[must_use]
    pub(in crate::fleet) fn could_hold(&self, takes: ResourceAmount) -> bool {
        self.capacity >= takes.bytes && self.units.is_none_or(|units| units >= takes.units)
    }

    /// Amount that the engine has reserved and taken here.
    #[must_use]
    pub(in crate::fleet) fn amount_of(&self, engine: &EngineId) -> ResourceAmount {
        ResourceAmount { bytes: self.booked_by(engine), units: self.units_taken.of(engine) }
    }

    /// Whether the account is configured, even with no accelerator at present, or still has reservations.
    fn must_be_kept(&self) -> bool {
        self.configured || !self.booked.is_empty()
    }

    #[must_use]
    pub(in crate::fleet) fn booked_by(&self, engine: &EngineId) -> Bytes {
        self.booked.of(engine).unwrap_or_default()
    }

    /// Whether the meter has been read since the last change, and recently.
    #[must_use]
    pub(in crate::fleet) fn is_fresh(&self, now: Tick) -> bool {
        !self.metered
            || self.reading.as_ref().is_some_and(|r| r.at >= self.changed_at && r.at + MAX_READING_AGE > now)
    }

    /// Memory in use besides `engine`, once every engine has taken what is reserved for it.
    ///
    /// For each engine that the meter can tell apart, this is the larger of right and fact. Usage of other programs is
    /// added.
    #[must_use]
    pub(in crate::fleet) fn used_by_others(&self, engine: &EngineId) -> Bytes {
        let booked = self.booked.sum_without(engine);
        let Some(reading) = &self.reading else {
            return booked;
        };
        let Some(by_engine) = &reading.by_engine else {
            return booked.max(reading.used.saturating_sub(self.booked_by(engine)));
        };
        let by_engines: Bytes = by_engine.values().copied().sum();
        let larger: Bytes = self
            .booked
            .iter()
            .filter(|(e, _)| *e != engine)
            .map(|(e, b)| b.max(by_engine.get(e).copied().unwrap_or_default()))
            .sum();
        larger + reading.used.saturating_sub(by_engines)
    }

    /// Memory in use here, by a fresh reading of a meter that names no processes.
    ///
    /// `None` if another engine has a reservation here, or if the meter tells processes apart.
    #[must_use]
    pub(in crate::fleet) fn used_if_alone(&self, engine: &EngineId, now: Tick) -> Option<Bytes> {
        let reading =
            self.reading.as_ref().filter(|r| r.by_engine.is_none() && r.at + MAX_READING_AGE > now)?;
        let alone = self.booked.iter().all(|(other, _)| other == engine);
        (self.metered && alone).then_some(reading.used)
    }

    /// Whether no reading is in progress, or the one in progress is lost.
    #[must_use]
    pub(in crate::fleet) fn may_read(&self, now: Tick) -> bool {
        self.reading_requested.is_none_or(|at| at + READING_TIMEOUT <= now)
    }

    /// Whether no reading was requested and lost, so the meter may well answer.
    #[must_use]
    pub(in crate::fleet) fn meter_answers(&self, now: Tick) -> bool {
        self.reading_requested.is_none_or(|at| at + READING_TIMEOUT > now)
    }

    /// Whether the meter was not read since this moment, and no reading is in progress.
    #[must_use]
    pub(in crate::fleet) fn is_unread_since(&self, moment: Tick) -> bool {
        self.metered
            && self.reading_requested.is_none()
            && self.reading.as_ref().is_none_or(|r| r.at < moment)
    }

    /// When to check again for a lost accelerator: only a reading can show that it is back.
    #[must_use]
    pub(in crate::fleet) fn recovery_check_at(&self) -> Option<Tick> {
        (self.metered && !self.healthy).then(|| self.last_attempt + LOST_RETRY_INTERVAL)
    }

    /// When the requested reading counts as lost.
    #[must_use]
    pub(in crate::fleet) fn reading_timeout_at(&self) -> Option<Tick> {
        self.reading_requested.map(|at| at + READING_TIMEOUT)
    }

    /// Records a reading. Only released memory resets the count: a meter that moves up and down all the time must not
    /// make waiters wait forever.
    pub(in crate::fleet) fn record_reading(&mut self, reading: MeterReading) {
        match self.baseline_used {
            Some(first) if reading.used + MIN_RELEASED_BYTES > first => {
                self.readings_without_release = self.readings_without_release.saturating_add(1)
            }
            _ => (self.readings_without_release, self.baseline_used) = (0, Some(reading.used)),
        }
        self.reading_requested = None;
        self.reading = Some(reading);
    }

    /// Restarts the count because memory is being released: earlier readings do not show how long that takes.
    pub(in crate::fleet) const fn reset_readings(&mut self) {
        (self.readings_without_release, self.baseline_used) = (0, None);
    }

    /// Whether the meter has shown this usage for too long to be a lag.
    ///
    /// The memory then belongs to another program.
    #[must_use]
    pub(in crate::fleet) const fn is_usage_confirmed(&self) -> bool {
        self.readings_without_release >= MAX_READINGS_WITHOUT_RELEASE
    }

    /// Why nothing is granted here, if so.
    #[must_use]
    pub(in crate::fleet) fn problem(&self) -> Option<String> {
        if !self.healthy {
            return Some(
                "lost: the accelerator no longer answers; its engines are replaced elsewhere".to_owned(),
            );
        }
        if self.reserved() > self.capacity {
            return Some(format!(
                "overcommitted: {} reserved of {}; nothing new is granted here",
                self.reserved(),
                self.capacity
            ));
        }
        let units = self.units.filter(|units| self.units_taken.sum() > *units)?;
        let units_text = pluralize(self.units_taken.sum(), self.unit_noun());
        Some(format!("overcommitted: {units_text} taken of {units}; nothing new is granted here"))
    }

    /// Observed bytes of one engine, if known or inferable.
    ///
    /// `unused`: what others have reserved and do not use.
    #[must_use]
    pub(in crate::fleet) fn observed_of(&self, engine: &EngineId, unused: Bytes) -> Option<Bytes> {
        let reading = self.reading.as_ref()?;
        Some(match &reading.by_engine {
            Some(by_engine) => by_engine.get(engine).copied().unwrap_or_default(),
            None => {
                let used_by_others = self.booked.sum_without(engine).saturating_sub(unused);
                reading.used.saturating_sub(used_by_others)
            }
        })
    }

    /// The pause before the next reading: 10 ms at first, doubling to 100 ms while no reading shows a release.
    #[must_use]
    pub(in crate::fleet) fn reading_delay(&self) -> Millis {
        Millis((10 << self.readings_without_release.min(4)).min(100))
    }
}

impl HostAccount {
    #[must_use]
    pub(in crate::fleet) fn reserved(&self) -> Bytes {
        self.booked.sum()
    }

    #[must_use]
    pub(in crate::fleet) fn free(&self) -> Bytes {
        self.capacity.saturating_sub(self.reserved())
    }
}

impl MemoryLedger {
    /// Applies a new list of accelerators. Returns whether it differs from the former one.
    ///
    /// Accounts that stay keep their reservations. Unlisted accounts that still hold something stay too, but grant
    /// nothing: their capacity is zero.
    pub(in crate::fleet) fn configure(&mut self, accelerators: &[Accelerator], host: Bytes) -> bool {
        let configured = self.accelerators.iter().filter(|(_, account)| account.configured).count();
        let is_same = |spec: &Accelerator| {
            self.accelerators.get(&spec.id).is_some_and(|account| account.is_configured_as(spec))
        };
        let is_unchanged = self.host.capacity == host
            && configured == accelerators.len()
            && accelerators.iter().all(is_same);
        if is_unchanged {
            return false;
        }
        self.host.capacity = host;
        self.accelerators.rebuild(|all| {
            for account in all.values_mut() {
                let account = Arc::make_mut(account);
                account.capacity = Bytes::ZERO;
                account.configured = false;
                account.units = account.units.map(|_| 0);
            }
            for spec in accelerators {
                let account =
                    all.entry(spec.id.clone()).or_insert_with(|| Arc::new(AcceleratorAccount::new(spec)));
                let account = Arc::make_mut(account);
                account.capacity = spec.capacity;
                account.units = spec.units;
                account.pool.clone_from(&spec.pool);
                account.node.clone_from(&spec.node);
                account.host_memory = spec.host_memory;
                account.cordoned = spec.cordoned;
                account.configured = true;
                account.metered = spec.metered;
            }
            all.retain(|_, account| account.must_be_kept());
        });
        true
    }

    /// Adds accounts of accelerators of a pool with slots that are not configured, where a running engine was found.
    ///
    /// They grant nothing, and keep what the engine holds until they are configured again.
    pub(in crate::fleet) fn add_unconfigured(
        &mut self,
        accelerators: &[AcceleratorId],
        pool: &AcceleratorId,
    ) {
        if accelerators.iter().all(|id| self.accelerators.get(id).is_some()) {
            return;
        }
        self.accelerators.rebuild(|all| {
            for id in accelerators {
                let spec = Accelerator {
                    units: Some(0),
                    pool: Some(pool.clone()),
                    ..Accelerator::new(id.clone(), Bytes::ZERO)
                };
                all.entry(id.clone()).or_insert_with(|| {
                    Arc::new(AcceleratorAccount { configured: false, ..AcceleratorAccount::new(&spec) })
                });
            }
        });
    }

    /// Sets the engine's reservation on each of these accelerators, in place of what it had there.
    ///
    /// `units`: what it takes on each, of a pool or of an accelerator with slots, unless it has units there already.
    pub(in crate::fleet) fn book(
        &mut self,
        engine: &EngineId,
        accelerators: &[AcceleratorId],
        bytes: Bytes,
        units: Option<u32>,
    ) {
        for id in accelerators {
            self.accelerators.book(id, engine, Some(bytes));
            let units_to_take = |account: &AcceleratorAccount| units.or_else(|| account.units.map(|_| 1));
            if let Some(units) = self.accelerators.get(id).and_then(units_to_take) {
                self.accelerators.change(id, |account| account.units_taken.take(engine, units));
            }
        }
    }

    /// Reduces the engine's reservations to `bytes` wherever it has any.
    ///
    /// Zero ends them, unless the engine keeps its process (`has_process`) and has units there.
    pub(in crate::fleet) fn shrink(&mut self, engine: &EngineId, bytes: Bytes, has_process: bool, now: Tick) {
        for id in self.accelerators.account_ids_of(engine) {
            let part = self.accelerators.change(&id, |account| {
                account.changed_at = now;
                account.amount_of(engine)
            });
            let part = part.unwrap_or_default();
            let keeps = bytes > Bytes::ZERO || (has_process && part.units > 0);
            self.accelerators.book(&id, engine, keeps.then(|| bytes.min(part.bytes)));
            if self.accelerators.get(&id).is_some_and(|account| !account.must_be_kept()) {
                self.accelerators.rebuild(|all| all.retain(|_, account| account.must_be_kept()));
            }
        }
    }

    /// The most that the engine has reserved on any account.
    #[must_use]
    pub(in crate::fleet) fn booked_bytes(&self, engine: &EngineId) -> Bytes {
        self.booked_amount(engine).bytes
    }

    /// The largest amount that the engine has reserved and taken on any account.
    #[must_use]
    pub(in crate::fleet) fn booked_amount(&self, engine: &EngineId) -> ResourceAmount {
        let parts = self.accelerators.accounts_of(engine).map(|(_, account)| account.amount_of(engine));
        parts.max_by_key(|part| (part.bytes, part.units)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> AcceleratorAccount {
        let gpu = Accelerator { metered: true, ..Accelerator::new("gpu-0".into(), Bytes::gib(24)) };
        AcceleratorAccount::new(&gpu)
    }

    fn reading(used: Bytes, at: u64) -> MeterReading {
        MeterReading { used, by_engine: None, at: Tick(at) }
    }

    #[test]
    fn a_meter_that_never_rests_settles_all_the_same() {
        let mut account = account();
        for at in 0..=u64::from(MAX_READINGS_WITHOUT_RELEASE) {
            assert!(!account.is_usage_confirmed() && account.reading_delay() >= Millis(10));
            account.record_reading(reading(Bytes::gib(20) + Bytes::mib(at % 3), at));
        }
        assert!(account.is_usage_confirmed());
    }

    #[test]
    fn memory_that_comes_back_slowly_is_waited_for() {
        let mut account = account();
        for at in 0..100 {
            account.record_reading(reading(Bytes::mib(20_000 - at * 32), at));
            assert!(!account.is_usage_confirmed());
        }
    }
}
