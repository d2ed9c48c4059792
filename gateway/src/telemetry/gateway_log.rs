//! The gateway's own log, on standard error.
//!
//! A caller may be a core with streams, or the task that should end the gateway, so it must not write itself. It puts
//! the finished line into a queue; lines that do not fit because of a slow reader are dropped and counted, as in the
//! access log.

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

/// Maximum backlog, in lines and in bytes: a line may be as long as a configuration has errors.
const QUEUE_CAPACITY: usize = 8192;
const MAX_QUEUED_BYTES: usize = 4 << 20;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Receives what `tracing` writes.
#[derive(Clone)]
pub struct GatewayLog {
    lines: Arc<LineSender<LogLine>>,
    queued_bytes: Arc<AtomicUsize>,
    drop_counters: TelemetryDropCounters,
}

/// One event, with its share of the backlog.
struct LogLine {
    text: Box<[u8]>,
    queued_bytes: Arc<AtomicUsize>,
}

impl GatewayLog {
    /// Starts the log to standard error. `drop_counters` counts dropped lines.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(drop_counters: &TelemetryDropCounters) -> io::Result<Self> {
        let sink = LineSink {
            name: "log",
            out: Box::new(io::stderr()),
            path: None,
            queue: QUEUE_CAPACITY,
            batch_interval: Duration::ZERO,
            full: drop_counters.log_full.clone(),
            failed: drop_counters.log_failed.clone(),
            // No other output is left to report the failure; it is counted.
            on_failure: |_| {},
        };
        let lines = LineSender::start(sink, |line: &LogLine, out| out.extend_from_slice(&line.text))?;
        Ok(Self {
            lines: Arc::new(lines),
            queued_bytes: Arc::default(),
            drop_counters: drop_counters.clone(),
        })
    }

    /// Waits up to a second until all lines are written. Must be called last.
    pub fn close(&self) {
        // If this times out, no output is left to report that.
        self.lines.close(CLOSE_TIMEOUT);
    }
}

impl Drop for LogLine {
    fn drop(&mut self) {
        self.queued_bytes.fetch_sub(self.text.len(), Ordering::Relaxed);
    }
}

impl Write for &GatewayLog {
    /// Takes one event, which always arrives in a single call.
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
