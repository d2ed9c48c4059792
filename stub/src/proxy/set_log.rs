//! `POST /v1/set-log?startPos=N`: whoever holds the engine's log copies it here, piece by piece, so that it can be read as
//! this container's output.
//!
//! A piece says where in the log it begins. What this output has already is left out, so a piece may be sent again,
//! overlapping or whole; what would leave a gap is refused. Because every byte has its position, a body needs no bound
//! and no memory: each of its frames is appended as it comes, also between those of another caller's piece. Only the
//! append itself is for one at a time ([`ContainerLog`]); it may block, as long as nobody reads this container's output, and so runs
//! on a thread that may.
//!
//! The log of one process of the stub begins at 0: that of the engine is then to be sent from its beginning.

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
    #[error("startPos is missing: say at which byte of the log this piece begins, as in {PATH}?startPos=0")]
    Missing,
    #[error("startPos is '{0}', and must be a whole number")]
    Unreadable(String),
    #[error("startPos is {0}, and must not be negative")]
    Negative(String),
    #[error("startPos is {start}, beyond the end of the log at {end}: send what lies between first")]
    Gap { start: u64, end: u64 },
    #[error("the body broke off; the log ends at {end}: {error}")]
    Body { end: u64, error: axum::Error },
    #[error("writing the log failed; it ends at {end}: {error}")]
    Write { end: u64, error: io::Error },
}

/// The log, as far as it is here.
#[derive(Clone)]
pub(crate) struct ContainerLog {
    output: Arc<Mutex<Box<dyn Write + Send>>>,
    end: Arc<AtomicU64>,
}

impl ContainerLog {
    /// Appends to `out`, which is to be this container's output.
    pub(crate) fn new(out: impl Write + Send + 'static) -> Self {
        Self { output: Arc::new(Mutex::new(Box::new(out))), end: Arc::default() }
    }

    /// Its length by now.
    pub(crate) fn end(&self) -> u64 {
        self.end.load(Ordering::SeqCst)
    }

    /// Appends what is new of the bytes that begin at `start`; how many those were.
    async fn append(&self, start: u64, bytes: Bytes) -> Result<u64, Error> {
        let mut out = Arc::clone(&self.output).lock_owned().await;
        let end = Arc::clone(&self.end);
        // The lock goes along: a caller who leaves must not let the next one in while this still writes.
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
            // Trailers are no part of the log.
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

/// Blocks as long as the output does.
fn append_unseen(out: &mut dyn Write, end: &AtomicU64, start: u64, bytes: &[u8]) -> Result<u64, Error> {
    let before = end.load(Ordering::SeqCst);
    let known = usize::try_from(before.saturating_sub(start)).unwrap_or(usize::MAX);
    let mut fresh = bytes.get(known..).unwrap_or_default();
    let failed = |error| Error::Write { end: end.load(Ordering::SeqCst), error };
    // Piece by piece, so that after an error it is known how much is there.
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

/// Answers [`PATH`].
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
            tracing::warn!(%error, "set-log");
            (status, format!("{error}\r\n")).into_response()
        }
    }
}

/// The first `startPos`.
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
