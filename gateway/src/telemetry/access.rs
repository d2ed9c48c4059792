//! The access log: records, which become lines in a thread of their own.

use std::{
    io::{self, Write},
    sync::Arc,
    time::Duration,
};

use super::{
    Error, Record, line,
    lines::{Failure, Lines, Sink, open},
};
use crate::{config::AccessLog, metrics::Lost};

/// Records that may wait to be written: a second of a very busy gateway.
const QUEUE: usize = 8192;
/// Nobody who follows the log sees so much of a delay.
const GATHER: Duration = Duration::from_millis(20);
const CLOSE: Duration = Duration::from_secs(2);

pub(super) struct Access(Arc<Lines<Arc<Record>>>);

impl Access {
    pub(super) fn start(log: &AccessLog, lost: &Lost) -> Result<Option<Self>, Error> {
        let (out, path): (Box<dyn Write + Send>, _) = match log {
            AccessLog::Off => return Ok(None),
            AccessLog::Stdout => (Box::new(io::stdout()), None),
            AccessLog::Stderr => (Box::new(io::stderr()), None),
            AccessLog::File(path) => {
                let file = open(path).map_err(|source| Error::Access { path: path.clone(), source })?;
                (Box::new(file), Some(path.clone()))
            }
        };
        let sink = Sink {
            name: "access-log",
            out,
            path,
            queue: QUEUE,
            gather: GATHER,
            full: lost.access_full.clone(),
            failed: lost.access_failed.clone(),
            on_failure: failed,
        };
        let lines = Lines::start(sink, |record: &Arc<Record>, out| line::write(record, out));
        Ok(Some(Self(Arc::new(lines.map_err(Error::Thread)?))))
    }

    /// Never waits.
    pub(super) fn tell(&self, record: Arc<Record>) {
        self.0.tell(record);
    }

    pub(super) fn reopen(&self) {
        self.0.reopen();
    }

    pub(super) async fn close(&self) {
        let lines = Arc::clone(&self.0);
        if !matches!(tokio::task::spawn_blocking(move || lines.close(CLOSE)).await, Ok(true)) {
            tracing::warn!("the end of the access log could not be written in time");
        }
    }
}

fn failed(failure: &Failure<'_>) {
    match failure {
        Failure::Write(error) => tracing::error!(%error, "the access log cannot be written"),
        Failure::Reopen(path, error) => {
            let path = path.display();
            tracing::error!(%path, %error, "the access log cannot be reopened; the old file goes on");
        }
    }
}
