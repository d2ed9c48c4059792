//! Times that the steps of a model's engines took, with their spread.

use serde::{Deserialize, Serialize};

use super::WaitRange;
use crate::{fleet::event::LearnedMeasurements, model::SleepLevel, units::Millis};

/// Mean and mean deviation of a time, as TCP estimates round-trip times (RFC 6298).
///
/// The newest sample counts for a quarter. After one sample, the deviation is half of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeEstimate {
    pub mean: Millis,
    pub deviation: Millis,
}

/// Times of the steps of one variant's engines, for quotes.
///
/// The decisions read the means in [`LearnedMeasurements`], which mixes wakes from both levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LearnedTimes {
    /// From the reservation until the engine served, as the start deadline counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<TimeEstimate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_one: Option<TimeEstimate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_two: Option<TimeEstimate>,
    /// A sleep in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep: Option<TimeEstimate>,
    /// A rehearsed sleep, which pins host memory and takes longer for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rehearsed_sleep: Option<TimeEstimate>,
    /// From the order to stop until the process was gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<TimeEstimate>,
}

/// How many mean deviations a range reaches beyond the mean: of normally distributed times, it holds nine of ten.
const RANGE_DEVIATIONS: u64 = 2;
/// A range reaches at least this part of the mean beyond it: equal times in a row do not prove that the next is equal.
const MIN_SPREAD_PART: u64 = 8;

impl TimeEstimate {
    #[must_use]
    pub const fn first(sample: Millis) -> Self {
        Self { mean: sample, deviation: Millis(sample.0 / 2) }
    }

    #[must_use]
    pub const fn updated(self, sample: Millis) -> Self {
        let apart = Millis(self.mean.0.abs_diff(sample.0));
        Self { mean: moved(self.mean, sample), deviation: moved(self.deviation, apart) }
    }

    /// Adds the sample to an estimate, which may have none yet.
    pub fn learn(estimate: &mut Option<Self>, sample: Millis) {
        *estimate = Some(estimate.map_or_else(|| Self::first(sample), |known| known.updated(sample)));
    }

    /// Estimates the time of so many such steps, one after the other.
    #[must_use]
    pub fn repeated(self, count: u32) -> Self {
        let count = u64::from(count);
        Self {
            mean: Millis(self.mean.0.saturating_mul(count)),
            deviation: Millis(self.deviation.0.saturating_mul(count.isqrt())),
        }
    }

    #[must_use]
    pub fn range(self) -> WaitRange {
        let spread = self.deviation.0.saturating_mul(RANGE_DEVIATIONS).max(self.mean.0 / MIN_SPREAD_PART);
        WaitRange {
            low: self.mean.saturating_sub(Millis(spread)),
            likely: self.mean,
            high: self.mean + Millis(spread),
        }
    }
}

impl LearnedTimes {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    const fn wake_mut(&mut self, level: SleepLevel) -> &mut Option<TimeEstimate> {
        match level {
            SleepLevel::One => &mut self.wake_one,
            SleepLevel::Two => &mut self.wake_two,
        }
    }
}

impl LearnedMeasurements {
    pub(in crate::fleet) fn record_start(&mut self, took: Millis) {
        self.times.start = self.times.start.or_else(|| self.start.map(TimeEstimate::first));
        TimeEstimate::learn(&mut self.times.start, took);
        self.start = self.times.start.map(|estimate| estimate.mean);
    }

    pub(in crate::fleet) fn record_wake(&mut self, level: SleepLevel, took: Millis) {
        self.wake = Some(self.wake.map_or(took, |mean| moved(mean, took)));
        TimeEstimate::learn(self.times.wake_mut(level), took);
    }

    pub(in crate::fleet) fn record_sleep(&mut self, took: Millis) {
        if !self.has_only_rehearsed() {
            self.times.sleep = self.times.sleep.or_else(|| self.sleep.map(TimeEstimate::first));
        }
        TimeEstimate::learn(&mut self.times.sleep, took);
        self.sleep = self.times.sleep.map(|estimate| estimate.mean);
    }

    /// Records a rehearsed sleep. Its time stands for that of a sleep until one in use is measured.
    pub(in crate::fleet) fn record_rehearsed_sleep(&mut self, took: Millis) {
        let is_first_of_all = self.sleep.is_none() || self.has_only_rehearsed();
        if !is_first_of_all {
            // A mean without a spread, of an earlier version or another gateway, is that of sleeps in use.
            self.times.sleep = self.times.sleep.or_else(|| self.sleep.map(TimeEstimate::first));
        }
        TimeEstimate::learn(&mut self.times.rehearsed_sleep, took);
        if is_first_of_all {
            self.sleep = self.times.rehearsed_sleep.map(|estimate| estimate.mean);
        }
    }

    /// Whether the time of a sleep is that of rehearsals.
    const fn has_only_rehearsed(&self) -> bool {
        self.times.sleep.is_none() && self.times.rehearsed_sleep.is_some()
    }

    /// The expected time of a start; `None` if none was ever measured.
    ///
    /// Of times from an earlier version, or from another gateway, only the mean is known.
    pub(in crate::fleet) fn start_range(&self) -> Option<WaitRange> {
        self.times.start.or_else(|| self.start.map(TimeEstimate::first)).map(TimeEstimate::range)
    }

    /// The expected time of a wake. Where no wake from this level was measured, that from the other level counts.
    pub(in crate::fleet) fn wake_range(&self, level: SleepLevel) -> Option<WaitRange> {
        let of_level = match level {
            SleepLevel::One => self.times.wake_one,
            SleepLevel::Two => self.times.wake_two,
        };
        of_level.or_else(|| self.wake.map(TimeEstimate::first)).map(TimeEstimate::range)
    }

    pub(in crate::fleet) fn sleep_range(&self) -> Option<WaitRange> {
        self.times.sleep.or_else(|| self.sleep.map(TimeEstimate::first)).map(TimeEstimate::range)
    }

    /// The expected time of a rehearsed sleep. Without one, a sleep in use is all that is known.
    pub(in crate::fleet) fn rehearsed_sleep_range(&self) -> Option<WaitRange> {
        self.times.rehearsed_sleep.map(TimeEstimate::range).or_else(|| self.sleep_range())
    }
}

/// Moves a mean a quarter of the way to the sample.
const fn moved(mean: Millis, sample: Millis) -> Millis {
    Millis(mean.0.saturating_mul(3).saturating_add(sample.0) / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(low: u64, likely: u64, high: u64) -> WaitRange {
        WaitRange { low: Millis(low), likely: Millis(likely), high: Millis(high) }
    }

    #[test]
    fn one_sample_gives_a_wide_range_and_equal_ones_narrow_it_to_a_quarter_of_the_mean() {
        let mut estimate = None;
        TimeEstimate::learn(&mut estimate, Millis(8000));
        let first = estimate.unwrap();
        assert_eq!(first.range(), range(0, 8000, 16_000));
        (0..40).for_each(|_| TimeEstimate::learn(&mut estimate, Millis(8000)));
        assert_eq!(estimate.unwrap().range(), range(7000, 8000, 9000));
        assert_eq!(first.repeated(4).range(), range(16_000, 32_000, 48_000), "spreads add as squares");
    }

    #[test]
    fn four_of_five_samples_of_an_even_spread_are_in_the_range() {
        let sample = |n: u64| Millis(1000 + n.wrapping_mul(2_654_435_761) % 10_000);
        let mut estimate = TimeEstimate::first(sample(0));
        let mut inside = 0;
        for n in 1..=1000 {
            inside += u32::from(estimate.range().contains(sample(n)));
            estimate = estimate.updated(sample(n));
        }
        assert!((800..=1000).contains(&inside), "{inside} of 1000");
    }

    #[test]
    fn wakes_are_learned_by_level_and_the_decisions_mean_mixes_them() {
        let mut learned = LearnedMeasurements::default();
        assert_eq!(learned.wake_range(SleepLevel::One), None);
        learned.record_wake(SleepLevel::One, Millis(800));
        assert_eq!(learned.wake_range(SleepLevel::Two), Some(range(0, 800, 1600)), "that of level 1");
        learned.record_wake(SleepLevel::Two, Millis(4800));
        assert_eq!(learned.wake, Some(Millis(1800)));
        assert_eq!(learned.wake_range(SleepLevel::One), Some(range(0, 800, 1600)));
        assert_eq!(learned.wake_range(SleepLevel::Two), Some(range(0, 4800, 9600)));
    }

    #[test]
    fn a_rehearsed_sleep_counts_as_a_sleep_until_one_in_use_replaces_it() {
        let mut learned = LearnedMeasurements::default();
        learned.record_rehearsed_sleep(Millis(20_000));
        learned.record_rehearsed_sleep(Millis(20_000));
        assert_eq!((learned.sleep, learned.times.sleep), (Some(Millis(20_000)), None));
        learned.record_sleep(Millis(1000));
        assert_eq!(learned.sleep, Some(Millis(1000)), "the rehearsals are forgotten");
        assert_eq!(learned.sleep_range(), Some(range(0, 1000, 2000)));
        learned.record_rehearsed_sleep(Millis(20_000));
        assert_eq!(learned.sleep, Some(Millis(1000)));
        assert_eq!(learned.rehearsed_sleep_range().map(|range| range.likely), Some(Millis(20_000)));
        let mut of_older =
            LearnedMeasurements { sleep: Some(Millis(2000)), ..LearnedMeasurements::default() };
        assert_eq!(of_older.rehearsed_sleep_range(), Some(range(0, 2000, 4000)));
        of_older.record_rehearsed_sleep(Millis(20_000));
        assert_eq!(
            (of_older.sleep, of_older.sleep_range()),
            (Some(Millis(2000)), Some(range(0, 2000, 4000)))
        );
    }

    #[test]
    fn an_older_file_is_read_and_its_means_count_until_their_spread_is_known() {
        let older = r#"{"peak": 7, "residue": null, "start": 40000, "wake": 900, "sleep": 2000}"#;
        let mut learned: LearnedMeasurements = serde_json::from_str(older).unwrap();
        assert!(learned.times.is_empty());
        assert_eq!(learned.start_range(), Some(range(0, 40_000, 80_000)));
        assert_eq!(learned.sleep_range(), Some(range(0, 2000, 4000)));
        learned.record_start(Millis(60_000));
        assert_eq!(learned.start, Some(Millis(45_000)));
        let again = serde_json::from_str(&serde_json::to_string(&learned).unwrap()).unwrap();
        assert_eq!(learned, again);
        let nothing = serde_json::to_value(LearnedMeasurements::default()).unwrap();
        assert!(nothing.get("times").is_none(), "{nothing}");
    }
}
