//! Every accelerator's account, and what is asked of all of them at once: which has the most to give, where an engine
//! has something booked, which are waited for. Shared between copies until one is written to, as [`super::engines`] is.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::budget::Account;
use crate::{
    model::{AcceleratorId, EngineId},
    units::Bytes,
};

type Map = BTreeMap<AcceleratorId, Arc<Account>>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Map", into = "Map")]
pub(super) struct Accounts {
    all: Arc<Map>,
    /// The most free first, then by name.
    by_free: Arc<BTreeSet<(Reverse<Bytes>, AcceleratorId)>>,
    /// Where an engine has something booked.
    places: Arc<BTreeMap<EngineId, BTreeSet<AcceleratorId>>>,
    /// Readings are under way, or it is lost and looked for.
    awaited: Arc<BTreeSet<AcceleratorId>>,
    /// The largest capacity, but for pools.
    largest: Bytes,
    /// What has been changed since somebody took note of it.
    touched: Touched,
}

/// Accounts that have been changed.
#[derive(Clone, Debug)]
pub(super) enum Touched {
    These(Vec<AcceleratorId>),
    All,
}

impl Default for Touched {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

impl Accounts {
    pub(super) fn get(&self, id: &AcceleratorId) -> Option<&Account> {
        self.all.get(id).map(|account| &**account)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&AcceleratorId, &Account)> {
        self.all.iter().map(|(id, account)| (id, &**account))
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) const fn largest(&self) -> Bytes {
        self.largest
    }

    pub(super) fn most_free_first(&self) -> impl Iterator<Item = &AcceleratorId> {
        self.by_free.iter().map(|(_, id)| id)
    }

    pub(super) fn awaited(&self) -> impl Iterator<Item = (&AcceleratorId, &Account)> {
        self.awaited.iter().filter_map(|id| Some((id, self.get(id)?)))
    }

    /// Where this engine has something booked.
    pub(super) fn places(&self, engine: &EngineId) -> impl Iterator<Item = (&AcceleratorId, &Account)> {
        self.places.get(engine).into_iter().flatten().filter_map(|id| Some((id, self.get(id)?)))
    }

    pub(super) fn place_ids(&self, engine: &EngineId) -> Vec<AcceleratorId> {
        self.places.get(engine).into_iter().flatten().cloned().collect()
    }

    pub(super) fn change<R>(
        &mut self,
        id: &AcceleratorId,
        change: impl FnOnce(&mut Account) -> R,
    ) -> Option<R> {
        if !self.all.contains_key(id) {
            return None;
        }
        let account = Arc::make_mut(Arc::make_mut(&mut self.all).get_mut(id)?);
        let (free, awaited) = (account.free(), is_awaited(account));
        let result = change(account);
        if let Touched::These(ids) = &mut self.touched {
            ids.push(id.clone());
        }
        let (now_free, now_awaited) = (account.free(), is_awaited(account));
        if free != now_free {
            let by_free = Arc::make_mut(&mut self.by_free);
            by_free.remove(&(Reverse(free), id.clone()));
            by_free.insert((Reverse(now_free), id.clone()));
        }
        if awaited && !now_awaited {
            Arc::make_mut(&mut self.awaited).remove(id);
        } else if !awaited && now_awaited {
            Arc::make_mut(&mut self.awaited).insert(id.clone());
        }
        Some(result)
    }

    /// Books in place of what the engine had there; zero ends it when `remove`.
    pub(super) fn book(&mut self, id: &AcceleratorId, engine: &EngineId, bytes: Option<Bytes>) {
        let booked = self.change(id, |account| match bytes {
            Some(bytes) => account.booked.book(engine, bytes),
            None => {
                account.booked.remove(engine);
                account.taken.remove(engine);
            }
        });
        if booked.is_none() {
            return;
        }
        let places = Arc::make_mut(&mut self.places);
        if bytes.is_some() {
            places.entry(engine.clone()).or_default().insert(id.clone());
        } else if let Some(of) = places.get_mut(engine) {
            of.remove(id);
            if of.is_empty() {
                places.remove(engine);
            }
        }
    }

    /// The indexes are what they would be, were they made anew.
    pub(super) fn is_indexed(&self) -> bool {
        let anew = Self::from(Map::clone(&self.all));
        self.by_free == anew.by_free
            && self.places == anew.places
            && self.awaited == anew.awaited
            && self.largest == anew.largest
    }

    /// What has been changed since this was last asked.
    pub(super) fn take_touched(&mut self) -> Touched {
        std::mem::take(&mut self.touched)
    }

    /// All of them may change, come and go.
    pub(super) fn rewrite(&mut self, change: impl FnOnce(&mut Map)) {
        change(Arc::make_mut(&mut self.all));
        *self = Self::from(std::mem::take(Arc::make_mut(&mut self.all)));
    }
}

fn is_awaited(account: &Account) -> bool {
    account.asked.is_some() || account.sought_at().is_some()
}

impl PartialEq for Accounts {
    fn eq(&self, other: &Self) -> bool {
        self.all == other.all
    }
}

impl Eq for Accounts {}

impl From<Map> for Accounts {
    fn from(all: Map) -> Self {
        let mut places: BTreeMap<EngineId, BTreeSet<AcceleratorId>> = BTreeMap::new();
        for (id, account) in &all {
            for (engine, _) in account.booked.iter() {
                places.entry(engine.clone()).or_default().insert(id.clone());
            }
        }
        let awaited = all.iter().filter(|(_, a)| is_awaited(a)).map(|(id, _)| id.clone());
        Self {
            by_free: Arc::new(all.iter().map(|(id, a)| (Reverse(a.free()), id.clone())).collect()),
            awaited: Arc::new(awaited.collect()),
            largest: all.values().filter(|a| a.units.is_none()).map(|a| a.capacity).max().unwrap_or_default(),
            places: Arc::new(places),
            all: Arc::new(all),
            touched: Touched::All,
        }
    }
}

impl From<Accounts> for Map {
    fn from(accounts: Accounts) -> Self {
        Self::clone(&accounts.all)
    }
}
