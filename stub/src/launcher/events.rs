//! What happened to the instances, in order, for whoever watches.
//!
//! Each watcher has a place in one common record and takes from there what it has not seen, so a slow one costs nothing
//! but its place; when the record no longer reaches back to it, its stream ends, and it lists and watches anew.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use serde::Serialize;

/// Events that are kept for those who come back.
pub(crate) const KEPT: usize = 1000;
/// What they may take, in bytes: an instance is as large as whoever made it said, up to the largest body that is taken.
/// Usual ones come nowhere near.
pub(crate) const MOST: usize = 8 << 20;

/// Grows by one with every event.
pub(crate) type Revision = u64;

/// What happened to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Kind {
    Created,
    /// Its process ended by itself.
    Stopped,
    Deleted,
    /// It became ready, or is so no longer: only for those who ask for it, since the public launcher has no such event.
    Updated,
}

#[derive(Debug)]
struct Event {
    revision: Revision,
    /// Of [`Kind::Updated`]: the instance.
    about: Option<String>,
    line: Bytes,
}

/// The last events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    kept: VecDeque<Event>,
    /// Of the lines that are kept.
    bytes: usize,
    /// Of the newest event that is not kept any more.
    oldest: Revision,
}

/// One line of the stream.
pub(crate) fn line(kind: Kind, object: &impl Serialize) -> Bytes {
    #[derive(Serialize)]
    struct Line<'a, T> {
        #[serde(rename = "type")]
        kind: Kind,
        object: &'a T,
    }
    let mut text = serde_json::to_vec(&Line { kind, object }).unwrap_or_default();
    text.push(b'\n');
    text.into()
}

impl Events {
    /// Adds an event. `revision` is larger than all before.
    pub(crate) fn publish(
        &mut self,
        kind: Kind,
        revision: Revision,
        instance: &str,
        object: &impl Serialize,
    ) {
        let about = (kind == Kind::Updated).then(|| instance.to_owned());
        // Of each instance only the newest is kept: one that comes and goes would push out what others wait for.
        if about.is_some() {
            self.kept.retain(|event| event.about != about);
            self.bytes = self.kept.iter().map(|event| event.line.len()).sum();
        }
        let line = line(kind, object);
        self.bytes += line.len();
        self.kept.push_back(Event { revision, about, line });
        // The newest stays, whatever its size: those who watch wait for it.
        while self.kept.len() > KEPT || self.kept.len() > 1 && self.bytes > MOST {
            let Some(event) = self.kept.pop_front() else { break };
            self.bytes -= event.line.len();
            self.oldest = event.revision;
        }
    }

    /// Who has not seen what came up to here has missed something.
    pub(crate) const fn oldest(&self) -> Revision {
        self.oldest
    }

    /// The lines of all events after `seen`, and the revision of the last; nothing, when there is none.
    ///
    /// # Errors
    /// Some of them are not kept any more.
    pub(crate) fn after(&self, seen: Revision, updates: bool) -> Result<Option<(Bytes, Revision)>, Missed> {
        if seen < self.oldest {
            return Err(Missed);
        }
        let mut lines = BytesMut::new();
        let mut last = None;
        for event in self.kept.iter().skip_while(|event| event.revision <= seen) {
            if updates || event.about.is_none() {
                lines.extend_from_slice(&event.line);
            }
            last = Some(event.revision);
        }
        Ok(last.map(|last| (lines.freeze(), last)))
    }
}

/// There were more events than are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missed;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(events: &Events, seen: Revision, updates: bool) -> String {
        let lines = events.after(seen, updates).unwrap();
        lines.map(|(lines, _)| String::from_utf8(lines.to_vec()).unwrap()).unwrap_or_default()
    }

    fn published(count: u64) -> Events {
        let mut events = Events::default();
        for i in 1..=count {
            events.publish(Kind::Created, i, "x", &json!({"i": i}));
        }
        events
    }

    #[test]
    fn publish_and_watch() {
        let mut events = Events::default();
        assert_eq!(events.after(0, true), Ok(None));
        events.publish(Kind::Created, 1, "abc", &json!({"instance_id": "abc"}));
        assert_eq!(text(&events, 0, false), "{\"type\":\"CREATED\",\"object\":{\"instance_id\":\"abc\"}}\n");
        assert_eq!(events.after(0, false).unwrap().unwrap().1, 1);
        assert_eq!(events.after(1, false), Ok(None));
    }

    #[test]
    fn watch_since_revision() {
        let events = published(3);
        assert_eq!(text(&events, 1, false).lines().count(), 2);
        assert!(text(&events, 2, false).contains(r#"{"i":3}"#));
        // One that was announced and did not happen yet is waited for.
        assert_eq!(events.after(7, false), Ok(None));
    }

    #[test]
    fn revision_too_old_raises() {
        let events = published(KEPT as u64 + 10);
        assert_eq!(events.oldest(), 10);
        assert_eq!(events.after(9, false), Err(Missed));
        assert_eq!(text(&events, 10, false).lines().count(), KEPT);
    }

    #[test]
    fn the_record_is_bounded_by_its_bytes_too_and_the_newest_event_stays() {
        let mut events = Events::default();
        let quarter = "x".repeat(MOST / 4);
        for revision in 1..=10 {
            events.publish(Kind::Created, revision, "x", &quarter);
            assert!(events.bytes <= MOST, "{}", events.bytes);
        }
        assert_eq!((events.kept.len(), events.oldest()), (3, 7));
        assert_eq!(events.after(6, false), Err(Missed));
        assert_eq!(events.after(7, false).unwrap().unwrap().1, 10);
        // Of one instance only the newest update counts.
        for revision in 11..=20 {
            events.publish(Kind::Updated, revision, "a", &"");
        }
        assert_eq!((events.kept.len(), events.oldest()), (4, 7));
        events.publish(Kind::Created, 21, "x", &"x".repeat(2 * MOST));
        assert_eq!((events.kept.len(), events.oldest()), (1, 20));
        assert_eq!(text(&events, 20, false).lines().count(), 1);
        events.publish(Kind::Deleted, 22, "x", &"small");
        assert_eq!(
            (events.kept.len(), events.oldest(), events.bytes),
            (1, 21, text(&events, 21, false).len())
        );
    }

    #[test]
    fn updates_are_for_those_who_ask_and_push_nothing_out() {
        let mut events = published(1);
        for revision in 2..=3000 {
            events.publish(
                Kind::Updated,
                revision,
                if revision % 2 == 0 { "a" } else { "b" },
                &json!(revision),
            );
        }
        events.publish(Kind::Stopped, 3001, "a", &json!({}));
        assert_eq!(events.oldest(), 0);
        assert_eq!(text(&events, 0, false).lines().count(), 2);
        let all = text(&events, 0, true);
        assert_eq!(all.lines().nth(1).unwrap(), r#"{"type":"UPDATED","object":2999}"#);
        assert_eq!(all.lines().count(), 4);
        // What is left out was seen all the same.
        assert_eq!(events.after(1, false).unwrap().unwrap().1, 3001);
    }
}
