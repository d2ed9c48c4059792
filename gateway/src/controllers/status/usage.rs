//! What an engine was seen to use of the memory that its model declares.
//!
//! Only ever advice: a peak is what happened to be asked of it so far, and a declaration is what it may take.

use rouse::units::Bytes;

use crate::controllers::crd::Quantity;

/// From this share of the declared memory on, a declaration is taken for a good one. In percent.
const WELL_USED_PERCENT: u128 = 90;
/// What is advised, in percent of the peak.
const ADVISED_PERCENT: u128 = 110;
const MEBIBYTE: u128 = 1 << 20;

/// How much of it is used.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredMemoryUsage {
    /// The peak as a share of what is declared; more than 1 is more than declared.
    pub ratio: f64,
    /// The same in whole percent, rounded down.
    pub percent: u32,
    /// What to declare instead, when that is less.
    pub advised: Option<Bytes>,
    /// The advice as a sentence.
    pub recommendation: Option<String>,
}

/// Of one accelerator: what is declared, and the most that an engine was seen to use. `None` while there is nothing to
/// compare.
#[must_use]
pub fn usage(declared: Bytes, peak: Bytes) -> Option<DeclaredMemoryUsage> {
    if declared == Bytes::ZERO || peak == Bytes::ZERO {
        return None;
    }
    let (all, used) = (u128::from(declared.0), u128::from(peak.0));
    let advised = (used * 100 < all * WELL_USED_PERCENT)
        .then(|| (used * ADVISED_PERCENT).div_ceil(100).div_ceil(MEBIBYTE) * MEBIBYTE);
    // Of a declaration of a few MiB the rounding may eat what is saved.
    let advised =
        advised.filter(|advised| *advised < all).and_then(|bytes| u64::try_from(bytes).ok()).map(Bytes);
    let percent = u32::try_from(used * 100 / all).unwrap_or(u32::MAX);
    let recommendation = advised.map(|advised| {
        format!(
            "declare memory: {} instead of {}, since no engine was seen to use more than {} of it ({percent} %)",
            Quantity::from(advised),
            Quantity::from(declared),
            Quantity::from(peak),
        )
    });
    Some(DeclaredMemoryUsage { ratio: peak.0 as f64 / declared.0 as f64, percent, advised, recommendation })
}
