//! Random numbers for the choice of engines: cheap, one source per core, not for secrets.

use std::{cell::Cell, hash::BuildHasher as _, hash::RandomState};

/// A SplitMix64 generator with its own seed in every process and on every core. Cores with equal draws would all choose
/// the same engine.
#[derive(Debug)]
pub struct Rng(Cell<u64>);

impl Rng {
    #[must_use]
    pub fn new() -> Self {
        // The standard library seeds each `RandomState` differently.
        Self::seeded(RandomState::new().hash_one(0u8))
    }

    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        Self(Cell::new(seed))
    }

    #[must_use]
    pub fn next_u64(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.0.set(state);
        mix64(state)
    }

    /// Two different numbers below `n`, which must be at least 2.
    #[must_use]
    pub fn two_distinct_below(&self, n: usize) -> (usize, usize) {
        let draw = self.next_u64();
        // The high half of a product spreads 32 bits over 0..n without a division.
        let below = |draw: u64, n: usize| (((draw & 0xFFFF_FFFF) * n as u64) >> 32) as usize;
        let first = below(draw, n);
        let second = below(draw >> 32, n - 1);
        (first, if second >= first { second + 1 } else { second })
    }
}

impl Default for Rng {
    fn default() -> Self {
        Self::new()
    }
}

/// SplitMix64's finalizer: every input bit flips about half of the output bits.
#[must_use]
pub(super) const fn mix64(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_draws_differ_and_every_pair_comes_about_equally_often() {
        let rng = Rng::seeded(7);
        for n in 2..6 {
            let mut seen = vec![0u32; n * n];
            for _ in 0..6_000 {
                let (a, b) = rng.two_distinct_below(n);
                assert!(a != b && a < n && b < n);
                *seen.get_mut(a * n + b).unwrap() += 1;
            }
            let fair = 6_000 / (n * (n - 1)) as u32;
            let pairs = seen.iter().enumerate().filter(|(at, _)| at / n != at % n);
            assert!(pairs.clone().all(|(_, &s)| s > fair * 7 / 10 && s < fair * 13 / 10), "{n}: {seen:?}");
        }
    }

    #[test]
    fn cores_draw_differently() {
        assert_ne!(Rng::new().next_u64(), Rng::new().next_u64());
    }
}
