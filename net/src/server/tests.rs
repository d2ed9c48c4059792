//! The loop over a client in memory. The tests poll it only when it was woken, so a lost wake-up stops them, and they
//! count the polls, so a busy loop fails them.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::io::ReadBuf;

use super::*;
use crate::relay::ConnectionPool;

mod differential;
mod disconnects;
mod ends;
mod exchanges;

/// Polls that one event may cause.
const MAX_POLLS: usize = 200;

/// The client's side of a connection.
#[derive(Debug, Default)]
pub(super) struct ClientIo {
    sent: RefCell<VecDeque<u8>>,
    has_ended: Cell<bool>,
    received: RefCell<Vec<u8>>,
    /// The bytes that the client still accepts.
    room: Cell<usize>,
    writes: Cell<usize>,
    /// Bytes were written after the last flush.
    is_unflushed: Cell<bool>,
    pub(super) was_shut_down: Cell<bool>,
    read_waker: RefCell<Option<Waker>>,
    write_waker: RefCell<Option<Waker>>,
}

impl ClientIo {
    fn wake(waker: &RefCell<Option<Waker>>) {
        if let Some(waker) = waker.take() {
            waker.wake();
        }
    }
}

impl ServerIo for ClientIo {
    fn poll_read(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut sent = self.sent.borrow_mut();
        if sent.is_empty() && !self.has_ended.get() {
            // As a socket does, keep only the last waker.
            *self.read_waker.borrow_mut() = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let length = sent.len().min(buf.remaining());
        buf.put_slice(&sent.drain(..length).collect::<Vec<u8>>());
        Poll::Ready(Ok(()))
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        assert!(!bytes.is_empty() && !self.was_shut_down.get());
        let length = bytes.len().min(self.room.get());
        if length == 0 {
            *self.write_waker.borrow_mut() = Some(cx.waker().clone());
            return Poll::Pending;
        }
        self.room.set(self.room.get() - length);
        self.writes.set(self.writes.get() + 1);
        self.is_unflushed.set(true);
        self.received.borrow_mut().extend_from_slice(&bytes[..length]);
        Poll::Ready(Ok(length))
    }

    fn poll_flush(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_unflushed.set(false);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.was_shut_down.set(true);
        Poll::Ready(Ok(()))
    }
}

/// Notes that its task was woken.
#[derive(Debug, Default)]
pub(super) struct WakeFlag(AtomicBool);

impl WakeFlag {
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The frames of a response, which a test adds one by one.
#[derive(Debug, Default)]
pub(super) struct Frames {
    ready: RefCell<VecDeque<Option<Result<Bytes, ()>>>>,
    waker: RefCell<Option<Waker>>,
    polls: Cell<usize>,
    dropped: Cell<bool>,
}

impl Frames {
    /// Adds a frame, an error, or with `None` the end.
    pub(super) fn add(&self, frame: Option<Result<&str, ()>>) {
        let frame = frame.map(|frame| frame.map(|text| Bytes::copy_from_slice(text.as_bytes())));
        self.ready.borrow_mut().push_back(frame);
        ClientIo::wake(&self.waker);
    }
}

/// The body of a response.
#[derive(Debug)]
pub(super) struct TestBody {
    frames: Rc<Frames>,
    length: Option<u64>,
    uses_scratch: bool,
}

impl TestBody {
    pub(super) fn text(text: &str) -> Self {
        let frames = Rc::<Frames>::default();
        if !text.is_empty() {
            frames.add(Some(Ok(text)));
        }
        frames.add(None);
        Self { frames, length: Some(text.len() as u64), uses_scratch: false }
    }

    pub(super) fn stream(frames: &Rc<Frames>, uses_scratch: bool) -> Self {
        Self { frames: Rc::clone(frames), length: None, uses_scratch }
    }

    fn poll(&self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, ()>>> {
        self.frames.polls.set(self.frames.polls.get() + 1);
        let next = self.frames.ready.borrow_mut().pop_front();
        next.map_or_else(
            || {
                *self.frames.waker.borrow_mut() = Some(cx.waker().clone());
                Poll::Pending
            },
            Poll::Ready,
        )
    }
}

impl Drop for TestBody {
    fn drop(&mut self) {
        self.frames.dropped.set(true);
    }
}

impl Body for TestBody {
    type Data = Bytes;
    type Error = ();

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ()>>> {
        self.poll(cx).map(|frame| frame.map(|frame| frame.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.frames.ready.borrow().front(), Some(None))
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl ScratchBody for TestBody {
    fn uses_scratch(&self) -> bool {
        self.uses_scratch
    }

    fn poll_frame_into(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, ()>>> {
        let frame = ready!(self.poll(cx));
        Poll::Ready(frame.map(|frame| {
            frame.map(|bytes| match memory.and_then(|memory| memory.get_mut(..bytes.len())) {
                Some(room) if self.uses_scratch => {
                    room.copy_from_slice(&bytes);
                    ScratchFrame::InScratch(0..bytes.len())
                }
                _ => ScratchFrame::Owned(bytes),
            })
        }))
    }
}

pub(super) type TestRequest = Request<Http1RequestBody<ClientIo>>;
pub(super) type TestFuture = Pin<Box<dyn Future<Output = Response<TestBody>>>>;
type TestService = Box<dyn Fn(TestRequest) -> TestFuture>;

/// A connection, and its client.
pub(super) struct TestServer {
    pub(super) connection: Http1Connection<ClientIo, TestService, TestFuture, TestBody>,
    pub(super) client: Rc<ClientIo>,
    woken: Arc<WakeFlag>,
    pub(super) end: Option<Http1End>,
    /// Also polls the loop where nothing has happened.
    pub(super) polls_spuriously: bool,
}

impl TestServer {
    pub(super) fn new<F: Future<Output = Response<TestBody>> + 'static>(
        service: impl Fn(TestRequest) -> F + 'static,
    ) -> Self {
        let service: TestService = Box::new(move |request| Box::pin(service(request)));
        let client = Rc::new(ClientIo { room: Cell::new(usize::MAX), ..ClientIo::default() });
        let limits = Http1Limits { max_head_bytes: 1024, max_headers: 8, max_read_ahead_bytes: 64 };
        let pool = ConnectionPool::default();
        let connection = Http1Connection::new(Rc::clone(&client), service, limits, pool, Rc::default());
        let mut server =
            Self { connection, client, woken: Arc::default(), end: None, polls_spuriously: false };
        server.poll();
        server
    }

    /// Polls the loop once, woken or not.
    pub(super) fn poll(&mut self) {
        if self.end.is_some() {
            return;
        }
        let waker = Waker::from(Arc::clone(&self.woken));
        if let Poll::Ready(end) = self.connection.poll(&mut Context::from_waker(&waker)) {
            self.end = Some(end);
        }
    }

    /// Polls the loop for as long as it is woken.
    pub(super) fn run(&mut self) {
        let mut polls = 0;
        while self.woken.take() {
            self.poll();
            polls += 1;
            assert!(polls < MAX_POLLS, "the loop wakes itself again and again");
        }
        if self.polls_spuriously {
            (0..3).for_each(|_| self.poll());
        }
    }

    /// The client sends these bytes.
    pub(super) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.client.sent.borrow_mut().extend(bytes.as_ref());
        ClientIo::wake(&self.client.read_waker);
        self.run();
    }

    /// The client closes its sending half.
    pub(super) fn send_end(&mut self) {
        self.client.has_ended.set(true);
        ClientIo::wake(&self.client.read_waker);
        self.run();
    }

    /// The client accepts so many more bytes.
    pub(super) fn set_room(&mut self, bytes: usize) {
        self.client.room.set(bytes);
        if bytes > 0 {
            ClientIo::wake(&self.client.write_waker);
        }
        self.run();
    }

    /// Takes what the client has received.
    pub(super) fn received_raw(&self) -> String {
        String::from_utf8(self.client.received.take()).unwrap()
    }

    /// As [`Self::received_raw`], without the dates.
    pub(super) fn received(&self) -> String {
        let text = self.received_raw();
        let mut lines: Vec<&str> = text.split("\r\n").collect();
        lines.retain(|line| !line.starts_with("date: "));
        lines.join("\r\n")
    }

    pub(super) fn writes(&self) -> usize {
        self.client.writes.replace(0)
    }
}

/// Reads a request's whole body.
pub(super) async fn read_body(body: Http1RequestBody<ClientIo>) -> Result<Vec<u8>, RequestBodyError> {
    use http_body_util::BodyExt as _;
    body.collect().await.map(|body| body.to_bytes().to_vec())
}

/// A server that hands the body of `request` to the test, as to another task, and answers as `respond` does.
pub(super) fn server_and_held_body<F: Future<Output = Response<TestBody>> + 'static>(
    respond: impl Fn() -> F + 'static,
    request: &str,
) -> (TestServer, Http1RequestBody<ClientIo>) {
    let body = Rc::new(RefCell::new(None));
    let held = Rc::clone(&body);
    let mut server = TestServer::new(move |request: TestRequest| {
        *held.borrow_mut() = Some(request.into_body());
        respond()
    });
    server.send(request);
    let body = body.take().unwrap();
    (server, body)
}

/// Answers without reading the body.
pub(super) async fn refuse(_: TestRequest) -> Response<TestBody> {
    Response::new(TestBody::text("no"))
}

/// Answers with the request's method, path and body.
pub(super) async fn echo(request: TestRequest) -> Response<TestBody> {
    let line = format!("{} {}", request.method(), request.uri());
    let text = match read_body(request.into_body()).await {
        Ok(body) => format!("{line} {}", String::from_utf8(body).unwrap()),
        Err(error) => format!("{line}: {error}"),
    };
    Response::new(TestBody::text(&text))
}

#[test]
fn a_connection_is_small() {
    // Beside it there are the shared state, and while a request is served its future.
    type TestConnection = Http1Connection<ClientIo, TestService, TestFuture, TestBody>;
    assert!(size_of::<TestConnection>() <= 168, "{}", size_of::<TestConnection>());
    // With its counts, an allocation of 160 bytes.
    assert!(size_of::<wire::Wire<ClientIo>>() <= 144, "{}", size_of::<wire::Wire<ClientIo>>());
}
