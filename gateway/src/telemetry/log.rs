//! The gateway's own log, on standard error.
//!
//! Whoever logs is a core with streams, or the task that should end the gateway. So neither writes: a line is put into
//! a queue as it is, and what nobody reads is dropped and counted, like the access log's.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

use super::lines::{Lines, Sink};
use crate::metrics::Lost;

/// What may wait to be written, in lines and in bytes: a line may be as long as a configuration has mistakes.
const QUEUE: usize = 8192;
const ROOM: usize = 4 << 20;
const CLOSE: Duration = Duration::from_secs(1);

/// Takes what `tracing` writes.
#[derive(Clone)]
pub struct Log {
    lines: Arc<Lines<Line>>,
    waiting: Arc<AtomicUsize>,
    lost: Lost,
}

/// One event, and its place in what may wait.
struct Line {
    text: Box<[u8]>,
    waiting: Arc<AtomicUsize>,
}

impl Log {
    /// Lines go to standard error from here on; `lost` counts those that do not.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(lost: &Lost) -> io::Result<Self> {
        let sink = Sink {
            name: "log",
            out: Box::new(io::stderr()),
            path: None,
            queue: QUEUE,
            gather: Duration::ZERO,
            full: lost.log_full.clone(),
            failed: lost.log_failed.clone(),
            // There is nowhere left to say it; it is counted.
            on_failure: |_| {},
        };
        let lines = Lines::start(sink, |line: &Line, out| out.extend_from_slice(&line.text))?;
        Ok(Self { lines: Arc::new(lines), waiting: Arc::default(), lost: lost.clone() })
    }

    /// Waits until what was logged is written, for a second at most. To be called last.
    pub fn close(&self) {
        // Nobody is left to be told when it is not.
        self.lines.close(CLOSE);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.text.len(), Ordering::Relaxed);
    }
}

impl Write for &Log {
    /// All of an event comes in one call.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let before = self.waiting.fetch_add(text.len(), Ordering::Relaxed);
        let line = Line { text: text.into(), waiting: Arc::clone(&self.waiting) };
        if before + text.len() > ROOM {
            self.lost.log_full.inc();
        } else {
            self.lines.tell(line);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}
