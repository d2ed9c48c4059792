//! A connection that reads HTTP/1.1 strictly and writes it by hand.
//!
//! Not hyper's server: a good server refuses to write half of the faults that an engine can have on the wire
//! (informational responses, a reset in the middle of a chunk, a response before the body was read, a close-delimited
//! response). One path that can do both is also easier to trust than a good server with a second path behind it.
//! Reading continues while a response is made, because the end of the client's stream is how an engine learns that the
//! client has disconnected.

mod head;

use std::{
    io,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, Interest},
    net::TcpStream,
    time,
};

use crate::{clock, counters::SimCounters};

pub(crate) use head::SimRequestHead;

use head::{SimRequestFraming, parse};

const MAX_HEAD_BYTES: usize = 64 << 10;
/// How many bytes a client may send ahead during a response. Beyond it reading stops, like uvicorn's.
const MAX_READ_AHEAD_BYTES: usize = 64 << 10;

/// Why a connection ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SimConnectionError {
    /// The client disconnected, or was idle for too long.
    ClientLeft,
    /// The request violates RFC 9112.
    Malformed(&'static str),
    /// A fault breaks the connection.
    Fault,
}

impl From<io::Error> for SimConnectionError {
    fn from(_: io::Error) -> Self {
        Self::ClientLeft
    }
}

pub(crate) struct SimConnection {
    io: TcpStream,
    buf: BytesMut,
    counters: Arc<SimCounters>,
    unix_us: u64,
    /// A write was begun but not completed.
    write_incomplete: bool,
    /// Whether written bytes count. Those of the engine's own `/sim` paths do not.
    pub(crate) counts_bytes: bool,
}

impl SimConnection {
    pub(crate) fn new(io: TcpStream, counters: Arc<SimCounters>) -> Self {
        counters.connections_open.fetch_add(1, Relaxed);
        counters.connections_total.fetch_add(1, Relaxed);
        Self {
            io,
            buf: BytesMut::with_capacity(4096),
            counters,
            unix_us: 0,
            write_incomplete: false,
            counts_bytes: false,
        }
    }

    /// Reads the next request's head. [`SimConnectionError::ClientLeft`] if none begins within `idle`.
    pub(crate) async fn head(
        &mut self,
        idle: Option<Duration>,
    ) -> Result<SimRequestHead, SimConnectionError> {
        if !self.buf.is_empty() {
            self.unix_us = clock::wall_us();
        }
        loop {
            // Old clients end a body with a stray CRLF, which RFC 9112 (2.2) tells servers to skip.
            while matches!(self.buf.first(), Some(b'\r' | b'\n')) {
                self.buf.advance(1);
            }
            if let Some(head) = parse(&mut self.buf, self.unix_us)? {
                return Ok(head);
            }
            if self.buf.len() > MAX_HEAD_BYTES {
                return Err(SimConnectionError::Malformed("head too long"));
            }
            let begins = self.buf.is_empty();
            match idle.filter(|_| begins) {
                Some(idle) => {
                    time::timeout(idle, self.fill()).await.map_err(|_| SimConnectionError::ClientLeft)??
                }
                None => self.fill().await?,
            }
            if begins {
                self.unix_us = clock::wall_us();
            }
        }
    }

    /// Reads the body that `head` announces.
    pub(crate) async fn body(&mut self, head: &SimRequestHead) -> Result<Bytes, SimConnectionError> {
        if head.header("expect").is_some_and(|v| v.eq_ignore_ascii_case("100-continue")) {
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let SimRequestFraming::Length(length) = head.body else {
            return self.chunked().await;
        };
        let length = usize::try_from(length).map_err(|_| SimConnectionError::Malformed("body too long"))?;
        self.fill_to(length).await?;
        Ok(self.buf.split_to(length).freeze())
    }

    async fn chunked(&mut self) -> Result<Bytes, SimConnectionError> {
        let mut body = BytesMut::new();
        loop {
            let line = self.line().await?;
            let digits = line.split(';').next().unwrap_or_default().trim();
            let sized = usize::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'));
            let size = sized.ok_or(SimConnectionError::Malformed("chunk size"))?;
            if size == 0 {
                break;
            }
            self.fill_to(size.checked_add(2).ok_or(SimConnectionError::Malformed("chunk size"))?).await?;
            body.extend_from_slice(&self.buf.split_to(size));
            if !self.buf.starts_with(b"\r\n") {
                return Err(SimConnectionError::Malformed("chunk end"));
            }
            self.buf.advance(2);
        }
        while !self.line().await?.is_empty() {}
        Ok(body.freeze())
    }

    async fn line(&mut self) -> Result<String, SimConnectionError> {
        loop {
            if let Some(end) = self.buf.windows(2).position(|w| w == b"\r\n") {
                let line = String::from_utf8_lossy(&self.buf.split_to(end)).into_owned();
                self.buf.advance(2);
                return Ok(line);
            }
            if self.buf.len() > MAX_HEAD_BYTES {
                return Err(SimConnectionError::Malformed("line too long"));
            }
            self.fill().await?;
        }
    }

    async fn fill_to(&mut self, length: usize) -> Result<(), SimConnectionError> {
        while self.buf.len() < length {
            // In steps: allocate for received bytes, not for the announced length.
            self.buf.reserve((length - self.buf.len()).min(1 << 20));
            self.fill().await?;
        }
        Ok(())
    }

    async fn fill(&mut self) -> Result<(), SimConnectionError> {
        if self.buf.capacity() - self.buf.len() < 1024 {
            self.buf.reserve(4096);
        }
        if self.io.read_buf(&mut self.buf).await? == 0 { Err(SimConnectionError::ClientLeft) } else { Ok(()) }
    }

    /// Waits until the client disconnects, and buffers what it sends until then.
    pub(crate) async fn client_left(&mut self) -> SimConnectionError {
        while self.buf.len() < MAX_READ_AHEAD_BYTES {
            if let Err(broken) = self.fill().await {
                return broken;
            }
        }
        std::future::pending().await
    }

    /// Writes all of `bytes`, or fails if the client has disconnected.
    pub(crate) async fn send(&mut self, mut bytes: &[u8]) -> Result<(), SimConnectionError> {
        // Writing to a socket with free buffer space uses no budget, so a stream without pauses would monopolize the
        // thread.
        tokio::task::coop::consume_budget().await;
        self.write_incomplete = true;
        loop {
            self.read_ahead()?;
            match self.io.try_write(bytes) {
                Ok(n) => {
                    if self.counts_bytes {
                        self.counters.bytes_out.fetch_add(n as u64, Relaxed);
                    }
                    bytes = &bytes[n..];
                    if bytes.is_empty() {
                        self.write_incomplete = false;
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let reads = self.buf.len() < MAX_READ_AHEAD_BYTES;
                    let interest =
                        if reads { Interest::READABLE | Interest::WRITABLE } else { Interest::WRITABLE };
                    self.io.ready(interest).await?;
                }
                Err(_) => return Err(SimConnectionError::ClientLeft),
            }
        }
    }

    /// Whether a write was abandoned halfway, so that further bytes would be garbage.
    pub(crate) fn has_incomplete_write(&self) -> bool {
        self.write_incomplete
    }

    fn read_ahead(&mut self) -> Result<(), SimConnectionError> {
        if self.buf.len() >= MAX_READ_AHEAD_BYTES {
            return Ok(());
        }
        match self.io.try_read_buf(&mut self.buf) {
            Ok(0) => Err(SimConnectionError::ClientLeft),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(SimConnectionError::ClientLeft),
            _ => Ok(()),
        }
    }

    /// Turns the following close into a reset.
    pub(crate) fn reset(&mut self) {
        // A broken socket needs no reset.
        self.io.set_zero_linger().ok();
    }
}

impl Drop for SimConnection {
    fn drop(&mut self) {
        self.counters.connections_open.fetch_sub(1, Relaxed);
    }
}
