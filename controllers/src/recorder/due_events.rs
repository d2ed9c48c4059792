//! The Events that are to be written, and when.
//!
//! Of the Events that are due, Warnings go first: thousands of starting engines have an Event each, which take minutes
//! to write. Meanwhile at least one write in five is of another Event.

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::EventKey;

/// Maximum number of Warnings in a row while another Event is due.
const MAX_WARNINGS_IN_A_ROW: u32 = 4;

#[derive(Debug, Default)]
pub(super) struct DueEvents {
    warnings: BTreeSet<(Instant, EventKey)>,
    others: BTreeSet<(Instant, EventKey)>,
    /// Warnings that were taken since the last other Event.
    warnings_in_a_row: u32,
}

impl DueEvents {
    pub(super) fn insert(&mut self, at: Instant, key: EventKey) {
        let (_, reason, _) = &key;
        let queue = if reason.is_warning() { &mut self.warnings } else { &mut self.others };
        queue.insert((at, key));
    }

    /// Returns when the next Event is due.
    pub(super) fn next_at(&self) -> Option<Instant> {
        let first = |queue: &BTreeSet<(Instant, EventKey)>| queue.first().map(|(at, _)| *at);
        [first(&self.warnings), first(&self.others)].into_iter().flatten().min()
    }

    /// Takes the next Event that is due: of each type, the one that has waited longest.
    pub(super) fn take(&mut self, now: Instant) -> Option<EventKey> {
        let is_due = |queue: &BTreeSet<(Instant, EventKey)>| queue.first().is_some_and(|(at, _)| *at <= now);
        let (warning, other) = (is_due(&self.warnings), is_due(&self.others));
        let (_, key) = if warning && (!other || self.warnings_in_a_row < MAX_WARNINGS_IN_A_ROW) {
            self.warnings_in_a_row = self.warnings_in_a_row.saturating_add(1);
            self.warnings.pop_first()?
        } else if other {
            self.warnings_in_a_row = 0;
            self.others.pop_first()?
        } else {
            return None;
        };
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use tokio::time::Duration;

    use super::*;
    use crate::event_content::EventReason;

    fn key(number: u32, reason: EventReason) -> EventKey {
        (format!("uid-{number:03}"), reason, None)
    }

    /// Takes this many Events at this moment; returns for each whether it is a Warning.
    fn take(due: &mut DueEvents, now: Instant, count: usize) -> Vec<bool> {
        iter::from_fn(|| due.take(now)).take(count).map(|(_, reason, _)| reason.is_warning()).collect()
    }

    #[test]
    fn a_warning_overtakes_the_events_of_a_start() {
        let (mut due, begun) = (DueEvents::default(), Instant::now());
        for number in 0..100 {
            due.insert(begun, key(number, EventReason::ScaledUp));
        }
        let now = begun + Duration::from_secs(1);
        assert_eq!(take(&mut due, now, 2), [false; 2]);
        due.insert(now, key(0, EventReason::FailedCreate));
        assert_eq!(take(&mut due, now, 2), [true, false]);
        assert_eq!(take(&mut due, now, 100).len(), 97, "no Event is lost");
        assert_eq!(due.next_at(), None);
    }

    #[test]
    fn other_events_go_on_while_there_are_many_warnings() {
        let (mut due, now) = (DueEvents::default(), Instant::now());
        for number in 0..20 {
            due.insert(now, key(number, EventReason::InsufficientMemory));
            due.insert(now, key(number, EventReason::ScaledUp));
        }
        let five = [true, true, true, true, false];
        assert_eq!(take(&mut due, now, 10), [five, five].concat());
        assert_eq!(take(&mut due, now, 40).iter().filter(|warning| **warning).count(), 12, "all are taken");
    }

    #[test]
    fn an_event_that_is_not_due_yet_delays_no_other() {
        let (mut due, now) = (DueEvents::default(), Instant::now());
        let later = now + Duration::from_secs(60);
        due.insert(later, key(0, EventReason::FailedCreate));
        due.insert(now, key(0, EventReason::ScaledUp));
        assert_eq!(due.next_at(), Some(now));
        assert_eq!(take(&mut due, now, 2), [false]);
        assert_eq!((due.next_at(), due.take(now)), (Some(later), None));
        assert_eq!(take(&mut due, later, 2), [true]);
    }
}
