//! Wall time of noted moments.
//!
//! A gateway runs for months, and in them clocks are set. So each record reads the clock when it is made, and earlier
//! moments follow from it by the monotonic clock: a request's length is right whatever happens, and its place in time
//! is no worse than the machine's clock.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// One moment on both clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wall {
    at: Instant,
    is: SystemTime,
}

impl Wall {
    /// The present.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads wall time")]
    pub(crate) fn now() -> Self {
        Self { at: Instant::now(), is: SystemTime::now() }
    }

    pub(crate) fn of(self, at: Instant) -> SystemTime {
        let earlier = self.at.saturating_duration_since(at);
        let later = at.saturating_duration_since(self.at);
        self.is.checked_sub(earlier).and_then(|is| is.checked_add(later)).unwrap_or(self.is)
    }

    /// Since the Unix epoch.
    pub(crate) fn since_epoch(self, at: Instant) -> Duration {
        self.of(at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_placed_by_the_clock_as_it_is_now() {
        let at = Instant::now();
        let wall = Wall { at, is: SystemTime::UNIX_EPOCH + Duration::from_secs(5) };
        let span = Duration::from_micros(1_500);
        assert_eq!(wall.since_epoch(at + span), Duration::from_micros(5_001_500));
        assert_eq!(wall.since_epoch(at.checked_sub(span).unwrap()), Duration::from_micros(4_998_500));
    }
}
