//! A client's connection of HTTP/1.1, as far as the gateway and the stub serve it alike.
//!
//! hyper reads requests and writes what is rare. Two things it does not do: it looks away from a socket that has bytes
//! for it, and so misses that a client has left ([`ReadAhead`] reads on in its place), and it holds two buffers and looks at
//! both of its halves for every frame of a long stream ([`Http1Connection`] lets such an answer pass without it).

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

/// The socket of a client, beside hyper.
pub trait DownstreamIo {
    /// Writes past hyper, which must be gone.
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// Sends what layers in between hold of what was written.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// What hyper had read and not used, before it went.
    fn unread(&self, bytes: &[u8]);

    /// Bytes are ready for the client, and it takes none of them.
    fn is_write_blocked(&self) -> bool;
}

/// An answer whose frames can be left in memory that is lent.
pub trait ScratchBody: Body {
    /// It comes from an engine, and reads into memory that is lent; else it needs none.
    fn uses_scratch(&self) -> bool;

    /// The next frame, as [`RelayBody::poll_frame_into`] gives it. Where no memory is lent it has its own.
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
