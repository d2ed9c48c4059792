//! The ordered log of instance events, for watchers.
//!
//! All watchers read one shared log, each from its own position, so a slow watcher costs only its position. When the
//! log no longer reaches back to that position, the watcher's stream ends, and the client lists and watches again.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use serde::Serialize;

/// Events kept for reconnecting watchers.
pub(crate) const MAX_EVENTS: usize = 1000;
/// Limit of the kept events in bytes. An instance can be as large as its creator's request, up to the largest accepted
/// body. Usual events stay far below.
pub(crate) const MAX_EVENT_BYTES: usize = 8 << 20;

/// The number of an event; each event increments it.
pub(crate) type EventRevision = u64;

/// The kind of an instance event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum InstanceEventKind {
    Created,
    /// The process ended by itself.
    Stopped,
    Deleted,
    /// The readiness changed. Sent only to watchers that request it, since the public launcher has no such event.
    Updated,
}

#[derive(Debug)]
struct InstanceEvent {
    revision: EventRevision,
    /// The instance, for [`InstanceEventKind::Updated`].
    updated_instance: Option<String>,
    line: Bytes,
}

/// The most recent events.
#[derive(Debug, Default)]
pub(crate) struct InstanceEventLog {
    events: VecDeque<InstanceEvent>,
    /// Total bytes of the kept lines.
    bytes: usize,
    /// Revision of the newest dropped event.
    last_dropped: EventRevision,
}

/// Renders one line of the stream.
pub(crate) fn event_line(kind: InstanceEventKind, object: &impl Serialize) -> Bytes {
    #[derive(Serialize)]
    struct EventLine<'a, T> {
        #[serde(rename = "type")]
        kind: InstanceEventKind,
        object: &'a T,
    }
    let mut text = serde_json::to_vec(&EventLine { kind, object }).unwrap_or_default();
    text.push(b'\n');
    text.into()
}

impl InstanceEventLog {
    /// Adds an event. `revision` must exceed all previous revisions.
    pub(crate) fn publish(
        &mut self,
        kind: InstanceEventKind,
        revision: EventRevision,
        instance: &str,
        object: &impl Serialize,
    ) {
        let about = (kind == InstanceEventKind::Updated).then(|| instance.to_owned());
        // Keep only the newest update of each instance. An instance whose readiness flaps would otherwise push out
        // other events.
        if about.is_some() {
            self.events.retain(|event| event.updated_instance != about);
            self.bytes = self.events.iter().map(|event| event.line.len()).sum();
        }
        let line = event_line(kind, object);
        self.bytes += line.len();
        self.events.push_back(InstanceEvent { revision, updated_instance: about, line });
        // Keep the newest event whatever its size: watchers wait for it.
        while self.events.len() > MAX_EVENTS || self.events.len() > 1 && self.bytes > MAX_EVENT_BYTES {
            let Some(event) = self.events.pop_front() else { break };
            self.bytes -= event.line.len();
            self.last_dropped = event.revision;
        }
    }

    /// Revision of the newest dropped event. A watcher that has not read up to it has missed events.
    pub(crate) const fn last_dropped(&self) -> EventRevision {
        self.last_dropped
    }

    /// Returns the lines of all events after `last_seen`, with the last event's revision. `None` if there is none.
    ///
    /// # Errors
    /// Some of these events were dropped.
    pub(crate) fn events_after(
        &self,
        last_seen: EventRevision,
        updates: bool,
    ) -> Result<Option<(Bytes, EventRevision)>, EventsMissed> {
        if last_seen < self.last_dropped {
            return Err(EventsMissed);
        }
        let mut lines = BytesMut::new();
        let mut last = None;
        for event in self.events.iter().skip_while(|event| event.revision <= last_seen) {
            if updates || event.updated_instance.is_none() {
                lines.extend_from_slice(&event.line);
            }
            last = Some(event.revision);
        }
        Ok(last.map(|last| (lines.freeze(), last)))
    }
}

/// Events that the watcher has not read were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventsMissed;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(events: &InstanceEventLog, last_seen: EventRevision, updates: bool) -> String {
        let lines = events.events_after(last_seen, updates).unwrap();
        lines.map(|(lines, _)| String::from_utf8(lines.to_vec()).unwrap()).unwrap_or_default()
    }

    fn published(count: u64) -> InstanceEventLog {
        let mut events = InstanceEventLog::default();
        for i in 1..=count {
            events.publish(InstanceEventKind::Created, i, "x", &json!({"i": i}));
        }
        events
    }

    #[test]
    fn publish_and_watch() {
        let mut events = InstanceEventLog::default();
        assert_eq!(events.events_after(0, true), Ok(None));
        events.publish(InstanceEventKind::Created, 1, "abc", &json!({"instance_id": "abc"}));
        assert_eq!(text(&events, 0, false), "{\"type\":\"CREATED\",\"object\":{\"instance_id\":\"abc\"}}\n");
        assert_eq!(events.events_after(0, false).unwrap().unwrap().1, 1);
        assert_eq!(events.events_after(1, false), Ok(None));
    }

    #[test]
    fn watch_since_revision() {
        let events = published(3);
        assert_eq!(text(&events, 1, false).lines().count(), 2);
        assert!(text(&events, 2, false).contains(r#"{"i":3}"#));
        // A revision ahead of the newest event waits.
        assert_eq!(events.events_after(7, false), Ok(None));
    }

    #[test]
    fn revision_too_old_raises() {
        let events = published(MAX_EVENTS as u64 + 10);
        assert_eq!(events.last_dropped(), 10);
        assert_eq!(events.events_after(9, false), Err(EventsMissed));
        assert_eq!(text(&events, 10, false).lines().count(), MAX_EVENTS);
    }

    #[test]
    fn the_record_is_bounded_by_its_bytes_too_and_the_newest_event_stays() {
        let mut events = InstanceEventLog::default();
        let quarter = "x".repeat(MAX_EVENT_BYTES / 4);
        for revision in 1..=10 {
            events.publish(InstanceEventKind::Created, revision, "x", &quarter);
            assert!(events.bytes <= MAX_EVENT_BYTES, "{}", events.bytes);
        }
        assert_eq!((events.events.len(), events.last_dropped()), (3, 7));
        assert_eq!(events.events_after(6, false), Err(EventsMissed));
        assert_eq!(events.events_after(7, false).unwrap().unwrap().1, 10);
        // Only the newest update of an instance counts.
        for revision in 11..=20 {
            events.publish(InstanceEventKind::Updated, revision, "a", &"");
        }
        assert_eq!((events.events.len(), events.last_dropped()), (4, 7));
        events.publish(InstanceEventKind::Created, 21, "x", &"x".repeat(2 * MAX_EVENT_BYTES));
        assert_eq!((events.events.len(), events.last_dropped()), (1, 20));
        assert_eq!(text(&events, 20, false).lines().count(), 1);
        events.publish(InstanceEventKind::Deleted, 22, "x", &"small");
        assert_eq!(
            (events.events.len(), events.last_dropped(), events.bytes),
            (1, 21, text(&events, 21, false).len())
        );
    }

    #[test]
    fn updates_are_for_those_who_ask_and_push_nothing_out() {
        let mut events = published(1);
        for revision in 2..=3000 {
            events.publish(
                InstanceEventKind::Updated,
                revision,
                if revision % 2 == 0 { "a" } else { "b" },
                &json!(revision),
            );
        }
        events.publish(InstanceEventKind::Stopped, 3001, "a", &json!({}));
        assert_eq!(events.last_dropped(), 0);
        assert_eq!(text(&events, 0, false).lines().count(), 2);
        let all = text(&events, 0, true);
        assert_eq!(all.lines().nth(1).unwrap(), r#"{"type":"UPDATED","object":2999}"#);
        assert_eq!(all.lines().count(), 4);
        // Filtered events still advance the revision.
        assert_eq!(events.events_after(1, false).unwrap().unwrap().1, 3001);
    }
}
