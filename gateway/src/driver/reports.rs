//! What other threads report to the driver without waiting for it: events, and waiters that have left the queue.
//!
//! Reports come from synchronous code and from drops, which can neither wait for a full channel nor fail. So this is no
//! channel. A later event on the same subject replaces the earlier one, which bounds the events by the number of
//! engines, variants and gateways. A waiter that has left keeps its place in the queue until the driver has taken the
//! report, which bounds those reports by the number of places.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    fleet::event::{Event, WaiterId},
    model::{EngineId, ModelName, VariantName},
    units::Generation,
};
use tokio::sync::Notify;

#[derive(Default)]
pub(super) struct DriverReports {
    pending: Mutex<PendingReports>,
    changed: Notify,
}

#[derive(Default)]
struct PendingReports {
    /// The latest event on each subject, with its number.
    events: BTreeMap<ReportSubject, (u64, Event)>,
    next_number: u64,
    left: VecDeque<WaiterId>,
}

/// The subject of an event. The driver needs only the latest event on each.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum ReportSubject {
    Configuration,
    Leadership,
    ApiServer,
    Peers,
    Shutdown,
    RemoteDemand(String),
    /// The target of a variant.
    Target(ModelName, VariantName),
    /// The stub refused a request: one refusal is as good as many.
    StubGate(EngineId, Generation),
    /// The fleet has at most one canary under way for an engine.
    Canary(EngineId, Generation),
}

impl ReportSubject {
    /// Returns `None` for an outcome, of which each one counts. The platform's channel carries those.
    fn of(event: &Event) -> Option<Self> {
        Some(match event {
            Event::Configured { .. } => Self::Configuration,
            Event::LeadershipChanged { .. } => Self::Leadership,
            Event::ApiServerChanged { .. } => Self::ApiServer,
            Event::PeersChanged { .. } => Self::Peers,
            Event::Shutdown { .. } => Self::Shutdown,
            Event::RemoteDemand { gateway, .. } => Self::RemoteDemand(gateway.clone()),
            Event::Desired { model, variant, .. } => Self::Target(model.clone(), variant.clone()),
            Event::StubGateClosed { engine, generation } => Self::StubGate(engine.clone(), *generation),
            Event::Canary { engine, generation, .. } => Self::Canary(engine.clone(), *generation),
            _ => return None,
        })
    }
}

impl DriverReports {
    /// Adds an event, in place of an earlier one on the same subject.
    pub(super) fn add_event(&self, event: Event) {
        let subject = ReportSubject::of(&event);
        debug_assert!(subject.is_some(), "an outcome belongs into the platform's channel: {event:?}");
        let Some(subject) = subject else {
            tracing::error!(?event, "event dropped: an outcome belongs into the platform's channel");
            return;
        };
        let mut pending = self.pending();
        let number = pending.next_number;
        pending.next_number += 1;
        pending.events.insert(subject, (number, event));
        drop(pending);
        self.changed.notify_one();
    }

    /// Adds a waiter that has left the queue. The caller keeps the waiter's place taken.
    pub(super) fn add_left(&self, waiter: WaiterId) {
        self.pending().left.push_back(waiter);
        self.changed.notify_one();
    }

    /// Waits for a report. May return without one.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Moves all events to the batch, in the order of their arrival. Returns the waiters that have left, as many as
    /// the batch still has room for.
    pub(super) fn take(&self, batch: &mut Vec<Event>, max_batch: usize) -> Vec<WaiterId> {
        let mut pending = self.pending();
        if !pending.events.is_empty() {
            let mut events: Vec<_> = mem::take(&mut pending.events).into_values().collect();
            events.sort_unstable_by_key(|(number, _)| *number);
            batch.extend(events.into_iter().map(|(_, event)| event));
        }
        let room = max_batch.saturating_sub(batch.len()).min(pending.left.len());
        pending.left.drain(..room).collect()
    }

    fn pending(&self) -> MutexGuard<'_, PendingReports> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rouse::fleet::event::CanaryVerdict;

    use super::*;

    #[test]
    fn reports_of_a_driver_that_is_held_up_are_as_many_as_their_subjects_and_the_latest_counts() {
        let reports = DriverReports::default();
        let engine = |replica| EngineId::new("m".into(), replica);
        let canary =
            |replica, verdict| Event::Canary { engine: engine(replica), generation: Generation(1), verdict };
        let demand = |gateway: &str| Event::RemoteDemand { gateway: gateway.to_owned(), demand: None };
        reports.add_event(Event::ApiServerChanged { answers: true });
        for _ in 0..10_000 {
            reports.add_event(Event::StubGateClosed { engine: engine(0), generation: Generation(1) });
            reports.add_event(canary(0, CanaryVerdict::Inconclusive));
        }
        reports.add_event(demand("a"));
        reports.add_event(demand("b"));
        reports.add_event(canary(1, CanaryVerdict::Passed));
        reports.add_event(canary(0, CanaryVerdict::Passed));
        reports.add_event(Event::ApiServerChanged { answers: false });
        let mut batch = Vec::new();
        assert!(reports.take(&mut batch, 256).is_empty());
        let expected = [
            Event::StubGateClosed { engine: engine(0), generation: Generation(1) },
            demand("a"),
            demand("b"),
            canary(1, CanaryVerdict::Passed),
            canary(0, CanaryVerdict::Passed),
            Event::ApiServerChanged { answers: false },
        ];
        assert_eq!(batch, expected);
    }

    #[test]
    fn the_end_of_the_adoption_is_an_outcome_behind_the_adopted_engines_and_no_report() {
        assert!(ReportSubject::of(&Event::ApiServerChanged { answers: true }).is_some());
        assert!(ReportSubject::of(&Event::AdoptionDone).is_none());
    }

    #[test]
    fn waiters_that_leave_in_crowds_fill_one_batch_after_the_other() {
        let reports = DriverReports::default();
        (0..600).for_each(|n| reports.add_left(WaiterId(n)));
        reports.add_event(Event::ApiServerChanged { answers: true });
        let mut taken = Vec::new();
        for expected in [255, 256, 89, 0] {
            let mut batch = Vec::new();
            let left = reports.take(&mut batch, 256);
            assert_eq!(left.len(), expected);
            taken.extend(left);
        }
        assert!(taken.into_iter().eq((0..600).map(WaiterId)), "none is lost");
    }
}
