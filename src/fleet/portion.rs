//! How much of one accelerator, or of one pool: bytes and, of a pool, accelerators. There is room for an engine only
//! where there is enough of both.

use std::{iter::Sum, ops::Add};

use crate::units::Bytes;

/// Compared by [`Self::covers`] alone: of two portions each may have more of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) bytes: Bytes,
    pub(super) units: u32,
}

impl Portion {
    pub(super) fn is_nothing(self) -> bool {
        self == Self::default()
    }

    /// It is enough for this.
    pub(super) fn covers(self, other: Self) -> bool {
        self.bytes >= other.bytes && self.units >= other.units
    }

    /// What is left of each, at least nothing.
    pub(super) const fn less(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(other.bytes), units: self.units.saturating_sub(other.units) }
    }

    /// The smaller of each.
    pub(super) fn least(self, other: Self) -> Self {
        Self { bytes: self.bytes.min(other.bytes), units: self.units.min(other.units) }
    }
}

impl Add for Portion {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, units: self.units.saturating_add(other.units) }
    }
}

impl Sum for Portion {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), Add::add)
    }
}
