//! Wall time of recorded moments.
//!
//! A gateway runs for months, during which clocks are set. So each record reads the clock when it ends, and earlier
//! moments follow from that by the monotonic clock: a request's duration is always right, and its wall time is as good
//! as the machine's clock.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// One moment on both clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WallClock {
    instant: Instant,
    system_time: SystemTime,
}

impl WallClock {
    /// Reads both clocks now.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads wall time")]
    pub(crate) fn now() -> Self {
        Self { instant: Instant::now(), system_time: SystemTime::now() }
    }

    pub(crate) fn system_time_of(self, at: Instant) -> SystemTime {
        let earlier = self.instant.saturating_duration_since(at);
        let later = at.saturating_duration_since(self.instant);
        self.system_time.checked_sub(earlier).and_then(|is| is.checked_add(later)).unwrap_or(self.system_time)
    }

    /// Returns the time since the Unix epoch.
    pub(crate) fn since_epoch(self, at: Instant) -> Duration {
        self.system_time_of(at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_placed_by_the_clock_as_it_is_now() {
        let at = Instant::now();
        let wall = WallClock { instant: at, system_time: SystemTime::UNIX_EPOCH + Duration::from_secs(5) };
        let span = Duration::from_micros(1_500);
        assert_eq!(wall.since_epoch(at + span), Duration::from_micros(5_001_500));
        assert_eq!(wall.since_epoch(at.checked_sub(span).unwrap()), Duration::from_micros(4_998_500));
    }
}
