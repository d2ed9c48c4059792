//! One request and its response, on a connection of their own.
//!
//! A leader has such calls under way to thousands of engines at once, and each call keeps its memory until the engine
//! answers. So a call holds little more than the bytes it has received, which it reads with the relay's parser.
//!
//! A server may answer before it has read the request, because it refuses the body, and may read no more of it after
//! that. So the request is sent while the response is read, and a failure to send it ends nothing but the sending.

use std::{
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    task::{Context, Poll},
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Method, StatusCode};
use tokio::io::{AsyncReadExt as _, AsyncWrite as _};

use super::HttpClientError;
use crate::{
    backend_origin::Duplex,
    relay::{BodyDecoder, parse_response_head},
};

/// Most responses fit into one read of this size. The reads of larger ones double.
const FIRST_READ_BYTES: usize = 1 << 10;
const MAX_READ_BYTES: usize = 16 << 10;

/// A response whose head has arrived. Dropping it closes the connection.
#[derive(Debug)]
pub struct ResponseStream {
    status: StatusCode,
    gated: bool,
    decoder: BodyDecoder,
    connection: CallConnection,
}

/// The connection of one call.
#[derive(Debug)]
struct CallConnection {
    io: Box<dyn Duplex>,
    /// The part of the request that is not sent yet; `None` once the request is sent, or cannot be.
    unsent: Option<Bytes>,
    /// Bytes received and not decoded yet.
    received: BytesMut,
    read_bytes: usize,
}

impl ResponseStream {
    /// Sends a request, and waits for the head of its response.
    ///
    /// # Errors
    /// [`HttpClientError::Broken`]: the connection ended before. [`HttpClientError::Malformed`]: this is not HTTP/1.
    pub(super) async fn open(
        io: Box<dyn Duplex>,
        wire: Bytes,
        method: &Method,
    ) -> Result<Self, HttpClientError> {
        let (received, read_bytes) = (BytesMut::new(), FIRST_READ_BYTES);
        let mut connection = CallConnection { io, unsent: Some(wire), received, read_bytes };
        loop {
            if connection.read_more().await? == 0 {
                return Err(HttpClientError::Broken);
            }
            let mut bytes = mem::take(&mut connection.received).freeze();
            let head = parse_response_head(&mut bytes, method).map_err(|_| HttpClientError::Malformed)?;
            // The rest of the head goes here: its headers share the memory of these bytes.
            let head = head.map(|head| (head.status, head.gated, head.decoder));
            connection.received = bytes.into();
            if let Some((status, gated, decoder)) = head {
                return Ok(Self { status, gated, decoder, connection });
            }
        }
    }

    /// The response status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.status
    }

    /// A 503 with a stub's mark.
    pub(super) const fn is_gated(&self) -> bool {
        self.gated
    }

    /// Returns the next piece of the body; `None` at its end. Dropping the future before it completes loses nothing.
    ///
    /// # Errors
    /// [`HttpClientError::Broken`]: the connection ended before the body did. [`HttpClientError::Malformed`]: the
    /// body's framing is not HTTP/1.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, HttpClientError> {
        loop {
            let mut bytes = self.connection.received.split();
            let found = self.decoder.decode(&mut bytes).map_err(|_| HttpClientError::Malformed)?;
            if !found.payload.is_empty() {
                return Ok(Some(bytes.freeze().slice(found.payload)));
            }
            if self.decoder.is_done() {
                return Ok(None);
            }
            match self.connection.read_more().await? {
                0 if matches!(self.decoder, BodyDecoder::UntilClose) => return Ok(None),
                0 => return Err(HttpClientError::Broken),
                _ => {}
            }
        }
    }

    /// Returns the rest of the body.
    ///
    /// # Errors
    /// As those of [`Self::chunk`]; [`HttpClientError::BodyTooLarge`]: the body is longer than `max_bytes`.
    pub async fn body(&mut self, max_bytes: usize) -> Result<Bytes, HttpClientError> {
        let Some(first) = self.chunk().await? else { return Ok(Bytes::new()) };
        let mut body = BytesMut::from(first);
        while body.len() <= max_bytes {
            let Some(piece) = self.chunk().await? else { return Ok(body.freeze()) };
            body.extend_from_slice(&piece);
        }
        Err(HttpClientError::BodyTooLarge(max_bytes))
    }
}

impl CallConnection {
    /// Reads the bytes that are there, or waits for some, and sends the request meanwhile; 0 is the end.
    async fn read_more(&mut self) -> Result<usize, HttpClientError> {
        self.received.reserve(self.read_bytes);
        let read = poll_fn(|cx| {
            self.poll_send(cx);
            pin!(self.io.read_buf(&mut self.received)).poll(cx)
        });
        let read = read.await.map_err(|_| HttpClientError::Broken)?;
        if read >= self.read_bytes {
            self.read_bytes = (self.read_bytes * 2).min(MAX_READ_BYTES);
        }
        Ok(read)
    }

    /// Sends as much of the request as the connection takes now, and wakes the task when the connection takes more.
    fn poll_send(&mut self, cx: &mut Context<'_>) {
        let Some(unsent) = &mut self.unsent else { return };
        let mut io = Pin::new(&mut self.io);
        while !unsent.is_empty() {
            match io.as_mut().poll_write(cx, unsent) {
                Poll::Pending => return,
                Poll::Ready(Ok(sent @ 1..)) => unsent.advance(sent),
                Poll::Ready(Ok(0) | Err(_)) => break,
            }
        }
        if io.poll_flush(cx).is_ready() {
            self.unsent = None;
        }
    }
}
