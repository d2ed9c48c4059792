//! The waiters of one model in serving order: highest band first, then by `fairness`.
//!
//! The order between keys changes with every grant and every token, so it is never stored. The keys' own queues are
//! merged when a waiter is to be served, as far as needed.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, btree_map::Values},
    iter::Peekable,
    sync::Arc,
};

use crate::{
    fleet::{
        dispatch::fairness::FairnessCounters,
        event::{Waiter, WaiterId},
        plan::QueueDemand,
    },
    units::Tick,
};

/// Order within a key: the earliest arrival first.
type ArrivalKey = (Tick, WaiterId);

#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct ModelQueue {
    /// Boxed, because a node of the map has room for eleven and nearly always holds one.
    bands: BTreeMap<Reverse<i32>, Box<PriorityBand>>,
    arrivals: BTreeSet<ArrivalKey>,
    deadlines: BTreeSet<(Tick, WaiterId)>,
}

#[derive(Clone, Debug, Default)]
struct PriorityBand {
    keys: BTreeMap<String, BTreeMap<ArrivalKey, Arc<Waiter>>>,
    counters: FairnessCounters,
}

impl ModelQueue {
    pub(in crate::fleet) fn add_waiter(&mut self, waiter: Arc<Waiter>) {
        self.arrivals.insert((waiter.arrived, waiter.id));
        self.deadlines.insert((waiter.deadline, waiter.id));
        let PriorityBand { keys, counters: shares } =
            &mut **self.bands.entry(Reverse(waiter.band)).or_default();
        shares.record_return(&waiter);
        if !keys.contains_key(&waiter.key) {
            shares.add_key(&waiter.key, keys.keys().map(String::as_str));
        }
        keys.entry(waiter.key.clone()).or_default().insert((waiter.arrived, waiter.id), waiter);
    }

    pub(in crate::fleet) fn remove_waiter(&mut self, waiter: &Waiter) {
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

    pub(in crate::fleet) fn record_grant(&mut self, waiter: &Waiter, canary: bool) {
        if let Some(band) = self.bands.get_mut(&Reverse(waiter.band)) {
            band.counters.record_grant(waiter, canary);
        }
        self.remove_waiter(waiter);
    }

    pub(in crate::fleet) fn record_served(&mut self, key: &str, tokens: u64, leases: u32) {
        for band in self.bands.values_mut() {
            band.counters.record_served(key, tokens, leases);
        }
    }

    pub(in crate::fleet) fn exceeds_in_flight(&self, leases: u32) -> bool {
        self.bands.values().any(|band| band.counters.exceeds_in_flight(leases))
    }

    pub(in crate::fleet) fn limit_in_flight(&mut self, leases: u32) {
        self.bands.values_mut().for_each(|band| band.counters.limit_in_flight(leases));
    }

    pub(in crate::fleet) fn set_counters(&mut self, band: i32, shares: &FairnessCounters) {
        self.bands.entry(Reverse(band)).or_default().counters = shares.clone();
    }

    /// The counters of the bands that have named keys.
    pub(in crate::fleet) fn keyed_counters(&self) -> impl Iterator<Item = (i32, &FairnessCounters)> {
        let keyed = |shares: &FairnessCounters| shares.keys().any(|key| !key.is_empty());
        self.counters().filter(move |(_, shares)| keyed(shares))
    }

    pub(in crate::fleet) fn counters(&self) -> impl Iterator<Item = (i32, &FairnessCounters)> {
        self.bands.iter().map(|(band, b)| (band.0, &b.counters))
    }

    pub(in crate::fleet) fn len(&self) -> usize {
        self.arrivals.len()
    }

    pub(in crate::fleet) fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
    }

    pub(in crate::fleet) fn demand(&self) -> QueueDemand {
        let first = self.bands.iter().find(|(_, band)| !band.keys.is_empty());
        QueueDemand {
            waiting: u32::try_from(self.len()).unwrap_or(u32::MAX),
            remote: 0,
            band: first.map_or(0, |(band, _)| band.0),
            oldest: self.arrivals.first().map(|(arrived, _)| *arrived).unwrap_or_default(),
        }
    }

    pub(in crate::fleet) fn waiter_ids(&self) -> impl Iterator<Item = WaiterId> + '_ {
        self.arrivals.iter().map(|(_, id)| *id)
    }

    pub(in crate::fleet) fn has_expired_waiter(&self, now: Tick) -> bool {
        self.deadlines.first().is_some_and(|(deadline, _)| *deadline <= now)
    }

    /// Returns the first deadline after this moment.
    pub(in crate::fleet) fn deadline_after(&self, moment: Tick) -> Option<Tick> {
        self.deadlines.range((Tick(moment.0.saturating_add(1)), WaiterId(0))..).next().map(|(at, _)| *at)
    }

    /// Returns all waiters in the order in which they would be served.
    pub(in crate::fleet) fn in_fair_order(&self) -> impl Iterator<Item = &Waiter> {
        self.bands.values().flat_map(|band| band.in_fair_order())
    }
}

impl PriorityBand {
    fn in_fair_order(&self) -> FairOrderIter<'_> {
        let mut rest: Vec<_> = self.keys.values().map(|queue| queue.values().peekable()).collect();
        let heads = self.keys.keys().zip(&mut rest).enumerate();
        let heads = heads.filter_map(|(index, (key, queue))| {
            let first = queue.peek()?;
            Some(Reverse((self.counters.counter(key), first.arrived, first.id, index)))
        });
        FairOrderIter { heads: heads.collect(), key_queues: rest, charge: self.counters.charge() }
    }
}

/// Merges the keys' queues, charging each grant to its key as a real grant would.
struct FairOrderIter<'q> {
    /// The first waiter of each key, lowest counter first.
    heads: BinaryHeap<Reverse<(u64, Tick, WaiterId, usize)>>,
    key_queues: Vec<Peekable<Values<'q, ArrivalKey, Arc<Waiter>>>>,
    charge: u64,
}

impl<'q> Iterator for FairOrderIter<'q> {
    type Item = &'q Waiter;

    fn next(&mut self) -> Option<&'q Waiter> {
        let Reverse((counter, .., index)) = self.heads.pop()?;
        let queue = self.key_queues.get_mut(index)?;
        let waiter = queue.next()?;
        if let Some(next) = queue.peek() {
            let counter = counter.saturating_add(self.charge);
            self.heads.push(Reverse((counter, next.arrived, next.id, index)));
        }
        Some(waiter)
    }
}
