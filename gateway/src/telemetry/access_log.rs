//! The access log: a separate thread turns records into lines.

use rouse_config::AccessLogTarget;
use std::{
    io::{self, Write},
    sync::Arc,
    time::Duration,
};

use super::{
    Error, RequestRecord, access_line,
    line_writer::{LineSender, LineSink, SinkFailure, open_append},
};
use crate::metrics::TelemetryDropCounters;

/// Maximum number of queued records: a second of a very busy gateway.
const QUEUE_CAPACITY: usize = 8192;
/// A delay that a person following the log does not notice.
const BATCH_INTERVAL: Duration = Duration::from_millis(20);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct AccessLogWriter(Arc<LineSender<Arc<RequestRecord>>>);

impl AccessLogWriter {
    pub(super) fn start(
        log: &AccessLogTarget,
        drop_counters: &TelemetryDropCounters,
    ) -> Result<Option<Self>, Error> {
        let (out, path): (Box<dyn Write + Send>, _) = match log {
            AccessLogTarget::Off => return Ok(None),
            AccessLogTarget::Stdout => (Box::new(io::stdout()), None),
            AccessLogTarget::Stderr => (Box::new(io::stderr()), None),
            AccessLogTarget::File(path) => {
                let file =
                    open_append(path).map_err(|source| Error::Access { path: path.clone(), source })?;
                (Box::new(file), Some(path.clone()))
            }
        };
        let sink = LineSink {
            name: "access-log",
            out,
            path,
            queue: QUEUE_CAPACITY,
            batch_interval: BATCH_INTERVAL,
            full: drop_counters.access_full.clone(),
            failed: drop_counters.access_failed.clone(),
            on_failure: log_sink_failure,
        };
        let lines =
            LineSender::start(sink, |record: &Arc<RequestRecord>, out| access_line::write(record, out));
        Ok(Some(Self(Arc::new(lines.map_err(Error::Thread)?))))
    }

    /// Enqueues a record. Never waits.
    pub(super) fn enqueue(&self, record: Arc<RequestRecord>) {
        self.0.enqueue(record);
    }

    pub(super) fn reopen(&self) {
        self.0.reopen();
    }

    pub(super) async fn close(&self) {
        let lines = Arc::clone(&self.0);
        if !matches!(tokio::task::spawn_blocking(move || lines.close(CLOSE_TIMEOUT)).await, Ok(true)) {
            tracing::warn!("the last access log lines were not written in time");
        }
    }
}

fn log_sink_failure(failure: &SinkFailure<'_>) {
    match failure {
        SinkFailure::Write(error) => tracing::error!(%error, "cannot write the access log"),
        SinkFailure::Reopen(path, error) => {
            let path = path.display();
            tracing::error!(%path, %error, "cannot reopen the access log, writing to the old file");
        }
    }
}
