//! Estimates how large a share of a model's requests has one key, to spread a popular key over several engines.
//!
//! A key's requests prefer one engine, whose cache has their beginning. If many requests have the same key (a system
//! prompt of all users), one engine is too few for them, and it is cheap to keep that beginning in several caches. The
//! number of engines follows from the share alone, and not from the load of the moment: a number that changes with the
//! load would fill one cache after the other.
//!
//! Counting is approximate, so that it costs two cache lines and no lock. Counts of keys that meet in one slot cancel
//! each other out, which leaves the more frequent one. An update that another core overwrites is lost.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A power of two.
const SLOTS: usize = 512;
/// The low bits of a slot: the count. The others are those of the key.
const COUNT_MASK: u64 = (1 << 24) - 1;
/// After this many requests all counts are halved: per engine, and at least.
const WINDOW_PER_ENGINE: u32 = 256;
const MIN_WINDOW: u32 = 1024;
/// The engines for a key, in quarters of those that its share of the requests would fill.
const SPREAD_QUARTERS: u64 = 7;

pub(super) struct KeyPopularity {
    slots: Box<[AtomicU64]>,
    /// Requests counted in the present window.
    requests: AtomicU32,
}

impl KeyPopularity {
    pub(super) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(), requests: AtomicU32::new(0) }
    }

    /// Counts a request with this key. Returns how many of `engines` engines its requests are spread over: at least 1.
    pub(super) fn spread(&self, key: u64, engines: usize) -> usize {
        let total = u32::try_from(engines).unwrap_or(u32::MAX);
        let window = total.saturating_mul(WINDOW_PER_ENGINE).max(MIN_WINDOW);
        let counted = self.count_request(window);
        let count = self.count_key(key);
        // While few requests are counted, one of them is no measure of a share.
        let counted = u64::from(counted.max(window / 8));
        let spread = (count * u64::from(total) * SPREAD_QUARTERS).div_ceil(4 * counted).max(1);
        // Over more than half of the engines, the rest may as well take part.
        let spread = if spread > 1 && 2 * spread > u64::from(total) { u64::from(total) } else { spread };
        usize::try_from(spread).unwrap_or(engines)
    }

    /// Returns the number of requests in the present window, this one included.
    fn count_request(&self, window: u32) -> u32 {
        let before = self.requests.load(Ordering::Relaxed);
        let counted = before.saturating_add(1);
        if counted < window {
            self.requests.store(counted, Ordering::Relaxed);
            return counted;
        }
        let half = window / 2;
        // Only one core halves the counts.
        let ends = self.requests.compare_exchange(before, half, Ordering::Relaxed, Ordering::Relaxed);
        if ends.is_ok() {
            for slot in &self.slots {
                let word = slot.load(Ordering::Relaxed);
                slot.store((word & !COUNT_MASK) | ((word & COUNT_MASK) / 2), Ordering::Relaxed);
            }
        }
        half
    }

    /// Returns the number of requests with this key, as far as its slot has it.
    fn count_key(&self, key: u64) -> u64 {
        let at = key as usize % SLOTS;
        let Some(slot) = self.slots.get(at) else { return 0 };
        let word = slot.load(Ordering::Relaxed);
        let (tag, count) = (word & !COUNT_MASK, word & COUNT_MASK);
        if tag == key & !COUNT_MASK || count == 0 {
            let count = (count + 1).min(COUNT_MASK);
            slot.store(key & !COUNT_MASK | count, Ordering::Relaxed);
            count
        } else {
            slot.store(word - 1, Ordering::Relaxed);
            0
        }
    }
}

impl std::fmt::Debug for KeyPopularity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyPopularity").field("requests", &self.requests).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::rng::mix64, *};

    /// The spread of a key that makes up every `nth` request, beside keys that occur once.
    fn spread(nth: u64, engines: usize) -> usize {
        let popularity = KeyPopularity::new();
        let requests = 4 * u64::from(MIN_WINDOW.max(WINDOW_PER_ENGINE * u32::try_from(engines).unwrap()));
        let mut last = 0;
        for request in 1..=requests {
            if request.is_multiple_of(nth) {
                last = popularity.spread(mix64(0), engines);
            } else {
                assert_eq!(popularity.spread(mix64(request), engines), 1, "a key that occurs once");
            }
        }
        last
    }

    #[test]
    fn a_key_is_spread_over_as_many_engines_as_its_share_of_the_requests_fills() {
        assert_eq!([1, 2, 5, 10, 100].map(|nth| spread(nth, 4)), [4, 4, 2, 1, 1]);
        assert_eq!([1, 2, 5].map(|nth| spread(nth, 2)), [2, 2, 1]);
        assert_eq!(spread(8, 32), 7);
    }

    #[test]
    fn a_key_that_is_no_longer_popular_is_forgotten() {
        let popularity = KeyPopularity::new();
        for _ in 0..MIN_WINDOW {
            popularity.spread(1, 4);
        }
        assert_eq!(popularity.spread(1, 4), 4);
        for request in 0..8 * u64::from(MIN_WINDOW) {
            popularity.spread(mix64(request), 4);
        }
        assert_eq!(popularity.spread(1, 4), 1);
    }
}
