//! The journal: every event that a [`Fleet`] received, in the same batches.
//!
//! Each line is one turn of the driver with the events that it had received before planning. The batches matter as much
//! as the events: a plan between two events decides differently from a plan after both. So a replay gives the same
//! commands only with the same boundaries. A header starts every run of a gateway. The gateway's journal file, the
//! simulator and `replay` share these functions; each reads and writes files itself. [`transcript`] renders a journal.

pub mod transcript;

use serde::{Deserialize, Serialize};

use crate::{
    fleet::{Fleet, Plan, event::Event},
    units::Tick,
};

/// Version of the format. Other versions are not read.
pub const FORMAT_VERSION: u32 = 2;

/// One line of a journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum JournalLine {
    /// A gateway started, or restarted its journal: the following lines belong to a new fleet.
    Header {
        journal: u32,
        version: String,
        at: Tick,
        /// Number of turns dropped since the gateway started, because the disk was slow or full. An increase over the
        /// previous header marks a gap.
        #[serde(default, skip_serializing_if = "is_zero")]
        dropped: u64,
    },
    /// One turn of the driver. A turn without events was woken by a deadline alone.
    Turn { at: Tick, events: Vec<Event> },
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot parse line {line} of the journal")]
    UnreadableLine {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("the journal has format {0}, this version reads {FORMAT_VERSION}")]
    UnsupportedFormat(u32),
    #[error("the first line of the journal is not a journal header")]
    NoHeader,
}

impl JournalLine {
    #[must_use]
    pub fn header(version: &str, at: Tick) -> Self {
        Self::header_after_gap(version, at, 0)
    }

    /// The header after a gap. `dropped` counts the turns dropped since the gateway started.
    #[must_use]
    pub fn header_after_gap(version: &str, at: Tick, dropped: u64) -> Self {
        Self::Header { journal: FORMAT_VERSION, version: version.to_owned(), at, dropped }
    }

    #[must_use]
    pub const fn at(&self) -> Tick {
        match self {
            Self::Header { at, .. } | Self::Turn { at, .. } => *at,
        }
    }
}

const fn is_zero(dropped: &u64) -> bool {
    *dropped == 0
}

/// Writes one line, without its line end.
///
/// # Errors
/// If an event cannot be expressed as JSON, which would be a defect.
pub fn write(line: &JournalLine) -> Result<String, serde_json::Error> {
    serde_json::to_string(line)
}

/// Writes the line of one turn from borrowed events, without its line end.
///
/// # Errors
/// As [`write()`].
pub fn write_turn(at: Tick, events: &[Event]) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct TurnLine<'a> {
        at: Tick,
        events: &'a [Event],
    }
    serde_json::to_string(&TurnLine { at, events })
}

/// Reads one line. All readers call this function, so that the code that parses events, half a megabyte, is in a
/// program once.
///
/// # Errors
/// If it is not a journal line.
pub fn read_line(line: &str) -> Result<JournalLine, serde_json::Error> {
    serde_json::from_str(line)
}

/// Reads every line of a journal. Truncated lines are skipped in two places: the last line (the writer was killed), and
/// lines before a header with dropped turns (the disk was full).
///
/// # Errors
/// If a line is not a journal line, or has another format.
pub fn read(text: &str) -> Result<Vec<JournalLine>, Error> {
    let mut lines = Vec::new();
    let mut cut = None;
    for (index, raw) in text.lines().enumerate() {
        if raw.trim().is_empty() {
            continue;
        }
        match read_line(raw) {
            Ok(JournalLine::Header { journal, .. }) if journal != FORMAT_VERSION => {
                return Err(Error::UnsupportedFormat(journal));
            }
            Ok(line) => {
                let gap = matches!(line, JournalLine::Header { dropped: 1.., .. });
                if let Some(error) = cut.take().filter(|_| !gap) {
                    return Err(error);
                }
                lines.push(line);
            }
            Err(source) => {
                cut.get_or_insert(Error::UnreadableLine { line: index + 1, source });
            }
        }
    }
    if let Some(error) = cut.filter(|_| text.ends_with('\n')) {
        return Err(error);
    }
    match lines.first() {
        Some(JournalLine::Header { .. }) => Ok(lines),
        _ => Err(Error::NoHeader),
    }
}

/// Replays a journal into new fleets and passes every plan to `each`.
pub fn replay(lines: &[JournalLine], mut each: impl FnMut(Tick, &[Event], &Plan, &Fleet)) {
    let mut fleet = Fleet::new();
    for line in lines {
        match line {
            JournalLine::Header { .. } => fleet = Fleet::new(),
            JournalLine::Turn { at, events } => {
                for event in events {
                    fleet.on(event, *at);
                }
                let plan = fleet.plan(*at);
                fleet.issued(&plan.commands, *at);
                each(*at, events, &plan, &fleet);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::event::WaiterId;

    #[test]
    fn a_journal_is_read_as_it_was_written_and_a_cut_last_line_is_left_out() {
        let events = vec![Event::AdoptionDone, Event::Left { waiter: WaiterId(3) }];
        let turn = JournalLine::Turn { at: Tick(12), events: events.clone() };
        assert_eq!(write(&turn).unwrap(), write_turn(Tick(12), &events).unwrap());
        let lines = vec![JournalLine::header("0.1.0", Tick(7)), turn];
        let text: String = lines.iter().map(|line| write(line).unwrap() + "\n").collect();
        assert_eq!(read(&text).unwrap(), lines);
        let (cut, _) = text.split_at(text.len() - 5);
        assert_eq!(read(cut).unwrap(), lines[..1]);
        assert!(matches!(read("{}\n"), Err(Error::UnreadableLine { line: 1, .. })));
        assert!(matches!(read(""), Err(Error::NoHeader)));
        let gap = write(&JournalLine::header_after_gap("0.1.0", Tick(20), 3)).unwrap();
        let read_on = read(&format!("{cut}\n{gap}\n")).unwrap();
        assert_eq!(read_on[1..], [JournalLine::header_after_gap("0.1.0", Tick(20), 3)]);
        let restarted = write(&JournalLine::header("0.1.0", Tick(20))).unwrap();
        assert!(matches!(read(&format!("{cut}\n{restarted}\n")), Err(Error::UnreadableLine { line: 2, .. })));
        assert!(matches!(read(&text.replacen(":2,", ":1,", 1)), Err(Error::UnsupportedFormat(1))));
    }
}
