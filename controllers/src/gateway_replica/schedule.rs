//! Decides when this gateway writes its GatewayReplica, so that starts do not wait and writes stay few.
//!
//! Each write is paid for with [`WRITE_INTERVAL`]. A change that is not urgent waits until all earlier writes are paid
//! for. Urgent ones may run into debt, up to [`URGENT_BURST`] writes, and carry along whatever else has changed. So a
//! gateway writes once in [`WRITE_INTERVAL`] in the long run, whatever happens.

use tokio::time::{Duration, Instant};

use crate::status_inputs::DemandUrgency;

/// Minimum interval between writes in the long run.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between comparisons of the whole demand with what is stored.
const FULL_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum interval between any two writes. Changes that come within it share a write.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of writes that are not paid for.
const URGENT_BURST: u32 = 5;
/// Delay before the retry of a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// What a report compares with the stored status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReportScope {
    /// Models that got their first waiter or request, or lost their last.
    Changes,
    /// All models, their numbers and times.
    Everything,
}

/// When the next report is due.
#[derive(Debug)]
pub(super) struct WriteSchedule {
    /// When the last write began.
    last: Option<Instant>,
    /// When all writes so far are paid for.
    paid_at: Instant,
    /// When everything is compared again.
    next_full: Instant,
    /// When the pending urgent changes are due.
    urgent_at: Option<Instant>,
    /// A change is pending that is not urgent.
    use_changed: bool,
    /// The last write failed, and everything waits for the retry.
    failed: bool,
}

impl WriteSchedule {
    /// The first report is due at once.
    pub(super) const fn new(now: Instant) -> Self {
        Self { last: None, paid_at: now, next_full: now, urgent_at: None, use_changed: false, failed: false }
    }

    /// Records a change of demand.
    pub(super) fn note(&mut self, urgency: DemandUrgency, now: Instant) {
        match urgency {
            DemandUrgency::Use => self.use_changed = true,
            DemandUrgency::WaiterEdge => self.urgent_at = Some(self.urgent_at.unwrap_or(now)),
        }
    }

    /// Returns when the next report is due.
    pub(super) fn due(&self) -> Instant {
        if self.failed {
            return self.next_full;
        }
        let mut due = self.next_full.max(self.paid_at);
        if self.use_changed {
            due = due.min(self.paid_at);
        }
        if let Some(at) = self.urgent_at {
            let apart = self.last.map_or(at, |last| at.max(last + MIN_INTERVAL));
            due = due.min(self.within_burst(apart));
        }
        due
    }

    /// Begins a report, which covers all changes noted so far.
    pub(super) fn begin(&mut self, now: Instant) -> ReportScope {
        (self.urgent_at, self.use_changed, self.failed) = (None, false, false);
        if self.next_full > now {
            return ReportScope::Changes;
        }
        self.next_full = now + FULL_INTERVAL;
        ReportScope::Everything
    }

    /// Records that the report that began at `now` wrote, or tried to.
    pub(super) fn wrote(&mut self, now: Instant) {
        self.paid_at = self.paid_at.max(now) + WRITE_INTERVAL;
        self.last = Some(now);
    }

    /// Records that a write failed: everything waits for the next report, which compares everything.
    pub(super) fn retry_later(&mut self, now: Instant) {
        (self.failed, self.next_full) = (true, now + RETRY_DELAY);
    }

    /// Records that another write came first: the next report compares everything with what that write left.
    pub(super) fn retry_soon(&mut self, now: Instant) {
        (self.failed, self.next_full) = (true, self.within_burst(now + MIN_INTERVAL));
    }

    /// Returns this time, or a later one if more than [`URGENT_BURST`] writes would not be paid for then.
    fn within_burst(&self, at: Instant) -> Instant {
        let credit = self.paid_at.checked_sub(WRITE_INTERVAL * (URGENT_BURST - 1));
        credit.map_or(at, |credit| at.max(credit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Returns when a gateway writes within a minute in which changes of these urgencies come at these intervals.
    fn writes_of_a_minute(urgencies: &[(DemandUrgency, u64)]) -> Vec<Duration> {
        let started = Instant::now();
        let mut schedule = WriteSchedule::new(started);
        let mut writes = Vec::new();
        for elapsed in 0..60_000_u64 {
            let now = started + millis(elapsed);
            for (urgency, _) in urgencies.iter().filter(|(_, interval)| elapsed.is_multiple_of(*interval)) {
                schedule.note(*urgency, now);
            }
            if schedule.due() <= now {
                schedule.begin(now);
                schedule.wrote(now);
                writes.push(millis(elapsed));
            }
        }
        writes
    }

    #[test]
    fn a_first_waiter_is_reported_at_once() {
        let started = Instant::now();
        let mut schedule = WriteSchedule::new(started);
        assert_eq!(schedule.due(), started, "so is the gateway itself");
        assert_eq!(schedule.begin(started), ReportScope::Everything);
        schedule.wrote(started);
        assert_eq!(schedule.due(), started + FULL_INTERVAL);
        let now = started + millis(300);
        schedule.note(DemandUrgency::Use, now);
        assert_eq!(schedule.due(), started + WRITE_INTERVAL);
        schedule.note(DemandUrgency::WaiterEdge, now);
        assert_eq!(schedule.due(), now);
        assert_eq!(schedule.begin(now), ReportScope::Changes, "one report for both");
        schedule.wrote(now);
        assert_eq!(schedule.due(), started + FULL_INTERVAL);
        schedule.note(DemandUrgency::WaiterEdge, now + millis(1));
        assert_eq!(schedule.due(), now + MIN_INTERVAL, "those of a moment share a write");
    }

    #[test]
    fn a_report_that_finds_nothing_to_write_costs_nothing() {
        let started = Instant::now();
        let mut schedule = WriteSchedule::new(started);
        schedule.begin(started);
        schedule.note(DemandUrgency::Use, started);
        assert_eq!(schedule.due(), started);
    }

    #[test]
    fn a_gateway_writes_once_a_second_whatever_happens() {
        assert_eq!(writes_of_a_minute(&[]).len(), 12, "each comparison of everything");
        assert_eq!(writes_of_a_minute(&[(DemandUrgency::Use, 1)]).len(), 60);
        let most = 60 + usize::try_from(URGENT_BURST).unwrap();
        for interval in [1, 50, 333, 900, 1_000, 1_050, 1_500, 4_000] {
            let writes =
                writes_of_a_minute(&[(DemandUrgency::Use, 1), (DemandUrgency::WaiterEdge, interval)]);
            assert!((60..=most).contains(&writes.len()), "{} at {interval}", writes.len());
        }
    }

    #[test]
    fn a_storm_of_first_waiters_is_a_burst_and_then_a_write_a_second() {
        let storm = writes_of_a_minute(&[(DemandUrgency::WaiterEdge, 1)]);
        let first: Vec<u128> = storm.iter().take(8).map(Duration::as_millis).collect();
        assert_eq!(first, [0, 100, 200, 300, 400, 1_000, 2_000, 3_000]);
    }

    #[test]
    fn a_write_that_another_writer_always_precedes_is_repeated_once_a_second_in_the_long_run() {
        let started = Instant::now();
        let mut schedule = WriteSchedule::new(started);
        let mut now = started;
        for _ in 0..60 {
            schedule.begin(now);
            schedule.wrote(now);
            schedule.retry_soon(now);
            now = schedule.due();
        }
        assert!(now >= started + WRITE_INTERVAL * (60 - URGENT_BURST), "{:?}", now - started);
    }

    #[test]
    fn everything_waits_for_the_retry_of_a_failed_write() {
        let now = Instant::now();
        let mut schedule = WriteSchedule::new(now);
        schedule.begin(now);
        schedule.wrote(now);
        schedule.retry_later(now);
        schedule.note(DemandUrgency::WaiterEdge, now);
        assert_eq!(schedule.due(), now + RETRY_DELAY);
        let again = now + RETRY_DELAY;
        assert_eq!(schedule.begin(again), ReportScope::Everything);
        schedule.wrote(again);
        schedule.retry_soon(again);
        assert_eq!(schedule.due(), again + MIN_INTERVAL);
    }
}
