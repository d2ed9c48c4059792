//! A client's connection of HTTP/1.1, as far as the gateway and the stub serve it alike.
//!
//! hyper reads requests and writes what is rare. Two things it does not do: it looks away from a socket that has bytes
//! for it, and so misses that a client has left ([`Ahead`] reads on in its place), and it holds two buffers and looks at
//! both of its halves for every frame of a long stream ([`Http1`] lets such an answer pass without it).

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http_body::Body;

use crate::relay::{Observer, Piece, RelayBody};

mod ahead;
mod dates;
pub mod offer;
mod passing;
mod takeover;
mod wire;

pub use ahead::{AHEAD, Ahead};
pub use dates::Dates;
pub use offer::Offer;
pub use passing::{Cut, Passing};
pub use takeover::Http1;
pub use wire::Wire;

/// The socket of a client, beside hyper.
pub trait Peer {
    /// Writes past hyper, which must be gone.
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// Sends what layers in between hold of what was written.
    fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// What hyper had read and not used, before it went.
    fn unread(&self, bytes: &[u8]);

    /// Bytes are ready for the client, and it takes none of them.
    fn is_blocked(&self) -> bool;
}

/// An answer whose frames can be left in memory that is lent.
pub trait Answer: Body {
    /// It comes from an engine, and reads into memory that is lent; else it needs none.
    fn is_relayed(&self) -> bool;

    /// The next frame, as [`RelayBody::poll_piece`] gives it. Where no memory is lent it has its own.
    fn poll_piece(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, Self::Error>>>;
}

impl<O: Observer + Unpin> Answer for RelayBody<O> {
    fn is_relayed(&self) -> bool {
        true
    }

    fn poll_piece(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, Self::Error>>> {
        match memory {
            Some(memory) => Self::poll_piece(self, memory, cx),
            None => {
                let frame = ready!(Pin::new(self).poll_frame(cx));
                Poll::Ready(frame.map(|frame| frame.map(|f| Piece::Own(f.into_data().unwrap_or_default()))))
            }
        }
    }
}
