//! The election's state machine. It is pure: times and records come in, actions come out.

use std::time::Duration;

use tokio::time::Instant;

use super::{LEASE_DURATION, RENEW_DEADLINE};

/// Age at which an observation is too old to rule out changes since.
const MAX_OBSERVATION_AGE: Duration = Duration::from_secs(3);

/// Version of the Lease object; only equality has a meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseVersion {
    /// Uid of the object, which distinguishes all objects that ever had the name. An update without a uid creates the
    /// Lease if none exists, whatever version the update carries.
    pub object: String,
    pub number: String,
}

/// Content of the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// `None`: the lease was given back.
    pub holder: Option<String>,
    pub epoch: u64,
    /// Duration after which others may take the lease, as its writer set it.
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
    /// Send time of our last successful renewal.
    renewed: Option<Instant>,
    /// A write failed or its outcome is unknown: read the lease before the next write.
    unsure: bool,
    /// Highest epoch seen. Epochs must grow even if someone deletes the object.
    highest: u64,
}

enum ObservedLease {
    Unknown,
    /// There is no lease, or no longer.
    ///
    /// A former holder may decide until its lease would have expired, so no gateway creates another before `free_at`.
    /// `observed_at` is the time of the last check: a lease that was created and deleted between two checks goes
    /// unseen.
    Absent {
        free_at: Instant,
        observed_at: Instant,
    },
    /// `observed_at`: when this gateway first saw this version, by its own clock.
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

    /// Whether the lease still contains our last write, so that the next write needs no read.
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
        // The record is another gateway's, or ours with a change by someone else.
        if record.holder.as_ref() != Some(&self.name) || record.epoch != self.highest {
            self.renewed = None;
        }
        self.highest = self.highest.max(record.epoch);
        let known = match &self.observed {
            ObservedLease::Lease { version: before, observed_at: at, .. } if *before == version => Some(*at),
            _ => None,
        };
        // A renewal with a lost response does not extend the claim: its write time is unknown.
        self.observed = ObservedLease::Lease { record, version, observed_at: known.unwrap_or(now) };
    }

    /// Returns the time from which this gateway may create a missing lease.
    ///
    /// That is now if this process never saw a lease: the epoch covers what a new process cannot know.
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

    /// Decides the next action on the lease. `floor` grows with wall-clock time.
    ///
    /// Epochs keep growing through `floor` when a gateway that never saw the deleted object recreates it, or when a
    /// program without epochs does. A stub keeps the highest epoch it got and would ignore a leader with a lower one
    /// for good.
    pub(super) fn next_action(&self, now: Instant, floor: u64) -> LeaseAction {
        let new_record =
            |epoch| LeaseRecord { holder: Some(self.name.clone()), epoch, duration: LEASE_DURATION };
        let next = floor.max(self.highest + 1);
        match &self.observed {
            ObservedLease::Unknown => LeaseAction::Wait,
            ObservedLease::Absent { free_at: free, .. } if *free > now => LeaseAction::Wait,
            ObservedLease::Absent { .. } => LeaseAction::Create(new_record(next)),
            ObservedLease::Lease { record, version, observed_at: at } => {
                let is_own = record.holder.as_ref() == Some(&self.name);
                let free = record.holder.is_none() || *at + span(record) <= now;
                if is_own && self.leadership(now).is_some() {
                    LeaseAction::Replace(new_record(record.epoch), version.clone())
                } else if is_own || free {
                    // This includes our own lapsed lease: orders given in between must not count as one tenure.
                    LeaseAction::Replace(new_record(next), version.clone())
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

    /// Ends the claim. The next one has another epoch.
    pub(super) const fn end_claim(&mut self) {
        self.renewed = None;
    }

    /// Returns the epoch and the send time of the last renewal, while the claim is valid.
    pub(super) fn leadership(&self, now: Instant) -> Option<(u64, Instant)> {
        let renewed = self.renewed.filter(|renewed| *renewed + RENEW_DEADLINE > now)?;
        match &self.observed {
            ObservedLease::Lease { record, .. } if record.holder.as_ref() == Some(&self.name) => {
                Some((record.epoch, renewed))
            }
            _ => None,
        }
    }

    /// Returns the time until our claim or another gateway's lease expires.
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

    /// Returns the record that gives the lease back.
    pub(super) fn release_record(&self) -> Option<(LeaseRecord, LeaseVersion)> {
        match &self.observed {
            // If the lease was written since, the version makes this write fail instead of overwriting it.
            ObservedLease::Lease { record, version, .. } if record.holder.as_ref() == Some(&self.name) => {
                Some((LeaseRecord { holder: None, ..record.clone() }, version.clone()))
            }
            _ => None,
        }
    }
}

/// A foreign writer may have set a shorter duration than a leader assumes.
fn span(record: &LeaseRecord) -> Duration {
    record.duration.max(LEASE_DURATION)
}
