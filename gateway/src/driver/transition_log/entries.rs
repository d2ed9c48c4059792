//! Turns transitions into entries of the timeline.
//!
//! The leader knows why an engine changes and what that costs. Another gateway knows engines only as the leader
//! publishes them, so its entries have no reason, and a cost only where both ends of a transition were published.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    fault::Fault,
    fleet::event::{PublishedEngine, PublishedEngineState},
    model::{EngineId, ModelName},
    units::{Bytes, Millis, Tick},
};
use rouse_net::openai;

use super::TransitionInProgress;
use crate::driver::timeline::{Timeline, TimelineEntry, TimelineKind};

/// The shortest time between two entries for refusals of one model with one code: a crowd of refused requests must not
/// displace everything else.
const REFUSAL_INTERVAL: Millis = Millis::secs(10);

pub(super) struct TimelineWriter {
    timeline: Arc<Timeline>,
    /// When a refusal by this model and code was last added.
    refusals: BTreeMap<(ModelName, &'static str), Tick>,
    /// Each engine as the leader published it last. Empty at the leader.
    published: BTreeMap<EngineId, PublishedStep>,
}

/// A published state, and when the transition that it belongs to began.
#[derive(Clone, Copy)]
struct PublishedStep {
    state: PublishedEngineState,
    began: Tick,
}

impl TimelineWriter {
    pub(super) const fn new(timeline: Arc<Timeline>) -> Self {
        Self { timeline, refusals: BTreeMap::new(), published: BTreeMap::new() }
    }

    /// Adds a transition that succeeded. `why`: the reason, unless it was known at the beginning.
    pub(super) fn ended(
        &self,
        engine: &EngineId,
        what: TimelineKind,
        ended: TransitionInProgress,
        why: String,
        now: Tick,
    ) {
        let took = Some(now.since(ended.began));
        let what = if ended.is_eviction { TimelineKind::Evicted } else { what };
        let cause = if why.is_empty() { ended.reason } else { why };
        let freed = (ended.frees > Bytes::ZERO).then_some(ended.frees);
        self.timeline.add(TimelineEntry { took, freed, ..entry(engine, what, cause, now) });
    }

    /// Adds an engine that failed. `ended`: its transition, if it failed in one.
    pub(super) fn failed(
        &self,
        engine: &EngineId,
        ended: Option<TransitionInProgress>,
        cause: String,
        now: Tick,
    ) {
        let took = ended.map(|ended| now.since(ended.began));
        self.timeline.add(TimelineEntry { took, ..entry(engine, TimelineKind::Failed, cause, now) });
    }

    /// Adds a failure that the engine survives.
    pub(super) fn warned(&self, engine: &EngineId, cause: String, now: Tick) {
        self.timeline.add(entry(engine, TimelineKind::Warned, cause, now));
    }

    /// Adds a refused request, unless one like it was added just before.
    pub(super) fn refused(&mut self, model: &ModelName, fault: &Fault, now: Tick) {
        self.refusals.retain(|_, at| now.since(*at) < REFUSAL_INTERVAL);
        let kind = (model.clone(), openai::error::code(fault));
        if self.refusals.contains_key(&kind) {
            return;
        }
        self.refusals.insert(kind, now);
        self.timeline.add(TimelineEntry {
            at: now,
            model: model.clone(),
            engine: None,
            what: TimelineKind::Refused,
            cause: fault.to_string(),
            took: None,
            freed: None,
        });
    }

    /// Adds the change of an engine that the leader published. The first report of an engine is no change.
    pub(super) fn published(&mut self, engine: &EngineId, published: Option<&PublishedEngine>, now: Tick) {
        let before = self.published.get(engine).copied();
        match published {
            Some(published) => {
                let step = PublishedStep::after(before, published);
                self.published.insert(engine.clone(), step);
            }
            None => {
                self.published.remove(engine);
            }
        }
        let Some(before) = before else { return };
        let Some(what) = published_change(before.state, published.map(|published| published.state)) else {
            return;
        };
        let at = published.map_or(now, |published| published.since.min(now));
        let took = is_transition(before.state).then(|| at.since(before.began));
        let failure = published.and_then(|published| published.failure.as_ref());
        let cause = failure.map_or_else(
            || "as the gateway that leads has published".to_owned(),
            |failure| failure.cause.describe(),
        );
        self.timeline.add(TimelineEntry { took, ..entry(engine, what, cause, at) });
    }

    /// Forgets what another gateway has published, because this one leads.
    pub(super) fn forget_published(&mut self) {
        self.published.clear();
    }
}

impl PublishedStep {
    fn after(before: Option<Self>, published: &PublishedEngine) -> Self {
        let began = match before {
            Some(Self { state: PublishedEngineState::Launching, began })
                if published.state == PublishedEngineState::Loading =>
            {
                began
            }
            Some(step) if step.state == published.state => step.began,
            _ => published.since,
        };
        Self { state: published.state, began }
    }
}

/// What happened between two published states. `after`: `None` if the engine has no process any more.
const fn published_change(
    before: PublishedEngineState,
    after: Option<PublishedEngineState>,
) -> Option<TimelineKind> {
    use PublishedEngineState::{
        Asleep, Awake, Backoff, Draining, Failing, FallingAsleep, Launching, Loading, Stopping, Waking,
    };
    match (before, after) {
        (Launching | Loading, Some(Awake)) => Some(TimelineKind::Launched),
        (Waking | Asleep(_), Some(Awake)) => Some(TimelineKind::Woke),
        (Awake | Draining | FallingAsleep, Some(Asleep(_))) => Some(TimelineKind::Slept),
        (Failing | Backoff, Some(Failing | Backoff)) => None,
        (_, Some(Failing | Backoff)) => Some(TimelineKind::Failed),
        (Awake | Draining | FallingAsleep | Asleep(_) | Waking | Stopping, None) => {
            Some(TimelineKind::Stopped)
        }
        _ => None,
    }
}

/// Whether the engine is on its way, so that the state's end is the end of a transition.
const fn is_transition(state: PublishedEngineState) -> bool {
    use PublishedEngineState::{FallingAsleep, Launching, Loading, Stopping, Waking};
    matches!(state, Launching | Loading | Waking | FallingAsleep | Stopping)
}

fn entry(engine: &EngineId, what: TimelineKind, cause: String, at: Tick) -> TimelineEntry {
    TimelineEntry {
        at,
        model: engine.model.clone(),
        engine: Some(engine.clone()),
        what,
        cause,
        took: None,
        freed: None,
    }
}

#[cfg(test)]
mod tests {
    use rouse::model::SleepLevel;

    use super::*;

    fn engine() -> EngineId {
        EngineId::new("m".into(), 0)
    }

    fn writer() -> (Arc<Timeline>, TimelineWriter) {
        let timeline = Arc::<Timeline>::default();
        (Arc::clone(&timeline), TimelineWriter::new(timeline))
    }

    fn kinds(timeline: &Timeline) -> Vec<(TimelineKind, Option<Millis>)> {
        timeline.since(0).entries.iter().map(|entry| (entry.what, entry.took)).collect()
    }

    fn published(state: PublishedEngineState, since: u64) -> PublishedEngine {
        PublishedEngine {
            state,
            address: None,
            fingerprint: 0,
            accelerators: Vec::new(),
            since: Tick(since),
            failure: None,
        }
    }

    #[test]
    fn a_follower_shows_what_the_leader_published_with_its_durations() {
        let (timeline, mut writer) = writer();
        let states = [
            (PublishedEngineState::Launching, 10),
            (PublishedEngineState::Loading, 14),
            (PublishedEngineState::Awake, 20),
            (PublishedEngineState::Draining, 30),
            (PublishedEngineState::FallingAsleep, 31),
            (PublishedEngineState::Asleep(SleepLevel::One), 34),
            (PublishedEngineState::Asleep(SleepLevel::One), 34),
            // The report of the wake itself was lost.
            (PublishedEngineState::Awake, 50),
            (PublishedEngineState::Failing, 60),
            (PublishedEngineState::Backoff, 61),
        ];
        for (state, since) in states {
            writer.published(&engine(), Some(&published(state, since)), Tick(1000));
        }
        writer.published(&engine(), None, Tick(1000));
        assert_eq!(
            kinds(&timeline),
            [
                (TimelineKind::Launched, Some(Millis(10))),
                (TimelineKind::Slept, Some(Millis(3))),
                (TimelineKind::Woke, None),
                (TimelineKind::Failed, None),
            ]
        );
    }

    #[test]
    fn an_engine_that_is_first_reported_has_changed_nothing() {
        let (timeline, mut writer) = writer();
        writer.published(&engine(), Some(&published(PublishedEngineState::Awake, 5)), Tick(9));
        writer.published(&engine(), None, Tick(12));
        assert_eq!(kinds(&timeline), [(TimelineKind::Stopped, None)]);
        writer.published(&engine(), None, Tick(15));
        assert_eq!(timeline.since(0).entries.len(), 1);
    }

    #[test]
    fn a_crowd_of_refusals_is_one_entry_in_ten_seconds() {
        let (timeline, mut writer) = writer();
        let full = Fault::ControlPlaneUnavailable;
        for second in 0..25 {
            writer.refused(&"m".into(), &full, Tick(second * 1000));
            writer.refused(&"m".into(), &Fault::ShuttingDown, Tick(second * 1000));
        }
        assert_eq!(kinds(&timeline).len(), 6, "at 0, 10 and 20 s, for each code");
        writer.refused(&"other".into(), &full, Tick(24_000));
        let last = timeline.since(6).entries;
        assert_eq!((last.len(), last[0].engine.as_ref(), last[0].model.as_str()), (1, None, "other"));
    }

    #[test]
    fn an_eviction_says_what_it_freed() {
        let (timeline, writer) = writer();
        let cause = crate::metrics::TransitionCause::Swap;
        let sleep = TransitionInProgress::new(crate::metrics::TransitionKind::Sleep, cause, Tick(100));
        let sleep = TransitionInProgress { frees: Bytes::gib(20), ..sleep };
        writer.ended(&engine(), TimelineKind::Slept, sleep, "for other".to_owned(), Tick(150));
        let entry = Arc::clone(&timeline.since(0).entries[0]);
        assert_eq!((entry.what, entry.cause.as_str()), (TimelineKind::Evicted, "for other"));
        assert_eq!((entry.took, entry.freed), (Some(Millis(50)), Some(Bytes::gib(20))));
    }
}
