//! `POST /v1/set-log?startPos=N` copies the engine's log to this container's output, piece by piece.
//!
//! A piece names its position in the log. Bytes that the output already has are skipped, so a piece may be resent,
//! overlapping or whole. A piece that would leave a gap is refused. Because every byte has a position, a body needs
//! neither a size limit nor a buffer: each frame is appended on arrival, even between the frames of another caller's
//! piece. Only the append itself is exclusive ([`ContainerLog`]). It blocks while this container's output is not read,
//! so it runs on a blocking thread.
//!
//! The log starts at 0 with each process of the stub, so the engine's log must then be sent from its beginning.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{RawQuery, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use http_body_util::BodyExt as _;
use tokio::{sync::Mutex, task};

pub(crate) const PATH: &str = "/v1/set-log";

/// Why a piece was not appended, or only in part.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(
        "startPos is missing: give the byte of the log at which this piece begins, as in {PATH}?startPos=0"
    )]
    Missing,
    #[error("startPos is '{0}', but must be a whole number")]
    Unreadable(String),
    #[error("startPos is {0}, but must not be negative")]
    Negative(String),
    #[error("startPos is {start}, beyond the end of the log at {end}: send the bytes in between first")]
    Gap { start: u64, end: u64 },
    #[error("the request body ended early; the log ends at {end}: {error}")]
    Body { end: u64, error: axum::Error },
    #[error("writing the log failed; the log ends at {end}: {error}")]
    Write { end: u64, error: io::Error },
}

/// The copied log so far.
#[derive(Clone)]
pub(crate) struct ContainerLog {
    output: Arc<Mutex<Box<dyn Write + Send>>>,
    end: Arc<AtomicU64>,
}

impl ContainerLog {
    /// Appends to `out`, usually this container's output.
    pub(crate) fn new(out: impl Write + Send + 'static) -> Self {
        Self { output: Arc::new(Mutex::new(Box::new(out))), end: Arc::default() }
    }

    /// The current length.
    pub(crate) fn end(&self) -> u64 {
        self.end.load(Ordering::SeqCst)
    }

    /// Appends the new part of the bytes at `start`, and returns its length.
    async fn append(&self, start: u64, bytes: Bytes) -> Result<u64, Error> {
        let mut out = Arc::clone(&self.output).lock_owned().await;
        let end = Arc::clone(&self.end);
        // The task owns the lock: a caller that disconnects must not admit the next caller while this write runs.
        let written = task::spawn_blocking(move || append_unseen(&mut **out, &end, start, &bytes)).await;
        written.unwrap_or_else(|error| {
            Err(Error::Write { end: self.end(), error: io::Error::other(error.to_string()) })
        })
    }

    async fn copy(&self, start: u64, mut body: Body) -> Result<u64, Error> {
        let end = self.end();
        if start > end {
            return Err(Error::Gap { start, end });
        }
        let (mut position, mut appended) = (start, 0);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Error::Body { end: self.end(), error })?;
            // Trailers are not part of the log.
            let Ok(bytes) = frame.into_data() else { continue };
            let next = position.saturating_add(bytes.len() as u64);
            if next > self.end() {
                appended += self.append(position, bytes).await?;
            }
            position = next;
        }
        Ok(appended)
    }
}

/// Appends the unseen part of the bytes. Blocks as long as the output does.
fn append_unseen(out: &mut dyn Write, end: &AtomicU64, start: u64, bytes: &[u8]) -> Result<u64, Error> {
    let before = end.load(Ordering::SeqCst);
    let already_known = usize::try_from(before.saturating_sub(start)).unwrap_or(usize::MAX);
    let mut fresh = bytes.get(already_known..).unwrap_or_default();
    let failed = |error| Error::Write { end: end.load(Ordering::SeqCst), error };
    // Count each write, so that after an error the end of the log is known.
    while !fresh.is_empty() {
        match out.write(fresh) {
            Ok(0) => return Err(failed(io::ErrorKind::WriteZero.into())),
            Ok(count) => {
                fresh = fresh.get(count..).unwrap_or_default();
                end.fetch_add(count as u64, Ordering::SeqCst);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    out.flush().map_err(failed)?;
    Ok(end.load(Ordering::SeqCst) - before)
}

/// Serves [`PATH`].
pub(crate) fn routes(log: ContainerLog) -> Router {
    Router::new().route(PATH, post(set_log)).with_state(log)
}

async fn set_log(State(log): State<ContainerLog>, RawQuery(query): RawQuery, body: Body) -> Response {
    let appended = match parse_start_pos(query.as_deref()) {
        Ok(start) => log.copy(start, body).await,
        Err(error) => Err(error),
    };
    match appended {
        Ok(count) => format!("appended {count} bytes; the log ends at {}\r\n", log.end()).into_response(),
        Err(error) => {
            let status = match &error {
                Error::Write { .. } => StatusCode::INTERNAL_SERVER_ERROR,
                _ => StatusCode::BAD_REQUEST,
            };
            tracing::warn!(%error, "set-log request failed");
            (status, format!("{error}\r\n")).into_response()
        }
    }
}

/// Parses the first `startPos`.
fn parse_start_pos(query: Option<&str>) -> Result<u64, Error> {
    let pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let (_, text) = { pairs }.find(|(name, _)| *name == "startPos").ok_or(Error::Missing)?;
    let number = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if text.strip_prefix('-').is_some_and(number) {
        return Err(Error::Negative(text.to_owned()));
    }
    let start = number(text).then(|| text.parse().ok()).flatten();
    start.ok_or_else(|| Error::Unreadable(text.chars().take(64).collect()))
}

#[cfg(test)]
mod tests;
