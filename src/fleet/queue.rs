//! Those who wait for one model, in the order in which they are served: highest band first, then as `share` says.
//!
//! The order between keys moves with every grant and every token, so it is never kept: it is merged from the keys'
//! own queues when somebody is to be served, as far as it is needed.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, btree_map::Values},
    iter::Peekable,
    sync::Arc,
};

use super::{
    event::{Waiter, WaiterId},
    plan::Demand,
    share::Shares,
};
use crate::units::Tick;

/// A key's own order: the earliest arrival first.
type Place = (Tick, WaiterId);

#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    bands: BTreeMap<Reverse<i32>, Band>,
    arrivals: BTreeSet<Place>,
    deadlines: BTreeSet<(Tick, WaiterId)>,
}

#[derive(Clone, Debug, Default)]
struct Band {
    keys: BTreeMap<String, BTreeMap<Place, Arc<Waiter>>>,
    shares: Shares,
}

impl Queue {
    pub(super) fn arrived(&mut self, waiter: Arc<Waiter>) {
        self.arrivals.insert((waiter.arrived, waiter.id));
        self.deadlines.insert((waiter.deadline, waiter.id));
        let Band { keys, shares } = self.bands.entry(Reverse(waiter.band)).or_default();
        shares.returned(&waiter);
        if !keys.contains_key(&waiter.key) {
            shares.enter(&waiter.key, keys.keys().map(String::as_str));
        }
        keys.entry(waiter.key.clone()).or_default().insert((waiter.arrived, waiter.id), waiter);
    }

    pub(super) fn left(&mut self, waiter: &Waiter) {
        self.arrivals.remove(&(waiter.arrived, waiter.id));
        self.deadlines.remove(&(waiter.deadline, waiter.id));
        let Some(band) = self.bands.get_mut(&Reverse(waiter.band)) else { return };
        if let Some(queue) = band.keys.get_mut(&waiter.key) {
            queue.remove(&(waiter.arrived, waiter.id));
            if queue.is_empty() {
                band.keys.remove(&waiter.key);
            }
        }
    }

    pub(super) fn granted(&mut self, waiter: &Waiter, canary: bool) {
        if let Some(band) = self.bands.get_mut(&Reverse(waiter.band)) {
            band.shares.granted(waiter, canary);
        }
        self.left(waiter);
    }

    pub(super) fn served(&mut self, key: &str, tokens: u64, leases: u32) {
        for band in self.bands.values_mut() {
            band.shares.served(key, tokens, leases);
        }
    }

    pub(super) fn exceeds(&self, leases: u32) -> bool {
        self.bands.values().any(|band| band.shares.exceeds(leases))
    }

    pub(super) fn limit(&mut self, leases: u32) {
        self.bands.values_mut().for_each(|band| band.shares.limit(leases));
    }

    pub(super) fn set_shares(&mut self, band: i32, shares: &Shares) {
        self.bands.entry(Reverse(band)).or_default().shares = shares.clone();
    }

    /// What the bands' keys were served, but for those without any.
    pub(super) fn shares(&self) -> impl Iterator<Item = (i32, &Shares)> {
        let keyed = |shares: &Shares| shares.keys().any(|key| !key.is_empty());
        self.all_shares().filter(move |(_, shares)| keyed(shares))
    }

    pub(super) fn all_shares(&self) -> impl Iterator<Item = (i32, &Shares)> {
        self.bands.iter().map(|(band, b)| (band.0, &b.shares))
    }

    pub(super) fn len(&self) -> usize {
        self.arrivals.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
    }

    pub(super) fn demand(&self) -> Demand {
        let first = self.bands.iter().find(|(_, band)| !band.keys.is_empty());
        Demand {
            waiting: u32::try_from(self.len()).unwrap_or(u32::MAX),
            elsewhere: 0,
            band: first.map_or(0, |(band, _)| band.0),
            oldest: self.arrivals.first().map(|(arrived, _)| *arrived).unwrap_or_default(),
        }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = WaiterId> + '_ {
        self.arrivals.iter().map(|(_, id)| *id)
    }

    pub(super) fn is_late(&self, now: Tick) -> bool {
        self.deadlines.first().is_some_and(|(deadline, _)| *deadline <= now)
    }

    /// The first deadline after this moment.
    pub(super) fn deadline_after(&self, moment: Tick) -> Option<Tick> {
        self.deadlines.range((Tick(moment.0.saturating_add(1)), WaiterId(0))..).next().map(|(at, _)| *at)
    }

    /// Everybody, as they would be served from here on.
    pub(super) fn in_turn(&self) -> impl Iterator<Item = &Waiter> {
        self.bands.values().flat_map(Band::in_turn)
    }
}

impl Band {
    fn in_turn(&self) -> InTurn<'_> {
        let mut rest: Vec<_> = self.keys.values().map(|queue| queue.values().peekable()).collect();
        let heads = self.keys.keys().zip(&mut rest).enumerate();
        let heads = heads.filter_map(|(index, (key, queue))| {
            let first = queue.peek()?;
            Some(Reverse((self.shares.counter(key), first.arrived, first.id, index)))
        });
        InTurn { heads: heads.collect(), rest, charge: self.shares.charge() }
    }
}

/// The keys' queues merged; each grant is charged to its key as it would be in truth.
struct InTurn<'q> {
    /// The first of each key, lowest counter first.
    heads: BinaryHeap<Reverse<(u64, Tick, WaiterId, usize)>>,
    rest: Vec<Peekable<Values<'q, Place, Arc<Waiter>>>>,
    charge: u64,
}

impl<'q> Iterator for InTurn<'q> {
    type Item = &'q Waiter;

    fn next(&mut self) -> Option<&'q Waiter> {
        let Reverse((counter, .., index)) = self.heads.pop()?;
        let queue = self.rest.get_mut(index)?;
        let waiter = queue.next()?;
        if let Some(next) = queue.peek() {
            let counter = counter.saturating_add(self.charge);
            self.heads.push(Reverse((counter, next.arrived, next.id, index)));
        }
        Some(waiter)
    }
}
