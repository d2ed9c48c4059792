//! A connection that hyper serves, except while a response bypasses it.

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

/// An HTTP/1.1 connection. `H` builds hyper's side of it, once at the start and again after each bypass.
#[derive(Debug)]
pub struct Http1Connection<P, I, S: HttpService<Incoming>, H> {
    stage: Http1Stage<P, I, S>,
    hyper: H,
    slot: Rc<RawResponseSlot<P, S::ResBody>>,
    closing: bool,
}

type HyperServerConnection<I, S> = http1::Connection<TokioIo<I>, S>;

/// Boxed so that the unused variants take no space.
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
    /// `slot` is the slot into which the service puts responses that can bypass hyper.
    pub fn new(slot: Rc<RawResponseSlot<P, S::ResBody>>, hyper: H) -> Self {
        Self { stage: Http1Stage::Hyper(hyper()), hyper, slot, closing: false }
    }

    /// Ready when the connection is over.
    ///
    /// # Errors
    /// As hyper's connection. A response that was cut off is not an error.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        loop {
            match &mut self.stage {
                Http1Stage::Hyper(connection) => {
                    if let Poll::Ready(result) = Pin::new(&mut **connection).poll(cx) {
                        return Poll::Ready(result);
                    }
                    // hyper writes until the socket is full. A blocked socket means that hyper may still hold bytes of
                    // an earlier response, so wait.
                    if !self.slot.is_filled() || self.slot.peer.is_write_blocked() {
                        return Poll::Pending;
                    }
                    self.hand_off();
                }
                Http1Stage::Raw(raw_response) => {
                    if ready!(raw_response.poll(cx)).is_err() {
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

    /// Closes the connection after the exchange in progress.
    pub fn close(&mut self) {
        self.closing = true;
        if let Http1Stage::Hyper(connection) = &mut self.stage {
            Pin::new(&mut **connection).graceful_shutdown();
        }
    }

    fn hand_off(&mut self) {
        let now = std::mem::replace(&mut self.stage, Http1Stage::Closed);
        let (Http1Stage::Hyper(connection), Some(raw_response)) = (now, self.slot.take()) else {
            return;
        };
        self.closing |= raw_response.closes_connection();
        self.slot.peer.unread(&connection.into_parts().read_buf);
        self.stage = Http1Stage::Raw(raw_response);
    }
}
