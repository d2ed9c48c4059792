//! Pods that kubelets rejected, and when to delete each.
//!
//! The owner of a rejected Pod creates another at once. If that one is rejected, too, Pods pile up as fast as the
//! scheduler binds them. So the first one is deleted after a second and each further one later, and few deletions are
//! under way at a time: a storm costs the API server no storm of deletions.

use std::collections::{BTreeMap, BTreeSet};

use super::{command::SlotsCommand, event::RejectedPod};
use crate::{
    due_times::DueTimes,
    pairing::ids::Uid,
    units::{Millis, Tick},
};

/// Most deletions under way.
const MAX_IN_FLIGHT: usize = 16;
/// Time from an owner's first rejection to the deletion of that Pod. It doubles with each further rejection.
const FIRST_PAUSE: Millis = Millis::secs(1);
const LONGEST_PAUSE: Millis = Millis::secs(300);
/// Time without a rejection after which an owner's next one is its first.
const RESET_AFTER: Millis = Millis::secs(600);
/// Time after which a command without an outcome counts as lost.
const ISSUED_WITHIN: Millis = Millis::secs(60);
/// Time from a deletion until the Pod must be gone. Then it is deleted again.
const GONE_WITHIN: Millis = Millis::secs(60);
const RETRY_PAUSE: Millis = Millis::secs(10);
const REFUSED_PAUSE: Millis = Millis::secs(300);

/// All rejected Pods that still exist.
#[derive(Clone, Debug, Default)]
pub(super) struct RejectedPods {
    pods: BTreeMap<Uid, RejectedPod>,
    /// When to delete each, or to delete it again.
    due: DueTimes<Uid>,
    in_flight: BTreeSet<Uid>,
    owners: BTreeMap<Uid, OwnerRejections>,
}

/// The last rejections of an owner's Pods.
#[derive(Clone, Debug)]
struct OwnerRejections {
    count: u32,
    last: Tick,
}

impl RejectedPods {
    pub(super) fn observe(&mut self, pod: RejectedPod, now: Tick) {
        if self.pods.contains_key(&pod.uid) {
            return;
        }
        self.owners.retain(|_, owner| now.since(owner.last) < RESET_AFTER);
        let first = OwnerRejections { count: 0, last: now };
        let owner = self.owners.entry(pod.owner.clone()).or_insert(first);
        owner.last = now;
        owner.count = owner.count.saturating_add(1);
        self.due.set(&pod.uid, Some(now + pause(owner.count)));
        self.pods.insert(pod.uid.clone(), pod);
    }

    pub(super) fn gone(&mut self, uid: &Uid) {
        self.pods.remove(uid);
        self.due.set(uid, None);
        self.in_flight.remove(uid);
    }

    pub(super) fn plan(&mut self, now: Tick) -> Vec<SlotsCommand> {
        // A command that is due again had no outcome.
        self.in_flight.retain(|uid| self.due.get(uid).is_some_and(|at| at > now));
        let room = MAX_IN_FLIGHT.saturating_sub(self.in_flight.len());
        let due = self.due.due_by(now).take(room).filter_map(|uid| self.pods.get(uid));
        due.map(|pod| SlotsCommand::DeletePod { pod: pod.clone() }).collect()
    }

    pub(super) fn issued(&mut self, uid: &Uid, now: Tick) {
        if self.set_due(uid, now + ISSUED_WITHIN) {
            self.in_flight.insert(uid.clone());
        }
    }

    pub(super) fn executed(&mut self, uid: &Uid, now: Tick) {
        self.in_flight.remove(uid);
        self.set_due(uid, now + GONE_WITHIN);
    }

    pub(super) fn failed(&mut self, uid: &Uid, is_refused: bool, now: Tick) {
        self.in_flight.remove(uid);
        self.set_due(uid, now + if is_refused { REFUSED_PAUSE } else { RETRY_PAUSE });
    }

    /// The next moment at which a Pod can be deleted, without an event in between.
    pub(super) fn next_deadline(&self) -> Option<Tick> {
        if self.in_flight.len() < MAX_IN_FLIGHT {
            return self.due.first();
        }
        self.in_flight.iter().filter_map(|uid| self.due.get(uid)).min()
    }

    /// Returns whether the Pod still exists.
    fn set_due(&mut self, uid: &Uid, due: Tick) -> bool {
        let exists = self.pods.contains_key(uid);
        if exists {
            self.due.set(uid, Some(due));
        }
        exists
    }
}

/// The pause before the deletion after the `count`-th rejection, from 1.
fn pause(count: u32) -> Millis {
    let doubled = FIRST_PAUSE.0.saturating_mul(1 << count.saturating_sub(1).min(16));
    Millis(doubled.min(LONGEST_PAUSE.0))
}
