//! One connection: a read and a write per request, a write per event.

use std::{io, sync::Arc};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task,
    time::{Instant, sleep_until},
};

use super::{
    Engine,
    ask::{Ask, Ends, Pieces},
    dated::{Dated, ok},
    exact,
    head::{self, Framing, Head, Route},
    wire::{DONE, Stamp, monotonic_ns},
};

/// Bodies up to this size are read whole; of longer ones the ends are kept.
const WHOLE: u64 = 16 << 10;
/// Free room to read into, once a body is long.
const LARGE: usize = 64 << 10;
const SMALL: usize = 4 << 10;

/// Serves a connection until it ends.
pub(super) async fn serve(engine: Arc<Engine>, io: TcpStream) {
    // Nagle's wait would be measured as the proxy's.
    io.set_nodelay(true).ok();
    let mut connection = Connection {
        answer: Dated::new(&ok("application/json", &engine.wire.answer)),
        last: (Vec::new(), engine.finders.ask(&Ends::of(b""))),
        engine,
        io,
        read: BytesMut::with_capacity(SMALL),
    };
    loop {
        match connection.exchange().await {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    let refusal =
                        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
                    connection.io.write_all(refusal).await.ok();
                }
                break;
            }
        }
    }
}

struct Connection {
    engine: Arc<Engine>,
    io: TcpStream,
    /// Read and not yet used.
    read: BytesMut,
    /// The last body that was short, and what it asked for.
    last: (Vec<u8>, Ask),
    answer: Dated,
}

impl Connection {
    /// One request and its answer; whether another may follow.
    async fn exchange(&mut self) -> io::Result<bool> {
        let head = self.head().await?;
        if head.waits {
            self.io.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let ask = self.body(head.framing).await?;
        if head.route != Route::Chat {
            self.tell(head.route).await?;
            return Ok(head.keeps_alive);
        }
        if ask.stream {
            self.stream(&ask).await?;
        } else {
            exact::wait(ask.engine).await?;
            self.io.write_all(self.answer.now()).await?;
        }
        Ok(head.keeps_alive)
    }

    async fn head(&mut self) -> io::Result<Head> {
        loop {
            if !self.read.is_empty()
                && let Some(head) = head::parse(&self.read).map_err(|_| io::ErrorKind::InvalidData)?
            {
                self.read.advance(head.bytes);
                return Ok(head);
            }
            self.more(SMALL).await?;
        }
    }

    async fn more(&mut self, room: usize) -> io::Result<()> {
        self.read.reserve(room);
        match self.io.read_buf(&mut self.read).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn body(&mut self, framing: Framing) -> io::Result<Ask> {
        match framing {
            Framing::Length(length) if length <= WHOLE => {
                let length = length as usize;
                while self.read.len() < length {
                    self.more(length - self.read.len()).await?;
                }
                let body = &self.read[..length];
                // Load is the same request over and over, and comparing is cheaper than searching.
                if body != &self.last.0[..] {
                    self.last = (body.to_vec(), self.engine.finders.ask(&Ends::of(body)));
                }
                self.read.advance(length);
                Ok(self.last.1)
            }
            Framing::Length(length) => {
                let mut pieces = Pieces::default();
                self.take(length, &mut pieces).await?;
                Ok(self.engine.finders.ask(&pieces.ends()))
            }
            Framing::Chunked => {
                let mut pieces = Pieces::default();
                loop {
                    let size = self.size_line().await?;
                    if size == 0 {
                        // Trailers, and the blank line after them.
                        while !self.line().await?.is_empty() {}
                        return Ok(self.engine.finders.ask(&pieces.ends()));
                    }
                    self.take(size, &mut pieces).await?;
                    self.line().await?;
                }
            }
        }
    }

    async fn take(&mut self, mut length: u64, pieces: &mut Pieces) -> io::Result<()> {
        while length > 0 {
            if self.read.is_empty() {
                self.more(LARGE).await?;
            }
            let piece = self.read.len().min(usize::try_from(length).unwrap_or(usize::MAX));
            pieces.add(&self.read[..piece]);
            self.read.advance(piece);
            length -= piece as u64;
        }
        Ok(())
    }

    async fn size_line(&mut self) -> io::Result<u64> {
        let line = self.line().await?;
        let digits = line[..].split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
        let size = str::from_utf8(digits).ok().and_then(|digits| u64::from_str_radix(digits, 16).ok());
        size.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The next line, without its end.
    async fn line(&mut self) -> io::Result<BytesMut> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.read) {
                let mut line = self.read.split_to(end + 1);
                line.truncate(line.trim_ascii_end().len());
                return Ok(line);
            }
            self.more(SMALL).await?;
        }
    }

    /// What a gateway asks an engine before it trusts it.
    async fn tell(&mut self, route: Route) -> io::Result<()> {
        let wire = &self.engine.wire;
        let bytes = match route {
            Route::Health => ok("text/plain", b""),
            Route::Models => ok("application/json", &wire.models),
            Route::About => ok("application/json", &wire.about),
            Route::Version => ok("application/json", br#"{"version":"0.11.2"}"#),
            Route::Sleeping => ok("application/json", br#"{"is_sleeping":false}"#),
            Route::Chat | Route::Unknown => {
                b"HTTP/1.1 404 Not Found\r\ndate: -----------------------------\r\ncontent-length: 0\r\n\r\n"
                    .to_vec()
            }
        };
        self.io.write_all(Dated::new(&bytes).now()).await
    }

    async fn stream(&mut self, ask: &Ask) -> io::Result<()> {
        let head = b"HTTP/1.1 200 OK\r\ndate: -----------------------------\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
            cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
        self.io.write_all(Dated::new(head).now()).await?;
        let mut event = self.engine.wire.event.chunk();
        exact::wait(ask.engine).await?;
        let mut due = Instant::now();
        for sequence in 0..ask.events {
            if ask.interval.is_zero() && sequence > 0 {
                // A real engine gives every stream its token before it gives any of them the next.
                task::yield_now().await;
            } else if sequence > 0 {
                sleep_until(due).await;
            }
            let stamp = Stamp { sequence, sent_ns: monotonic_ns() };
            self.io.write_all(event.stamped(stamp)).await?;
            due += ask.interval;
            if sequence == 0 {
                due += ask.interval.mul_f64(self.engine.phase());
            }
        }
        let mut last = format!("{:x}\r\n", DONE.len()).into_bytes();
        last.extend_from_slice(DONE);
        last.extend_from_slice(b"\r\n0\r\n\r\n");
        self.io.write_all(&last).await
    }
}
