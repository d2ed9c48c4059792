//! How a failing watch pauses, and what the log says about it.

use std::time::Duration;

use kube::runtime::{
    utils::Backoff,
    watcher::{self, DefaultBackoff},
};

/// Backoff of a broken watch, with a low cap.
///
/// After an outage the watches must recover soon: the gateway that then gets the lease decides by what its watches saw.
#[derive(Default)]
pub(super) struct WatchBackoff(DefaultBackoff);

const MAX_BACKOFF: Duration = Duration::from_secs(2);

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(MAX_BACKOFF))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.0.reset();
    }
}

/// Number of consecutive refusals after which a missing right counts as lasting.
const REFUSALS_BEFORE_SKIP: u32 = 3;
/// Maximum extra pause of a refused watch: bounds the delay before a new right takes effect.
const MAX_REFUSED_BACKOFF: Duration = Duration::from_secs(15);

/// The failures of one watch since it last worked.
///
/// The log has the first failure, each new cause and the recovery, rather than every try.
pub(super) struct WatchOutage<'a> {
    what: &'a str,
    failures: u32,
    cause: String,
}

impl<'a> WatchOutage<'a> {
    pub(super) fn new(what: &'a str) -> Self {
        Self { what, failures: 0, cause: String::new() }
    }

    /// Counts a failed try and returns the extra pause after a refusal.
    ///
    /// An immediate retry would meet the same refusal.
    pub(super) fn failed(&mut self, error: &watcher::Error) -> Option<Duration> {
        let cause = error.to_string();
        if cause == self.cause {
            tracing::debug!(what = self.what, cause, failures = self.failures, "watch failed again");
        } else {
            tracing::warn!(what = self.what, cause, "watch failed, retrying");
            self.cause = cause;
        }
        self.failures += 1;
        let doubled = 1_u64.checked_shl(self.failures.saturating_sub(2)).unwrap_or(u64::MAX);
        is_refusal(error).then(|| Duration::from_secs(doubled).min(MAX_REFUSED_BACKOFF))
    }

    /// Whether a refused watch was refused so often that the missing right counts as lasting.
    pub(super) fn lasts(&self, refused: Option<Duration>) -> bool {
        refused.is_some() && self.failures >= REFUSALS_BEFORE_SKIP
    }

    pub(super) fn recovered(&mut self) {
        if self.failures > 0 {
            tracing::info!(what = self.what, failures = self.failures, "watch recovered");
            (self.failures, self.cause) = (0, String::new());
        }
    }
}

/// Whether the API server refused the request for lack of rights.
fn is_refusal(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        watcher::Error::WatchError(status) => status,
        _ => return false,
    };
    matches!(status.code, 401 | 403)
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn refused(message: &str) -> watcher::Error {
        let status = Status { code: 403, message: message.to_owned(), ..Status::default() };
        watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_refused_watch_waits_longer_each_time_up_to_a_limit_and_begins_anew_once_it_worked() {
        let mut outage = WatchOutage::new("pods in here");
        let mut pauses = || outage.failed(&refused("forbidden")).unwrap().as_secs();
        assert_eq!([(); 7].map(|()| pauses()), [1, 1, 2, 4, 8, 15, 15]);
        for _ in 0..100 {
            assert_eq!(outage.failed(&refused("forbidden")), Some(MAX_REFUSED_BACKOFF));
        }
        outage.recovered();
        assert_eq!(outage.failed(&refused("forbidden")), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_watch_whose_connection_fails_is_retried_at_its_usual_pauses() {
        let mut outage = WatchOutage::new("pods");
        assert_eq!(outage.failed(&watcher::Error::NoResourceVersion), None);
        assert_eq!(outage.failures, 1);
    }
}
