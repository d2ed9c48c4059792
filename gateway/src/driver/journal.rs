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
        journal::{self, Line},
        narrate,
    },
    units::{Millis, Tick},
};
use tokio::sync::broadcast;

use crate::{
    metrics::Lost,
    telemetry::{Failure, Lines, Sink},
};

/// Lines kept for a slow reader before it misses some.
const BACKLOG: usize = 1024;
/// A file of this size is turned over.
const CAP: u64 = 64 << 20;
/// What may wait to be written, in turns and in bytes: seconds of a busy gateway.
const QUEUE: usize = 4096;
const ROOM: usize = 16 << 20;
/// After turns were dropped, the state is written at most so often: a full disk may stay full.
const AGAIN: Millis = Millis::secs(1);
const CLOSE: Duration = Duration::from_secs(2);

pub struct Journal {
    file: Option<JournalFile>,
    lines: broadcast::Sender<Arc<str>>,
}

/// Where the journal is written, besides to whoever listens.
pub struct JournalFile {
    path: PathBuf,
    lost: Lost,
    lines: Lines<Entry>,
    /// Bytes that are told and not yet on their way.
    waiting: Arc<AtomicUsize>,
    /// Bytes told to this file.
    told: u64,
    begun: bool,
    /// How many turns were dropped until the last beginning, by a full queue and by failed writes: more is a gap.
    full: u64,
    failed: u64,
    /// No beginning behind a gap before this.
    again: Tick,
}

/// One turn, or where a beginning is due, the header and what follows it.
struct Entry {
    line: String,
    begins: Option<Begins>,
}

#[derive(Clone, Copy)]
struct Begins {
    at: Tick,
    /// Turns that a full queue had cost by then.
    full: u64,
}

impl Default for Journal {
    /// One that goes to listeners alone.
    fn default() -> Self {
        Self { file: None, lines: broadcast::channel(BACKLOG).0 }
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
        if !matches!(tokio::task::spawn_blocking(move || file.lines.close(CLOSE)).await, Ok(true)) {
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
    pub fn open(path: &Path, lost: &Lost) -> io::Result<Self> {
        let file = Some(open(path)?);
        Self::over(path, Box::new(Later { path: path.to_owned(), file }), lost)
    }

    fn over(path: &Path, out: Box<dyn Write + Send>, lost: &Lost) -> io::Result<Self> {
        let waiting = Arc::default();
        let lines = start(out, lost, &waiting)?;
        let (path, lost) = (path.to_owned(), lost.clone());
        let (full, failed) = (lost.journal_full.get(), lost.journal_failed.get());
        Ok(Self { path, lost, lines, waiting, told: 0, begun: false, full, failed, again: Tick(0) })
    }

    /// The fleet is as it was before the turn's commands were recorded, and after its events: what begins anew begins with that
    /// state, so its first line needs no events of its own.
    fn append(&mut self, line: &str, at: Tick, fleet: &Fleet) {
        if !self.begun {
            self.begun = self.begin(line.to_owned(), at);
            return;
        }
        if self.told >= CAP {
            return self.turn_over(at, fleet);
        }
        let failing = self.lost.journal_failed.get() > self.failed;
        if !failing && self.lost.journal_full.get() == self.full {
            self.tell(Entry { line: line.to_owned(), begins: None });
        } else if at < self.again {
            let lost = if failing { &self.lost.journal_failed } else { &self.lost.journal_full };
            lost.inc();
        } else {
            self.again = at + AGAIN;
            self.begin_anew(at, fleet);
        }
    }

    /// The old file is the old thread's, which ends when it has written what it was told.
    fn turn_over(&mut self, at: Tick, fleet: &Fleet) {
        let out = Box::new(Later { path: self.path.clone(), file: None });
        self.told = 0;
        match start(out, &self.lost, &self.waiting) {
            Ok(lines) => self.lines = lines,
            Err(error) => tracing::error!(%error, "the journal's file is not turned over"),
        }
        self.begin_anew(at, fleet);
    }

    fn begin_anew(&mut self, at: Tick, fleet: &Fleet) {
        if let Ok(state) = journal::write_turn(at, &fleet.snapshot()) {
            self.begin(state, at);
        }
    }

    fn begin(&mut self, line: String, at: Tick) -> bool {
        let (full, failed) = (self.lost.journal_full.get(), self.lost.journal_failed.get());
        let told = self.tell(Entry { line, begins: Some(Begins { at, full }) });
        if told {
            (self.full, self.failed) = (full, failed);
        }
        told
    }

    fn tell(&mut self, entry: Entry) -> bool {
        let size = entry.line.len();
        let waiting = self.waiting.fetch_add(size, Ordering::Relaxed);
        let fits = waiting == 0 || waiting + size <= ROOM;
        if fits && self.lines.tell(entry) {
            self.told += size as u64;
            return true;
        }
        if !fits {
            self.lost.journal_full.inc();
        }
        self.waiting.fetch_sub(size, Ordering::Relaxed);
        false
    }
}

fn start(out: Box<dyn Write + Send>, lost: &Lost, waiting: &Arc<AtomicUsize>) -> io::Result<Lines<Entry>> {
    let sink = Sink {
        name: "journal",
        out,
        path: None,
        queue: QUEUE,
        gather: Duration::ZERO,
        full: lost.journal_full.clone(),
        failed: lost.journal_failed.clone(),
        on_failure: |failure| {
            if let Failure::Write(error) = failure {
                tracing::error!(%error, "the journal cannot be written; turns are dropped until it can be again");
            }
        },
    };
    let (failed, waiting) = (lost.journal_failed.clone(), Arc::clone(waiting));
    // What failed before this file is not its gap.
    let mut known = failed.get();
    Lines::start(sink, move |entry: &Entry, out| {
        waiting.fetch_sub(entry.line.len(), Ordering::Relaxed);
        if let Some(Begins { at, full }) = entry.begins {
            known = failed.get();
            let header = Line::header_after(env!("CARGO_PKG_VERSION"), at, full + known);
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
struct Later {
    path: PathBuf,
    file: Option<File>,
}

impl Write for Later {
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
    let old = turned_over(path);
    is_there(&old)?;
    if is_there(path)? {
        fs::rename(path, old)?;
    }
    OpenOptions::new().create_new(true).append(true).mode(0o600).open(path)
}

/// Something else than a regular file is not a journal's to rename.
fn is_there(path: &Path) -> io::Result<bool> {
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

fn turned_over(path: &Path) -> PathBuf {
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
    out.write_all(narrate::narrate(&lines).as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests;
