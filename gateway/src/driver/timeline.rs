//! The latest transitions of engines with their cause and cost, for people who watch.
//!
//! The driver adds entries where it counts transitions, so the timeline and the metrics agree. The timeline keeps the
//! last ones only: the log and the journal have all of them.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rouse::{
    model::{EngineId, ModelName},
    units::{Bytes, Millis, Tick},
};
use serde::Serialize;
use tokio::sync::watch;

/// How many entries are kept.
const MAX_ENTRIES: usize = 200;

/// What happened to an engine, or to a request that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum TimelineKind {
    Launched,
    Woke,
    Slept,
    /// Put to sleep or stopped for another model's memory.
    Evicted,
    Stopped,
    Failed,
    /// A request that waited for the model was refused.
    Refused,
    Warned,
}

/// One entry of the timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    pub at: Tick,
    pub model: ModelName,
    /// `None`: the entry concerns no engine.
    pub engine: Option<EngineId>,
    pub what: TimelineKind,
    /// Why it happened, in words.
    pub cause: String,
    /// How long the transition took. `None`: unknown.
    pub took: Option<Millis>,
    /// The memory that the transition freed, over all of the engine's accelerators.
    pub freed: Option<Bytes>,
}

/// The latest entries, which the driver writes and pages read.
pub struct Timeline {
    entries: Mutex<KeptEntries>,
    /// The number of the next entry.
    next: watch::Sender<u64>,
}

#[derive(Default)]
struct KeptEntries {
    /// The number of the entry that comes next.
    next: u64,
    entries: VecDeque<Arc<TimelineEntry>>,
}

/// The entries since a reader's last look.
#[derive(Debug, PartialEq, Eq)]
pub struct TimelineUpdate {
    /// Entries that the reader was too slow for.
    pub missed: u64,
    pub entries: Vec<Arc<TimelineEntry>>,
    /// Where the reader's next look begins.
    pub next: u64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { entries: Mutex::default(), next: watch::Sender::new(0) }
    }
}

impl Timeline {
    /// Adds an entry. Never waits for a reader.
    pub fn add(&self, entry: TimelineEntry) {
        let mut kept = self.kept();
        if kept.entries.len() >= MAX_ENTRIES {
            kept.entries.pop_front();
        }
        kept.entries.push_back(Arc::new(entry));
        kept.next += 1;
        let next = kept.next;
        drop(kept);
        self.next.send_replace(next);
    }

    /// Returns the entries from this number on. 0 returns all that are kept, and none counts as missed.
    #[must_use]
    pub fn since(&self, from: u64) -> TimelineUpdate {
        let kept = self.kept();
        let oldest = kept.next - kept.entries.len() as u64;
        let missed = if from == 0 { 0 } else { oldest.saturating_sub(from) };
        let skip = usize::try_from(from.saturating_sub(oldest)).unwrap_or(usize::MAX);
        TimelineUpdate {
            missed,
            entries: kept.entries.iter().skip(skip).map(Arc::clone).collect(),
            next: kept.next,
        }
    }

    /// Notifies of every new entry.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    fn kept(&self) -> MutexGuard<'_, KeptEntries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(n: u64) -> TimelineEntry {
        TimelineEntry {
            at: Tick(n),
            model: "m".into(),
            engine: Some(EngineId::new("m".into(), 0)),
            what: TimelineKind::Woke,
            cause: "1 request waiting for the model".to_owned(),
            took: Some(Millis(900)),
            freed: None,
        }
    }

    #[test]
    fn a_reader_gets_what_is_kept_then_what_is_new_and_learns_what_it_missed() {
        let timeline = Timeline::default();
        assert_eq!(timeline.since(0), TimelineUpdate { missed: 0, entries: Vec::new(), next: 0 });
        (0..3).for_each(|n| timeline.add(entry(n)));
        let first = timeline.since(0);
        assert_eq!((first.entries.len(), first.missed, first.next), (3, 0, 3));
        assert!(timeline.since(first.next).entries.is_empty());
        timeline.add(entry(3));
        assert_eq!(timeline.since(first.next).entries, [Arc::new(entry(3))]);
        (4..1000).for_each(|n| timeline.add(entry(n)));
        let late = timeline.since(4);
        assert_eq!((late.entries.len(), late.missed, late.next), (MAX_ENTRIES, 796, 1000));
        assert_eq!(late.entries.first().map(|entry| entry.at), Some(Tick(800)));
        assert_eq!(timeline.since(0).missed, 0, "a new reader has missed nothing");
    }

    #[test]
    fn a_page_gets_each_field_by_its_name() {
        let value = serde_json::to_value(entry(7)).unwrap();
        let expected = serde_json::json!({
            "at": 7, "model": "m", "engine": "m#0", "what": "woke",
            "cause": "1 request waiting for the model", "took": 900, "freed": null,
        });
        assert_eq!(value, expected);
    }

    #[tokio::test]
    async fn a_reader_that_waits_is_woken() {
        let timeline = Timeline::default();
        let mut changes = timeline.changes();
        timeline.add(entry(1));
        changes.changed().await.unwrap();
        assert_eq!(*changes.borrow_and_update(), 1);
    }
}
