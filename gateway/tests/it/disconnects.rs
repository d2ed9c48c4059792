//! Ten thousand clients that leave, at whatever moment: nothing may be left of them anywhere, and what an engine did
//! for them ends at once.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    live::{ALL_FROM_HERE, Engine, Open},
    support::{
        Client, Fixture, Gateway, Sim,
        client::{chat_body, request},
        pause, row,
        threads::Threads,
    },
};

/// How many leave, and how many are there at a time.
const CLIENTS: usize = 10_000;
const CROWD: usize = 48;
/// Those of the crowd whose aborts are timed, each on an engine of its own; and how many aborts of each at least. They
/// ask the engine for its numbers in between, so on a busy machine the crowd is done long before them: it goes on until
/// they have enough, for so many clients at most.
const TIMED: usize = 2;
const ENOUGH: usize = 75;
const MOST: usize = 5 * CLIENTS;
/// For what another process does in its own time, on a machine that may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const SEED: u64 = 0x5eed_2026;

#[test]
fn nothing_is_left_of_ten_thousand_clients_that_left() {
    let _alone = crate::alone();
    let names: Vec<String> = (0..TIMED).map(|n| format!("timed-{n}")).collect();
    let mut fixture = Fixture::new(&["8Gi", "8Gi"])
        .settings(ALL_FROM_HERE)
        .model(&Sim { flags: "--itl 20ms", ..Sim::new("m") })
        .model(&Sim { flags: "--start-time 5m", ..Sim::new("parks") });
    for name in &names {
        fixture = fixture.model(&Sim { flags: "--itl 20ms", ..Sim::new(name) });
    }
    let gateway = fixture.start();
    for name in names.iter().map(String::as_str).chain(["m"]) {
        assert!(gateway.client().chat(name, true, 4).is_whole_stream());
    }
    // Its engine starts for as long as this test takes.
    let first = Open::chat(&gateway.client(), "parks", true, 4);
    gateway.until("launching", PATIENCE, || gateway.engine("parks#0")["state"] == "Loading");
    drop(first);
    settled(&gateway, usize::MAX);
    let before = descriptors(&gateway);

    let began = Instant::now();
    let (left, timing, storm) = (AtomicUsize::new(0), AtomicUsize::new(TIMED), Storm::default());
    let delays = thread::scope(|scope| {
        for crowd in 0..CROWD - TIMED {
            let (left, timing, storm, client) = (&left, &timing, &storm, gateway.client());
            let mut chance = Chance(SEED + crowd as u64);
            scope.spawn(move || {
                let most = || if timing.load(Relaxed) > 0 { MOST } else { CLIENTS };
                while left.fetch_add(1, Relaxed) < most() {
                    leave(&client, &mut chance, storm);
                }
            });
        }
        let timers: Vec<_> = names
            .iter()
            .map(|name| {
                let (left, timing, storm, gateway) = (&left, &timing, &storm, &gateway);
                scope.spawn(move || timed(gateway, name, left, timing, storm))
            })
            .collect();
        timers.into_iter().flat_map(|timer| timer.join().unwrap()).collect::<Vec<_>>()
    });
    println!("{} clients left within {:?}", left.load(Relaxed), began.elapsed());
    settled(&gateway, before);
    let engine = Engine::of(&gateway, "m#0").counters();
    println!(
        "engine: {} of {} requests aborted; {} malformed",
        engine["aborts"], engine["total"], engine["malformed"]
    );
    assert_eq!(engine["malformed"], 0);
    left_in_phases(&gateway);
    report(delays);
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
}

/// Clients left in every phase that lasts, and engines were told: else nothing was shown of what is left of them.
pub(crate) fn left_in_phases(gateway: &Gateway) {
    let metrics = gateway.admin().get("/metrics").text();
    for phase in ["parked", "connecting", "headers", "streaming"] {
        let of_phase = metrics.lines().filter(|line| {
            line.starts_with("rouse_client_disconnects_total") && line.contains(&format!("phase=\"{phase}\""))
        });
        let left: u64 = of_phase.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
        println!("{left} left while {phase}");
        // The engine answers within a millisecond, so few are met before its head.
        assert!(left > 50 || phase == "headers", "{left} left while {phase}");
    }
    assert!(Engine::of(gateway, "m#0").counters()["aborts"].as_u64().unwrap() > 50);
}

/// The crowd as it comes and goes, which can be stopped for a moment: whoever is there stays, and those who stream are
/// served.
///
/// An abort goes through several processes, each of which has to get one of the machine's cores, and fifty threads of this test
/// want them at the same time: with the crowd on two cores the slowest abort in a hundred took 45 to 125 ms, of which all but
/// 18 ms were waited for a core. So half of the aborts are timed beside all who are there, but while nobody comes or goes. From
/// the others is taken what the gateway's and the engine's threads waited for a core, which alone would not do: on a full
/// machine some thread waits nearly always. In a row, where a stub waits as well, all are timed in such a calm.
#[derive(Default)]
struct Storm(RwLock<()>);

impl Storm {
    fn blows(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One client: a phase, a moment in it, a way to leave.
fn leave(client: &Client, chance: &mut Chance, storm: &Storm) {
    let stray = if chance.of(2) == 0 { "\r\n" } else { "" };
    let stream = chance.of(3) > 0;
    let model = if chance.of(5) == 0 { "parks" } else { "m" };
    let text =
        request("/v1/chat/completions", "", &chat_body(model, stream, 1 + chance.of(400) as u32)) + stray;
    let phase = chance.of(5);
    // Before the body, or even the head, is whole.
    let sent = if phase == 0 { 1 + chance.of(text.len() as u64 - 3) as usize } else { text.len() };
    let comes = storm.blows();
    let mut socket = client.connect();
    socket.write_all(text.get(..sent).unwrap().as_bytes()).unwrap();
    drop(comes);
    match phase {
        0 => {}
        // Parked, connecting, waiting for the head, or just streaming, as chance has it.
        1 | 2 => pause(Duration::from_micros(chance.of(8_000))),
        // After some of the answer, where there will be one.
        _ => {
            socket.set_read_timeout(Some(Duration::from_millis(1 + chance.of(60)))).unwrap();
            // It may end, or not begin, before we leave: that is a moment, too.
            socket.read(&mut [0; 512]).unwrap_or_default();
        }
    }
    let _goes = storm.blows();
    if chance.of(2) == 0 {
        reset_on_close(&socket);
    } else if chance.of(4) == 0 {
        // Half of it first: a client's end of stream means that it left.
        socket.shutdown(Shutdown::Write).unwrap_or_default();
        pause(Duration::from_millis(1));
    }
    // Closed before the guard goes.
    drop(socket);
}

/// Clients of an engine that nobody else uses, one after the other: microseconds from each one's close to its abort, amid the
/// storm without those that a core was waited for.
fn timed(
    gateway: &Gateway,
    model: &str,
    left: &AtomicUsize,
    timing: &AtomicUsize,
    storm: &Storm,
) -> Vec<u64> {
    let engine = Engine::of(gateway, &format!("{model}#0"));
    let mut chance = Chance(SEED ^ engine.pid as u64);
    let mut delays = Vec::new();
    while delays.len() < ENOUGH || left.load(Relaxed) < CLIENTS {
        left.fetch_add(1, Relaxed);
        let before = engine.counters();
        let streaming = chance.of(2) == 0;
        let stray = if chance.of(2) == 0 { "\r\n" } else { "" };
        let text = request("/v1/chat/completions", "", &chat_body(model, streaming, 10_000)) + stray;
        let mut open = Open::raw(&gateway.client(), &text);
        if streaming {
            open = open.until("data: ");
        } else {
            gateway.until("it runs", PATIENCE, || engine.counters()["running"] == 1);
        }
        if chance.of(2) == 0 {
            reset_on_close(open.socket());
        }
        let held = (row::is_asked() || chance.of(2) == 0).then(|| storm.held());
        if held.is_some() {
            // It goes the same way, behind what is still to be done for those who left last.
            assert!(gateway.client().chat(model, true, 1).is_whole_stream());
        }
        let earlier = [gateway.pid(), engine.pid].map(|pid| (pid, Threads::of(pid)));
        let closed = engine_sim_now();
        drop(open);
        let aborts = before["aborts"].as_u64().unwrap() + 1;
        gateway.until("aborted", PATIENCE, || engine.counters()["aborts"] == aborts);
        let aborted = engine.counters()["last_abort_unix_us"].as_u64().unwrap();
        let mut delay = Duration::from_micros(aborted.saturating_sub(closed));
        if held.is_none() {
            let waited = earlier.iter().map(|(pid, earlier)| Threads::of(*pid).waited_since(earlier)).sum();
            delay = delay.saturating_sub(waited);
        }
        drop(held);
        delays.push(u64::try_from(delay.as_micros()).unwrap());
        if delays.len() == ENOUGH {
            timing.fetch_sub(1, Relaxed);
        }
    }
    delays
}

/// Aborts arrive within 50 ms, but for one in a hundred.
fn report(delays: Vec<u64>) {
    assert!(delays.len() >= TIMED * ENOUGH);
    let (_, late) = printed(delays);
    assert!(late <= 50_000, "p99 {late} µs");
}

/// Median and p99.
pub(crate) fn printed(mut delays: Vec<u64>) -> (u64, u64) {
    delays.sort_unstable();
    let at = |share: f64| delays.get((delays.len() as f64 * share) as usize).copied().unwrap_or(u64::MAX);
    let (median, late, worst) = (at(0.5), at(0.99), delays.last().copied().unwrap_or(u64::MAX));
    println!("{} aborts timed: median {median} µs, p99 {late} µs, worst {worst} µs", delays.len());
    (median, late)
}

/// No lease, no waiter, no request of any engine, and no more descriptors than there may be.
pub(crate) fn settled(gateway: &Gateway, descriptors_before: usize) {
    gateway.until("no lease and no waiter", PATIENCE, || {
        let fleet = gateway.fleet();
        let models = fleet["models"].as_array().unwrap();
        models.iter().all(|m| m["leases"] == 0 && m["waiting"] == 0)
    });
    for id in ["m#0", "timed-0#0", "timed-1#0"] {
        let engine = Engine::of(gateway, id);
        gateway.until("no request", PATIENCE, || {
            let counters = engine.counters();
            counters["running"] == 0 && counters["waiting"] == 0
        });
    }
    gateway.until("descriptors are back", PATIENCE, || descriptors(gateway) <= descriptors_before);
}

pub(crate) fn descriptors(gateway: &Gateway) -> usize {
    fs::read_dir(format!("/proc/{}/fd", gateway.pid())).unwrap().count()
}

/// The close of this socket throws away what is unsent and resets the connection.
pub(crate) fn reset_on_close(socket: &TcpStream) {
    socket2::SockRef::from(socket).set_linger(Some(Duration::ZERO)).unwrap();
}

#[expect(clippy::disallowed_methods, reason = "held against another process's wall time")]
pub(crate) fn engine_sim_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

/// The same numbers from the same seed (splitmix64).
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn of(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}
