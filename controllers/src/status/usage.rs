//! Compares a model's declared memory with its observed use.
//!
//! The result is only advice: a peak reflects the load so far, while a declaration covers what an engine may take.

use rouse::units::Bytes;

use crate::crd::Quantity;

/// Share of the declared memory, in percent, from which on a declaration counts as good.
const WELL_USED_PERCENT: u128 = 90;
/// Advised declaration, in percent of the peak.
const ADVISED_PERCENT: u128 = 110;
const MEBIBYTE: u128 = 1 << 20;

/// How much of the declared memory is used.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredMemoryUsage {
    /// The peak divided by the declaration; above 1 if the engine uses more than declared.
    pub ratio: f64,
    /// That ratio in whole percent, rounded down.
    pub percent: u32,
    /// A smaller declaration to use instead, if there is one.
    pub advised: Option<Bytes>,
    /// The advice as a sentence.
    pub recommendation: Option<String>,
}

/// Compares the declared memory and the observed peak of one accelerator; `None` if either is zero.
#[must_use]
pub fn usage(declared: Bytes, peak: Bytes) -> Option<DeclaredMemoryUsage> {
    if declared == Bytes::ZERO || peak == Bytes::ZERO {
        return None;
    }
    let (all, used) = (u128::from(declared.0), u128::from(peak.0));
    let recommended = (used * 100 < all * WELL_USED_PERCENT)
        .then(|| (used * ADVISED_PERCENT).div_ceil(100).div_ceil(MEBIBYTE) * MEBIBYTE);
    // Rounding up to a MiB may eat the saving on a declaration of a few MiB.
    let recommended = recommended
        .filter(|recommended| *recommended < all)
        .and_then(|bytes| u64::try_from(bytes).ok())
        .map(Bytes);
    let percent = u32::try_from(used * 100 / all).unwrap_or(u32::MAX);
    let recommendation = recommended.map(|recommended| {
        format!(
            "declare memory: {} instead of {}, because no engine has used more than {} of it ({percent} %)",
            Quantity::from(recommended),
            Quantity::from(declared),
            Quantity::from(peak),
        )
    });
    Some(DeclaredMemoryUsage {
        ratio: peak.0 as f64 / declared.0 as f64,
        percent,
        advised: recommended,
        recommendation,
    })
}
