//! Streams an engine's output as text, and follows it on request.
//!
//! Following polls the file four times a second. Watching the file would need a thread per follower, and a person at a
//! console cannot tell the difference.

use std::{io, path::PathBuf, time::Duration};

use axum::{
    body::{Body, Bytes},
    response::{IntoResponse, Response},
};
use http::{StatusCode, header};
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt, SeekFrom},
    time::MissedTickBehavior,
};

const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The message for a missing log file.
pub(super) const NO_LOGS_MESSAGE: &str = "this gateway has no output of the engine: the engine has not started yet, or its log cannot be written (see the gateway's own log)";
const CHUNK_BYTES: usize = 64 * 1024;

pub(super) async fn stream(path: PathBuf, follow: bool) -> Response {
    let file = match File::open(&path).await {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return super::error(StatusCode::NOT_FOUND, "no_logs", NO_LOGS_MESSAGE);
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "reading an engine's log failed");
            return super::error(
                StatusCode::INTERNAL_SERVER_ERROR,
                "log_unreadable",
                "cannot read the engine's output: the gateway's own log has the cause",
            );
        }
    };
    let mut looks = tokio::time::interval(POLL_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let tail = LogTail { file, offset: 0, follow, poll_timer: looks };
    let pieces = futures_util::stream::unfold(tail, |mut tail| async move {
        let piece = tail.next().await.transpose()?;
        Some((piece, tail))
    });
    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    (kind, Body::from_stream(pieces)).into_response()
}

struct LogTail {
    file: File,
    offset: u64,
    follow: bool,
    poll_timer: tokio::time::Interval,
}

impl LogTail {
    /// The next chunk. `None`: the end of a file that is not followed.
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            let mut piece = Vec::with_capacity(CHUNK_BYTES);
            let read = self.file.read_buf(&mut piece).await?;
            if read > 0 {
                self.offset += read as u64;
                return Ok(Some(piece.into()));
            }
            if !self.follow {
                return Ok(None);
            }
            self.poll_timer.tick().await;
            // Logs are capped by copy and truncate: a file shorter than the offset has restarted.
            if self.file.metadata().await?.len() < self.offset {
                self.offset = self.file.seek(SeekFrom::Start(0)).await?;
            }
        }
    }
}
