//! Remembers which engine made which response, for requests that continue one (`previous_response_id`).
//!
//! Engines keep responses in their own memory, so only the engine that made a response can continue it. The record here
//! is a bounded hint of this process: [`MAX_RESPONSES`] responses, each for at least [`MIN_RETENTION`] after its last
//! use unless newer ones displace it, and useless once the engine's generation is over.
//!
//! The next request of a conversation may arrive on any connection, and so on any core: the memory must be shared. It
//! is written once per response of one API, and read once per request that names an earlier response. A few short
//! locks, by shard, cost less than the care that a lock-free structure would need. Entries age by two generations of
//! maps: an entry found in the old map moves to the young one, and the old map is dropped whole when the young one is
//! full or old.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    model::EngineId,
    units::{Generation, Millis, Tick},
};

/// The most responses that are remembered.
const MAX_RESPONSES: usize = 64 << 10;
/// The shortest retention after the last use, if there is room.
const MIN_RETENTION: Millis = Millis::secs(3600);
const SHARDS: usize = 16;

/// One generation of an engine.
pub type EngineGeneration = (EngineId, Generation);

#[derive(Debug)]
pub struct ResponseOwners {
    shards: Box<[Mutex<ResponseOwnerShard>]>,
}

#[derive(Debug, Default)]
struct ResponseOwnerShard {
    young: HashMap<u64, EngineGeneration>,
    old: HashMap<u64, EngineGeneration>,
    /// When the young map was started.
    young_since: Tick,
}

impl ResponseOwners {
    /// Records the engine of a response. `response`: the hash of its id.
    pub fn remember(&self, response: u64, owner: EngineGeneration, now: Tick) {
        let mut shard = self.shard(response);
        shard.rotate(now);
        shard.young.insert(response, owner);
    }

    #[must_use]
    pub fn owner_of(&self, response: u64, now: Tick) -> Option<EngineGeneration> {
        let mut shard = self.shard(response);
        shard.rotate(now);
        if let Some(owner) = shard.old.remove(&response) {
            shard.young.entry(response).or_insert(owner);
        }
        shard.young.get(&response).cloned()
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder is less than what it is the remainder of")]
    fn shard(&self, response: u64) -> MutexGuard<'_, ResponseOwnerShard> {
        // Shard by the high bits; the maps hash the whole value.
        let at = (response >> 32) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResponseOwnerShard {
    fn rotate(&mut self, now: Tick) {
        if self.young.len() >= MAX_RESPONSES / SHARDS / 2 || now.since(self.young_since) > MIN_RETENTION {
            self.old = std::mem::take(&mut self.young);
            self.young_since = now;
        }
    }
}

impl Default for ResponseOwners {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::rng::mix64, *};

    fn author(replica: u32) -> EngineGeneration {
        (EngineId::new("m".into(), replica), Generation(1))
    }

    #[test]
    fn what_is_used_stays_and_the_whole_is_bounded() {
        let authors = ResponseOwners::default();
        let id = |n: u64| mix64(n);
        authors.remember(id(0), author(9), Tick(1));
        for n in 1..200_000 {
            authors.remember(id(n), author(0), Tick(1));
            if n % 1000 == 0 {
                assert_eq!(authors.owner_of(id(0), Tick(1)), Some(author(9)));
            }
        }
        let held: usize =
            authors.shards.iter().map(|s| s.lock().map_or(0, |s| s.young.len() + s.old.len())).sum();
        assert!(held <= MAX_RESPONSES && held > MAX_RESPONSES / 3, "{held}");
        assert_eq!(authors.owner_of(id(199_999), Tick(1)), Some(author(0)));
        assert_eq!(authors.owner_of(id(1), Tick(1)), None);
    }

    #[test]
    fn what_is_old_goes() {
        let authors = ResponseOwners::default();
        let hour = MIN_RETENTION.0;
        authors.remember(7, author(1), Tick(hour * 2));
        assert_eq!(authors.owner_of(7, Tick(hour * 3)), Some(author(1)));
        assert_eq!(authors.owner_of(7, Tick(hour * 4 + 1)), Some(author(1)), "it was used");
        assert_eq!(authors.owner_of(8, Tick(hour * 6)), None);
        assert_eq!(authors.owner_of(8, Tick(hour * 8)), None);
        assert_eq!(authors.owner_of(7, Tick(hour * 8)), None);
    }
}
