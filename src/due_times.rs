//! When each of many things is due, and which of them are due now.

use std::collections::{BTreeMap, BTreeSet};

use crate::units::Tick;

/// A moment for each of some keys, found by key and in the order of time.
#[derive(Clone, Debug)]
pub struct DueTimes<K> {
    by_key: BTreeMap<K, Tick>,
    /// The same entries, ordered by time.
    by_time: BTreeSet<(Tick, K)>,
}

impl<K> Default for DueTimes<K> {
    fn default() -> Self {
        Self { by_key: BTreeMap::new(), by_time: BTreeSet::new() }
    }
}

impl<K: Clone + Ord> DueTimes<K> {
    /// Sets when this key is due; `None` if never.
    pub fn set(&mut self, key: &K, at: Option<Tick>) {
        if let Some(before) = self.by_key.remove(key) {
            self.by_time.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.by_time.insert((at, key.clone()));
            self.by_key.insert(key.clone(), at);
        }
    }

    /// When this key is due.
    #[must_use]
    pub fn get(&self, key: &K) -> Option<Tick> {
        self.by_key.get(key).copied()
    }

    /// The first moment at which a key is due.
    #[must_use]
    pub fn first(&self) -> Option<Tick> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// The keys that are due by this moment, the earliest first.
    pub fn due_by(&self, now: Tick) -> impl Iterator<Item = &K> {
        self.by_time.iter().take_while(move |(at, _)| *at <= now).map(|(_, key)| key)
    }

    pub fn clear(&mut self) {
        self.by_key.clear();
        self.by_time.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_due_at_the_last_moment_that_was_set_for_it() {
        let mut times = DueTimes::default();
        assert_eq!(times.first(), None);
        times.set(&"a", Some(Tick(5)));
        times.set(&"b", Some(Tick(3)));
        times.set(&"a", Some(Tick(2)));
        assert_eq!((times.first(), times.get(&"b")), (Some(Tick(2)), Some(Tick(3))));
        assert_eq!(times.due_by(Tick(1)).count(), 0);
        assert_eq!(times.due_by(Tick(5)).collect::<Vec<_>>(), [&"a", &"b"]);
        times.set(&"a", None);
        assert_eq!((times.first(), times.get(&"a")), (Some(Tick(3)), None));
        assert_eq!(times.due_by(Tick(5)).count(), 1);
        times.clear();
        assert_eq!(times.first(), None);
    }
}
