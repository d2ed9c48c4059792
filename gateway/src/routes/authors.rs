//! Which engine made which response, for requests that go on from one (`previous_response_id`).
//!
//! Engines that keep responses keep them in their own memory, so only the engine that made one can go on from it. What is
//! remembered here is a hint of this process and a bounded one: [`MOST`] responses, each for at least [`AGE`] after it was
//! last used unless newer ones push it out, and in vain once the engine's life is over.
//!
//! The next request of a conversation comes on any connection, and so to any core: the memory must be shared. It is
//! written once for each answer of one API, and read once for each request that names an earlier response; a few short
//! locks, by shard, cost less than anything without one would in care. Age goes by generations of two maps: what is found
//! in the old one moves to the young one, and the old one is dropped whole when the young one is full or old.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    model::EngineId,
    units::{Generation, Millis, Tick},
};

/// Responses that are remembered at most.
const MOST: usize = 64 << 10;
/// For at least so long, when there is room.
const AGE: Millis = Millis::secs(3600);
const SHARDS: usize = 16;

/// One life of an engine.
pub type Author = (EngineId, Generation);

#[derive(Debug)]
pub struct Authors {
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Debug, Default)]
struct Shard {
    young: HashMap<u64, Author>,
    old: HashMap<u64, Author>,
    /// Of the young ones.
    since: Tick,
}

impl Authors {
    /// `response`: the hash of its id.
    pub fn remember(&self, response: u64, author: Author, now: Tick) {
        let mut shard = self.shard(response);
        shard.turn(now);
        shard.young.insert(response, author);
    }

    #[must_use]
    pub fn of(&self, response: u64, now: Tick) -> Option<Author> {
        let mut shard = self.shard(response);
        shard.turn(now);
        if let Some(author) = shard.old.remove(&response) {
            shard.young.entry(response).or_insert(author);
        }
        shard.young.get(&response).cloned()
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder is less than what it is the remainder of")]
    fn shard(&self, response: u64) -> MutexGuard<'_, Shard> {
        // By the high bits: the maps go by a hash of the whole.
        let at = (response >> 32) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn turn(&mut self, now: Tick) {
        if self.young.len() >= MOST / SHARDS / 2 || now.since(self.since) > AGE {
            self.old = std::mem::take(&mut self.young);
            self.since = now;
        }
    }
}

impl Default for Authors {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::lots::scramble, *};

    fn author(replica: u32) -> Author {
        (EngineId::new("m".into(), replica), Generation(1))
    }

    #[test]
    fn what_is_used_stays_and_the_whole_is_bounded() {
        let authors = Authors::default();
        let id = |n: u64| scramble(n);
        authors.remember(id(0), author(9), Tick(1));
        for n in 1..200_000 {
            authors.remember(id(n), author(0), Tick(1));
            if n % 1000 == 0 {
                assert_eq!(authors.of(id(0), Tick(1)), Some(author(9)));
            }
        }
        let held: usize =
            authors.shards.iter().map(|s| s.lock().map_or(0, |s| s.young.len() + s.old.len())).sum();
        assert!(held <= MOST && held > MOST / 3, "{held}");
        assert_eq!(authors.of(id(199_999), Tick(1)), Some(author(0)));
        assert_eq!(authors.of(id(1), Tick(1)), None);
    }

    #[test]
    fn what_is_old_goes() {
        let authors = Authors::default();
        let hour = AGE.0;
        authors.remember(7, author(1), Tick(hour * 2));
        assert_eq!(authors.of(7, Tick(hour * 3)), Some(author(1)));
        assert_eq!(authors.of(7, Tick(hour * 4 + 1)), Some(author(1)), "it was used");
        assert_eq!(authors.of(8, Tick(hour * 6)), None);
        assert_eq!(authors.of(8, Tick(hour * 8)), None);
        assert_eq!(authors.of(7, Tick(hour * 8)), None);
    }
}
