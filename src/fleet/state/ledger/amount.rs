//! An amount of one accelerator or pool: bytes, and for a pool accelerators. An engine needs enough of both.

use std::{iter::Sum, ops::Add};

use crate::units::Bytes;

/// Compare only with [`Self::covers`]: of two amounts each may have more of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::fleet) struct ResourceAmount {
    pub(in crate::fleet) bytes: Bytes,
    pub(in crate::fleet) units: u32,
}

impl ResourceAmount {
    pub(in crate::fleet) fn is_zero(self) -> bool {
        self == Self::default()
    }

    /// Whether this amount suffices for `other`.
    pub(in crate::fleet) fn covers(self, other: Self) -> bool {
        self.bytes >= other.bytes && self.units >= other.units
    }

    /// Subtracts each component, down to zero.
    pub(in crate::fleet) const fn saturating_sub(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(other.bytes), units: self.units.saturating_sub(other.units) }
    }

    /// The smaller of each component.
    pub(in crate::fleet) fn component_min(self, other: Self) -> Self {
        Self { bytes: self.bytes.min(other.bytes), units: self.units.min(other.units) }
    }
}

impl Add for ResourceAmount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, units: self.units.saturating_add(other.units) }
    }
}

impl Sum for ResourceAmount {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), Add::add)
    }
}
