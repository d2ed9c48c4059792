//! Decides when to poll an endpoint and what the responses mean. No clock, no I/O.
//!
//! **While unready.** A request may be waiting, so late detection is what costs; a poll costs one refused connection,
//! some 50 µs. A wake takes from a fraction of a second to some seconds, a cold start minutes. So the interval is a
//! thousandth of the time waited so far, at least 10 ms and at most 1 s. A wait under 10 s is detected within 10 ms,
//! and a longer wait within a thousandth of its length. An hour of refusals costs some 8,000 polls.
//!
//! **While ready.** One poll each `period`, counted from poll to poll, so that a slow response shifts nothing.
//! `threshold` failures in a row make the engine unready, and each success resets the count. So every state that lasts
//! longer than `threshold` periods is detected, in both directions. For this reason the interval while unready never
//! exceeds a period.

use std::time::Duration;

use tokio::time::Instant;

use super::PollSpec;

const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The fraction of the wait by which detection may be late.
const POLL_INTERVAL_DIVISOR: u32 = 1000;

#[derive(Debug)]
pub(super) struct ReadinessTracker {
    period: Duration,
    threshold: u32,
    ready: bool,
    failures: u32,
    /// Start of the current wait for readiness.
    unready_since: Instant,
}

/// The result of a recorded response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PollOutcome {
    pub(super) ready: bool,
    pub(super) next_poll_at: Instant,
}

impl ReadinessTracker {
    pub(super) const fn new(watched: &PollSpec, ready: bool, now: Instant) -> Self {
        Self { period: watched.period, threshold: watched.threshold, ready, failures: 0, unready_since: now }
    }

    /// Records a response that arrived at `now` to a poll sent at `sent_at`.
    pub(super) fn record(&mut self, good: bool, sent_at: Instant, now: Instant) -> PollOutcome {
        self.failures = if good { 0 } else { self.failures.saturating_add(1) };
        if good {
            self.ready = true;
        } else if self.ready && self.failures >= self.threshold {
            self.ready = false;
            self.unready_since = now;
        }
        let gap = if self.ready { self.period } else { self.poll_interval(now) };
        PollOutcome { ready: self.ready, next_poll_at: (sent_at + gap).max(now) }
    }

    fn poll_interval(&self, now: Instant) -> Duration {
        let waited = now.duration_since(self.unready_since);
        (waited / POLL_INTERVAL_DIVISOR).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL).min(self.period)
    }

    pub(super) const fn period(&self) -> Duration {
        self.period
    }

    pub(super) const fn threshold(&self) -> u32 {
        self.threshold
    }

    pub(super) const fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn tracker(period: Duration, threshold: u32, now: Instant) -> ReadinessTracker {
        ReadinessTracker { period, threshold, ready: false, failures: 0, unready_since: now }
    }

    #[test]
    fn what_comes_within_ten_seconds_is_seen_in_10_ms_and_later_within_a_thousandth() {
        let start = Instant::now();
        let mut readiness_tracker = tracker(1000 * MS, 3, start);
        let (mut now, mut asked) = (start, 0);
        while now < start + Duration::from_secs(3600) {
            let next = readiness_tracker.record(false, now, now).next_poll_at;
            let (gap, waited) = (next - now, now - start);
            assert!(
                gap <= (waited / POLL_INTERVAL_DIVISOR).max(MIN_POLL_INTERVAL),
                "{gap:?} after {waited:?}"
            );
            assert!(gap >= MIN_POLL_INTERVAL && gap <= MAX_POLL_INTERVAL);
            (now, asked) = (next, asked + 1);
        }
        assert!((7_500..9_500).contains(&asked), "{asked}");
        assert_eq!(readiness_tracker.record(false, now, now).next_poll_at - now, MAX_POLL_INTERVAL);
    }

    #[test]
    fn unready_is_after_so_many_failures_in_a_row_and_then_it_is_asked_quickly_again() {
        let start = Instant::now();
        let mut readiness_tracker = tracker(1000 * MS, 3, start);
        let mut now = start;
        let mut note = |good| {
            now += 1000 * MS;
            let verdict = readiness_tracker.record(good, now, now);
            (verdict.ready, verdict.next_poll_at - now)
        };
        for (good, ready, gap) in [
            (false, false, 10 * MS),
            (true, true, 1000 * MS),
            (false, true, 1000 * MS),
            (false, true, 1000 * MS),
            (true, true, 1000 * MS),
            (false, true, 1000 * MS),
            (false, true, 1000 * MS),
            (false, false, 10 * MS),
            (true, true, 1000 * MS),
        ] {
            assert_eq!(note(good), (ready, gap));
        }
    }

    #[test]
    fn a_slow_answer_delays_no_question() {
        let start = Instant::now();
        let mut readiness_tracker = tracker(1000 * MS, 3, start);
        assert_eq!(readiness_tracker.record(true, start, start + 300 * MS).next_poll_at, start + 1000 * MS);
        assert_eq!(readiness_tracker.record(true, start, start + 1400 * MS).next_poll_at, start + 1400 * MS);
    }

    /// An endpoint flips 1,000 times, each time slightly after the threshold, and responds at once or late.
    #[test]
    fn a_thousand_flaps_lose_none() {
        for (period, threshold) in [(1000 * MS, 3), (50 * MS, 1), (7 * MS, 5), (1 * MS, 1)] {
            let start = Instant::now();
            let mut readiness_tracker = tracker(period, threshold, start);
            // Responses arrive within a period; a later response delays the next poll.
            let delay = period / 2;
            let span = period * threshold + delay + MS;
            let (mut now, mut seen) = (start, vec![false]);
            while now < start + span * 1000 {
                let phase = (now - start).as_nanos() / span.as_nanos();
                let verdict = readiness_tracker.record(phase % 2 == 1, now, now + delay);
                if seen.last() != Some(&verdict.ready) {
                    seen.push(verdict.ready);
                }
                now = verdict.next_poll_at;
            }
            assert_eq!(seen.len(), 1000, "period {period:?}");
        }
    }
}
