//! Reports the engine's load to gateways that ask for it: ORCA reports in the heads of relayed responses.
//!
//! ```text
//!   request that asks ──▶ relay ─────────▶ engine
//!          wakes the reader │                │ GET /metrics, while requests run
//!   response's head ◀─────  adds the latest reading
//! ```
//!
//! The reader runs on the control thread. It reads while requests run *and* some client asks for reports now and then,
//! so an engine that is idle or asleep, or whose clients never ask, is never read. A request waits for no reading: the
//! first one after a pause may get no report.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::HeaderValue;
use rouse_net::engine_load::{EngineLoad, REPORT_INTERVAL, orca};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

use super::{actuation, state::Proxy};

/// Pause between two readings.
const READ_INTERVAL: Duration = Duration::from_millis(250);
/// Pause after two readings without a result. Many engines have no metrics, and never will.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The most time for a reading.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// An older reading is not reported.
const MAX_READING_AGE: Duration = Duration::from_secs(1);
/// How long one request for a report keeps the reader awake: gateways ask every [`REPORT_INTERVAL`].
const WANTED_FOR: Duration = Duration::from_millis(5 * REPORT_INTERVAL.0);

/// The latest report, and whether any client wants one.
#[derive(Debug, Default)]
pub(crate) struct LoadReporter {
    state: Mutex<LoadReporterState>,
    /// Notified when a client asks for a report.
    requested: Notify,
}

#[derive(Debug, Default)]
struct LoadReporterState {
    requested_at: Option<Instant>,
    /// The report, and when the engine was read.
    latest: Option<(HeaderValue, Instant)>,
}

impl LoadReporter {
    /// Records that a client asks for reports.
    pub(super) fn request(&self, now: Instant) {
        self.state().requested_at = Some(now);
        self.requested.notify_one();
    }

    /// Returns the latest report, unless it is too old.
    pub(super) fn report(&self, now: Instant) -> Option<HeaderValue> {
        let state = self.state();
        let (report, read_at) = state.latest.as_ref()?;
        (now.duration_since(*read_at) <= MAX_READING_AGE).then(|| report.clone())
    }

    fn is_wanted(&self, now: Instant) -> bool {
        self.state().requested_at.is_some_and(|at| now.duration_since(at) <= WANTED_FOR)
    }

    /// Stores a reading. Returns how long to wait before the next one.
    fn store(&self, load: Option<EngineLoad>, now: Instant) -> Duration {
        let report = load.and_then(|load| orca::to_header(&load)).map(|report| (report, now));
        let is_read = report.is_some();
        let before = std::mem::replace(&mut self.state().latest, report);
        // An engine that reported before is only slow, and gateways need its load most then.
        if is_read || before.is_some() { READ_INTERVAL } else { RETRY_INTERVAL }
    }

    fn state(&self) -> MutexGuard<'_, LoadReporterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the engine's load while it is wanted, forever. Run it once.
pub(super) async fn run(proxy: &Proxy) {
    loop {
        proxy.load_reporter.requested.notified().await;
        while proxy.gate.has_leases() && proxy.load_reporter.is_wanted(Instant::now()) {
            let load = match proxy.gate.target() {
                Some(target) => actuation::adapter(proxy, target).load(READ_TIMEOUT).await,
                None => None,
            };
            sleep(proxy.load_reporter.store(load, Instant::now())).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_given_for_a_second_and_wanted_for_ten() {
        let reporter = LoadReporter::default();
        let begin = Instant::now();
        assert!(reporter.report(begin).is_none() && !reporter.is_wanted(begin));
        reporter.request(begin);
        assert!(reporter.is_wanted(begin + WANTED_FOR));
        assert!(!reporter.is_wanted(begin + WANTED_FOR + Duration::from_millis(1)));
        let load = EngineLoad { waiting: Some(2.0), ..EngineLoad::default() };
        assert_eq!(reporter.store(Some(load), begin), READ_INTERVAL);
        let report = reporter.report(begin + MAX_READING_AGE).unwrap();
        assert_eq!(orca::from_header(report.as_bytes()), Some(load));
        assert!(reporter.report(begin + MAX_READING_AGE + Duration::from_millis(1)).is_none());
    }

    #[test]
    fn an_engine_without_metrics_is_read_seldom_and_its_last_report_is_dropped() {
        let reporter = LoadReporter::default();
        let begin = Instant::now();
        assert_eq!(reporter.store(None, begin), RETRY_INTERVAL);
        reporter.store(Some(EngineLoad { kv_use: Some(0.5), ..EngineLoad::default() }), begin);
        assert_eq!(reporter.store(None, begin), READ_INTERVAL);
        assert!(reporter.report(begin).is_none());
        assert_eq!(reporter.store(None, begin), RETRY_INTERVAL);
    }
}
