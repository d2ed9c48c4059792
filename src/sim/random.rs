//! Pseudo-random numbers that are the same on every machine: splitmix64.

/// A generator that is fully determined by its seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number, any of 2^64.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    pub const fn between(&mut self, low: u64, high: u64) -> u64 {
        if high <= low {
            return low;
        }
        low + self.next_u64() % (high - low + 1)
    }

    /// In `0..1`.
    pub fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// True with probability `p`. Draws nothing if `p` is zero, so a disabled fault changes no seed.
    pub fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.fraction() < p
    }

    /// Exponentially distributed: the gaps of a Poisson process.
    pub fn exponential(&mut self, mean: u64) -> u64 {
        (-(1.0 - self.fraction()).ln() * mean as f64) as u64
    }

    /// A random element of `things`, if any.
    pub fn pick<'a, T>(&mut self, things: &'a [T]) -> Option<&'a T> {
        let last = things.len().checked_sub(1)?;
        things.get(self.between(0, last as u64) as usize)
    }
}
