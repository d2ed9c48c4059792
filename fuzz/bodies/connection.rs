//! A client's connection of arbitrary bytes: the server sees the same requests however the bytes are cut, answers each
//! of them once, and neither stops reading nor wakes itself for ever.

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    io,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use rouse_net::{
    relay::{ConnectionPool, ScratchFrame},
    server::{Http1Connection, Http1End, Http1Limits, Http1Phase, Http1RequestBody, ScratchBody, ServerIo},
};
use tokio::io::ReadBuf;

/// Polls that one piece may cause.
const MAX_POLLS: usize = 1000;

/// A client that has sent these bytes, and sends no more for now.
#[derive(Default)]
struct ClientBytes {
    sent: RefCell<Bytes>,
    received: RefCell<Vec<u8>>,
    waits: Cell<bool>,
}

impl ServerIo for ClientBytes {
    fn poll_read(&self, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut sent = self.sent.borrow_mut();
        if sent.is_empty() {
            self.waits.set(true);
            return Poll::Pending;
        }
        let length = sent.len().min(buf.remaining());
        buf.put_slice(&sent.split_to(length));
        Poll::Ready(Ok(()))
    }

    fn poll_write(&self, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.received.borrow_mut().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// The body of every response.
struct Answer(Option<Bytes>);

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

impl ScratchBody for Answer {
    fn uses_scratch(&self) -> bool {
        false
    }

    fn poll_frame_into(
        &mut self,
        _: Option<&mut [u8]>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(ScratchFrame::Owned(bytes))))
    }
}

#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Each request: its line, its headers, and its body, which is `None` when its framing is broken.
type SeenRequests = Vec<(String, Vec<(String, Vec<u8>)>, Option<Vec<u8>>)>;

pub(crate) fn connection(data: &[u8]) {
    let whole = serve(data, data.len());
    for cut in [1, 7] {
        assert_eq!(serve(data, cut), whole, "cut every {cut} bytes");
    }
}

/// Serves the bytes in pieces of this size, and returns the requests that the service saw.
fn serve(data: &[u8], cut: usize) -> SeenRequests {
    thread_local! {
        static POOL: ConnectionPool = ConnectionPool::default();
    }
    let seen = Rc::<RefCell<SeenRequests>>::default();
    let service = {
        let seen = Rc::clone(&seen);
        move |request: Request<Http1RequestBody<ClientBytes>>| {
            let seen = Rc::clone(&seen);
            async move {
                let (head, mut body) = request.into_parts();
                let mut whole = Some(Vec::new());
                while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                    match frame {
                        Ok(frame) => {
                            let data = frame.into_data().unwrap_or_default();
                            if let Some(whole) = &mut whole {
                                whole.extend_from_slice(&data);
                            }
                        }
                        Err(_) => whole = None,
                    }
                }
                let headers =
                    head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
                let line = format!("{} {} {:?}", head.method, head.uri, head.version);
                seen.borrow_mut().push((line, headers.collect(), whole));
                Response::new(Answer(Some(Bytes::from_static(b"ok"))))
            }
        }
    };
    let client = Rc::<ClientBytes>::default();
    let limits = Http1Limits { max_head_bytes: 4096, max_headers: 20, ..Http1Limits::default() };
    let mut server =
        Http1Connection::new(Rc::clone(&client), service, limits, POOL.with(Clone::clone), Rc::default());
    let flag = Arc::<WakeFlag>::default();
    let waker = Waker::from(Arc::clone(&flag));
    let mut end = None;
    for piece in data.chunks(cut.max(1)) {
        *client.sent.borrow_mut() = Bytes::copy_from_slice(piece);
        let mut polls = 0;
        loop {
            client.waits.set(false);
            if let Poll::Ready(ended) = server.poll(&mut Context::from_waker(&waker)) {
                end = Some(ended);
                break;
            }
            if !flag.0.swap(false, Ordering::Relaxed) {
                break;
            }
            polls += 1;
            assert!(polls < MAX_POLLS, "the loop wakes itself again and again");
        }
        if end.is_some() {
            break;
        }
        assert!(
            client.waits.get() && client.sent.borrow().is_empty(),
            "the loop waits for the client's bytes"
        );
        assert!(matches!(server.phase(), Http1Phase::Idle | Http1Phase::ReadingHead | Http1Phase::Serving));
    }
    assert!(matches!(end, None | Some(Http1End::Closed { .. } | Http1End::Refused(_))), "{end:?}");
    drop(server);
    let received = client.received.take();
    let answers = received.windows(5).filter(|window| **window == *b"HTTP/").count();
    let interim = received.windows(12).filter(|window| **window == *b"HTTP/1.1 100").count();
    let seen = Rc::into_inner(seen).map(RefCell::into_inner).unwrap_or_default();
    assert_eq!(answers - interim, seen.len(), "one answer to each request");
    seen
}
