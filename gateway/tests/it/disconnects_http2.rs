//! HTTP/2 clients that end a stream or a connection, in the clear and under TLS: nothing is left of them, and an engine
//! ends their work at once.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use rouse_testing::random::TestRng;
use rustls::ClientConfig;
use tokio::time::Instant;

use crate::{
    disconnects::{
        MAX_ABORT_DELAY_US, MAX_TRIES, TEST_TIMEOUT, TIMED_MODELS, assert_left_in_phases, descriptors,
        engine_sim_now, print_quantiles, reset_on_close, until_settled, while_others_disconnect,
    },
    live::{EngineUnderTest, UNLIMITED_CONNECTIONS},
    support::{
        GatewayFixture, GatewayProcess, SimModel,
        client::chat_body,
        frames::{
            self, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, POST, RST_STREAM, frame, header_block,
        },
        pause,
        tls::{BlockingTlsStream, CertificateAuthority, connect_tls},
    },
};

/// How many connections, and how many at a time. Each connection has up to eight streams.
const CONNECTIONS: usize = 1_500;
const CROWD: usize = 8;
/// Timed aborts per round, on each of two engines.
const ABORTS: usize = 100;
const SEED: u64 = 0x5eed_0002;

/// A connection in the clear or under TLS.
enum PlainOrTlsStream {
    Plain(TcpStream),
    Tls(Box<BlockingTlsStream>),
}

impl PlainOrTlsStream {
    fn connect(gateway: &GatewayProcess, tls: Option<&Arc<ClientConfig>>) -> Self {
        let mut wire = match tls {
            None => Self::Plain(gateway.client().connect()),
            Some(client) => Self::Tls(Box::new(connect_tls(gateway.api, client))),
        };
        // The gateway may close the connection before this client has written.
        drop(frames::write(&mut wire, &frames::preface_and_settings(&[])));
        wire
    }

    fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &stream.sock,
        }
    }

    /// Sends TLS's close_notify.
    fn notify(&mut self) {
        if let Self::Tls(stream) = self {
            stream.conn.send_close_notify();
            drop(stream.flush());
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        drop(frames::write(self, bytes));
    }
}

impl Read for PlainOrTlsStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(bytes),
            Self::Tls(stream) => stream.read(bytes),
        }
    }
}

impl Write for PlainOrTlsStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

#[test]
fn nothing_is_left_of_clients_that_left_in_the_clear() {
    let _alone = crate::lock_timed_tests();
    let fixture = GatewayFixture::new(&["8Gi", "8Gi"]);
    nothing_is_left(fixture, None);
}

#[test]
fn nothing_is_left_of_clients_that_left_under_tls() {
    let _alone = crate::lock_timed_tests();
    let fixture = GatewayFixture::new(&["8Gi", "8Gi"]);
    let authority = CertificateAuthority::new(fixture.dir());
    authority.issue("server");
    let settings = authority.settings("");
    nothing_is_left(fixture.settings(&settings), Some(authority.client(&["h2"], None)));
}

fn nothing_is_left(fixture: GatewayFixture, tls: Option<Arc<ClientConfig>>) {
    let engine = |name| SimModel { flags: "--itl 20ms", ..SimModel::new(name) };
    let gateway = fixture
        .settings(UNLIMITED_CONNECTIONS)
        .model(&engine("m"))
        .model(&engine(TIMED_MODELS[0]))
        .model(&engine(TIMED_MODELS[1]))
        .model(&SimModel { flags: "--start-time 5m", ..SimModel::new("parks") })
        .start();
    for name in TIMED_MODELS.into_iter().chain(["m"]) {
        gateway.wake_by_admin(name);
    }
    assert_eq!(gateway.admin().post("/admin/v1/models/parks/wake", "").status, 202);
    gateway.until("launching", TEST_TIMEOUT, || gateway.engine("parks#0")["state"] == "Loading");
    drop(PlainOrTlsStream::connect(&gateway, tls.as_ref()));
    until_settled(&gateway, usize::MAX);
    let before = descriptors(&gateway);

    let (begun, left, streams) = (Instant::now(), AtomicUsize::new(0), AtomicUsize::new(0));
    let delays = thread::scope(|scope| {
        for crowd in 0..CROWD {
            let (left, streams, gateway, tls) = (&left, &streams, &gateway, tls.as_ref());
            let mut chance = TestRng(SEED + crowd as u64);
            scope.spawn(move || {
                while left.fetch_add(1, Relaxed) < CONNECTIONS {
                    streams.fetch_add(leave(gateway, tls, &mut chance), Relaxed);
                }
            });
        }
        let timers = TIMED_MODELS.map(|name| {
            let (gateway, tls) = (&gateway, tls.as_ref());
            scope.spawn(move || timed(gateway, tls, name))
        });
        timers.into_iter().flat_map(|timer| timer.join().unwrap()).collect::<Vec<_>>()
    });
    println!(
        "{} streams of {CONNECTIONS} connections left within {:?}",
        streams.into_inner(),
        begun.elapsed()
    );
    // The crowd takes all cores, so the latest of these aborts only show how long they wait for a core.
    let (median, _) = print_quantiles("aborts", delays.into_iter().map(|(abort, _)| abort).collect());
    assert!(median <= MAX_ABORT_DELAY_US, "median {median} µs");
    aborts_arrive_in_time(&gateway, tls.as_ref());
    until_settled(&gateway, before);
    assert_eq!(EngineUnderTest::of(&gateway, "m#0").counters()["malformed"], 0);
    assert_left_in_phases(&gateway);
}

/// 99 of 100 aborts arrive within 50 ms while other clients connect and leave. Where the machine gives no core for
/// that, the bound is the time of an exchange beside them: an exchange passes through the same processes, there and
/// back.
fn aborts_arrive_in_time(gateway: &GatewayProcess, tls: Option<&Arc<ClientConfig>>) {
    let others = |chance: &mut TestRng| {
        leave(gateway, tls, chance);
    };
    let late = |_| {
        let (aborts, exchanges) =
            while_others_disconnect(others, |name| timed(gateway, tls, name)).into_iter().unzip();
        (print_quantiles("aborts", aborts).1, print_quantiles("exchanges", exchanges).1)
    };
    let is_late = |(abort, exchange): &(u64, u64)| *abort > MAX_ABORT_DELAY_US.max(*exchange);
    let late: Vec<_> = (0..MAX_TRIES).map(late).take_while(is_late).collect();
    assert!(late.len() < MAX_TRIES, "p99 of aborts and of exchanges in each try: {late:?} µs");
}

/// Opens one connection with some streams, ends each at its own moment, and then closes the connection with the
/// remaining ones. Returns the number of streams.
fn leave(gateway: &GatewayProcess, tls: Option<&Arc<ClientConfig>>, chance: &mut TestRng) -> usize {
    let mut wire = PlainOrTlsStream::connect(gateway, tls);
    let count = 1 + chance.below(8) as u32;
    for stream in (0..count).map(|n| 2 * n + 1) {
        let model = if chance.below(5) == 0 { "parks" } else { "m" };
        let body = chat_body(model, chance.below(3) > 0, 1 + chance.below(400) as u32);
        if chance.below(4) == 0 {
            // The body of this stream never ends.
            wire.send(&frame(HEADERS, END_HEADERS, stream, &header_block(&POST)));
            let some = chance.below(body.len() as u64) as usize;
            wire.send(&frame(DATA, 0, stream, body.get(..some).unwrap().as_bytes()));
        } else {
            wire.send(&frames::chat(stream, &body));
        }
        pause(Duration::from_micros(chance.below(3_000)));
        if chance.below(3) == 0 {
            wire.send(&frame(
                RST_STREAM,
                0,
                1 + 2 * chance.below(u64::from(stream / 2 + 1)) as u32,
                &8_u32.to_be_bytes(),
            ));
        }
    }
    if chance.below(2) == 0 {
        wire.socket().set_read_timeout(Some(Duration::from_millis(1 + chance.below(30)))).unwrap();
        wire.read(&mut [0; 2048]).unwrap_or_default();
    }
    match chance.below(6) {
        0 => reset_on_close(wire.socket()),
        1 => wire.send(&frame(GOAWAY, 0, 0, &[0; 8])),
        2 => wire.notify(),
        3 => {
            wire.socket().shutdown(Shutdown::Write).unwrap_or_default();
            pause(Duration::from_millis(1));
        }
        _ => {}
    }
    count as usize
}

/// Runs streams one after the other on an engine without other clients. Returns the microseconds from each stream's end
/// to its abort, and those of a short exchange just before.
fn timed(gateway: &GatewayProcess, tls: Option<&Arc<ClientConfig>>, model: &str) -> Vec<(u64, u64)> {
    let engine = EngineUnderTest::of(gateway, &format!("{model}#0"));
    let mut chance = TestRng(SEED ^ engine.pid as u64);
    let mut delays = Vec::new();
    for _ in 0..ABORTS {
        let before = engine.counters();
        let mut wire = PlainOrTlsStream::connect(gateway, tls);
        let exchange = exchange(&mut wire, model);
        wire.send(&frames::chat(3, &chat_body(model, chance.below(2) == 0, 10_000)));
        gateway.until("it runs", TEST_TIMEOUT, || engine.counters()["running"] == 1);
        let way = chance.below(3);
        let reset = frame(RST_STREAM, 0, 3, &8_u32.to_be_bytes());
        if way == 1 {
            reset_on_close(wire.socket());
        }
        let closed = engine_sim_now();
        // Ends the stream alone and keeps the connection, or closes the connection.
        let kept = if way == 0 {
            wire.send(&reset);
            Some(wire)
        } else {
            drop(wire);
            None
        };
        let aborts = before["aborts"].as_u64().unwrap() + 1;
        gateway.until("aborted", TEST_TIMEOUT, || engine.counters()["aborts"] == aborts);
        let aborted = engine.counters()["last_abort_unix_us"].as_u64().unwrap();
        delays.push((aborted.saturating_sub(closed), exchange));
        drop(kept);
    }
    delays
}

/// Times an answer of one token on the connection's first stream, in microseconds.
fn exchange(wire: &mut PlainOrTlsStream, model: &str) -> u64 {
    let begun = Instant::now();
    wire.send(&frames::chat(1, &chat_body(model, false, 1)));
    let mut ended = false;
    while !ended {
        let frame = frames::read_frame(wire).expect("the connection lasts");
        ended = frame.stream == 1 && frame.flags & END_STREAM != 0;
    }
    u64::try_from(begun.elapsed().as_micros()).unwrap()
}
