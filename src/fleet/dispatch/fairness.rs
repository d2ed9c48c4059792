//! Fairness between keys: who of a model's waiters goes next, by what each key was served.
//!
//! Start-time fair queueing with tokens for a measure ("Fairness in Serving Large Language Models", OSDI 2024, calls it
//! the virtual token counter). Each key has a counter; a place goes to the key whose counter is lowest, and among its
//! own requests, as among equals, to the earliest. A key that floods moves only its own counter.
//!
//! * Absence is no credit. A key that comes to wait starts no lower than where the last grant was made (and no higher
//!   than anybody who waits): else whoever was away all night would have the morning to itself.
//! * What an answer will cost is known only at its end. A grant is charged what an answer usually takes for as long as it
//!   is under way, so that many grants at one moment are as fair as the same grants one by one. Of a model's grants as
//!   many are taken to be under way as it has leases, the latest ones: whose answer is over is known for certain only of
//!   all together. A charge is a guess that changes as more is learned, so it is never mixed with what was served, and
//!   nobody's start is counted from it: who came while it was too high would be put behind those who had it when it falls.
//! * Who comes back to the queue was not served: the place was gone before the lease could be taken, or an engine's
//!   first answer failed. It is no longer charged.
//! * Counters live as long as a model is busy. Once nobody waits and nothing runs, nothing is owed.
//!
//! The counters are a model's own, not one for all that a key does. What keys compete for here is the next place of one
//! model, and tokens of different models are no common currency: with one counter, heavy use of a small embedding
//! model would bar a key from a large one for as long as others want that. They are a band's own as well, since a
//! higher band is served first in any case, and its progress must not age those below it.
//!
//! Which model has its turn is not decided here: it goes by the oldest waiter (`turn_order`), of whom a flood has one, as
//! has everybody.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::event::{Waiter, WaiterId},
    units::Tick,
};

/// What an answer is taken to cost before any was seen, in weighted tokens.
const DEFAULT_CHARGE_TOKENS: u64 = 512;
/// So many grants are remembered in full in what an answer usually costs.
const MAX_AVERAGED_GRANTS: u64 = 256;

/// So many of the last grants are remembered one by one: most that come back do so within a turn or two.
const MAX_RECENT_GRANTS: usize = 64;

/// The counters of one model's keys in one band, in weighted tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FairnessCounters {
    keys: BTreeMap<String, KeyCounter>,
    /// Where the last grant was made: what its key had been served.
    virtual_time: u64,
    /// What a grant is charged.
    charge: u64,
    /// What the charge is learned from.
    tokens: u64,
    grants: u64,
    /// The latest first.
    recent: VecDeque<RecentGrant>,
    /// Of these so many are under way.
    #[serde(default)]
    in_flight: usize,
}

/// One grant, for as long as its request may come back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RecentGrant {
    id: WaiterId,
    key: String,
    arrived: Tick,
    deadline: Tick,
    /// It may come back under another number.
    canary: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KeyCounter {
    served: u64,
    /// Grants that are taken to be under way.
    #[serde(default)]
    in_flight: u32,
}

impl Default for FairnessCounters {
    fn default() -> Self {
        Self {
            keys: BTreeMap::new(),
            virtual_time: 0,
            charge: DEFAULT_CHARGE_TOKENS,
            tokens: 0,
            grants: 0,
            recent: VecDeque::new(),
            in_flight: 0,
        }
    }
}

impl FairnessCounters {
    pub(in crate::fleet) fn counter(&self, key: &str) -> u64 {
        self.keys.get(key).map_or(0, |share| {
            share.served.saturating_add(self.charge.saturating_mul(share.in_flight.into()))
        })
    }

    /// What the next grant adds to its key's counter.
    pub(in crate::fleet) const fn charge(&self) -> u64 {
        self.charge
    }

    pub(in crate::fleet) fn contains(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    pub(in crate::fleet) fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// The key comes to wait, where it had nobody waiting; the others that have are `waiting`.
    pub(in crate::fleet) fn add_key<'k>(&mut self, key: &str, waiting: impl Iterator<Item = &'k str>) {
        let lowest = waiting.map(|other| self.keys.get(other).map_or(0, |share| share.served)).min();
        let from = lowest.map_or(self.virtual_time, |lowest| lowest.min(self.virtual_time));
        let share = self.keys.entry(key.to_owned()).or_default();
        share.served = share.served.max(from);
    }

    pub(in crate::fleet) fn record_grant(&mut self, waiter: &Waiter, canary: bool) {
        self.grants += 1;
        if let Some(share) = self.keys.get_mut(&waiter.key) {
            self.virtual_time = share.served;
            share.in_flight = share.in_flight.saturating_add(1);
        }
        let Waiter { id, arrived, deadline, ref key, .. } = *waiter;
        self.recent.push_front(RecentGrant { id, key: key.clone(), arrived, deadline, canary });
        self.in_flight += 1;
        self.recent.truncate(MAX_RECENT_GRANTS.max(self.in_flight));
    }

    /// It waits again, or for the first time.
    pub(in crate::fleet) fn record_return(&mut self, waiter: &Waiter) {
        let same = |grant: &RecentGrant| {
            let came = (&grant.key, grant.arrived, grant.deadline);
            grant.id == waiter.id || (grant.canary && came == (&waiter.key, waiter.arrived, waiter.deadline))
        };
        let Some(at) = self.recent.iter().position(same) else { return };
        self.grants = self.grants.saturating_sub(1);
        if at < self.in_flight {
            self.end_grant(at);
        }
        self.recent.remove(at);
    }

    /// `leases`: how many answers of this model are under way, whoever's they are.
    pub(in crate::fleet) fn record_served(&mut self, key: &str, tokens: u64, leases: u32) {
        let Some(share) = self.keys.get_mut(key) else { return };
        share.served = share.served.saturating_add(tokens);
        self.tokens = self.tokens.saturating_add(tokens);
        // Those under way have been granted and not counted to their end.
        if self.grants >= 2 * u64::from(leases).max(1) {
            self.charge = (self.tokens / self.grants).max(1);
        }
        if self.grants >= MAX_AVERAGED_GRANTS {
            (self.tokens, self.grants) = (self.tokens / 2, self.grants / 2);
        }
    }

    /// More grants are taken to be under way than the model has leases.
    pub(in crate::fleet) const fn exceeds_in_flight(&self, leases: u32) -> bool {
        self.in_flight > leases as usize
    }

    /// The model has so many leases, on all of its engines: no more than the latest so many grants are under way.
    pub(in crate::fleet) fn limit_in_flight(&mut self, leases: u32) {
        while self.exceeds_in_flight(leases) {
            self.end_grant(self.in_flight - 1);
        }
        self.recent.truncate(MAX_RECENT_GRANTS.max(self.in_flight));
    }

    /// This grant, one of those under way, no longer is.
    fn end_grant(&mut self, at: usize) {
        self.in_flight -= 1;
        let key = self.recent.get(at).map(|grant| grant.key.as_str());
        if let Some(share) = key.and_then(|key| self.keys.get_mut(key)) {
            share.in_flight = share.in_flight.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiter(key: &str, id: u64) -> Waiter {
        Waiter {
            id: WaiterId(id),
            model: "m".into(),
            band: 0,
            key: key.to_owned(),
            arrived: Tick(7),
            deadline: Tick(100),
            stream: true,
            client: 0,
            required_engine: None,
        }
    }

    /// As it is told: how many leases there are, then what was served.
    fn served(shares: &mut FairnessCounters, key: &str, tokens: u64, leases: u32) {
        shares.limit_in_flight(leases);
        shares.record_served(key, tokens, leases);
    }

    fn enter(shares: &mut FairnessCounters, key: &str, waiting: &[&str]) {
        shares.add_key(key, waiting.iter().copied());
    }

    #[test]
    fn absence_is_no_credit_and_no_debt() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "busy", &[]);
        for _ in 0..10 {
            shares.record_grant(&waiter("busy", 1), false);
            served(&mut shares, "busy", 700, 1);
        }
        enter(&mut shares, "late", &["busy"]);
        assert!(shares.counter("late") < shares.counter("busy"), "it goes next");
        shares.record_grant(&waiter("late", 1), false);
        served(&mut shares, "late", 700, 1);
        assert!(shares.counter("late") >= shares.counter("busy"), "and not twice");
    }

    #[test]
    fn a_grant_is_charged_at_once_and_corrected_by_what_was_served() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "a", &[]);
        shares.record_grant(&waiter("a", 1), false);
        assert_eq!(shares.counter("a"), DEFAULT_CHARGE_TOKENS);
        served(&mut shares, "a", 100, 4);
        assert_eq!(shares.counter("a"), 100 + DEFAULT_CHARGE_TOKENS, "it is not over yet");
        served(&mut shares, "a", DEFAULT_CHARGE_TOKENS, 0);
        assert_eq!(shares.counter("a"), 100 + DEFAULT_CHARGE_TOKENS, "it took more than is usual");
    }

    #[test]
    fn answers_shorter_than_is_usual_leave_no_growing_charge() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "a", &[]);
        for _ in 0..1000 {
            shares.record_grant(&waiter("a", 1), false);
            served(&mut shares, "a", 10, 1);
        }
        assert_eq!(shares.counter("a"), 10 * 1000 + shares.charge());
        assert_eq!(shares.charge(), 10);
    }

    #[test]
    fn who_was_charged_too_much_holds_nobody_up() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "a", &[]);
        for _ in 0..4 {
            shares.record_grant(&waiter("a", 1), false);
        }
        for _ in 0..4 {
            served(&mut shares, "a", 1, 1);
        }
        enter(&mut shares, "b", &["a"]);
        assert!(shares.counter("b") <= shares.counter("a"));
    }

    #[test]
    fn a_guess_that_falls_puts_nobody_behind_who_came_while_it_was_high() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "flood", &[]);
        for id in 0..4 {
            shares.record_grant(&waiter("flood", id), false);
            served(&mut shares, "flood", 20, 2);
        }
        shares.record_grant(&waiter("flood", 4), false);
        let before = shares.charge();
        enter(&mut shares, "quiet", &["flood"]);
        for id in 5..10 {
            served(&mut shares, "flood", 20, 2);
            assert!(shares.counter("quiet") < shares.counter("flood"), "the next place is its own");
            shares.record_grant(&waiter("flood", id), false);
        }
        assert!(
            shares.charge() <= before && before < DEFAULT_CHARGE_TOKENS,
            "{before}, then {}",
            shares.charge()
        );
    }

    #[test]
    fn who_was_served_and_left_is_charged_no_longer() {
        let mut shares = FairnessCounters::default();
        for key in ["a", "b"] {
            enter(&mut shares, key, &[]);
        }
        shares.record_grant(&waiter("a", 1), false);
        for id in 2..6 {
            shares.record_grant(&waiter("b", id), false);
            served(&mut shares, "b", 10, 2);
        }
        assert_eq!(shares.counter("a"), 0, "two are under way, the latest two");
        assert_eq!(shares.counter("b"), 40 + 2 * shares.charge());
    }

    #[test]
    fn what_is_remembered_of_grants_stays_small_though_nothing_is_ever_said_to_be_served() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "", &[]);
        for id in 0..1000 {
            shares.record_grant(&waiter("", id), false);
            shares.limit_in_flight(4);
        }
        assert_eq!((shares.recent.len(), shares.in_flight), (MAX_RECENT_GRANTS, 4));
        shares.limit_in_flight(0);
        assert_eq!(shares.counter(""), 0);
    }

    #[test]
    fn who_comes_back_unserved_is_charged_nothing() {
        let mut shares = FairnessCounters::default();
        enter(&mut shares, "a", &[]);
        shares.record_grant(&waiter("a", 1), false);
        shares.record_return(&waiter("a", 2));
        assert_eq!(shares.counter("a"), DEFAULT_CHARGE_TOKENS, "another of its requests");
        shares.record_return(&waiter("a", 1));
        shares.record_return(&waiter("a", 1));
        assert_eq!(shares.counter("a"), 0, "its place was gone");
        shares.record_grant(&waiter("a", 3), true);
        shares.record_return(&waiter("a", 4));
        assert_eq!(shares.counter("a"), 0, "a canary under its new number");
    }
}
