//! The generations of engines that start under one leader.
//!
//! They are above those of all former leaders, of which a leader may not know every engine.

use rouse::units::Generation;

/// Low bits of a generation, below its leader's epoch: an engine can have 2^16 generations under one leader.
const GENERATION_BITS: u32 = 16;

/// Returns the generation that all generations of this epoch are above.
pub(crate) const fn of_epoch(epoch: u64) -> Generation {
    Generation(epoch << GENERATION_BITS)
}

/// Returns the epoch whose generations are above this floor.
pub(crate) const fn epoch_of(floor: Generation) -> u64 {
    floor.0 >> GENERATION_BITS
}
