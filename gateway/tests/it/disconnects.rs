//! Ten thousand clients disconnect at any moment: nothing is left of them, and an engine ends their work at once.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use rouse_testing::random::TestRng;
use tokio::time::Instant;

use crate::{
    live::{EngineUnderTest, UNLIMITED_CONNECTIONS},
    support::{
        GatewayFixture, GatewayProcess, SimModel, TestClient,
        client::{chat_body, request},
        pause,
    },
};

/// How many clients leave, and how many are connected at a time.
const CLIENTS: usize = 10_000;
const CROWD: usize = 48;
/// The engines on which this test times aborts, one client at a time on each, and the aborts per engine.
pub(crate) const TIMED_MODELS: [&str; 2] = ["timed-0", "timed-1"];
const ABORTS: usize = 100;
/// How many clients connect and leave during the timed aborts, and how long each of them stays away. An abort passes
/// through three processes, and each needs one of the machine's cores. A crowd that wants all cores would make a queue
/// for cores, which this test does not time.
const OTHERS: u64 = 8;
const AWAY: Duration = Duration::from_millis(20);
/// Other processes on this machine can delay an abort, and nothing makes an abort early, so one of this many tries must
/// meet the bound.
pub(crate) const MAX_TRIES: usize = 5;
/// For the work of another process on a machine that may be busy.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);
const SEED: u64 = 0x5eed_2026;

#[test]
fn nothing_is_left_of_ten_thousand_clients_that_left() {
    let _alone = crate::lock_timed_tests();
    let mut fixture = GatewayFixture::new(&["8Gi", "8Gi"])
        .settings(UNLIMITED_CONNECTIONS)
        .model(&SimModel { flags: "--itl 20ms", ..SimModel::new("m") })
        .model(&SimModel { flags: "--start-time 5m", ..SimModel::new("parks") });
    for name in TIMED_MODELS {
        fixture = fixture.model(&SimModel { flags: "--itl 20ms", ..SimModel::new(name) });
    }
    let gateway = fixture.start();
    for name in TIMED_MODELS.into_iter().chain(["m"]) {
        assert!(gateway.client().chat(name, true, 4).is_whole_stream());
    }
    // The engine of this model starts for as long as this test runs.
    let first = gateway.client().open_chat("parks", true, 4);
    gateway.until("launching", TEST_TIMEOUT, || gateway.engine("parks#0")["state"] == "Loading");
    drop(first);
    until_settled(&gateway, usize::MAX);
    let before = descriptors(&gateway);

    let (began, left) = (Instant::now(), AtomicUsize::new(0));
    thread::scope(|scope| {
        for crowd in 0..CROWD {
            let (left, client) = (&left, gateway.client());
            let mut chance = TestRng(SEED + crowd as u64);
            scope.spawn(move || {
                while left.fetch_add(1, Relaxed) < CLIENTS {
                    leave(&client, &mut chance);
                }
            });
        }
    });
    println!("{CLIENTS} clients left within {:?}", began.elapsed());
    aborts_arrive_in_time(|chance| leave(&gateway.client(), chance), |name| timed(&gateway, name));
    until_settled(&gateway, before);
    let engine = EngineUnderTest::of(&gateway, "m#0").counters();
    println!(
        "engine: {} of {} requests aborted; {} malformed",
        engine["aborts"], engine["total"], engine["malformed"]
    );
    assert_eq!(engine["malformed"], 0);
    assert_left_in_phases(&gateway);
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
}

/// Clients left in every phase that lasts, and engines got aborts. Otherwise the test has shown nothing about what
/// disconnects leave behind.
pub(crate) fn assert_left_in_phases(gateway: &GatewayProcess) {
    let metrics = gateway.admin().get("/metrics").text();
    for phase in ["parked", "connecting", "headers", "streaming"] {
        let of_phase = metrics.lines().filter(|line| {
            line.starts_with("rouse_client_disconnects_total") && line.contains(&format!("phase=\"{phase}\""))
        });
        let left: u64 = of_phase.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
        println!("{left} left while {phase}");
        // The engine answers within a millisecond, so few clients leave before its response head.
        assert!(left > 50 || phase == "headers", "{left} left while {phase}");
    }
    assert!(EngineUnderTest::of(gateway, "m#0").counters()["aborts"].as_u64().unwrap() > 50);
}

/// Bound for the 99th percentile of aborts, in microseconds.
pub(crate) const MAX_ABORT_DELAY_US: u64 = 50_000;

/// 99 of 100 aborts arrive within 50 ms while other clients connect and leave. `aborts` returns, for one engine, the
/// microseconds from each client's close to its abort.
fn aborts_arrive_in_time(others: impl Fn(&mut TestRng) + Sync, aborts: impl Fn(&str) -> Vec<u64> + Sync) {
    let late = |_| print_quantiles("aborts", while_others_disconnect(&others, &aborts)).1;
    let late: Vec<u64> = (0..MAX_TRIES).map(late).take_while(|late| *late > MAX_ABORT_DELAY_US).collect();
    assert!(late.len() < MAX_TRIES, "p99 of each try: {late:?} µs");
}

/// Collects the results of `aborts` for each timed engine while other clients connect and leave.
pub(crate) fn while_others_disconnect<T: Send>(
    others: impl Fn(&mut TestRng) + Sync,
    aborts: impl Fn(&str) -> Vec<T> + Sync,
) -> Vec<T> {
    let going = AtomicBool::new(true);
    thread::scope(|scope| {
        for other in 0..OTHERS {
            let (others, going) = (&others, &going);
            let mut chance = TestRng(SEED ^ other);
            scope.spawn(move || {
                while going.load(Relaxed) {
                    others(&mut chance);
                    pause(AWAY);
                }
            });
        }
        let aborts = &aborts;
        let timers = TIMED_MODELS.map(|name| scope.spawn(move || aborts(name)));
        let ended = timers.map(|timer| timer.join());
        going.store(false, Relaxed);
        ended.into_iter().flat_map(Result::unwrap).collect()
    })
}

/// Runs one client with a random phase, a random moment in that phase, and a random way to leave.
fn leave(client: &TestClient, chance: &mut TestRng) {
    let stray = if chance.below(2) == 0 { "\r\n" } else { "" };
    let stream = chance.below(3) > 0;
    let model = if chance.below(5) == 0 { "parks" } else { "m" };
    let text =
        request("/v1/chat/completions", "", &chat_body(model, stream, 1 + chance.below(400) as u32)) + stray;
    let phase = chance.below(5);
    // Leaves before the body, or even the head, is complete.
    let sent = if phase == 0 { 1 + chance.below(text.len() as u64 - 3) as usize } else { text.len() };
    let mut socket = client.connect();
    socket.write_all(text.get(..sent).unwrap().as_bytes()).unwrap();
    match phase {
        0 => {}
        // Parked, connecting, waiting for the head, or just streaming, by chance.
        1 | 2 => pause(Duration::from_micros(chance.below(8_000))),
        // After a part of the answer, if the gateway sends one.
        _ => {
            socket.set_read_timeout(Some(Duration::from_millis(1 + chance.below(60)))).unwrap();
            // The answer may end, or not begin, before the client leaves: that moment is a case, too.
            socket.read(&mut [0; 512]).unwrap_or_default();
        }
    }
    if chance.below(2) == 0 {
        reset_on_close(&socket);
    } else if chance.below(4) == 0 {
        // The client closes its write half first: the gateway takes a client's end of stream for a disconnect.
        socket.shutdown(Shutdown::Write).unwrap_or_default();
        pause(Duration::from_millis(1));
    }
}

/// Runs clients one after the other on an engine without other clients, and returns the microseconds from each close to
/// its abort.
fn timed(gateway: &GatewayProcess, model: &str) -> Vec<u64> {
    let engine = EngineUnderTest::of(gateway, &format!("{model}#0"));
    let mut chance = TestRng(SEED ^ engine.pid as u64);
    let mut delays = Vec::new();
    for _ in 0..ABORTS {
        let before = engine.counters();
        let streaming = chance.below(2) == 0;
        let stray = if chance.below(2) == 0 { "\r\n" } else { "" };
        let text = request("/v1/chat/completions", "", &chat_body(model, streaming, 10_000)) + stray;
        let mut open = gateway.client().open(text);
        if streaming {
            open.until("data: ");
        } else {
            gateway.until("it runs", TEST_TIMEOUT, || engine.counters()["running"] == 1);
        }
        if chance.below(2) == 0 {
            reset_on_close(open.socket());
        }
        let closed = engine_sim_now();
        drop(open);
        let aborts = before["aborts"].as_u64().unwrap() + 1;
        gateway.until("aborted", TEST_TIMEOUT, || engine.counters()["aborts"] == aborts);
        let aborted = engine.counters()["last_abort_unix_us"].as_u64().unwrap();
        delays.push(aborted.saturating_sub(closed));
    }
    delays
}

/// Prints and returns the median and the 99th percentile.
pub(crate) fn print_quantiles(what: &str, mut delays: Vec<u64>) -> (u64, u64) {
    delays.sort_unstable();
    let at = |share: f64| delays.get((delays.len() as f64 * share) as usize).copied().unwrap_or(u64::MAX);
    let (median, late, worst) = (at(0.5), at(0.99), delays.last().copied().unwrap_or(u64::MAX));
    println!("{} {what} timed: median {median} µs, p99 {late} µs, worst {worst} µs", delays.len());
    (median, late)
}

/// Waits for no lease, no waiter, no request on any engine, and at most this many descriptors.
pub(crate) fn until_settled(gateway: &GatewayProcess, descriptors_before: usize) {
    gateway.until("no lease and no waiter", TEST_TIMEOUT, || {
        let fleet = gateway.fleet();
        let models = fleet["models"].as_array().unwrap();
        models.iter().all(|m| m["leases"] == 0 && m["waiting"] == 0)
    });
    for id in ["m#0", "timed-0#0", "timed-1#0"] {
        let engine = EngineUnderTest::of(gateway, id);
        gateway.until("no request", TEST_TIMEOUT, || {
            let counters = engine.counters();
            counters["running"] == 0 && counters["waiting"] == 0
        });
    }
    gateway.until("descriptors are back", TEST_TIMEOUT, || descriptors(gateway) <= descriptors_before);
}

pub(crate) fn descriptors(gateway: &GatewayProcess) -> usize {
    fs::read_dir(format!("/proc/{}/fd", gateway.pid())).unwrap().count()
}

/// Makes the close of this socket discard unsent bytes and reset the connection.
pub(crate) fn reset_on_close(socket: &TcpStream) {
    socket2::SockRef::from(socket).set_linger(Some(Duration::ZERO)).unwrap();
}

#[expect(clippy::disallowed_methods, reason = "held against another process's wall time")]
pub(crate) fn engine_sim_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}
