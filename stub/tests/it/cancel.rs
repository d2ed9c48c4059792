//! A client that disconnects cancels its request within 50 ms, in every phase: also if stray bytes follow its body, or
//! if it closes only its sending half.

use std::{
    io::Read as _,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    time::Duration,
};

use rouse_testing::scripted_engine::scripted;
use tokio::time::Instant;

use crate::{
    lock_timed_tests,
    support::{StubProcess, TestExchange, client::chat, stub_before, until},
};

const AT_ONCE: Duration = Duration::from_millis(50);
/// Timeout for the work of another thread.
const PATIENCE: Duration = Duration::from_secs(10);
const PATH: &str = "/v1/chat/completions";
const EVENTS: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nA\r\ndata: {}\n\n\r\n";
const SIZED: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1000\r\n\r\ndata: ";

/// An engine that reports each request, sends `says`, and reports when its connection is closed by the peer.
fn engine(says: &'static [u8]) -> (SocketAddr, mpsc::Receiver<()>, mpsc::Receiver<Instant>) {
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (request_tx, request_rx) = mpsc::channel();
    #[expect(clippy::disallowed_methods, reason = "a test's channel")]
    let (closed_tx, closed_rx) = mpsc::channel();
    let address = scripted(move |mut stream, _| {
        request_tx.send(()).unwrap();
        std::io::Write::write_all(&mut stream, says).unwrap();
        let mut buffer = [0; 4096];
        while matches!(stream.read(&mut buffer), Ok(1..)) {}
        closed_tx.send(Instant::now()).unwrap();
    });
    (address, request_rx, closed_rx)
}

/// The best of three tries, since a busy machine is sometimes late.
fn soon(mut once: impl FnMut() -> Duration) -> Duration {
    (0..3).map(|_| once()).min().unwrap()
}

/// The ways in which a client disconnects.
const WAYS: [fn(TestExchange) -> Option<TestExchange>; 2] = [
    |open| {
        drop(open);
        None
    },
    |open| {
        open.finish();
        Some(open)
    },
];

#[test]
fn it_leaves_while_the_engine_thinks_or_answers() {
    let _alone = lock_timed_tests();
    for (says, began) in [(&b""[..], false), (EVENTS, true), (SIZED, true)] {
        let (address, request_rx, closed_rx) = engine(says);
        let stub = stub_before(address, &[]);
        let relay = stub.relay();
        for stray in ["", "\r\n", "GET / HT"] {
            for way in WAYS {
                let delay = soon(|| {
                    let mut open = relay.open(relay.request("POST", PATH, "", &chat(9)) + stray);
                    if began {
                        open.until("data: ");
                    }
                    request_rx.recv_timeout(PATIENCE).expect("it is under way");
                    assert_eq!(stub.leases(), 1);
                    let disconnected_at = Instant::now();
                    let kept = way(open);
                    let closed = closed_rx.recv_timeout(PATIENCE).expect("the engine hears of it");
                    until("its lease is given back", || stub.leases() == 0);
                    drop(kept);
                    closed - disconnected_at
                });
                assert!(delay < AT_ONCE, "{delay:?} after the client left, {stray:?} behind its body");
            }
        }
    }
}

#[test]
fn it_leaves_in_the_midst_of_its_body() {
    let _alone = lock_timed_tests();
    for head in ["Content-Length: 1000000", "Transfer-Encoding: chunked"] {
        let (address, request_rx, closed_rx) = engine(b"");
        let stub = stub_before(address, &[]);
        let relay = stub.relay();
        let delay = soon(|| {
            let mut open = relay.open(format!("POST {PATH} HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n"));
            let piece = "x".repeat(100_000);
            assert!(open.try_write(format!("186A0\r\n{piece}\r\n")));
            request_rx.recv_timeout(PATIENCE).expect("it is under way");
            assert_eq!(stub.leases(), 1);
            let disconnected_at = Instant::now();
            drop(open);
            let closed = closed_rx.recv_timeout(PATIENCE).expect("the engine hears of it");
            until("its lease is given back", || stub.leases() == 0);
            closed - disconnected_at
        });
        assert!(delay < AT_ONCE, "{delay:?} after the client left");
    }
}

/// An engine whose accept queue is full, so that connecting hangs.
fn full() -> (TcpListener, Vec<TcpStream>) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
    let held = std::iter::from_fn(connect).take(64).collect();
    (listener, held)
}

#[test]
fn it_leaves_before_there_is_a_connection_and_the_dial_timeout_holds() {
    let _alone = lock_timed_tests();
    let (listener, _held) = full();
    let stub: StubProcess = stub_before(listener.local_addr().unwrap(), &["--proxy-dial-timeout=700ms"]);
    let relay = stub.relay();
    let delay = soon(|| {
        let open = relay.open(relay.request("POST", PATH, "", &chat(9)));
        until("it is under way", || stub.leases() == 1);
        let disconnected_at = Instant::now();
        drop(open);
        until("its lease is given back", || stub.leases() == 0);
        disconnected_at.elapsed()
    });
    assert!(delay < AT_ONCE, "{delay:?} after the client left");
    let asked = Instant::now();
    let answer = relay.post(PATH, &chat(9));
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (502, &"engine_unreachable".into()));
    assert!(asked.elapsed() >= Duration::from_millis(700));
}
