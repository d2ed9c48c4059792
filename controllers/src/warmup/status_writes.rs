//! When the status of each Warmup is written: soon, but not more than once a second without need.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    units::{Millis, Tick},
    warmup::{WarmupPhase, WarmupReport},
};

use crate::{crd::ledger::ObjectName, writer::Error};

/// Minimum interval between two writes of one status that show the same phase.
const MIN_INTERVAL: Millis = Millis::secs(1);
/// Pause after a write that failed.
const RETRY_PAUSE: Millis = Millis::secs(2);
/// Pause after a write that the API server has refused.
const REFUSED_PAUSE: Millis = Millis::secs(60);

/// The statuses that are to be written, and those that are being written.
#[derive(Debug, Default)]
pub(super) struct StatusWrites {
    warmups: BTreeMap<ObjectName, PendingStatus>,
}

#[derive(Debug, Default)]
struct PendingStatus {
    /// The report to write.
    report: Option<Arc<WarmupReport>>,
    /// The report that is being written.
    in_flight: Option<Arc<WarmupReport>>,
    /// The phase that was written last.
    phase: Option<WarmupPhase>,
    not_before: Tick,
    /// After a failure a change of the phase waits, too.
    has_failed: bool,
    /// The version that was observed last, if it is not the newest one: the next write waits for that.
    outdated: Option<String>,
}

impl StatusWrites {
    pub(super) fn clear(&mut self) {
        self.warmups.clear();
    }

    pub(super) fn forget(&mut self, name: &ObjectName) {
        self.warmups.remove(name);
    }

    /// Sets the report to write. It replaces one that was not written yet.
    pub(super) fn set(&mut self, name: &ObjectName, report: Arc<WarmupReport>) {
        self.warmups.entry(name.clone()).or_default().report = Some(report);
    }

    /// Returns the Warmups whose status can be written now. `version`: that of an object as observed last.
    pub(super) fn due(
        &mut self,
        version: impl Fn(&ObjectName) -> Option<String>,
        now: Tick,
    ) -> Vec<ObjectName> {
        for (name, pending) in &mut self.warmups {
            if pending.outdated.is_some() && pending.outdated != version(name) {
                pending.outdated = None;
            }
        }
        let due = self.warmups.iter().filter(|(_, pending)| pending.due_at().is_some_and(|at| at <= now));
        due.map(|(name, _)| name.clone()).collect()
    }

    /// Takes the report of a status that is due.
    pub(super) fn begin(&mut self, name: &ObjectName) -> Option<Arc<WarmupReport>> {
        let pending = self.warmups.get_mut(name)?;
        let report = pending.report.take()?;
        pending.in_flight = Some(Arc::clone(&report));
        Some(report)
    }

    /// Ends a write that was not needed, because the object shows the report already.
    pub(super) fn skip(&mut self, name: &ObjectName) {
        if let Some(pending) = self.warmups.get_mut(name) {
            pending.phase = pending.in_flight.take().map(|report| report.progress.phase);
        }
    }

    /// Takes the outcome of a write of this version: the version that the object has then.
    pub(super) fn finished(
        &mut self,
        name: &ObjectName,
        version: Option<String>,
        result: &Result<Option<String>, Error>,
        now: Tick,
    ) {
        let Some(pending) = self.warmups.get_mut(name) else { return };
        let Some(report) = pending.in_flight.take() else { return };
        pending.has_failed = result.is_err();
        match result {
            Ok(written) => {
                pending.phase = Some(report.progress.phase);
                pending.not_before = now + MIN_INTERVAL;
                // The object has another version now, unless the write changed nothing.
                pending.outdated = version.filter(|sent| written.as_ref() != Some(sent));
                return;
            }
            Err(Error::Conflict) => {
                pending.outdated = version;
                pending.not_before = now;
            }
            Err(Error::Gone) => {
                self.warmups.remove(name);
                return;
            }
            Err(error @ Error::Invalid(_)) => {
                tracing::warn!(warmup = %name, %error, "the status of a Warmup is refused");
                pending.not_before = now + REFUSED_PAUSE;
            }
            Err(Error::NotLeading | Error::Timeout | Error::Api(_)) => pending.not_before = now + RETRY_PAUSE,
        }
        pending.report.get_or_insert(report);
    }

    /// Returns when the next status can be written. A status that waits for a newer object has no time.
    pub(super) fn next_deadline(&self) -> Option<Tick> {
        self.warmups.values().filter_map(PendingStatus::due_at).min()
    }
}

impl PendingStatus {
    fn due_at(&self) -> Option<Tick> {
        let is_free = self.in_flight.is_none() && self.outdated.is_none();
        let report = self.report.as_ref().filter(|_| is_free)?;
        let is_urgent = !self.has_failed && self.phase != Some(report.progress.phase);
        Some(if is_urgent { Tick::default() } else { self.not_before })
    }
}

#[cfg(test)]
mod tests {
    use rouse::warmup::{WarmupProgress, WarmupReason};

    use super::*;

    fn report(phase: WarmupPhase, active: u32) -> Arc<WarmupReport> {
        Arc::new(WarmupReport {
            progress: WarmupProgress { phase, ..WarmupProgress::default() },
            desired: 3,
            active,
            succeeded: 0,
            failed: 0,
            items: BTreeMap::new(),
            nodes: Vec::new(),
            more_nodes: 0,
            reason: WarmupReason::Warming,
            message: String::new(),
        })
    }

    /// Whether a status is due while this version is the last that was observed.
    fn is_due(writes: &mut StatusWrites, version: &str, now: u64) -> bool {
        !writes.due(|_| Some(version.to_owned()), Tick(now)).is_empty()
    }

    #[test]
    fn a_phase_is_written_at_once_and_numbers_once_a_second() {
        let (mut writes, name) = (StatusWrites::default(), ObjectName::new("chat", "w"));
        writes.set(&name, report(WarmupPhase::InProgress, 1));
        assert!(is_due(&mut writes, "1", 0));
        assert_eq!(writes.begin(&name).unwrap().active, 1);
        writes.set(&name, report(WarmupPhase::InProgress, 2));
        assert!(!is_due(&mut writes, "1", 5_000), "one write is under way");
        writes.finished(&name, Some("1".to_owned()), &Ok(Some("2".to_owned())), Tick(5_000));
        assert!(!is_due(&mut writes, "1", 6_000), "the object of the first write is still to come");
        assert!(!is_due(&mut writes, "2", 5_500));
        assert_eq!(writes.next_deadline(), Some(Tick(6_000)));
        assert!(is_due(&mut writes, "2", 6_000));
        writes.set(&name, report(WarmupPhase::Completed, 0));
        assert!(is_due(&mut writes, "2", 5_500), "the phase is another");
        writes.begin(&name).unwrap();
        writes.finished(&name, Some("2".to_owned()), &Ok(Some("2".to_owned())), Tick(7_000));
        writes.set(&name, report(WarmupPhase::Completed, 1));
        assert!(is_due(&mut writes, "2", 8_000), "a write that changes nothing makes no version to wait for");
    }

    #[test]
    fn a_conflict_is_repeated_with_the_newer_object_and_the_newest_report() {
        let (mut writes, name) = (StatusWrites::default(), ObjectName::new("chat", "w"));
        writes.set(&name, report(WarmupPhase::InProgress, 1));
        writes.begin(&name).unwrap();
        writes.set(&name, report(WarmupPhase::InProgress, 2));
        writes.finished(&name, Some("1".to_owned()), &Err(Error::Conflict), Tick(10));
        assert!(!is_due(&mut writes, "1", 60_000));
        assert_eq!(writes.next_deadline(), None);
        assert!(is_due(&mut writes, "2", 20));
        assert_eq!(writes.begin(&name).unwrap().active, 2);
        writes.finished(&name, Some("2".to_owned()), &Err(Error::Timeout), Tick(30));
        assert_eq!(writes.next_deadline(), Some(Tick(2_030)));
    }
}
