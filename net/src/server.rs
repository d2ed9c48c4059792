//! The server of a client's HTTP/1.1 connection, for the gateway and the stub.
//!
//! ```text
//!   poll_head ─▶ service ─▶ head and first frame ─▶ frame ─▶ … ─▶ next head
//!   Idle, ReadingHead  Serving         Responding                 Flushing
//! ```
//!
//! **One loop, no task.** [`Http1Connection`] owns the service's future, and then the response's body. Dropping the
//! connection drops both at that moment, and with them the exchange with the engine. The caller polls the loop beside
//! its own deadlines: the loop reads no clock.
//!
//! **A disconnect is noticed in every phase.** While the service or a stream waits, the loop reads ahead, up to
//! [`Http1Limits::max_read_ahead_bytes`]. The bytes belong to the request's body or to the next request. An end or a
//! reset means that the client disconnected, even if the client closed only its sending half: a forgotten generation
//! holds an accelerator.
//!
//! **An idle connection or stream holds no buffer.** Bytes are read into the core's scratch memory. Only what is still
//! unused after the read is copied: the rest of a body, a part of a head, a pipelined request. Events are framed where
//! they were read, and written from there.
//!
//! **What is accepted is what hyper accepts,** less a short list that `server/tests/differential.rs` states and proves:
//! the parser is the same one. HTTP/2 and the admin API are served by hyper itself.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http_body::Body;
use tokio::io::ReadBuf;

use crate::relay::{RelayBody, RelayObserver, ScratchFrame};

pub mod body_rate;
mod chunked;
mod connection;
mod date_cache;
pub mod deadlines;
mod head;
mod head_reader;
pub mod last_response;
mod peeked;
mod request_body;
mod response;
mod response_head;
mod unwritten;
mod wire;
mod write_stall;

pub use connection::{Http1Connection, Http1End, Http1Phase};
pub use date_cache::DateCache;
pub use head::HeadRefusal;
pub use peeked::PeekedBytes;
pub use request_body::{Http1RequestBody, RequestBodyError};
pub use write_stall::StallTrackingTcp;

/// Default of [`Http1Limits::max_read_ahead_bytes`].
pub const DEFAULT_MAX_READ_AHEAD_BYTES: usize = 16 << 10;

/// The socket of a client. The loop, the request's body and the caller's deadlines share it.
pub trait ServerIo {
    /// Reads some bytes. A read that adds none is the end of the client's side.
    ///
    /// # Errors
    /// The connection broke.
    fn poll_read(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>>;

    /// Writes some bytes.
    ///
    /// # Errors
    /// The connection broke.
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// Flushes the layers in between, such as TLS.
    ///
    /// # Errors
    /// The connection broke.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ends the sending side. Further calls after the first have no effect.
    ///
    /// # Errors
    /// The connection broke.
    fn poll_shutdown(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}

/// Limits of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Http1Limits {
    /// Largest head, and largest trailer section of a chunked body, in bytes.
    pub max_head_bytes: usize,
    /// Most fields of a head, and most trailers of a chunked body; at most 128.
    pub max_headers: usize,
    /// Most bytes that are read ahead while an exchange is in progress. A client that pipelines more is noticed to have
    /// disconnected only at the next write.
    pub max_read_ahead_bytes: usize,
}

impl Default for Http1Limits {
    fn default() -> Self {
        Self {
            max_head_bytes: 64 << 10,
            max_headers: 100,
            max_read_ahead_bytes: DEFAULT_MAX_READ_AHEAD_BYTES,
        }
    }
}

/// A response body whose frames can be read into borrowed memory.
pub trait ScratchBody: Body {
    /// Reports whether the body comes from an engine and reads into borrowed memory. Other bodies need none.
    fn uses_scratch(&self) -> bool;

    /// Polls the next frame, as [`RelayBody::poll_frame_into`] does. Without `memory` the frame owns its bytes.
    fn poll_frame_into(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, Self::Error>>>;
}

impl<O: RelayObserver + Unpin> ScratchBody for RelayBody<O> {
    fn uses_scratch(&self) -> bool {
        true
    }

    fn poll_frame_into(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, Self::Error>>> {
        match memory {
            Some(memory) => Self::poll_frame_into(self, memory, cx),
            None => {
                let frame = ready!(Pin::new(self).poll_frame(cx));
                Poll::Ready(
                    frame.map(|frame| frame.map(|f| ScratchFrame::Owned(f.into_data().unwrap_or_default()))),
                )
            }
        }
    }
}

#[cfg(test)]
mod tests;
