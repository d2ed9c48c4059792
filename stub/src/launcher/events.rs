//! What happened to the instances, in order, for whoever watches.
//!
//! Each watcher has a place in one common record and takes from there what it has not seen, so a slow one costs nothing
//! but its place; when the record no longer reaches back to it, its stream ends, and it lists and watches anew.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use serde::Serialize;

/// Events that are kept for those who come back.
pub(crate) const MAX_EVENTS: usize = 1000;
/// What they may take, in bytes: an instance is as large as whoever made it said, up to the largest body that is taken.
/// Usual ones come nowhere near.
pub(crate) const MAX_EVENT_BYTES: usize = 8 << 20;

/// Grows by one with every event.
pub(crate) type EventRevision = u64;

/// What happened to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum InstanceEventKind {
    Created,
    /// Its process ended by itself.
    Stopped,
    Deleted,
    /// It became ready, or is so no longer: only for those who ask for it, since the public launcher has no such event.
    Updated,
}

#[derive(Debug)]
struct InstanceEvent {
    revision: EventRevision,
    /// Of [`InstanceEventKind::Updated`]: the instance.
    updated_instance: Option<String>,
    line: Bytes,
}

/// The last events.
#[derive(Debug, Default)]
pub(crate) struct InstanceEventLog {
    events: VecDeque<InstanceEvent>,
    /// Of the lines that are kept.
    bytes: usize,
    /// Of the newest event that is not kept any more.
    last_dropped: EventRevision,
}

/// One line of the stream.
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
    /// Adds an event. `revision` is larger than all before.
    pub(crate) fn publish(
        &mut self,
        kind: InstanceEventKind,
        revision: EventRevision,
        instance: &str,
        object: &impl Serialize,
    ) {
        let about = (kind == InstanceEventKind::Updated).then(|| instance.to_owned());
        // Of each instance only the newest is kept: one that comes and goes would push out what others wait for.
        if about.is_some() {
            self.events.retain(|event| event.updated_instance != about);
            self.bytes = self.events.iter().map(|event| event.line.len()).sum();
        }
        let line = event_line(kind, object);
        self.bytes += line.len();
        self.events.push_back(InstanceEvent { revision, updated_instance: about, line });
        // The newest stays, whatever its size: those who watch wait for it.
        while self.events.len() > MAX_EVENTS || self.events.len() > 1 && self.bytes > MAX_EVENT_BYTES {
            let Some(event) = self.events.pop_front() else { break };
            self.bytes -= event.line.len();
            self.last_dropped = event.revision;
        }
    }

    /// Who has not seen what came up to here has missed something.
    pub(crate) const fn last_dropped(&self) -> EventRevision {
        self.last_dropped
    }

    /// The lines of all events after `seen`, and the revision of the last; nothing, when there is none.
    ///
    /// # Errors
    /// Some of them are not kept any more.
    pub(crate) fn events_after(
        &self,
        seen: EventRevision,
        updates: bool,
    ) -> Result<Option<(Bytes, EventRevision)>, EventsMissed> {
        if seen < self.last_dropped {
            return Err(EventsMissed);
        }
        let mut lines = BytesMut::new();
        let mut last = None;
        for event in self.events.iter().skip_while(|event| event.revision <= seen) {
            if updates || event.updated_instance.is_none() {
                lines.extend_from_slice(&event.line);
            }
            last = Some(event.revision);
        }
        Ok(last.map(|last| (lines.freeze(), last)))
    }
}

/// There were more events than are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventsMissed;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(events: &InstanceEventLog, seen: EventRevision, updates: bool) -> String {
        let lines = events.events_after(seen, updates).unwrap();
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
        // One that was announced and did not happen yet is waited for.
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
        // Of one instance only the newest update counts.
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
        // What is left out was seen all the same.
        assert_eq!(events.events_after(1, false).unwrap().unwrap().1, 3001);
    }
}
