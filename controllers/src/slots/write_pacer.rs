//! When objects that follow from what is observed are written: soon, but one write at a time and once a second at most.

use std::collections::BTreeMap;

use rouse::units::{Millis, Tick};

use crate::writer::Error;

/// Minimum interval between two writes of one object.
const MIN_INTERVAL: Millis = Millis::secs(1);
/// Pause after a write that failed.
const RETRY_PAUSE: Millis = Millis::secs(2);
/// Pause after a write that the API server has refused.
const REFUSED_PAUSE: Millis = Millis::secs(60);

/// The writes of one kind, by the names of the objects.
#[derive(Debug)]
pub(super) struct WritePacer<N> {
    objects: BTreeMap<N, PacedWrite>,
}

#[derive(Debug, Default)]
struct PacedWrite {
    is_in_flight: bool,
    /// The version that the last write was for. The next one waits for the object that this write has made, or that
    /// made it fail.
    written_for: Option<String>,
    not_before: Tick,
    /// A write waits for that moment.
    is_waiting: bool,
}

impl<N> Default for WritePacer<N> {
    fn default() -> Self {
        Self { objects: BTreeMap::new() }
    }
}

impl<N: Ord + Clone> WritePacer<N> {
    pub(super) fn clear(&mut self) {
        self.objects.clear();
    }

    pub(super) fn forget(&mut self, name: &N) {
        self.objects.remove(name);
    }

    /// Begins a write of the object in this version, if it may be written now.
    pub(super) fn begin(&mut self, name: &N, version: Option<&str>, now: Tick) -> bool {
        let paced = self.objects.entry(name.clone()).or_default();
        let is_outdated = paced.written_for.is_some() && paced.written_for.as_deref() == version;
        if paced.is_in_flight || is_outdated {
            return false;
        }
        paced.is_waiting = paced.not_before > now;
        if paced.is_waiting {
            return false;
        }
        paced.is_in_flight = true;
        paced.written_for = version.map(str::to_owned);
        true
    }

    /// Takes the outcome of a write. Returns whether the object is to be looked at again.
    pub(super) fn finished(&mut self, name: &N, result: &Result<(), Error>, now: Tick) -> bool {
        let Some(paced) = self.objects.get_mut(name) else { return false };
        paced.is_in_flight = false;
        let pause = match result {
            Ok(()) => {
                paced.not_before = now + MIN_INTERVAL;
                return true;
            }
            // The newer object is on its way.
            Err(Error::Conflict) => return true,
            Err(Error::Gone) => {
                self.objects.remove(name);
                return false;
            }
            Err(Error::Invalid(_)) => REFUSED_PAUSE,
            Err(Error::NotLeading | Error::Timeout | Error::Api(_)) => RETRY_PAUSE,
        };
        paced.not_before = now + pause;
        paced.written_for = None;
        true
    }

    /// Returns when a write that waits for its time can begin.
    pub(super) fn next_deadline(&self) -> Option<Tick> {
        self.objects.values().filter(|paced| paced.is_waiting).map(|paced| paced.not_before).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_write_waits_for_the_object_of_the_last_one_and_for_a_second() {
        let mut pacer = WritePacer::default();
        assert!(pacer.begin(&"gpu", Some("1"), Tick(0)));
        assert!(!pacer.begin(&"gpu", Some("2"), Tick(0)), "one write is under way");
        assert!(pacer.finished(&"gpu", &Ok(()), Tick(10)));
        assert!(!pacer.begin(&"gpu", Some("1"), Tick(5_000)), "the object that it made is still to come");
        assert_eq!(pacer.next_deadline(), None);
        assert!(!pacer.begin(&"gpu", Some("2"), Tick(500)));
        assert_eq!(pacer.next_deadline(), Some(Tick(1_010)));
        assert!(pacer.begin(&"camera", Some("1"), Tick(500)), "another object");
        assert!(pacer.begin(&"gpu", Some("2"), Tick(1_010)));
        assert_eq!(pacer.next_deadline(), None);
    }

    #[test]
    fn a_failed_write_is_repeated_and_a_refused_one_later() {
        let mut pacer = WritePacer::default();
        for (error, pause) in [(Error::Timeout, 2_000), (Error::Invalid("no".to_owned()), 60_000)] {
            assert!(pacer.begin(&"gpu", Some("1"), Tick(0)));
            assert!(pacer.finished(&"gpu", &Err(error), Tick(0)));
            assert!(!pacer.begin(&"gpu", Some("1"), Tick(pause - 1)));
            assert_eq!(pacer.next_deadline(), Some(Tick(pause)));
            pacer.clear();
        }
        assert!(pacer.begin(&"gpu", Some("1"), Tick(0)));
        assert!(pacer.finished(&"gpu", &Err(Error::Conflict), Tick(0)));
        assert!(!pacer.begin(&"gpu", Some("1"), Tick(60_000)), "a conflict needs another object");
        assert!(pacer.begin(&"gpu", Some("2"), Tick(0)));
        assert!(!pacer.finished(&"gpu", &Err(Error::Gone), Tick(0)));
    }
}
