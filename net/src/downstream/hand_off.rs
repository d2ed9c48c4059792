//! A connection that is hyper's, but for the length of an answer that was offered.

use std::{
    error::Error,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use hyper::{body::Incoming, server::conn::http1, service::HttpService};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{DownstreamIo, RawResponse, RawResponseSlot, ScratchBody};

/// A connection of HTTP/1.1. `H` makes hyper's side of it, as often as it is wanted anew.
#[derive(Debug)]
pub struct Http1Connection<P, I, S: HttpService<Incoming>, H> {
    stage: Http1Stage<P, I, S>,
    hyper: H,
    slot: Rc<RawResponseSlot<P, S::ResBody>>,
    closing: bool,
}

type HyperServerConnection<I, S> = http1::Connection<TokioIo<I>, S>;

/// Boxed, so that what is not there takes no room.
#[derive(Debug)]
enum Http1Stage<P, I, S: HttpService<Incoming>> {
    Hyper(Box<HyperServerConnection<I, S>>),
    Raw(Box<RawResponse<P, S::ResBody>>),
    Closed,
}

impl<P, I, S, H> Http1Connection<P, I, S, H>
where
    P: DownstreamIo,
    I: AsyncRead + AsyncWrite + Unpin,
    S: HttpService<Incoming>,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    S::ResBody: ScratchBody + Unpin + 'static,
    <S::ResBody as http_body::Body>::Error: Into<Box<dyn Error + Send + Sync>>,
    H: Fn() -> Box<HyperServerConnection<I, S>>,
{
    /// Into `offer` the service puts those that may pass without hyper.
    pub fn new(offer: Rc<RawResponseSlot<P, S::ResBody>>, hyper: H) -> Self {
        Self { stage: Http1Stage::Hyper(hyper()), hyper, slot: offer, closing: false }
    }

    /// Ready when it is over.
    ///
    /// # Errors
    /// As hyper's connection. A client that was cut off in the midst of an answer is none.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        loop {
            match &mut self.stage {
                Http1Stage::Hyper(connection) => {
                    if let Poll::Ready(result) = Pin::new(&mut **connection).poll(cx) {
                        return Poll::Ready(result);
                    }
                    // Never while hyper still holds something of an earlier answer: it writes until the socket takes no
                    // more.
                    if !self.slot.is_filled() || self.slot.peer.is_write_blocked() {
                        return Poll::Pending;
                    }
                    self.hand_off();
                }
                Http1Stage::Raw(passing) => {
                    if ready!(passing.poll(cx)).is_err() {
                        return Poll::Ready(Ok(()));
                    }
                    self.stage = Http1Stage::Hyper((self.hyper)());
                    if self.closing {
                        self.close();
                    }
                }
                Http1Stage::Closed => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Ends it when what is under way is done.
    pub fn close(&mut self) {
        self.closing = true;
        if let Http1Stage::Hyper(connection) = &mut self.stage {
            Pin::new(&mut **connection).graceful_shutdown();
        }
    }

    fn hand_off(&mut self) {
        let now = std::mem::replace(&mut self.stage, Http1Stage::Closed);
        let (Http1Stage::Hyper(connection), Some(passing)) = (now, self.slot.take()) else {
            return;
        };
        self.closing |= passing.closes_connection();
        self.slot.peer.unread(&connection.into_parts().read_buf);
        self.stage = Http1Stage::Raw(passing);
    }
}
