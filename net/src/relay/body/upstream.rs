//! Reads the body from the engine's connection, and returns the connection to the pool.
//!
//! Apart from the body, because the exchange owns this half before there is a response head.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;
use tokio::time::Instant;

use super::ScratchFrame;
use crate::{
    lease::Lease,
    relay::{
        ConnectionPool, abort_watch::AbortWatch, connection::UpstreamConnection, decode::BodyDecoder,
        payload::UnsentRequest, pool::ConnectionKey,
    },
};
use rouse::{
    fault::{FailureCause, Fault},
    model::ModelName,
};

pin_project! {
    /// An exchange's abort watch, and its connection once the response head has arrived. One allocation, made when the
    /// exchange begins and never moved.
    pub(in crate::relay) struct UpstreamStream {
        #[pin]
        abort_watch: AbortWatch,
        pub(super) pool: ConnectionPool,
        connection: Option<UpstreamConnection>,
        // The part of the request that the engine had not read when it began to answer. Nearly always there is none.
        unsent: Option<Box<UnsentRequest>>,
        // The pool key to return the connection under; `None` when it cannot be reused.
        pool_key: Option<ConnectionKey>,
    }
}

impl UpstreamStream {
    pub(in crate::relay) fn new(watch: AbortWatch, pool: ConnectionPool) -> Pin<Box<Self>> {
        Box::pin(Self { abort_watch: watch, pool, connection: None, unsent: None, pool_key: None })
    }

    pub(in crate::relay) fn abort_watch(self: Pin<&mut Self>) -> Pin<&mut AbortWatch> {
        self.project().abort_watch
    }

    /// Attaches the connection over which the response head arrived.
    pub(in crate::relay) fn attach_connection(
        self: Pin<&mut Self>,
        connection: UpstreamConnection,
        unsent: UnsentRequest,
        home: Option<ConnectionKey>,
    ) {
        let this = self.project();
        *this.connection = Some(connection);
        *this.unsent = (!unsent.is_empty()).then(|| Box::new(unsent));
        *this.pool_key = home;
    }

    pub(super) fn close_connection(self: Pin<&mut Self>) {
        *self.project().connection = None;
    }

    /// Polls the next piece of payload; `None` at the end.
    pub(super) fn poll_next(
        self: Pin<&mut Self>,
        decoder: &mut BodyDecoder,
        lease: &Lease,
        model: &ModelName,
        memory: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<ScratchFrame>, Fault>> {
        if let Some(fault) = lease.revoked() {
            return Poll::Ready(Err(fault.clone()));
        }
        let this = self.project();
        let Some(connection) = this.connection else {
            return Poll::Ready(Err(Fault::Internal));
        };
        let buffered = &mut connection.read_buffer;
        if !buffered.is_empty() {
            let payload = decoder.decode_buffered(buffered).map_err(|_| broken_off_fault(model))?;
            if !payload.is_empty() {
                return Poll::Ready(Ok(Some(ScratchFrame::Owned(payload))));
            }
        }
        while !decoder.is_done() {
            let sent = match this.unsent {
                Some(unsent) => connection.poll_send(unsent, cx),
                None => connection.poll_flush(cx),
            };
            if let Poll::Ready(Err(_)) = sent {
                connection.must_close = true;
                if let Some(mut unsent) = this.unsent.take()
                    && let Some(fault) = unsent.take_fault()
                {
                    return Poll::Ready(Err(fault));
                }
            }
            let read = match connection.poll_read(memory, cx) {
                Poll::Ready(Ok(0)) if matches!(decoder, BodyDecoder::UntilClose) => break,
                Poll::Ready(Ok(read @ 1..)) => read,
                Poll::Ready(_) => return Poll::Ready(Err(broken_off_fault(model))),
                Poll::Pending => return this.abort_watch.poll(lease, model, cx).map(Err),
            };
            let Some(Ok(found)) = memory.get_mut(..read).map(|read| decoder.decode(read)) else {
                return Poll::Ready(Err(broken_off_fault(model)));
            };
            // The engine sent more than one response.
            connection.must_close |= found.used < read;
            if !found.payload.is_empty() {
                return Poll::Ready(Ok(Some(ScratchFrame::InScratch(found.payload))));
            }
        }
        Poll::Ready(Ok(None))
    }

    /// Returns the connection of a complete response to the pool, if it can be reused.
    pub(super) fn finish(self: Pin<&mut Self>, now: Instant) {
        let this = self.project();
        let Some(connection) = this.connection.take() else { return };
        let clean = this.unsent.as_ref().is_none_or(|unsent| unsent.is_empty())
            && connection.read_buffer.is_empty()
            && !connection.must_close;
        if let (Some(key), true) = (*this.pool_key, clean) {
            this.pool.put(key, connection, now);
        }
    }
}

impl std::fmt::Debug for UpstreamStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamStream").field("connection", &self.connection).finish_non_exhaustive()
    }
}

/// Fault for an engine that died or no longer sends HTTP. The supervisor determines why it died.
pub(super) fn broken_off_fault(model: &ModelName) -> Fault {
    Fault::EngineFailed { model: model.clone(), cause: FailureCause::ConnectionBroken, wait: None }
}
