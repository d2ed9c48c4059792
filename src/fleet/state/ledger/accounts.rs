//! The accounts of all accelerators, with indexes over them.
//!
//! The indexes answer which has the most free memory, in each pool and outside of pools, where an engine has a
//! reservation, and which await a reading.
//! Copies share the accounts until a write, as in [`crate::fleet::state::engines`].

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::state::ledger::{AcceleratorAccount, pool_accelerators::PoolAccelerators},
    model::{AcceleratorId, EngineId},
    shared_map::{SharedMap, SharedSet},
    units::{Bytes, Tick},
};

/// The accounts as a journal stores them.
type AccountMap = BTreeMap<AcceleratorId, Arc<AcceleratorAccount>>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "AccountMap", into = "AccountMap")]
pub(in crate::fleet) struct AcceleratorAccounts {
    all: SharedMap<AcceleratorId, Arc<AcceleratorAccount>>,
    /// Those outside of pools: the most free first, then by name.
    by_free: SharedSet<(Reverse<Bytes>, AcceleratorId)>,
    /// Those with slots, by pool.
    by_pool: SharedMap<AcceleratorId, PoolAccelerators>,
    /// Accounts on which an engine has a reservation.
    by_engine: SharedMap<EngineId, BTreeSet<AcceleratorId>>,
    /// Accounts with a reading in progress, or of a lost accelerator that is being checked.
    awaiting_reading: SharedSet<AcceleratorId>,
    /// The largest capacity, except for pools and what is in them.
    largest_capacity: Bytes,
    /// Accounts since the last [`AcceleratorAccounts::take_dirty`] whose change may make any of their engines due.
    dirty: DirtyAccounts,
    /// Engines whose own reservations changed since the last [`AcceleratorAccounts::take_rebooked`].
    rebooked: Vec<EngineId>,
}

/// Accounts whose change may make any of their engines due.
///
/// A reservation of one engine does not: a pool of a thousand engines would be visited whole at each start.
#[derive(Clone, Debug)]
pub(in crate::fleet) enum DirtyAccounts {
    Listed(Vec<AcceleratorId>),
    All,
}

impl Default for DirtyAccounts {
    fn default() -> Self {
        Self::Listed(Vec::new())
    }
}

impl AcceleratorAccounts {
    pub(in crate::fleet) fn get(&self, id: &AcceleratorId) -> Option<&AcceleratorAccount> {
        self.all.get(id).map(|account| &**account)
    }

    pub(in crate::fleet) fn iter(&self) -> impl Iterator<Item = (&AcceleratorId, &AcceleratorAccount)> {
        self.all.iter().map(|(id, account)| (id, &**account))
    }

    pub(in crate::fleet) fn len(&self) -> usize {
        self.all.len()
    }

    pub(in crate::fleet) const fn largest_capacity(&self) -> Bytes {
        self.largest_capacity
    }

    /// The accelerators outside of pools, and the pools themselves.
    pub(in crate::fleet) fn most_free_first(&self) -> impl Iterator<Item = &AcceleratorId> {
        self.by_free.iter().map(|(_, id)| id)
    }

    /// The accelerators of a pool that have accounts of their own, if it has such.
    pub(in crate::fleet) fn pool(&self, pool: &AcceleratorId) -> Option<&PoolAccelerators> {
        self.by_pool.get(pool)
    }

    /// The same with their accounts: the most free first, then by name.
    pub(in crate::fleet) fn in_pool(
        &self,
        pool: &AcceleratorId,
    ) -> impl Iterator<Item = (&AcceleratorId, &AcceleratorAccount)> {
        let members = self.pool(pool).into_iter().flat_map(PoolAccelerators::most_free_first);
        members.filter_map(|id| Some((id, self.get(id)?)))
    }

    /// Whether the node of this accelerator takes new Pods.
    pub(in crate::fleet) fn is_open(&self, id: &AcceleratorId) -> bool {
        self.get(id).is_some_and(|account| !account.cordoned)
    }

    pub(in crate::fleet) fn awaiting_reading(
        &self,
    ) -> impl Iterator<Item = (&AcceleratorId, &AcceleratorAccount)> {
        self.awaiting_reading.iter().filter_map(|id| Some((id, self.get(id)?)))
    }

    /// The accounts on which this engine has a reservation.
    pub(in crate::fleet) fn accounts_of(
        &self,
        engine: &EngineId,
    ) -> impl Iterator<Item = (&AcceleratorId, &AcceleratorAccount)> {
        self.by_engine.get(engine).into_iter().flatten().filter_map(|id| Some((id, self.get(id)?)))
    }

    pub(in crate::fleet) fn account_ids_of(&self, engine: &EngineId) -> Vec<AcceleratorId> {
        self.by_engine.get(engine).into_iter().flatten().cloned().collect()
    }

    pub(in crate::fleet) fn change<R>(
        &mut self,
        id: &AcceleratorId,
        change: impl FnOnce(&mut AcceleratorAccount) -> R,
    ) -> Option<R> {
        let account = Arc::make_mut(self.all.get_mut(id)?);
        let (free, awaited, due_key) = (account.free(), awaits_reading(account), DueKey::of(account));
        let result = change(account);
        if let DirtyAccounts::Listed(ids) = &mut self.dirty
            && due_key != DueKey::of(account)
        {
            ids.push(id.clone());
        }
        let (now_free, now_awaited) = (account.free(), awaits_reading(account));
        if free != now_free {
            if let Some(pool) = &account.pool {
                if let Some(members) = self.by_pool.get_mut(pool) {
                    members.change_free(id, free, now_free);
                }
            } else {
                self.by_free.remove(&(Reverse(free), id.clone()));
                self.by_free.insert((Reverse(now_free), id.clone()));
            }
        }
        if awaited && !now_awaited {
            self.awaiting_reading.remove(id);
        } else if !awaited && now_awaited {
            self.awaiting_reading.insert(id.clone());
        }
        Some(result)
    }

    /// Replaces the engine's reservation there; `None` ends it.
    pub(in crate::fleet) fn book(&mut self, id: &AcceleratorId, engine: &EngineId, bytes: Option<Bytes>) {
        let booked = self.change(id, |account| match bytes {
            Some(bytes) => account.booked.book(engine, bytes),
            None => {
                account.booked.remove(engine);
                account.units_taken.remove(engine);
            }
        });
        if booked.is_none() {
            return;
        }
        self.rebooked.push(engine.clone());
        let mut account_ids = self.by_engine.get(engine).cloned().unwrap_or_default();
        let changed = if bytes.is_some() { account_ids.insert(id.clone()) } else { account_ids.remove(id) };
        if !changed {
            return;
        }
        if account_ids.is_empty() {
            self.by_engine.remove(engine);
        } else {
            self.by_engine.insert(engine.clone(), account_ids);
        }
    }

    /// Whether the indexes equal newly built ones.
    pub(in crate::fleet) fn has_consistent_indexes(&self) -> bool {
        let anew = Self::from(self.to_map());
        self.by_free == anew.by_free
            && self.by_pool == anew.by_pool
            && self.by_engine == anew.by_engine
            && self.awaiting_reading == anew.awaiting_reading
            && self.largest_capacity == anew.largest_capacity
    }

    fn to_map(&self) -> AccountMap {
        self.all.iter().map(|(id, account)| (id.clone(), Arc::clone(account))).collect()
    }

    /// Returns the accounts since the last call whose change may make any of their engines due.
    pub(in crate::fleet) fn take_dirty(&mut self) -> DirtyAccounts {
        std::mem::take(&mut self.dirty)
    }

    /// Returns the engines whose own reservations changed since the last call.
    pub(in crate::fleet) fn take_rebooked(&mut self) -> Vec<EngineId> {
        std::mem::take(&mut self.rebooked)
    }

    /// Changes all accounts at once, then rebuilds the indexes.
    pub(in crate::fleet) fn rebuild(&mut self, change: impl FnOnce(&mut AccountMap)) {
        let mut all = AccountMap::from(std::mem::take(self));
        change(&mut all);
        *self = Self::from(all);
    }
}

/// The values of an account that decide when its engines are due.
#[derive(PartialEq, Eq)]
struct DueKey {
    healthy: bool,
    has_capacity: bool,
    metered: bool,
    is_being_read: bool,
    /// When the meter was read, and whether it named engines.
    reading: Option<(Tick, bool)>,
}

impl DueKey {
    fn of(account: &AcceleratorAccount) -> Self {
        Self {
            healthy: account.healthy,
            has_capacity: account.capacity > Bytes::ZERO,
            metered: account.metered,
            is_being_read: account.reading_requested.is_some(),
            reading: account.reading.as_ref().map(|reading| (reading.at, reading.by_engine.is_some())),
        }
    }
}

fn awaits_reading(account: &AcceleratorAccount) -> bool {
    account.reading_requested.is_some() || account.recovery_check_at().is_some()
}

impl PartialEq for AcceleratorAccounts {
    fn eq(&self, other: &Self) -> bool {
        self.all == other.all
    }
}

impl Eq for AcceleratorAccounts {}

impl From<AccountMap> for AcceleratorAccounts {
    fn from(all: AccountMap) -> Self {
        let mut accounts_by_engine: BTreeMap<EngineId, BTreeSet<AcceleratorId>> = BTreeMap::new();
        for (id, account) in &all {
            for (engine, _) in account.booked.iter() {
                accounts_by_engine.entry(engine.clone()).or_default().insert(id.clone());
            }
        }
        let mut by_pool: BTreeMap<AcceleratorId, PoolAccelerators> = BTreeMap::new();
        for (id, account) in &all {
            if let Some(pool) = &account.pool {
                by_pool.entry(pool.clone()).or_default().add(id, account);
            }
        }
        let awaited = all.iter().filter(|(_, a)| awaits_reading(a)).map(|(id, _)| id.clone());
        let outside = all.iter().filter(|(_, a)| a.pool.is_none());
        Self {
            by_free: outside.map(|(id, a)| (Reverse(a.free()), id.clone())).collect(),
            by_pool: by_pool.into(),
            awaiting_reading: awaited.collect(),
            largest_capacity: all
                .values()
                .filter(|a| a.units.is_none())
                .map(|a| a.capacity)
                .max()
                .unwrap_or_default(),
            by_engine: accounts_by_engine.into(),
            all: all.into(),
            dirty: DirtyAccounts::All,
            rebooked: Vec::new(),
        }
    }
}

impl From<AcceleratorAccounts> for AccountMap {
    fn from(accounts: AcceleratorAccounts) -> Self {
        accounts.to_map()
    }
}
