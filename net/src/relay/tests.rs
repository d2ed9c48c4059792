//! Real sockets on loopback, and engines that follow a test's script byte by byte.

use std::{
    cell::RefCell,
    future::Future,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt;
use rouse_testing::scripted_engine::request_length;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
    time::{Instant, timeout},
};

use super::*;
use crate::lease::{Gate, TickClock};
use rouse::units::Tick;

mod api_schemas;
mod disconnects;
mod endings;
mod responses;
mod reuse;

#[test]
fn an_exchange_is_small() {
    // A socket of a debug build has a number of eight bytes.
    let most = 384 + if cfg!(debug_assertions) { 8 } else { 0 };
    assert!(size_of::<body::UpstreamStream>() <= most, "{}", size_of::<body::UpstreamStream>());
    assert!(size_of::<Lease>() <= 16);
}

/// How long an engine may take to see that its client disconnected.
const AT_ONCE: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(10);

/// A listening engine.
struct ListeningEngine(TcpListener);

/// The engine's side of one connection.
struct Peer(TcpStream);

/// A core's side: a pool, and one engine's gate.
struct Core {
    pool: ConnectionPool,
    gate: Arc<Gate>,
    target: RelayTarget,
    timeouts: RelayTimeouts,
    path: PathAndQuery,
    headers: HeaderMap,
    inspection: ResponseInspection,
    wants_load_report: bool,
}

#[derive(Clone, Debug, Default)]
struct RecordingObserver(Rc<RefCell<ObserverRecord>>);

#[derive(Debug, Default)]
struct ObserverRecord {
    replays: u32,
    head: Option<StatusCode>,
    load: Option<EngineLoad>,
    first_bytes: u32,
    bytes: usize,
    facts: Option<ResponseFacts>,
    ends: Vec<ExchangeOutcome>,
}

impl RelayObserver for RecordingObserver {
    fn replayed(&mut self) {
        self.0.borrow_mut().replays += 1;
    }

    fn head(&mut self, status: StatusCode) {
        self.0.borrow_mut().head = Some(status);
    }

    fn load_report(&mut self, load: &EngineLoad) {
        self.0.borrow_mut().load = Some(*load);
    }

    fn first_byte(&mut self) {
        self.0.borrow_mut().first_bytes += 1;
    }

    fn frame(&mut self, bytes: usize, facts: Option<&ResponseFacts>) {
        let mut notes = self.0.borrow_mut();
        notes.bytes += bytes;
        notes.facts = facts.copied();
    }

    fn end(&mut self, outcome: ExchangeOutcome, _: Instant) {
        self.0.borrow_mut().ends.push(outcome);
    }
}

impl RecordingObserver {
    fn ends(&self) -> Vec<ExchangeOutcome> {
        self.0.borrow().ends.clone()
    }
}

impl ListeningEngine {
    async fn start() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    async fn accept(&self) -> Peer {
        Peer(timeout(LONG, self.0.accept()).await.expect("a connection").unwrap().0)
    }
}

impl Peer {
    /// Reads one request with its body.
    async fn request(&mut self) -> String {
        let mut received = Vec::new();
        loop {
            assert_ne!(self.0.read_buf(&mut received).await.unwrap(), 0, "closed inside a request");
            if request_length(&received).is_some() {
                return String::from_utf8_lossy(&received).into_owned();
            }
        }
    }

    async fn write(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    async fn chunk(&mut self, text: &str) {
        self.write(&format!("{:x}\r\n{text}\r\n", text.len())).await;
    }

    /// Checks that the other side closes within [`AT_ONCE`].
    async fn expect_close(&mut self) {
        // Megabytes may be in flight, and must be read before the close is seen.
        let mut room = vec![0; 1 << 20];
        let closed = timeout(AT_ONCE, async { while matches!(self.0.read(&mut room).await, Ok(1..)) {} });
        closed.await.expect("the connection is closed at once");
    }
}

impl Core {
    fn new(address: SocketAddr) -> Self {
        let gate = Gate::new(None, TickClock::new(Instant::now(), Tick(1)), Arc::new(Notify::new()));
        gate.open();
        Self {
            pool: ConnectionPool::default(),
            gate,
            target: RelayTarget {
                engine: EngineId::new("m".into(), 0),
                generation: Generation(1),
                address,
                authorization: None,
                origin: None,
            },
            timeouts: RelayTimeouts {
                connect: Millis::secs(2),
                first_byte: Millis::secs(10),
                non_stream: Millis::secs(10),
                idle: Millis::secs(10),
                exit_wait: Millis::ZERO,
            },
            path: PathAndQuery::from_static("/v1/chat/completions?x=1"),
            headers: HeaderMap::new(),
            inspection: ResponseInspection::Events,
            wants_load_report: false,
        }
    }

    fn exchange_args(&self, stream: bool, observer: &RecordingObserver) -> Exchange<'_, RecordingObserver> {
        Exchange {
            now: Instant::now(),
            target: self.target.clone(),
            request: UpstreamRequest {
                method: &Method::POST,
                path: &self.path,
                headers: &self.headers,
                request_id: None,
                body: Bytes::from_static(b"{\"model\":\"m\"}").into(),
                stream,
                schema: ApiSchema::OpenAi,
                inspection: self.inspection,
                wants_load_report: self.wants_load_report,
            },
            upload: None,
            lease: self.gate.take().unwrap(),
            timeouts: self.timeouts,
            observer: observer.clone(),
        }
    }

    async fn send(
        &self,
        stream: bool,
        observer: &RecordingObserver,
    ) -> Result<Response<RelayBody<RecordingObserver>>, ExchangeError> {
        timeout(LONG, exchange(&self.pool, self.exchange_args(stream, observer))).await.expect("an outcome")
    }

    fn is_unused(&self) -> bool {
        self.gate.leases() == 0
    }
}

const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

async fn frame(body: &mut RelayBody<RecordingObserver>) -> Option<Result<Bytes, RelayBodyError>> {
    let frame = timeout(LONG, body.frame()).await.expect("a frame");
    frame.map(|frame| frame.map(|frame| frame.into_data().expect("only data")))
}

/// Reads to the end; returns all bytes, and how the body ended.
async fn drain(body: &mut RelayBody<RecordingObserver>) -> (String, Result<(), Fault>) {
    let mut text = Vec::new();
    loop {
        match frame(body).await {
            Some(Ok(bytes)) => text.extend_from_slice(&bytes),
            Some(Err(RelayBodyError(fault))) => return (String::from_utf8(text).unwrap(), Err(fault)),
            None => return (String::from_utf8(text).unwrap(), Ok(())),
        }
    }
}

fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}
