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

use super::{Answer, Offer, Passing, Peer};

/// A connection of HTTP/1.1. `H` makes hyper's side of it, as often as it is wanted anew.
#[derive(Debug)]
pub struct Http1<P, I, S: HttpService<Incoming>, H> {
    now: Now<P, I, S>,
    hyper: H,
    offer: Rc<Offer<P, S::ResBody>>,
    closing: bool,
}

type Hyper<I, S> = http1::Connection<TokioIo<I>, S>;

/// Boxed, so that what is not there takes no room.
#[derive(Debug)]
enum Now<P, I, S: HttpService<Incoming>> {
    Hyper(Box<Hyper<I, S>>),
    Passing(Box<Passing<P, S::ResBody>>),
    Over,
}

impl<P, I, S, H> Http1<P, I, S, H>
where
    P: Peer,
    I: AsyncRead + AsyncWrite + Unpin,
    S: HttpService<Incoming>,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    S::ResBody: Answer + Unpin + 'static,
    <S::ResBody as http_body::Body>::Error: Into<Box<dyn Error + Send + Sync>>,
    H: Fn() -> Box<Hyper<I, S>>,
{
    /// Into `offer` the service puts those that may pass without hyper.
    pub fn new(offer: Rc<Offer<P, S::ResBody>>, hyper: H) -> Self {
        Self { now: Now::Hyper(hyper()), hyper, offer, closing: false }
    }

    /// Ready when it is over.
    ///
    /// # Errors
    /// As hyper's connection. A client that was cut off in the midst of an answer is none.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        loop {
            match &mut self.now {
                Now::Hyper(connection) => {
                    if let Poll::Ready(result) = Pin::new(&mut **connection).poll(cx) {
                        return Poll::Ready(result);
                    }
                    // Never while hyper still holds something of an earlier answer: it writes until the socket takes no
                    // more.
                    if !self.offer.is_made() || self.offer.peer.is_blocked() {
                        return Poll::Pending;
                    }
                    self.take_over();
                }
                Now::Passing(passing) => {
                    if ready!(passing.poll(cx)).is_err() {
                        return Poll::Ready(Ok(()));
                    }
                    self.now = Now::Hyper((self.hyper)());
                    if self.closing {
                        self.close();
                    }
                }
                Now::Over => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Ends it when what is under way is done.
    pub fn close(&mut self) {
        self.closing = true;
        if let Now::Hyper(connection) = &mut self.now {
            Pin::new(&mut **connection).graceful_shutdown();
        }
    }

    fn take_over(&mut self) {
        let now = std::mem::replace(&mut self.now, Now::Over);
        let (Now::Hyper(connection), Some(passing)) = (now, self.offer.take()) else {
            return;
        };
        self.closing |= passing.ends();
        self.offer.peer.unread(&connection.into_parts().read_buf);
        self.now = Now::Passing(passing);
    }
}
