//! One connection: a read and a write per request, and a write per event.

use std::{io, sync::Arc};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task,
    time::{Instant, sleep_until},
};

use super::{
    FastEngine,
    dated_response::{DatedResponse, ok},
    exact_timer,
    head::{self, FastRequestFraming, FastRequestHead, FastRoute},
    request::{BodyEnds, BodyEndsBuffer, FastRequest},
    wire::{DONE, EventStamp, monotonic_ns},
};

/// Bodies up to this size are read whole. Of longer bodies only the ends are kept.
const MAX_WHOLE_BODY_BYTES: u64 = 16 << 10;
/// Read buffer space for a long body.
const LARGE_READ_BYTES: usize = 64 << 10;
const SMALL_READ_BYTES: usize = 4 << 10;

/// Serves a connection until it ends.
pub(super) async fn serve(engine: Arc<FastEngine>, io: TcpStream) {
    // Nagle's delay would be measured as the proxy's.
    io.set_nodelay(true).ok();
    let mut connection = FastConnection {
        answer: DatedResponse::new(&ok("application/json", &engine.responses.answer)),
        last_request: (Vec::new(), engine.finders.parse(&BodyEnds::of_body(b""))),
        engine,
        io,
        read: BytesMut::with_capacity(SMALL_READ_BYTES),
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

struct FastConnection {
    engine: Arc<FastEngine>,
    io: TcpStream,
    /// Bytes read but not consumed.
    read: BytesMut,
    /// The last short body and its parsed request.
    last_request: (Vec<u8>, FastRequest),
    answer: DatedResponse,
}

impl FastConnection {
    /// Serves one request. Returns whether another may follow.
    async fn exchange(&mut self) -> io::Result<bool> {
        let head = self.head().await?;
        if head.expects_continue {
            self.io.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let ask = self.body(head.framing).await?;
        if head.route != FastRoute::Chat {
            self.answer_probe(head.route).await?;
            return Ok(head.keeps_alive);
        }
        if ask.stream {
            self.stream(&ask).await?;
        } else {
            exact_timer::wait(ask.engine_time).await?;
            self.io.write_all(self.answer.with_date()).await?;
        }
        Ok(head.keeps_alive)
    }

    async fn head(&mut self) -> io::Result<FastRequestHead> {
        loop {
            if !self.read.is_empty()
                && let Some(head) = head::parse(&self.read).map_err(|_| io::ErrorKind::InvalidData)?
            {
                self.read.advance(head.bytes);
                return Ok(head);
            }
            self.read_more(SMALL_READ_BYTES).await?;
        }
    }

    async fn read_more(&mut self, room: usize) -> io::Result<()> {
        self.read.reserve(room);
        match self.io.read_buf(&mut self.read).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn body(&mut self, framing: FastRequestFraming) -> io::Result<FastRequest> {
        match framing {
            FastRequestFraming::Length(length) if length <= MAX_WHOLE_BODY_BYTES => {
                let length = length as usize;
                while self.read.len() < length {
                    self.read_more(length - self.read.len()).await?;
                }
                let body = &self.read[..length];
                // Load repeats the same request, and comparing is cheaper than searching.
                if body != &self.last_request.0[..] {
                    self.last_request = (body.to_vec(), self.engine.finders.parse(&BodyEnds::of_body(body)));
                }
                self.read.advance(length);
                Ok(self.last_request.1)
            }
            FastRequestFraming::Length(length) => {
                let mut pieces = BodyEndsBuffer::default();
                self.read_body_ends(length, &mut pieces).await?;
                Ok(self.engine.finders.parse(&pieces.ends()))
            }
            FastRequestFraming::Chunked => {
                let mut pieces = BodyEndsBuffer::default();
                loop {
                    let size = self.size_line().await?;
                    if size == 0 {
                        // Trailers and the blank line after them.
                        while !self.line().await?.is_empty() {}
                        return Ok(self.engine.finders.parse(&pieces.ends()));
                    }
                    self.read_body_ends(size, &mut pieces).await?;
                    self.line().await?;
                }
            }
        }
    }

    async fn read_body_ends(&mut self, mut length: u64, pieces: &mut BodyEndsBuffer) -> io::Result<()> {
        while length > 0 {
            if self.read.is_empty() {
                self.read_more(LARGE_READ_BYTES).await?;
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

    /// The next line without its terminator.
    async fn line(&mut self) -> io::Result<BytesMut> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.read) {
                let mut line = self.read.split_to(end + 1);
                line.truncate(line.trim_ascii_end().len());
                return Ok(line);
            }
            self.read_more(SMALL_READ_BYTES).await?;
        }
    }

    /// Answers a gateway's probes before it trusts an engine.
    async fn answer_probe(&mut self, route: FastRoute) -> io::Result<()> {
        let wire = &self.engine.responses;
        let bytes = match route {
            FastRoute::Health => ok("text/plain", b""),
            FastRoute::Models => ok("application/json", &wire.models),
            FastRoute::ModelInfo => ok("application/json", &wire.model_info),
            FastRoute::Version => ok("application/json", br#"{"version":"0.11.2"}"#),
            FastRoute::Sleeping => ok("application/json", br#"{"is_sleeping":false}"#),
            FastRoute::Chat | FastRoute::Unknown => {
                b"HTTP/1.1 404 Not Found\r\ndate: -----------------------------\r\ncontent-length: 0\r\n\r\n"
                    .to_vec()
            }
        };
        self.io.write_all(DatedResponse::new(&bytes).with_date()).await
    }

    async fn stream(&mut self, ask: &FastRequest) -> io::Result<()> {
        let head = b"HTTP/1.1 200 OK\r\ndate: -----------------------------\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
            cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
        self.io.write_all(DatedResponse::new(head).with_date()).await?;
        let mut event = self.engine.responses.event.as_chunk();
        exact_timer::wait(ask.engine_time).await?;
        let mut due = Instant::now();
        for sequence in 0..ask.events {
            if ask.interval.is_zero() && sequence > 0 {
                // A real engine sends every stream its token before it sends any stream the next.
                task::yield_now().await;
            } else if sequence > 0 {
                sleep_until(due).await;
            }
            let stamp = EventStamp { sequence, sent_ns: monotonic_ns() };
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
