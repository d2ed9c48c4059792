//! What is told of single requests: spans to a collector, lines to an access log.
//!
//! A request notes moments as it goes, in a value of its own that exists only when somebody wants to hear of it: with
//! neither traces nor an access log, a request pays for one look at two options. When it is over the notes become a
//! `Record`, plain data that goes through a bounded queue to a thread or task of its own. There it becomes spans or
//! a line. So no request waits for a collector or a disk, and none formats anything; when a queue is full, what does
//! not fit is dropped and counted.
//!
//! Spans are built afterwards from noted moments and not with a tracing library's live spans: those would be entered
//! and left at every poll, and a span that ends by the drop of a future could not say why it ended.
//!
//! All of OpenTelemetry's crates stay behind `otlp`.

use std::sync::Arc;

use http::request;
use tokio::time::Instant;

mod access;
mod context;
mod line;
mod lines;
mod log;
mod notes;
mod otlp;
mod wall;

pub(crate) use context::{Ids, TRACEPARENT, TRACESTATE};
pub(crate) use lines::{Failure, Lines, Sink};
pub use log::Log;
pub(crate) use notes::{Ended, Notes, Record, Seen};
pub(crate) use wall::Wall;

use crate::{
    config::{self, Config},
    metrics::Lost,
};
use access::Access;
use context::Context;
use otlp::Traces;

/// Where records go.
#[derive(Default)]
pub struct Telemetry {
    traces: Option<Traces>,
    access: Option<Access>,
    /// Of requests without a decision of their own, the share that is traced.
    sample: f64,
}

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("logs.access: {}: {source}", .path.display())]
    Access { path: std::path::PathBuf, source: std::io::Error },
    #[error("cannot start the access log's thread: {0}")]
    Thread(std::io::Error),
    #[error("telemetry: {0}")]
    Traces(String),
}

impl Telemetry {
    /// Opens what the configuration asks for. Within the runtime that is to carry the exports.
    ///
    /// # Errors
    /// The access log's file cannot be opened, or the collector's address or certificates cannot be used.
    pub fn start(config: &Config, lost: &Lost) -> Result<Arc<Self>, Error> {
        let config::Telemetry { sample, .. } = config.telemetry;
        let traces = Traces::start(&config.telemetry, lost)?;
        let access = Access::start(&config.access_log, lost)?;
        Ok(Arc::new(Self { traces, access, sample }))
    }

    /// Begins to take notes of a request, if anybody wants them.
    pub(crate) fn begin(self: &Arc<Self>, ids: &Ids, head: &request::Parts, seen: Seen) -> Option<Notes> {
        if self.traces.is_none() && self.access.is_none() {
            return None;
        }
        let parent = Context::of(&head.headers);
        let own = self.traces.as_ref().map(|_| {
            let mut own = parent.map_or_else(|| Context::root(ids, self.sample), |parent| parent.child(ids));
            if seen.probe && parent.is_none() {
                own = own.unsampled();
            }
            own
        });
        Some(Notes::new(Arc::clone(self), Instant::now(), seen, head, parent, own))
    }

    fn finish(&self, record: Record) {
        let record = Arc::new(record);
        if let Some(access) = &self.access {
            access.tell(Arc::clone(&record));
        }
        if let Some(traces) = &self.traces
            && record.is_traced()
        {
            traces.tell(record);
        }
    }

    /// The access log's file was moved away: the next line goes into a new one.
    pub fn reopen(&self) {
        if let Some(access) = &self.access {
            access.reopen();
        }
    }

    /// Writes and exports what is queued, for two seconds at most.
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
