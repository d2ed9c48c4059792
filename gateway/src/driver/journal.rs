//! The journal on disk, and to whoever listens: one line for each turn of the driver.
//!
//! A file is capped: when it is full it becomes `FILE.1`, and the new one starts with the fleet's state written as
//! events, so that each file can be replayed alone.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use rouse::{
    fleet::{Fleet, event::Event},
    sim::{
        journal::{self, Line},
        narrate,
    },
    units::Tick,
};
use tokio::sync::broadcast;

/// Lines kept for a slow reader before it misses some.
const BACKLOG: usize = 1024;
/// A file of this size is turned over.
const CAP: u64 = 64 << 20;

pub struct Journal {
    file: Option<JournalFile>,
    lines: broadcast::Sender<Arc<str>>,
}

/// Where the journal is written, besides to whoever listens.
#[derive(Debug)]
pub struct JournalFile {
    path: PathBuf,
    file: File,
    written: u64,
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

    /// Writes down a turn: the events, and through them what was decided. A journal that cannot be written is given
    /// up with a word in the log; serving goes on.
    pub(super) fn write(&mut self, at: Tick, events: &[Event], fleet: &Fleet) {
        if self.file.is_none() && self.lines.receiver_count() == 0 {
            return;
        }
        let Ok(line) = journal::write_turn(at, events) else { return };
        if let Some(sink) = &mut self.file
            && let Err(error) = sink.append(&line, at, fleet)
        {
            tracing::error!(path = %sink.path.display(), %error, "the journal cannot be written any more");
            self.file = None;
        }
        // Nobody may be listening.
        drop(self.lines.send(line.into()));
    }
}

impl JournalFile {
    /// An existing file is turned over, never overwritten. A gateway must have its lock and its ports first: another one that runs
    /// with the same file would go on writing to one that is turned over.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn open(path: &Path) -> io::Result<Self> {
        if path.exists() {
            std::fs::rename(path, turned_over(path))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { path: path.to_owned(), file, written: 0 })
    }

    /// The fleet is as it was before the turn's commands were recorded, and after its events: a file that starts
    /// here starts with that state, so its first line needs no events of its own.
    fn append(&mut self, line: &str, at: Tick, fleet: &Fleet) -> io::Result<()> {
        let full = self.written >= CAP;
        if full {
            *self = Self::open(&self.path)?;
        }
        if self.written == 0 {
            let header = Line::header(env!("CARGO_PKG_VERSION"), at);
            self.line(&journal::write(&header)?)?;
            if full {
                return self.line(&journal::write_turn(at, &fleet.snapshot())?);
            }
        }
        self.line(line)
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(line.len() + 1);
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        self.written += bytes.len() as u64;
        self.file.write_all(&bytes)
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
