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

use super::line_writer::{LineSender, LineSink};
use crate::metrics::TelemetryDropCounters;

/// What may wait to be written, in lines and in bytes: a line may be as long as a configuration has mistakes.
const QUEUE_CAPACITY: usize = 8192;
const MAX_QUEUED_BYTES: usize = 4 << 20;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Takes what `tracing` writes.
#[derive(Clone)]
pub struct GatewayLog {
    lines: Arc<LineSender<LogLine>>,
    queued_bytes: Arc<AtomicUsize>,
    drop_counters: TelemetryDropCounters,
}

/// One event, and its place in what may wait.
struct LogLine {
    text: Box<[u8]>,
    queued_bytes: Arc<AtomicUsize>,
}

impl GatewayLog {
    /// Lines go to standard error from here on; `lost` counts those that do not.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(lost: &TelemetryDropCounters) -> io::Result<Self> {
        let sink = LineSink {
            name: "log",
            out: Box::new(io::stderr()),
            path: None,
            queue: QUEUE_CAPACITY,
            batch_interval: Duration::ZERO,
            full: lost.log_full.clone(),
            failed: lost.log_failed.clone(),
            // There is nowhere left to say it; it is counted.
            on_failure: |_| {},
        };
        let lines = LineSender::start(sink, |line: &LogLine, out| out.extend_from_slice(&line.text))?;
        Ok(Self { lines: Arc::new(lines), queued_bytes: Arc::default(), drop_counters: lost.clone() })
    }

    /// Waits until what was logged is written, for a second at most. To be called last.
    pub fn close(&self) {
        // Nobody is left to be told when it is not.
        self.lines.close(CLOSE_TIMEOUT);
    }
}

impl Drop for LogLine {
    fn drop(&mut self) {
        self.queued_bytes.fetch_sub(self.text.len(), Ordering::Relaxed);
    }
}

impl Write for &GatewayLog {
    /// All of an event comes in one call.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let before = self.queued_bytes.fetch_add(text.len(), Ordering::Relaxed);
        let line = LogLine { text: text.into(), queued_bytes: Arc::clone(&self.queued_bytes) };
        if before + text.len() > MAX_QUEUED_BYTES {
            self.drop_counters.log_full.inc();
        } else {
            self.lines.enqueue(line);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for GatewayLog {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}
