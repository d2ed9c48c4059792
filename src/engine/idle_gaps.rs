//! Latest pauses between two uses of an engine.
//!
//! The usual pause is their median, not their mean. A client that asks a few questions and then rests for a minute
//! returns within a second while it is asking. One long rest would dominate a mean until the questions are over.

use serde::{Deserialize, Serialize};

use crate::units::Millis;

/// How many pauses are kept.
const MAX_GAPS: usize = 4;

/// Pauses, latest first.
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

    /// Returns the lower median: half of the latest pauses were no longer than this.
    #[must_use]
    pub fn median(&self) -> Option<Millis> {
        let mut sorted = self.0;
        // Unknown pauses sort first.
        sorted.sort_unstable();
        let known_count = sorted.iter().flatten().count();
        let half = known_count.checked_sub(1)? / 2;
        sorted.get(MAX_GAPS - known_count + half).copied().flatten()
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
