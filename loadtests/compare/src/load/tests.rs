use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::Instant,
};

use super::*;

async fn engine() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(engine_sim::fast::serve(listener, "m"));
    address
}

/// How a relay damages an engine's output.
#[derive(Clone, Copy, PartialEq)]
enum RelayDamage {
    /// Splits it into pieces of a few bytes, which does no damage.
    Pieces,
    /// Flips one bit of one byte deep inside.
    Flip,
    /// Swaps two events.
    Swap,
    /// Drops an event.
    Drop,
    /// Duplicates an event.
    Double,
    /// Closes the connection early.
    Cut,
}

/// A TCP proxy that applies `harm` to the second event, or to the only response.
async fn relay(engine: SocketAddr, harm: RelayDamage) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let upstream = TcpStream::connect(engine).await.unwrap();
                let (mut from, mut to) = upstream.into_split();
                let (mut asks, mut answers) = client.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut asks, &mut to).await });
                // A whole short stream, or one response.
                let mut text = Vec::new();
                while !whole(&text) && matches!(from.read_buf(&mut text).await, Ok(1..)) {}
                for piece in harmed(text, harm).chunks(if harm == RelayDamage::Pieces { 7 } else { 1 << 20 })
                {
                    answers.write_all(piece).await.ok();
                    tokio::task::yield_now().await;
                }
                answers.shutdown().await.ok();
            });
        }
    });
    address
}

fn whole(text: &[u8]) -> bool {
    let head = memchr::memmem::find(text, b"\r\n\r\n").map(|at| at + 4);
    let length = memchr::memmem::find(text, b"content-length").and(head);
    length.is_some_and(|head| text.len() == head + engine_sim::fast::wire::ANSWER_BYTES)
        || text.ends_with(b"\r\n0\r\n\r\n")
}

fn harmed(mut text: Vec<u8>, harm: RelayDamage) -> Vec<u8> {
    const FRAME: usize = b"e2\r\n".len() + engine_sim::fast::wire::EVENT_BYTES + b"\r\n".len();
    let head = memchr::memmem::find(&text, b"\r\n\r\n").unwrap() + 4;
    let second = head + FRAME;
    match harm {
        RelayDamage::Pieces => {}
        RelayDamage::Flip => text[second + 200] ^= 4,
        RelayDamage::Swap => text[second..second + 2 * FRAME].rotate_left(FRAME),
        RelayDamage::Drop => drop(text.drain(second..second + FRAME)),
        RelayDamage::Double => {
            let event = text[second..second + FRAME].to_vec();
            text.splice(second..second, event);
        }
        RelayDamage::Cut => text.truncate(second + 100),
    }
    text
}

fn some_streams(proxy: SocketAddr) -> StreamLoad {
    StreamLoad {
        opened_per_second: MAX_OPENED_PER_SECOND,
        proxy,
        model: "m".into(),
        key: "k".into(),
        streams: 20,
        interval: Duration::from_millis(2),
        events: 10,
        check: ResponseCheck::Bytes,
    }
}

fn some_requests(proxy: SocketAddr) -> RequestLoad {
    RequestLoad {
        proxy,
        model: "m".into(),
        key: "k".into(),
        connections: 4,
        body: 1024,
        engine_time: Duration::ZERO,
        pace: RequestPace::Closed,
        duration: Duration::from_millis(200),
        check: ResponseCheck::Bytes,
    }
}

#[tokio::test]
async fn streams_come_whole_and_are_timed() {
    let engine = engine().await;
    for (interval, events) in [(Duration::from_millis(5), 20), (Duration::ZERO, 500)] {
        let load = StreamLoad { interval, events, ..some_streams(engine) };
        let result = streams(&load).await.unwrap();
        assert_eq!((result.errors, result.corrupted, result.first_error), (0, 0, None));
        assert_eq!(
            (result.units, result.latency.len(), result.lag.len()),
            (20 * u64::from(events), 20, result.units)
        );
        assert!(result.wall >= interval * (events - 1));
    }
}

#[tokio::test]
async fn harmless_relays_are_not_complained_of() {
    let relay = relay(engine().await, RelayDamage::Pieces).await;
    for check in [ResponseCheck::Bytes, ResponseCheck::Content] {
        let result = streams(&StreamLoad { check, ..some_streams(relay) }).await.unwrap();
        assert_eq!((result.units, result.errors, result.corrupted, result.first_error), (200, 0, 0, None));
    }
}

#[tokio::test]
async fn whatever_a_relay_does_to_events_is_noticed() {
    let engine = engine().await;
    // For each stream: the wrong events, and whether the stream also ended in an error.
    for (harm, wrong, broken) in [
        (RelayDamage::Flip, 1, 0),
        (RelayDamage::Swap, 3, 0),
        (RelayDamage::Drop, 1, 0),
        (RelayDamage::Double, 1, 0),
        (RelayDamage::Cut, 0, 1),
    ] {
        let result = streams(&some_streams(relay(engine, harm).await)).await.unwrap();
        let (corrupted, errors) = (result.corrupted, result.errors);
        assert!(
            corrupted >= 20 * wrong && errors >= 20 * broken,
            "{corrupted} {errors} {:?}",
            result.first_error
        );
        assert!(result.first_error.is_some());
    }
}

#[tokio::test]
async fn requests_are_answered_and_counted() {
    let result = requests(&some_requests(engine().await)).await.unwrap();
    assert_eq!((result.errors, result.corrupted, result.first_error), (0, 0, None));
    assert!(result.units > 0 && result.latency.len() == result.units);
}

#[tokio::test]
async fn a_changed_or_cut_answer_is_noticed() {
    let engine = engine().await;
    let result = requests(&some_requests(relay(engine, RelayDamage::Flip).await)).await.unwrap();
    assert!(result.corrupted > 0 && result.corrupted == result.units, "{result:?}");
    let result = requests(&some_requests(relay(engine, RelayDamage::Cut).await)).await.unwrap();
    assert!(result.errors > 0 && result.units == 0, "{result:?}");
}

#[tokio::test]
async fn a_request_has_a_body_of_the_wanted_size() {
    let load = RequestLoad { body: 1024, ..some_requests(engine().await) };
    let json: serde_json::Value = serde_json::from_str(&load.json()).unwrap();
    assert_eq!((load.json().len(), json["stream"].as_bool()), (1024, Some(false)));
    // Fields alone take more than this.
    let short = RequestLoad { body: 10, ..load };
    assert!(serde_json::from_str::<serde_json::Value>(&short.json()).is_ok());
}

#[tokio::test]
async fn each_idle_connection_is_open_after_one_response() {
    let (engine, open) = (engine().await, Arc::new(AtomicUsize::new(0)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = listener.local_addr().unwrap();
    let counted = Arc::clone(&open);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut upstream = TcpStream::connect(engine).await.unwrap();
                counted.fetch_add(1, Relaxed);
                tokio::io::copy_bidirectional(&mut client, &mut upstream).await.ok();
                counted.fetch_sub(1, Relaxed);
            });
        }
    });
    let load = RequestLoad { connections: 20, ..some_requests(proxy) };
    let idle = IdleConnections::open(&load).await.unwrap();
    assert_eq!((idle.count(), open.load(Relaxed)), (20, 20));
    drop(idle);
    while open.load(Relaxed) > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_wrong_response_is_no_idle_connection() {
    let engine = engine().await;
    for (harm, reason) in
        [(RelayDamage::Flip, "is not the engine's"), (RelayDamage::Cut, "ended in the middle")]
    {
        let load = some_requests(relay(engine, harm).await);
        let error = IdleConnections::open(&load).await.err().unwrap().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[tokio::test]
async fn an_open_load_keeps_its_schedule_through_slow_answers() {
    let engine_time = Duration::from_millis(100);
    let load = RequestLoad {
        connections: 60,
        body: 220_000,
        engine_time,
        pace: RequestPace::Open { per_second: 200.0 },
        duration: Duration::from_millis(500),
        ..some_requests(engine().await)
    };
    let began = Instant::now();
    let result = requests(&load).await.unwrap();
    assert_eq!((result.units, result.errors, result.corrupted), (100, 0, 0));
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(result.latency.min() >= 99_000, "{}", result.latency.min());
}

/// One connection cannot keep the schedule, so later requests wait longer.
#[tokio::test]
async fn what_could_not_be_sent_in_time_has_waited() {
    let load = RequestLoad {
        connections: 1,
        engine_time: Duration::from_millis(50),
        pace: RequestPace::Open { per_second: 100.0 },
        duration: Duration::from_millis(200),
        ..some_requests(engine().await)
    };
    let result = requests(&load).await.unwrap();
    assert_eq!(result.units, 20);
    // The last request was due at 190 ms and answered at 1 s.
    assert!(result.latency.max() > 700_000, "{}", result.latency.max());
}

#[tokio::test]
async fn refusals_and_closed_ports_are_errors() {
    let served = Arc::new(AtomicUsize::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let counted = Arc::clone(&served);
    let refusing = tokio::spawn(async move {
        while let Ok((mut io, _)) = listener.accept().await {
            io.read_buf(&mut Vec::with_capacity(4096)).await.ok();
            io.write_all(b"HTTP/1.1 429 Too Many\r\ncontent-length: 0\r\n\r\n").await.ok();
            counted.fetch_add(1, Relaxed);
        }
    });
    let result = requests(&some_requests(address)).await.unwrap();
    assert_eq!((result.units, result.first_error.as_deref()), (0, Some("status 429")));
    // The worker pauses after each refusal.
    assert!((1..500).contains(&result.errors) && served.load(Relaxed) as u64 >= result.errors);
    refusing.abort();
    assert!(refusing.await.unwrap_err().is_cancelled());
    let result = streams(&some_streams(address)).await.unwrap();
    assert_eq!((result.units, result.errors), (0, 20));
}

#[tokio::test]
async fn load_stays_on_this_machine_and_within_bounds() {
    let away: SocketAddr = "192.0.2.1:80".parse().unwrap();
    assert!(requests(&some_requests(away)).await.is_err());
    assert!(streams(&some_streams(away)).await.is_err());
    let here = engine().await;
    assert!(
        requests(&RequestLoad { duration: Duration::from_hours(48), ..some_requests(here) }).await.is_err()
    );
    assert!(requests(&RequestLoad { connections: 0, ..some_requests(here) }).await.is_err());
    assert!(streams(&StreamLoad { streams: 1_000_000, ..some_streams(here) }).await.is_err());
}
