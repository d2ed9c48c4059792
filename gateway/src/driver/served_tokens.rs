//! What the keys' requests were served, on its way to the decisions.
//!
//! Exchanges count on many threads and much more often than anything is decided; the driver reads what came together
//! once a turn. That it becomes an event there, and is not looked up by the fleet, is what makes a journal complete:
//! replayed, it gives the same order of grants.
//!
//! One lock for all threads, which the driver holds while it looks at every pair, is nothing for a request to wait at: each
//! core finds a counter there once ([`ServedTokensCache`]) and keeps it.
//!
//! Tokens count apart for each model, since a model's places are what its waiters compete for: what a key was served
//! by a small embedding model says nothing about its claim on the next place of a large one.

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

/// A key's counters by model; as many as are configured.
type ServedCounters = BTreeMap<ModelName, BTreeMap<String, Arc<AtomicU64>>>;

/// Tokens served and not told yet, by model and key.
#[derive(Debug, Default)]
pub struct ServedTokens {
    counters: Mutex<ServedCounters>,
}

/// The counters that one core has met. As many as there are, and they are never taken away.
#[derive(Debug, Default)]
pub struct ServedTokensCache(RefCell<ServedCounters>);

impl ServedTokensCache {
    /// As [`ServedTokens::counter`], which is asked only for what was not met yet.
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
    /// What this key is served by this model: add to it (weighted tokens) as they are served. Keep it for as long as
    /// a request lasts, or longer; the driver takes away what it has told.
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

    /// What was served since the last turn to those whose requests compete, in the order of names. What a key was
    /// served before it had to wait does not count: it took nothing from anybody.
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
