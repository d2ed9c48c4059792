//! A client's HTTP/1.1 connection, as both the gateway and the stub serve it.
//!
//! hyper reads requests and writes most responses. It falls short in two ways. First, it stops reading a socket that
//! has bytes pending, and so misses that a client has disconnected: [`ReadAhead`] reads in its place. Second, it holds
//! two buffers and polls both of its halves for every frame of a long stream: [`Http1Connection`] forwards such a
//! response without hyper.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http_body::Body;

use crate::relay::{RelayBody, RelayObserver, ScratchFrame};

pub mod bypass;
mod date_cache;
mod hand_off;
mod raw_response;
mod read_ahead;
mod write_stall;

pub use bypass::RawResponseSlot;
pub use date_cache::DateCache;
pub use hand_off::Http1Connection;
pub use raw_response::{RawResponse, TruncatedResponse};
pub use read_ahead::{MAX_READ_AHEAD_BYTES, ReadAhead};
pub use write_stall::StallTrackingTcp;

/// The socket of a client, used without hyper.
pub trait DownstreamIo {
    /// Writes directly to the socket. hyper must be gone.
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// Flushes the layers in between.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Puts back the bytes that hyper had read but not used before it was dropped.
    fn unread(&self, bytes: &[u8]);

    /// Reports whether bytes are ready for the client and the client takes none of them.
    fn is_write_blocked(&self) -> bool;
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
