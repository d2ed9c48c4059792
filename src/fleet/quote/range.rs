//! Arithmetic of expected waits.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::Millis;

/// How long a wait is expected to take. The ends are made to hold four of five waits.
///
/// `low` is at most `likely`, and `likely` at most `high`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitRange {
    pub low: Millis,
    pub likely: Millis,
    pub high: Millis,
}

impl WaitRange {
    pub const ZERO: Self = Self { low: Millis::ZERO, likely: Millis::ZERO, high: Millis::ZERO };

    #[must_use]
    pub const fn exactly(span: Millis) -> Self {
        Self { low: span, likely: span, high: span }
    }

    /// A step of which only its deadline is known. Most steps take a small part of their deadline.
    #[must_use]
    pub const fn within_deadline(deadline: Millis) -> Self {
        Self { low: Millis::ZERO, likely: Millis(deadline.0 / 8), high: deadline }
    }

    /// The time for this step and then the next.
    ///
    /// The spreads of independent steps add as squares: hardly ever are all of them slow.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let likely = self.likely + next.likely;
        let below =
            root_of_squares(self.likely.saturating_sub(self.low), next.likely.saturating_sub(next.low));
        let above =
            root_of_squares(self.high.saturating_sub(self.likely), next.high.saturating_sub(next.likely));
        Self { low: likely.saturating_sub(below), likely, high: likely + above }
    }

    /// The time until both have happened.
    #[must_use]
    pub fn both(self, other: Self) -> Self {
        Self {
            low: self.low.max(other.low),
            likely: self.likely.max(other.likely),
            high: self.high.max(other.high),
        }
    }

    /// The time until the first of the two has happened.
    #[must_use]
    pub fn first_of(self, other: Self) -> Self {
        Self {
            low: self.low.min(other.low),
            likely: self.likely.min(other.likely),
            high: self.high.min(other.high),
        }
    }

    /// The same wait, which something ends after this long at the latest.
    #[must_use]
    pub fn at_most(self, limit: Millis) -> Self {
        self.first_of(Self::exactly(limit))
    }

    /// What is left of the wait after it has lasted for `elapsed`.
    ///
    /// A wait that outlasts its range is expected to go on for a quarter of the range's width.
    #[must_use]
    pub fn left_after(self, elapsed: Millis) -> Self {
        let tail = Millis(self.high.saturating_sub(self.low).0 / 4);
        Self {
            low: self.low.saturating_sub(elapsed),
            likely: self.likely.saturating_sub(elapsed).max(self.likely.min(Millis(tail.0 / 2))),
            high: self.high.saturating_sub(elapsed).max(tail),
        }
    }

    /// The range with its lower and upper part scaled by so many thousandths.
    #[must_use]
    pub fn scaled(self, lower: u64, upper: u64) -> Self {
        let scaled = |part: Millis, by: u64| Millis(part.0.saturating_mul(by) / 1000);
        Self {
            low: self.likely.saturating_sub(scaled(self.likely.saturating_sub(self.low), lower)),
            high: self.likely + scaled(self.high.saturating_sub(self.likely), upper),
            ..self
        }
    }

    /// Both ends in whole seconds, rounded outwards.
    #[must_use]
    pub const fn whole_seconds(self) -> (u64, u64) {
        (self.low.0 / 1000, self.high.0.div_ceil(1000))
    }

    /// Whether a wait that took this long ended inside the range.
    #[must_use]
    pub fn contains(self, waited: Millis) -> bool {
        (self.low..=self.high).contains(&waited)
    }
}

/// In whole seconds: `12 to 20 s`, or `12 s` if both ends are the same.
impl fmt::Display for WaitRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.whole_seconds() {
            (low, high) if low == high => write!(f, "{high} s"),
            (low, high) => write!(f, "{low} to {high} s"),
        }
    }
}

fn root_of_squares(a: Millis, b: Millis) -> Millis {
    let square = |span: Millis| span.0.saturating_mul(span.0);
    Millis(square(a).saturating_add(square(b)).isqrt())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn range(low: u64, likely: u64, high: u64) -> WaitRange {
        WaitRange { low: Millis(low), likely: Millis(likely), high: Millis(high) }
    }

    #[test]
    fn steps_in_sequence_add_up_and_their_spreads_add_as_squares() {
        let steps = range(7000, 10_000, 13_000).then(range(6000, 10_000, 14_000));
        assert_eq!(steps, range(15_000, 20_000, 25_000));
        assert_eq!(steps.then(WaitRange::ZERO), steps);
        assert_eq!(steps.then(WaitRange::exactly(Millis(500))), range(15_500, 20_500, 25_500));
    }

    #[test]
    fn what_is_left_shrinks_with_time_and_a_late_step_goes_on_for_a_part_of_its_range() {
        let wake = range(6000, 10_000, 14_000);
        assert_eq!(wake.left_after(Millis::ZERO), wake);
        assert_eq!(wake.left_after(Millis(5000)), range(1000, 5000, 9000));
        assert_eq!(wake.left_after(Millis(13_900)), range(0, 1000, 2000));
        assert_eq!(wake.left_after(Millis(60_000)), range(0, 1000, 2000));
        assert_eq!(WaitRange::ZERO.left_after(Millis(60_000)), WaitRange::ZERO);
    }

    #[test]
    fn each_end_is_scaled_by_its_own_factor() {
        let wake = range(6000, 10_000, 14_000);
        assert_eq!(wake.scaled(500, 2000), range(8000, 10_000, 18_000));
        assert_eq!(wake.scaled(4000, 1000).low, Millis::ZERO, "no wait ends before it begins");
    }

    #[test]
    fn seconds_are_rounded_outwards() {
        for (wait, text) in [
            (range(12_900, 15_000, 19_100), "12 to 20 s"),
            (range(12_000, 12_000, 12_000), "12 s"),
            (range(0, 20, 40), "0 to 1 s"),
            (WaitRange::ZERO, "0 s"),
        ] {
            assert_eq!(wait.to_string(), text);
        }
    }

    fn ranges() -> impl Strategy<Value = WaitRange> {
        let ends = (0..u64::MAX / 8, 0..u64::MAX / 8, 0..u64::MAX / 8);
        ends.prop_map(|(a, b, c)| {
            let mut ends = [a, b, c];
            ends.sort_unstable();
            let [low, likely, high] = ends;
            range(low, likely, high)
        })
    }

    proptest! {
        #[test]
        fn every_result_is_in_order(a in ranges(), b in ranges(), span in 0..u64::MAX / 8, by in 0..5000_u64) {
            for result in [
                a.then(b), a.both(b), a.first_of(b), a.at_most(Millis(span)), a.left_after(Millis(span)),
                a.scaled(by, 5000 - by), WaitRange::within_deadline(Millis(span)),
            ] {
                prop_assert!(result.low <= result.likely && result.likely <= result.high, "{result:?}");
            }
        }
    }
}
