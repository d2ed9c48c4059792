//! How long an engine rests between two uses, by its latest pauses.
//!
//! What is usual is the median of the latest pauses, not their mean: a client that asks a few questions and rests for a minute is
//! expected back within a second in the middle of that, and one long rest would hide it from a mean until the questions are over.

use serde::{Deserialize, Serialize};

use crate::units::Millis;

/// So many are remembered.
const MAX_GAPS: usize = 4;

/// The latest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct IdleGaps([Option<Millis>; MAX_GAPS]);

impl IdleGaps {
    pub(super) const EMPTY: Self = Self([None; MAX_GAPS]);

    pub fn record(&mut self, pause: Millis) {
        self.0.rotate_right(1);
        if let Some(latest) = self.0.first_mut() {
            *latest = Some(pause);
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Half of the latest pauses were no longer than this.
    #[must_use]
    pub fn median(&self) -> Option<Millis> {
        let mut sorted = self.0;
        // Those that are not known yet come first.
        sorted.sort_unstable();
        let known = sorted.iter().flatten().count();
        let half = known.checked_sub(1)? / 2;
        sorted.get(MAX_GAPS - known + half).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_among_short_pauses_is_not_the_usual_one_and_older_pauses_are_forgotten() {
        let mut pauses = IdleGaps::default();
        let mut after = |pause: u64| {
            pauses.record(Millis(pause));
            pauses.median().map_or(0, |usual| usual.0)
        };
        assert_eq!([60_000, 300, 200, 400].map(&mut after), [60_000, 300, 300, 300]);
        assert_eq!([50_000, 300].map(&mut after), [300, 300], "in the next burst as before");
        assert_eq!(
            [40_000, 30_000, 20_000].map(&mut after),
            [400, 30_000, 20_000],
            "it rests for longer now"
        );
        assert_eq!(IdleGaps::EMPTY.median(), None);
    }
}
