//! Pseudo-random numbers for tests, so that a failure can be reproduced from its seed.

/// A linear congruential generator: the same seed gives the same numbers.
#[derive(Debug)]
pub struct TestRng(pub u64);

impl TestRng {
    /// The next number, less than `limit`. Below 2^31 in any case.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
