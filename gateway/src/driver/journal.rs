//! The journal on disk, and to whoever listens: one line for each turn of the driver.
//!
//! The driver waits for no disk: its lines go through a bounded queue to a thread. What does not fit, or cannot be written, is
//! dropped and counted, and what is written next begins anew, with a header that says how many turns are missing and the
//! fleet's state as events. A file is capped as well: when it is full it becomes `FILE.1`, and the next one begins like
//! that. So what stands between two headers can be replayed alone.

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
    fleet::{Fleet, event::Event},
    sim::{
        journal::{self, JournalLine},
        transcript,
    },
    units::{Millis, Tick},
};
use tokio::sync::broadcast;

use crate::{
    metrics::TelemetryDropCounters,
    telemetry::{LineSender, LineSink, SinkFailure},
};

/// Lines kept for a slow reader before it misses some.
const LISTENER_BACKLOG: usize = 1024;
/// A file of this size is turned over.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// What may wait to be written, in turns and in bytes: seconds of a busy gateway.
const QUEUE_CAPACITY: usize = 4096;
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// After turns were dropped, the state is written at most so often: a full disk may stay full.
const SEGMENT_RETRY_INTERVAL: Millis = Millis::secs(1);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub struct Journal {
    file: Option<JournalFile>,
    lines: broadcast::Sender<Arc<str>>,
}

/// Where the journal is written, besides to whoever listens.
pub struct JournalFile {
    path: PathBuf,
    drop_counters: TelemetryDropCounters,
    lines: LineSender<JournalEntry>,
    /// Bytes that are told and not yet on their way.
    queued_bytes: Arc<AtomicUsize>,
    /// Bytes told to this file.
    file_bytes: u64,
    started: bool,
    /// How many turns were dropped until the last beginning, by a full queue and by failed writes: more is a gap.
    dropped_by_full_queue: u64,
    dropped_by_failed_writes: u64,
    /// No beginning behind a gap before this.
    next_segment_at: Tick,
}

/// One turn, or where a beginning is due, the header and what follows it.
struct JournalEntry {
    line: String,
    segment_start: Option<SegmentStart>,
}

#[derive(Clone, Copy)]
struct SegmentStart {
    at: Tick,
    /// Turns that a full queue had cost by then.
    dropped_by_full_queue: u64,
}

impl Default for Journal {
    /// One that goes to listeners alone.
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

    /// Writes down a turn: the events, and through them what was decided. Never waits.
    pub(super) fn write(&mut self, at: Tick, events: &[Event], fleet: &Fleet) {
        if self.file.is_none() && self.lines.receiver_count() == 0 {
            return;
        }
        let Ok(line) = journal::write_turn(at, events) else { return };
        if let Some(file) = &mut self.file {
            file.append(&line, at, fleet);
        }
        // Nobody may be listening.
        drop(self.lines.send(line.into()));
    }

    /// Waits until what was told is in the file, for two seconds at most.
    pub(super) async fn close(&mut self) {
        let Some(file) = self.file.take() else { return };
        if !matches!(tokio::task::spawn_blocking(move || file.lines.close(CLOSE_TIMEOUT)).await, Ok(true)) {
            tracing::warn!("the end of the journal could not be written in time");
        }
    }
}

impl JournalFile {
    /// An existing file is turned over, never overwritten. A gateway must have its lock and its ports first: another one that runs
    /// with the same file would go on writing to one that is turned over.
    ///
    /// # Errors
    /// The file cannot be made, or something else than a regular file is there.
    pub fn open(path: &Path, lost: &TelemetryDropCounters) -> io::Result<Self> {
        let file = Some(open(path)?);
        Self::with_output(path, Box::new(LazyFile { path: path.to_owned(), file }), lost)
    }

    fn with_output(
        path: &Path,
        out: Box<dyn Write + Send>,
        lost: &TelemetryDropCounters,
    ) -> io::Result<Self> {
        let waiting = Arc::default();
        let lines = start(out, lost, &waiting)?;
        let (path, lost) = (path.to_owned(), lost.clone());
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

    /// The fleet is as it was before the turn's commands were recorded, and after its events: what begins anew begins with that
    /// state, so its first line needs no events of its own.
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

    /// The old file is the old thread's, which ends when it has written what it was told.
    fn rotate(&mut self, at: Tick, fleet: &Fleet) {
        let out = Box::new(LazyFile { path: self.path.clone(), file: None });
        self.file_bytes = 0;
        match start(out, &self.drop_counters, &self.queued_bytes) {
            Ok(lines) => self.lines = lines,
            Err(error) => tracing::error!(%error, "the journal's file is not turned over"),
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
        let told = self.enqueue(JournalEntry {
            line,
            segment_start: Some(SegmentStart { at, dropped_by_full_queue: full }),
        });
        if told {
            (self.dropped_by_full_queue, self.dropped_by_failed_writes) = (full, failed);
        }
        told
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
    lost: &TelemetryDropCounters,
    waiting: &Arc<AtomicUsize>,
) -> io::Result<LineSender<JournalEntry>> {
    let sink = LineSink {
        name: "journal",
        out,
        path: None,
        queue: QUEUE_CAPACITY,
        batch_interval: Duration::ZERO,
        full: lost.journal_full.clone(),
        failed: lost.journal_failed.clone(),
        on_failure: |failure| {
            if let SinkFailure::Write(error) = failure {
                tracing::error!(%error, "the journal cannot be written; turns are dropped until it can be again");
            }
        },
    };
    let (failed, waiting) = (lost.journal_failed.clone(), Arc::clone(waiting));
    // What failed before this file is not its gap.
    let mut known = failed.get();
    LineSender::start(sink, move |entry: &JournalEntry, out| {
        waiting.fetch_sub(entry.line.len(), Ordering::Relaxed);
        if let Some(SegmentStart { at, dropped_by_full_queue: full }) = entry.segment_start {
            known = failed.get();
            let header = JournalLine::header_after_gap(env!("CARGO_PKG_VERSION"), at, full + known);
            out.extend(journal::write(&header).unwrap_or_default().bytes());
            out.push(b'\n');
        } else if failed.get() > known {
            // Behind a gap it means nothing.
            failed.inc();
            return;
        }
        out.extend_from_slice(entry.line.as_bytes());
        out.push(b'\n');
    })
}

/// A file that is opened by the thread that writes it.
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

/// A new file, with what was there before turned over.
fn open(path: &Path) -> io::Result<File> {
    let old = rotated_path(path);
    is_regular_file(&old)?;
    if is_regular_file(path)? {
        fs::rename(path, old)?;
    }
    OpenOptions::new().create_new(true).append(true).mode(0o600).open(path)
}

/// Something else than a regular file is not a journal's to rename.
fn is_regular_file(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(_) => {
            let text = format!(
                "{} is a link, a folder, a pipe or a device: name a regular file, or one that is not there yet",
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

/// Feeds a journal to the decisions again and tells what happened, what was decided and what the reports said.
pub fn replay(path: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = journal::read(&text).with_context(|| format!("{} is not a journal", path.display()))?;
    if let Some(first) = lines.first() {
        writeln!(out, "times count from {} UTC", first.at())?;
    }
    out.write_all(transcript::render_transcript(&lines).as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests;
