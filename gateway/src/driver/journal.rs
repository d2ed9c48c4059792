//! Writes the journal to disk and to subscribers: one line per turn of the driver.
//!
//! The driver never waits for a disk: its lines go through a bounded queue to a thread. Lines that do not fit or cannot
//! be written are dropped and counted. The next line then starts a new segment, with a header that has the number of
//! missing turns, and the fleet's state as events. A full file becomes `FILE.1`, and the next file starts with such a
//! segment too. So each segment can be replayed alone.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use rouse::{
    fleet::{Fleet, command::Command, event::Event, report::Report},
    journal::{self, JournalLine, transcript},
    units::{Millis, Tick},
};
use serde::Serialize;
use tokio::sync::broadcast;

use crate::{
    metrics::TelemetryDropCounters,
    telemetry::{LineSender, LineSink, SinkFailure},
};

/// Lines kept for a slow subscriber before it misses some.
const LISTENER_BACKLOG: usize = 1024;
/// Size at which the file is rotated.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Maximum backlog, in turns and in bytes: seconds of a busy gateway.
const QUEUE_CAPACITY: usize = 4096;
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// Minimum interval between new segments after dropped turns: a full disk may stay full.
const SEGMENT_RETRY_INTERVAL: Millis = Millis::secs(1);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub struct Journal {
    file: Option<JournalFile>,
    lines: broadcast::Sender<Arc<str>>,
}

/// The journal's file, which receives all lines besides the subscribers.
pub struct JournalFile {
    path: PathBuf,
    drop_counters: TelemetryDropCounters,
    lines: LineSender<JournalEntry>,
    /// Bytes in the queue, not yet taken by the writer thread.
    queued_bytes: Arc<AtomicUsize>,
    /// Bytes enqueued for the current file.
    file_bytes: u64,
    started: bool,
    /// Counters of dropped turns as of the last segment's start; a higher count means a gap.
    dropped_by_full_queue: u64,
    dropped_by_failed_writes: u64,
    /// Earliest time of the next segment after a gap.
    next_segment_at: Tick,
}

/// One turn. At the start of a segment, the header precedes it.
struct JournalEntry {
    line: String,
    segment_start: Option<SegmentStart>,
}

#[derive(Clone, Copy)]
struct SegmentStart {
    at: Tick,
    /// Turns dropped by a full queue so far.
    dropped_by_full_queue: u64,
}

impl Default for Journal {
    /// Returns a journal without a file, for subscribers only.
    fn default() -> Self {
        Self { file: None, lines: broadcast::channel(LISTENER_BACKLOG).0 }
    }
}

impl Journal {
    pub(super) fn write_to(&mut self, file: JournalFile) {
        self.file = Some(file);
    }

    pub(super) fn lines(&self) -> broadcast::Sender<Arc<str>> {
        self.lines.clone()
    }

    /// Records a turn's events, from which a replay derives the decisions. Never waits.
    pub(super) fn write(&mut self, at: Tick, events: &[Event], fleet: &Fleet) {
        if self.file.is_none() && self.lines.receiver_count() == 0 {
            return;
        }
        let Ok(line) = journal::write_turn(at, events) else { return };
        if let Some(file) = &mut self.file {
            file.append(&line, at, fleet);
        }
        // An error means that the journal has no subscribers.
        drop(self.lines.send(line.into()));
    }

    /// Waits up to two seconds until all enqueued lines are in the file.
    pub(super) async fn close(&mut self) {
        let Some(file) = self.file.take() else { return };
        if !matches!(tokio::task::spawn_blocking(move || file.lines.close(CLOSE_TIMEOUT)).await, Ok(true)) {
            tracing::warn!("the last journal lines were not written in time");
        }
    }
}

impl JournalFile {
    /// Opens the journal; an existing file is rotated, never overwritten.
    ///
    /// Call this with the gateway's lock and ports held: another gateway with the same file would keep writing to the
    /// rotated one.
    ///
    /// # Errors
    /// Fails if the file cannot be created, or the path names something other than a regular file.
    pub fn open(path: &Path, drop_counters: &TelemetryDropCounters) -> io::Result<Self> {
        let file = Some(open(path)?);
        Self::with_output(path, Box::new(LazyFile { path: path.to_owned(), file }), drop_counters)
    }

    fn with_output(
        path: &Path,
        out: Box<dyn Write + Send>,
        drop_counters: &TelemetryDropCounters,
    ) -> io::Result<Self> {
        let waiting = Arc::default();
        let lines = start(out, drop_counters, &waiting)?;
        let (path, lost) = (path.to_owned(), drop_counters.clone());
        let (full, failed) = (lost.journal_full.get(), lost.journal_failed.get());
        Ok(Self {
            path,
            drop_counters: lost,
            lines,
            queued_bytes: waiting,
            file_bytes: 0,
            started: false,
            dropped_by_full_queue: full,
            dropped_by_failed_writes: failed,
            next_segment_at: Tick(0),
        })
    }

    /// Appends a turn, or a snapshot where a new segment is due.
    ///
    /// `fleet` has processed the turn's events but not recorded its commands. A new segment starts with that state, so
    /// its first line needs no events of the turn.
    fn append(&mut self, line: &str, at: Tick, fleet: &Fleet) {
        if !self.started {
            self.started = self.start_segment(line.to_owned(), at);
            return;
        }
        if self.file_bytes >= MAX_FILE_BYTES {
            return self.rotate(at, fleet);
        }
        let failing = self.drop_counters.journal_failed.get() > self.dropped_by_failed_writes;
        if !failing && self.drop_counters.journal_full.get() == self.dropped_by_full_queue {
            self.enqueue(JournalEntry { line: line.to_owned(), segment_start: None });
        } else if at < self.next_segment_at {
            let lost =
                if failing { &self.drop_counters.journal_failed } else { &self.drop_counters.journal_full };
            lost.inc();
        } else {
            self.next_segment_at = at + SEGMENT_RETRY_INTERVAL;
            self.start_segment_from_snapshot(at, fleet);
        }
    }

    /// The old writer thread keeps the old file and ends once it has written its queue.
    fn rotate(&mut self, at: Tick, fleet: &Fleet) {
        let out = Box::new(LazyFile { path: self.path.clone(), file: None });
        self.file_bytes = 0;
        match start(out, &self.drop_counters, &self.queued_bytes) {
            Ok(lines) => self.lines = lines,
            Err(error) => tracing::error!(%error, "cannot rotate the journal, writing to the old file"),
        }
        self.start_segment_from_snapshot(at, fleet);
    }

    fn start_segment_from_snapshot(&mut self, at: Tick, fleet: &Fleet) {
        if let Ok(state) = journal::write_turn(at, &fleet.snapshot()) {
            self.start_segment(state, at);
        }
    }

    fn start_segment(&mut self, line: String, at: Tick) -> bool {
        let (full, failed) = (self.drop_counters.journal_full.get(), self.drop_counters.journal_failed.get());
        let enqueued = self.enqueue(JournalEntry {
            line,
            segment_start: Some(SegmentStart { at, dropped_by_full_queue: full }),
        });
        if enqueued {
            (self.dropped_by_full_queue, self.dropped_by_failed_writes) = (full, failed);
        }
        enqueued
    }

    fn enqueue(&mut self, entry: JournalEntry) -> bool {
        let size = entry.line.len();
        let waiting = self.queued_bytes.fetch_add(size, Ordering::Relaxed);
        let fits = waiting == 0 || waiting + size <= MAX_QUEUED_BYTES;
        if fits && self.lines.enqueue(entry) {
            self.file_bytes += size as u64;
            return true;
        }
        if !fits {
            self.drop_counters.journal_full.inc();
        }
        self.queued_bytes.fetch_sub(size, Ordering::Relaxed);
        false
    }
}

fn start(
    out: Box<dyn Write + Send>,
    drop_counters: &TelemetryDropCounters,
    waiting: &Arc<AtomicUsize>,
) -> io::Result<LineSender<JournalEntry>> {
    let sink = LineSink {
        name: "journal",
        out,
        path: None,
        queue: QUEUE_CAPACITY,
        batch_interval: Duration::ZERO,
        full: drop_counters.journal_full.clone(),
        failed: drop_counters.journal_failed.clone(),
        on_failure: |failure| {
            if let SinkFailure::Write(error) = failure {
                tracing::error!(%error, "cannot write the journal; turns are dropped until a write succeeds");
            }
        },
    };
    let (failed, waiting) = (drop_counters.journal_failed.clone(), Arc::clone(waiting));
    // Failures from before this file are not part of its gap.
    let mut known = failed.get();
    LineSender::start(sink, move |entry: &JournalEntry, out| {
        waiting.fetch_sub(entry.line.len(), Ordering::Relaxed);
        if let Some(SegmentStart { at, dropped_by_full_queue: full }) = entry.segment_start {
            known = failed.get();
            let header = JournalLine::header_after_gap(env!("CARGO_PKG_VERSION"), at, full + known);
            out.extend(journal::write(&header).unwrap_or_default().bytes());
            out.push(b'\n');
        } else if failed.get() > known {
            // A line behind a gap cannot be replayed.
            failed.inc();
            return;
        }
        out.extend_from_slice(entry.line.as_bytes());
        out.push(b'\n');
    })
}

/// A file that the writer thread opens.
struct LazyFile {
    path: PathBuf,
    file: Option<File>,
}

impl Write for LazyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Creates a new file and rotates the existing one.
fn open(path: &Path) -> io::Result<File> {
    let old = rotated_path(path);
    is_regular_file(&old)?;
    if is_regular_file(path)? {
        fs::rename(path, old)?;
    }
    OpenOptions::new().create_new(true).append(true).mode(0o600).open(path)
}

/// Only a regular file may be renamed.
fn is_regular_file(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(_) => {
            let text = format!(
                "{} is a symbolic link, directory, pipe or device: name a regular file or a file that does not exist yet",
                path.display()
            );
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn rotated_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Replays a journal through the decisions and prints events, decisions and reports, as text or as `json`.
pub fn replay(path: &Path, json: bool, out: &mut impl Write) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = journal::read(&text).with_context(|| format!("{} is not a journal", path.display()))?;
    if json {
        return write_replay(&lines, out);
    }
    if let Some(first) = lines.first() {
        writeln!(out, "times are relative to {} UTC", first.at())?;
    }
    out.write_all(transcript::render_transcript(&lines).as_bytes())?;
    Ok(())
}

/// A turn of the journal with what followed from it.
#[derive(Serialize)]
struct ReplayedTurn<'a> {
    at: Tick,
    events: &'a [Event],
    commands: &'a [Command],
    /// `None`: it is that of the turn before.
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<&'a Report>,
}

/// Prints each line of a journal as JSON, its turns with the commands and the report that follow from them.
fn write_replay(lines: &[JournalLine], out: &mut impl Write) -> anyhow::Result<()> {
    let mut last = Report::default();
    for gateway_run in lines.chunk_by(|_, next| !matches!(next, JournalLine::Header { .. })) {
        if let Some(header @ JournalLine::Header { .. }) = gateway_run.first() {
            writeln!(out, "{}", journal::write(header)?)?;
        }
        let mut written: anyhow::Result<()> = Ok(());
        journal::replay(gateway_run, |at, events, plan, fleet| {
            let report = fleet.report(plan);
            let is_new = report != last;
            last = report;
            if written.is_ok() {
                let (commands, report) = (plan.commands.as_slice(), is_new.then_some(&last));
                written = write_json_line(&ReplayedTurn { at, events, commands, report }, out);
            }
        });
        written?;
    }
    Ok(())
}

fn write_json_line(turn: &ReplayedTurn<'_>, out: &mut impl Write) -> anyhow::Result<()> {
    Ok(writeln!(out, "{}", serde_json::to_string(turn)?)?)
}

#[cfg(test)]
mod tests;
