//! What follows from a lease as it was seen. Pure: moments come in, orders come out.

use std::time::Duration;

use tokio::time::Instant;

use super::{LEASE_DURATION, RENEW_DEADLINE};

/// Who looked so long ago has not seen what happened since.
const MAX_OBSERVATION_AGE: Duration = Duration::from_secs(3);

/// The version of an object, as the API server counts; only equality means anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseVersion {
    /// Which of all that ever had the name: its uid. An API server makes a Lease of an update that finds none, whatever
    /// version it was meant for, unless this says that another one was meant.
    pub object: String,
    pub number: String,
}

/// What stands in the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// `None`: given back.
    pub holder: Option<String>,
    pub epoch: u64,
    /// Seconds after which others may take it, as whoever wrote it meant.
    pub duration: Duration,
}

pub(super) enum LeaseAction {
    Wait,
    Create(LeaseRecord),
    Replace(LeaseRecord, LeaseVersion),
}

pub(super) struct ElectionState {
    name: String,
    observed: ObservedLease,
    /// Ours: when the last successful renewal was sent.
    renewed: Option<Instant>,
    /// A write failed, or may have: what stands there is read before the next.
    unsure: bool,
    /// Somebody may delete the object; epochs grow all the same.
    highest: u64,
}

enum ObservedLease {
    Unknown,
    /// There is none, or no longer. Whoever held it may decide until it would have run out: nobody makes another before
    /// `free`. Looked at last at `at`: what was made and deleted while nobody looked was not seen.
    Absent {
        free_at: Instant,
        observed_at: Instant,
    },
    /// `at`: when this version was first seen, by our clock.
    Lease {
        record: LeaseRecord,
        version: LeaseVersion,
        observed_at: Instant,
    },
}

impl ElectionState {
    pub(super) const fn new(name: String) -> Self {
        Self { name, observed: ObservedLease::Unknown, renewed: None, unsure: true, highest: 0 }
    }

    /// What stands in the lease is what was written last: it need not be read before it is written again.
    pub(super) fn is_sure(&self, now: Instant) -> bool {
        !self.unsure && self.leadership(now).is_some()
    }

    pub(super) fn observe(&mut self, found: Option<(LeaseRecord, LeaseVersion)>, now: Instant) {
        self.unsure = false;
        let Some((record, version)) = found else {
            (self.observed, self.renewed) =
                (ObservedLease::Absent { free_at: self.free_at(now), observed_at: now }, None);
            return;
        };
        // Another's, or ours as somebody else changed it.
        if record.holder.as_ref() != Some(&self.name) || record.epoch != self.highest {
            self.renewed = None;
        }
        self.highest = self.highest.max(record.epoch);
        let known = match &self.observed {
            ObservedLease::Lease { version: before, observed_at: at, .. } if *before == version => Some(*at),
            _ => None,
        };
        // A renewal that was written and whose answer was lost does not count for the claim: when it was written is not
        // known.
        self.observed = ObservedLease::Lease { record, version, observed_at: known.unwrap_or(now) };
    }

    /// From when on this one may make a lease where there is none. At once, where none was ever seen: what a process that
    /// begins cannot know is left to the epoch.
    fn free_at(&self, now: Instant) -> Instant {
        match &self.observed {
            ObservedLease::Unknown => now,
            ObservedLease::Lease { .. } if self.leadership(now).is_some() => now,
            ObservedLease::Absent { free_at: free, observed_at: at } if *at + MAX_OBSERVATION_AGE > now => {
                *free
            }
            ObservedLease::Absent { .. } | ObservedLease::Lease { .. } => now + LEASE_DURATION,
        }
    }

    /// `floor`: grows with the world's time, so that epochs do when the object is deleted and made anew by one that never
    /// saw it, or by somebody who knows nothing of epochs. What was told an epoch keeps the highest, and would never
    /// again listen to a leader with a lower one.
    pub(super) fn next_action(&self, now: Instant, floor: u64) -> LeaseAction {
        let ours = |epoch| LeaseRecord { holder: Some(self.name.clone()), epoch, duration: LEASE_DURATION };
        let next = floor.max(self.highest + 1);
        match &self.observed {
            ObservedLease::Unknown => LeaseAction::Wait,
            ObservedLease::Absent { free_at: free, .. } if *free > now => LeaseAction::Wait,
            ObservedLease::Absent { .. } => LeaseAction::Create(ours(next)),
            ObservedLease::Lease { record, version, observed_at: at } => {
                let mine = record.holder.as_ref() == Some(&self.name);
                let free = record.holder.is_none() || *at + span(record) <= now;
                if mine && self.leadership(now).is_some() {
                    LeaseAction::Replace(ours(record.epoch), version.clone())
                } else if mine || free {
                    // Also what it held itself and let lapse: what it ordered in between must not count as one tenure.
                    LeaseAction::Replace(ours(next), version.clone())
                } else {
                    LeaseAction::Wait
                }
            }
        }
    }

    pub(super) fn record_write(&mut self, record: LeaseRecord, version: LeaseVersion, sent: Instant) {
        (self.renewed, self.unsure) = (Some(sent), false);
        self.highest = self.highest.max(record.epoch);
        self.observed = ObservedLease::Lease { record, version, observed_at: sent };
    }

    pub(super) const fn record_failure(&mut self) {
        self.unsure = true;
    }

    /// The epoch, and when the last renewal was sent, while it holds.
    pub(super) fn leadership(&self, now: Instant) -> Option<(u64, Instant)> {
        let renewed = self.renewed.filter(|renewed| *renewed + RENEW_DEADLINE > now)?;
        match &self.observed {
            ObservedLease::Lease { record, .. } if record.holder.as_ref() == Some(&self.name) => {
                Some((record.epoch, renewed))
            }
            _ => None,
        }
    }

    /// In how long something ends by itself: our claim, or another's lease.
    pub(super) fn due(&self, now: Instant) -> Option<Duration> {
        let at = match &self.observed {
            ObservedLease::Lease { record, observed_at: at, .. }
                if record.holder.as_ref() != Some(&self.name) =>
            {
                *at + record.duration
            }
            _ => self.renewed? + RENEW_DEADLINE,
        };
        (at > now).then(|| at - now)
    }

    /// What gives it back.
    pub(super) fn release_record(&self) -> Option<(LeaseRecord, LeaseVersion)> {
        match &self.observed {
            // One that may have been written since is not written over blindly: the version says no.
            ObservedLease::Lease { record, version, .. } if record.holder.as_ref() == Some(&self.name) => {
                Some((LeaseRecord { holder: None, ..record.clone() }, version.clone()))
            }
            _ => None,
        }
    }
}

/// What somebody wrote there may be less than a holder believes in.
fn span(record: &LeaseRecord) -> Duration {
    record.duration.max(LEASE_DURATION)
}
