//! Counts the tokens served to each key's requests, for the fleet's decisions.
//!
//! Exchanges count on many threads, much more often than the fleet decides; the driver reads the sums once a turn. The
//! driver turns them into events instead of letting the fleet look them up, which makes the journal complete: a replay
//! yields the same order of grants.
//!
//! The driver holds the one lock of all threads while it reads every pair, and no request should wait for that. So each
//! core looks up a counter once ([`ServedTokensCache`]) and keeps it.
//!
//! Each model counts its own tokens, since its waiters compete for its places: a key's tokens from a small embedding
//! model have no bearing on its claim to the next place of a large model.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rouse::{
    fleet::{Fleet, event::Event},
    model::ModelName,
};

/// Counters by model and key, as many as are configured.
type ServedCounters = BTreeMap<ModelName, BTreeMap<String, Arc<AtomicU64>>>;

/// Tokens served and not reported yet, by model and key.
#[derive(Debug, Default)]
pub struct ServedTokens {
    counters: Mutex<ServedCounters>,
}

/// Counters that one core has used. Their number is bounded, and none is removed.
#[derive(Debug, Default)]
pub struct ServedTokensCache(RefCell<ServedCounters>);

impl ServedTokensCache {
    /// Same as [`ServedTokens::counter`], which this calls only on the first use.
    pub fn counter(&self, served: &ServedTokens, model: &ModelName, key: &str) -> Arc<AtomicU64> {
        if let Some(counter) = self.0.borrow().get(model).and_then(|of| of.get(key)) {
            return Arc::clone(counter);
        }
        let counter = served.counter(model, key);
        let mut known = self.0.borrow_mut();
        known.entry(model.clone()).or_default().insert(key.to_owned(), Arc::clone(&counter));
        counter
    }
}

impl ServedTokens {
    /// Returns the counter of what this model serves to this key.
    ///
    /// Add weighted tokens to it as they are served. Keep it for as long as a request lasts, or longer; the driver
    /// subtracts what it has reported.
    pub fn counter(&self, model: &ModelName, key: &str) -> Arc<AtomicU64> {
        let mut counters = self.counters();
        let of_model = match counters.get_mut(model) {
            Some(of_model) => of_model,
            None => counters.entry(model.clone()).or_default(),
        };
        match of_model.get(key) {
            Some(counter) => Arc::clone(counter),
            None => Arc::clone(of_model.entry(key.to_owned()).or_default()),
        }
    }

    /// Adds an event per competing key with the tokens served since the last turn.
    ///
    /// The events are in the order of names. Tokens from before the key had to wait do not count: they took nothing
    /// from other keys.
    pub(super) fn sample(&self, fleet: &Fleet, batch: &mut Vec<Event>) {
        let counters = self.counters();
        let take = |model: &ModelName, key: &str| {
            counters.get(model).and_then(|of| of.get(key)).map_or(0, |n| n.swap(0, Ordering::Relaxed))
        };
        for event in &*batch {
            if let Event::Arrived { waiter } = event
                && !fleet.tracks_key(&waiter.model, &waiter.key)
            {
                take(&waiter.model, &waiter.key);
            }
        }
        for (model, key) in fleet.tracked_keys() {
            let tokens = take(model, key);
            if tokens > 0 {
                batch.push(Event::Served { model: model.clone(), key: key.to_owned(), tokens });
            }
        }
    }

    fn counters(&self) -> MutexGuard<'_, ServedCounters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_count_together_and_take_the_lock_once_for_each_pair() {
        let (served, cores) =
            (ServedTokens::default(), [ServedTokensCache::default(), ServedTokensCache::default()]);
        for core in &cores {
            core.counter(&served, &"m".into(), "k").fetch_add(1, Ordering::Relaxed);
        }
        assert_eq!(served.counter(&"m".into(), "k").load(Ordering::Relaxed), 2);
        assert_eq!(served.counter(&"other".into(), "k").load(Ordering::Relaxed), 0);
        let _held = served.counters();
        assert_eq!(cores[0].counter(&served, &"m".into(), "k").load(Ordering::Relaxed), 2);
    }
}
