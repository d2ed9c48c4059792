//! Fairness between keys: the order of a model's waiters by what each key was served.
//!
//! Start-time fair queueing measured in tokens ("Fairness in Serving Large Language Models", OSDI 2024, calls it the
//! virtual token counter). Each key has a counter. A place goes to the key with the lowest counter, and within a key,
//! or between equal counters, to the earliest request. A key that floods the queue moves only its own counter.
//!
//! * Absence earns no credit. A key that starts to wait begins no lower than where the last grant was made (and no
//!   higher than any waiting key). Otherwise a key that was away all night would have the morning to itself.
//! * The cost of an answer is known only at its end. While an answer is in flight, its grant is charged the usual cost,
//!   so that many grants at one moment are as fair as the same grants one by one. As many of a model's grants count as
//!   in flight as the model has leases, the latest ones: which answers have ended is known only for all together. A
//!   charge is an estimate that changes as more is learned, so it is never mixed with served tokens, and no key's start
//!   is computed from it. Otherwise a key that arrived while the estimate was too high would be behind the charged keys
//!   when it falls.
//! * A request that returns to the queue was not served: its place was gone before it could take the lease, or an
//!   engine's first answer failed. It is no longer charged.
//! * Counters last as long as a model is busy. Once no request waits and none runs, nothing is owed.
//!
//! Each model has its own counters; there is no common one for all that a key does. Keys compete here for the next
//! place of one model, and tokens of different models are no common currency: with one counter, heavy use of a small
//! embedding model would bar a key from a large one for as long as other keys want that. Each band has its own counters
//! as well, since a higher band is served first in any case, and its progress must not age the bands below it.
//!
//! The choice of the model is not made here: it goes by the oldest waiter (`turn_order`), and a flood has only one of
//! these, like every other key.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::event::{Waiter, WaiterId},
    units::Tick,
};

/// Assumed cost of an answer before any was seen, in weighted tokens.
const DEFAULT_CHARGE_TOKENS: u64 = 512;
/// Number of grants at which the sums behind the average are halved.
///
/// This gives older answers less weight.
const MAX_AVERAGED_GRANTS: u64 = 256;

/// Number of latest grants remembered one by one: most returns happen within a turn or two.
const MAX_RECENT_GRANTS: usize = 64;

/// The counters of one model's keys in one band, in weighted tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FairnessCounters {
    keys: BTreeMap<String, KeyCounter>,
    /// Served tokens of the key of the last grant, at that grant.
    virtual_time: u64,
    /// The charge per grant in flight.
    charge: u64,
    /// Served tokens and grants that the charge is averaged over.
    tokens: u64,
    grants: u64,
    /// Latest grants, the latest first.
    recent: VecDeque<RecentGrant>,
    /// Number of the latest grants that count as in flight.
    #[serde(default)]
    in_flight: usize,
}

/// One grant, for as long as its request may return.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RecentGrant {
    id: WaiterId,
    key: String,
    arrived: Tick,
    deadline: Tick,
    /// A canary may return under another number.
    canary: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KeyCounter {
    served: u64,
    /// Grants that count as in flight.
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

    /// The amount that the next grant adds to its key's counter.
    pub(in crate::fleet) const fn charge(&self) -> u64 {
        self.charge
    }

    pub(in crate::fleet) fn contains(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    pub(in crate::fleet) fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// Adds a key that had no waiters. `waiting`: the other keys with waiters.
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

    /// Cancels the charge of a request that returned to the queue. Does nothing for a new one.
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

    /// Records served tokens. `leases`: all answers of this model in flight, of any key.
    pub(in crate::fleet) fn record_served(&mut self, key: &str, tokens: u64, leases: u32) {
        let Some(share) = self.keys.get_mut(key) else { return };
        share.served = share.served.saturating_add(tokens);
        self.tokens = self.tokens.saturating_add(tokens);
        // Grants in flight are counted, but their tokens are not complete.
        if self.grants >= 2 * u64::from(leases).max(1) {
            self.charge = (self.tokens / self.grants).max(1);
        }
        if self.grants >= MAX_AVERAGED_GRANTS {
            (self.tokens, self.grants) = (self.tokens / 2, self.grants / 2);
        }
    }

    /// Whether more grants count as in flight than the model has leases.
    pub(in crate::fleet) const fn exceeds_in_flight(&self, leases: u32) -> bool {
        self.in_flight > leases as usize
    }

    /// Keeps at most `leases` grants in flight, the latest ones.
    ///
    /// `leases`: the model's leases on all of its engines.
    pub(in crate::fleet) fn limit_in_flight(&mut self, leases: u32) {
        while self.exceeds_in_flight(leases) {
            self.end_grant(self.in_flight - 1);
        }
        self.recent.truncate(MAX_RECENT_GRANTS.max(self.in_flight));
    }

    /// Ends a grant that counts as in flight.
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

    /// Reports the leases first, then the served tokens, as the driver does.
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
