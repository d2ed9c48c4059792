//! Assigns keys to engines: consistent hashing over the engines of one model.
//!
//! The ring is made of the engines' variants and *numbers*, and neither of their addresses nor of their generations. A replaced
//! engine on another port takes over exactly its old keys, and the keys of other engines stay where their caches are.
//! Every gateway makes the same ring. The ring is rebuilt when the set of engines changes, never for a request.

use std::net::{Ipv6Addr, SocketAddr};

use pingora_ketama::{Bucket, Continuum};

use rouse::model::EngineId;

use super::{Endpoint, rng::mix64};

/// The engines that a walk visits at most once. Beyond this number, a repeated visit only costs time.
const MAX_TRACKED_ENGINES: usize = 256;

pub struct HashRing {
    points: Continuum,
    /// For each point of the ring, the index of its engine among the endpoints.
    owners: Box<[u16]>,
    /// The addresses on the ring of the engines that it was built from.
    engines: Box<[SocketAddr]>,
}

impl HashRing {
    #[must_use]
    pub fn new(endpoints: &[Endpoint]) -> Self {
        let engines: Box<[SocketAddr]> =
            endpoints.iter().map(|endpoint| ring_address(&endpoint.engine)).collect();
        let buckets: Vec<Bucket> = engines.iter().map(|name| Bucket::new(*name, 1)).collect();
        let points = Continuum::new(&buckets);
        let mut owners = Vec::new();
        let mut at = 0;
        while let Some(owner) = points.get_addr(&mut at) {
            let owner = engines.iter().position(|name| name == owner).unwrap_or_default();
            owners.push(u16::try_from(owner).unwrap_or_default());
            if at == 0 {
                break;
            }
        }
        Self { points, owners: owners.into(), engines }
    }

    /// Whether the ring was built from the same engines in the same order.
    #[must_use]
    pub fn is_built_from(&self, endpoints: &[Endpoint]) -> bool {
        self.engines.iter().copied().eq(endpoints.iter().map(|endpoint| ring_address(&endpoint.engine)))
    }

    /// The indexes of the engines in the key's order of preference, each once.
    #[must_use]
    pub fn walk(&self, key: u64) -> HashRingWalk<'_> {
        let at = self.points.node_idx(&key.to_le_bytes());
        HashRingWalk {
            ring: self,
            at,
            points: self.owners.len(),
            unseen: self.engines.len(),
            seen: [0; MAX_TRACKED_ENGINES / 64],
        }
    }
}

impl std::fmt::Debug for HashRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HashRing").field(&self.engines).finish()
    }
}

pub struct HashRingWalk<'a> {
    ring: &'a HashRing,
    at: usize,
    /// The points not yet visited, and the engines not yet returned.
    points: usize,
    unseen: usize,
    seen: [u64; MAX_TRACKED_ENGINES / 64],
}

impl Iterator for HashRingWalk<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        while self.unseen > 0 && self.points > 0 {
            let owner = usize::from(*self.ring.owners.get(self.at)?);
            self.at = if self.at + 1 == self.ring.owners.len() { 0 } else { self.at + 1 };
            self.points -= 1;
            let Some(word) = self.seen.get_mut(owner / 64) else { return Some(owner) };
            let bit = 1 << (owner % 64);
            if *word & bit == 0 {
                *word |= bit;
                self.unseen -= 1;
                return Some(owner);
            }
        }
        None
    }
}

/// A synthetic address for the ring, which prints addresses to place its points: any that differ in many bits will do.
fn ring_address(engine: &EngineId) -> SocketAddr {
    let replica = u64::from(engine.replica) ^ variant_bits(engine);
    let (high, low) = (mix64(replica.wrapping_add(1)), mix64(!replica));
    let bits = u128::from(high) << 64 | u128::from(low);
    SocketAddr::from((Ipv6Addr::from_bits(bits), 1))
}

/// Bits that tell the variants of a model apart: none for `default`, and above the replica numbers for any other.
fn variant_bits(engine: &EngineId) -> u64 {
    if engine.variant.is_default() {
        return 0;
    }
    let mixed = engine.variant.as_str().bytes().fold(1, |hash, byte| mix64(hash ^ u64::from(byte)));
    mixed << 32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{super::testing::endpoints, *};

    const KEYS: u64 = 20_000;

    fn owner(ring: &HashRing, replicas: &[u32], key: u64) -> u32 {
        *replicas.get(ring.walk(mix64(key)).next().unwrap()).unwrap()
    }

    #[test]
    fn a_walk_meets_every_engine_once() {
        for n in [1, 2, 3, 8, 70, 300] {
            let ring = HashRing::new(&endpoints(0..n));
            for key in 0..20 {
                let walk: Vec<usize> = ring.walk(mix64(key)).collect();
                let met: BTreeSet<usize> = walk.iter().copied().collect();
                assert_eq!(met.len(), n as usize);
                assert!(walk.len() == met.len() || n as usize > MAX_TRACKED_ENGINES);
            }
        }
    }

    #[test]
    fn keys_spread_evenly() {
        for n in [2, 3, 5, 8, 16] {
            let replicas: Vec<u32> = (0..n).collect();
            let ring = HashRing::new(&endpoints(0..n));
            let mut owned = vec![0u64; n as usize];
            for key in 0..KEYS {
                *owned.get_mut(owner(&ring, &replicas, key) as usize).unwrap() += 1;
            }
            let fair = KEYS / u64::from(n);
            assert!(owned.iter().all(|&o| o > fair * 3 / 4 && o < fair * 5 / 4), "{owned:?}");
        }
    }

    #[test]
    fn an_engine_that_goes_moves_only_its_own_keys_and_one_that_comes_takes_its_share() {
        for n in 2..10u32 {
            let all: Vec<u32> = (0..n).collect();
            let whole = HashRing::new(&endpoints(0..n));
            for gone in 0..n {
                let rest: Vec<u32> = all.iter().copied().filter(|r| *r != gone).collect();
                let without = HashRing::new(&endpoints(rest.iter().copied()));
                let mut moved = 0;
                for key in 0..KEYS {
                    let (before, after) = (owner(&whole, &all, key), owner(&without, &rest, key));
                    assert!(before == gone || before == after, "a key of {before} moved when {gone} went");
                    moved += u64::from(before != after);
                }
                assert!(moved < KEYS * 5 / 4 / u64::from(n), "{moved} of {KEYS} with {n}");
            }
        }
    }

    #[test]
    fn engines_of_two_variants_with_the_same_number_share_the_keys() {
        let mut both: Vec<Endpoint> = endpoints(0..2).into_iter().chain(endpoints(0..2)).collect();
        for endpoint in both.iter_mut().skip(2) {
            endpoint.engine.variant = "h100".into();
        }
        let ring = HashRing::new(&both);
        let mut owned = [0u64; 4];
        for key in 0..KEYS {
            owned[ring.walk(mix64(key)).next().unwrap()] += 1;
        }
        assert!(owned.iter().all(|&o| o > KEYS / 8), "{owned:?}");
    }

    #[test]
    fn the_order_of_the_engines_does_not_matter() {
        let (forth, back): (Vec<u32>, Vec<u32>) = ((0..7).collect(), (0..7).rev().collect());
        let rings = [HashRing::new(&endpoints(0..7)), HashRing::new(&endpoints((0..7).rev()))];
        assert!(!rings.last().unwrap().is_built_from(&endpoints(0..7)));
        for key in 0..KEYS {
            assert_eq!(owner(&rings[0], &forth, key), owner(&rings[1], &back, key));
        }
    }
}
