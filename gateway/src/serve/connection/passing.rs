//! An answer on its way to a client of HTTP/1.1, without hyper.
//!
//! It is the same body that hyper would have asked, asked in the same way: for the next frame only when the last one is
//! written. So everything that a body decides (heartbeats, deadlines, the last word of a broken stream, what is counted)
//! is decided once, here and there. What is left is the framing, which is always ours: what an engine puts between its
//! chunks stays with us.

use std::{
    io,
    io::Write as _,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::Buf as _;
use http::Response;
use http_body::Body as _;

use super::offer;
use crate::{http::reply::Reply, serve::socket::Socket};

const LAST: &[u8] = b"0\r\n\r\n";

pub(super) struct Passing {
    socket: Rc<Socket>,
    /// `None` when all of it was given to us.
    reply: Option<Reply>,
    unwritten: io::Cursor<Vec<u8>>,
    /// The head waits for what is ready to follow it.
    head: bool,
}

/// The client has a part of the answer, and no more will come.
pub(super) struct Cut;

impl Passing {
    pub(super) fn new(socket: Rc<Socket>, answer: Response<Reply>) -> Box<Self> {
        let (parts, reply) = answer.into_parts();
        let unwritten = io::Cursor::new(offer::head(parts.status, &parts.headers));
        Box::new(Self { socket, reply: Some(reply), unwritten, head: true })
    }

    /// Ready when the client was given all.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Cut>> {
        loop {
            if !std::mem::take(&mut self.head) {
                ready!(self.poll_write(cx)).map_err(|_| Cut)?;
            }
            let Some(reply) = &mut self.reply else {
                return Poll::Ready(Ok(()));
            };
            match Pin::new(&mut *reply).poll_frame(cx) {
                Poll::Pending if self.unwritten.has_remaining() => {}
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Err(Cut)),
                Poll::Ready(Some(Ok(frame))) => {
                    let ends = reply.is_end_stream();
                    if let Ok(data) = frame.into_data() {
                        self.add(&data);
                    }
                    if ends {
                        self.end();
                    }
                }
                Poll::Ready(None) => self.end(),
            }
        }
    }

    fn add(&mut self, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let out = self.unwritten.get_mut();
        out.reserve(data.len() + 20);
        // A vector takes all.
        drop(write!(out, "{:x}\r\n", data.len()));
        out.extend_from_slice(data);
        out.extend_from_slice(b"\r\n");
    }

    fn end(&mut self) {
        self.unwritten.get_mut().extend_from_slice(LAST);
        self.reply = None;
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.unwritten.has_remaining() {
            let written = ready!(self.socket.poll_write(cx, self.unwritten.chunk()))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unwritten.advance(written);
        }
        // What waits for its next event holds no memory.
        self.unwritten = io::Cursor::default();
        self.socket.poll_flush(cx)
    }
}
