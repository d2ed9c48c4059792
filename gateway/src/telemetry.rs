//! Reports single requests: spans to a collector, lines to an access log.
//!
//! A request records times in a recorder of its own, which exists only if traces or the access log are on; otherwise it
//! only pays for checking two options. When the request ends, its recorder becomes a `RequestRecord`, plain data that
//! goes through a bounded queue to a separate thread or task. There it becomes spans or a line. So no request waits for
//! a collector or a disk, or formats anything. Records that do not fit into a full queue are dropped and counted.
//!
//! Spans are built afterwards from the recorded times, without a tracing library's live spans: those would be entered
//! and left at every poll, and a span that ends with the drop of a future could not record why.
//!
//! Only `otlp` uses OpenTelemetry's crates.

use std::sync::Arc;

use http::request;
use tokio::time::Instant;

mod access_line;
mod access_log;
mod gateway_log;
mod line_writer;
mod otlp;
mod request_recorder;
mod trace_context;
mod wall_clock;

pub use gateway_log::GatewayLog;
pub(crate) use line_writer::{LineSender, LineSink, SinkFailure};
pub(crate) use request_recorder::{RequestOrigin, RequestOutcome, RequestRecord, RequestRecorder};
pub(crate) use trace_context::{TRACEPARENT, TRACESTATE, TraceIdGenerator};
pub(crate) use wall_clock::WallClock;

use crate::metrics::TelemetryDropCounters;
use access_log::AccessLogWriter;
use otlp::TraceExporter;
use rouse_config::Config;
use trace_context::TraceContext;

/// The targets of request records.
#[derive(Default)]
pub struct Telemetry {
    traces: Option<TraceExporter>,
    access: Option<AccessLogWriter>,
    /// Share of traced requests among those without a sampling decision of their own.
    sample: f64,
}

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("logs.access: cannot open {}: {source}", .path.display())]
    Access { path: std::path::PathBuf, source: std::io::Error },
    #[error("cannot start the access log thread: {0}")]
    Thread(std::io::Error),
    #[error("telemetry: cannot set up trace export: {0}")]
    Traces(String),
}

impl Telemetry {
    /// Opens the configured targets. Must be called within the runtime that carries the exports.
    ///
    /// # Errors
    /// The access log's file cannot be opened, or the collector's address or certificates cannot be used.
    pub fn start(config: &Config, drop_counters: &TelemetryDropCounters) -> Result<Arc<Self>, Error> {
        let rouse_config::TelemetryConfig { sample, .. } = config.telemetry;
        let traces = TraceExporter::start(&config.telemetry, drop_counters)?;
        let access = AccessLogWriter::start(&config.access_log, drop_counters)?;
        Ok(Arc::new(Self { traces, access, sample }))
    }

    /// Starts the recorder of a request, if any target is configured.
    pub(crate) fn start_recording(
        self: &Arc<Self>,
        ids: &TraceIdGenerator,
        head: &request::Parts,
        origin: RequestOrigin,
    ) -> Option<RequestRecorder> {
        if self.traces.is_none() && self.access.is_none() {
            return None;
        }
        let parent = TraceContext::from_headers(&head.headers);
        let own_context = self.traces.as_ref().map(|_| {
            let mut trace_context =
                parent.map_or_else(|| TraceContext::root(ids, self.sample), |parent| parent.child(ids));
            if origin.is_health_check && parent.is_none() {
                trace_context = trace_context.unsampled();
            }
            trace_context
        });
        Some(RequestRecorder::new(Arc::clone(self), Instant::now(), origin, head, parent, own_context))
    }

    fn finish(&self, record: RequestRecord) {
        let record = Arc::new(record);
        if let Some(access) = &self.access {
            access.enqueue(Arc::clone(&record));
        }
        if let Some(traces) = &self.traces
            && record.is_traced()
        {
            traces.enqueue(record);
        }
    }

    /// Reopens the access log after its file was moved: the next line goes into a new file.
    pub fn reopen(&self) {
        if let Some(access) = &self.access {
            access.reopen();
        }
    }

    /// Writes and exports queued records, for up to two seconds.
    pub async fn close(&self) {
        let traces = async {
            if let Some(traces) = &self.traces {
                traces.close().await;
            }
        };
        let access = async {
            if let Some(access) = &self.access {
                access.close().await;
            }
        };
        tokio::join!(traces, access);
    }
}
