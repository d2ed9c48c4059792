//! Two hundred clients from a recorded trace, six models, room for four: the load that turns are made for.
//!
//! The trace is open-loop: a client sends each request at its time, whatever became of its earlier requests. A stall
//! therefore shows as waiting, and no polite client hides it. `sim::trace` describes how the trace was made, and
//! `sim::fcfs` computes what a gateway without turns would have done with it. By default the test plays the minute on
//! file; `ROUSE_SOAK_SECONDS` plays a longer trace made in the same way.

use std::{fmt, net::SocketAddr, path::Path, time::Duration};

use engine_sim::content;
use rouse::{
    sim::{
        fcfs,
        trace::{self, TraceArrival},
    },
    units::Millis,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};

use crate::support::{
    GatewayFixture, GatewayProcess, SimModel, TestResponse,
    client::{chat_body, request},
    read,
};

const MODELS: [&str; 6] = ["amber", "basil", "cedar", "dahlia", "elder", "fennel"];
/// Models that can be awake at once: two on each of two accelerators.
const PLACES: usize = 4;
const MAX_TURN: u64 = 3000;
const DRAIN_DEADLINE: u64 = 2000;
const SLEEP: u64 = 50;
const WAKE: u64 = 50;
const FIRST_TOKEN: u64 = 5;
/// Slow tokens keep the load on streams and waiting, not on writing events.
const NEXT_TOKEN: u64 = 25;
/// A request that is still open this long after the last arrival hangs.
const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn two_hundred_clients_wait_within_the_bound_and_swaps_are_few() {
    let arrivals = arrivals();
    let gateway = six_models_with_room_for_four();
    launch_all(&gateway);
    assert_eq!(placed(&gateway), [3, 3], "models crowd one accelerator while the other has room");
    let before = swaps(&gateway);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outcomes = runtime.block_on(play(gateway.api, &arrivals));
    let failed: Vec<&String> = outcomes.iter().filter_map(|o| o.as_ref().err()).collect();
    let mut waits: Vec<u64> = outcomes.iter().flatten().copied().collect();
    waits.sort_unstable();
    let theirs = fcfs::serve(&arrivals, PLACES, Millis(SLEEP + WAKE));
    let figures = Figures {
        requests: arrivals.len(),
        failed: failed.len(),
        out_of_memory: out_of_memory(&gateway.dir),
        launches: sum(&gateway, "rouse_transitions_total", "transition=\"launch\""),
        stops: sum(&gateway, "rouse_transitions_total", "transition=\"stop\""),
        median: waits.get(waits.len() / 2).copied().unwrap_or_default(),
        longest: waits.last().copied().unwrap_or_default(),
        bound: bound(),
        swaps: swaps(&gateway) - before,
        swaps_by_arrival: theirs.swaps,
        longest_by_arrival: theirs.longest_wait.0,
    };
    println!("{figures}");
    assert!(failed.is_empty(), "{figures}\nfirst failures: {:#?}", &failed[..failed.len().min(5)]);
    assert_eq!(figures.out_of_memory, 0, "{figures}");
    // The gateway may stop a sleeper to start its model where there is room already. No engine ends in any other way.
    assert_eq!(figures.launches - figures.stops, MODELS.len() as u64, "{figures}\nan engine ended by itself");
    assert!(figures.longest <= figures.bound, "{figures}\nsomebody waited too long");
    assert!(figures.swaps > 0, "{figures}\nthe models did not get in each other's way");
    assert!(figures.swaps * 5 <= figures.swaps_by_arrival, "{figures}\ntoo many swaps");
    for model in MODELS {
        let id = format!("{model}#0");
        gateway.until_unused(&id);
        let counters = gateway.counters(&id);
        for trouble in ["failed", "aborts", "aborted_by_sleep", "requests_while_asleep", "malformed"] {
            assert_eq!(counters[trouble], 0, "{id} counted {trouble}: {counters}");
        }
    }
}

struct Figures {
    requests: usize,
    failed: usize,
    out_of_memory: usize,
    launches: u64,
    stops: u64,
    /// Waits from the arrival to the first byte of the answer, in ms.
    median: u64,
    longest: u64,
    bound: u64,
    swaps: u64,
    swaps_by_arrival: u64,
    longest_by_arrival: u64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "trace: {} requests, {} failed", self.requests, self.failed)?;
        writeln!(f, "  out of memory        {}", self.out_of_memory)?;
        writeln!(f, "  engines launched     {}, stopped {}", self.launches, self.stops)?;
        writeln!(f, "  wait                 median {} ms, longest {} ms", self.median, self.longest)?;
        writeln!(f, "  bound of the longest {} ms", self.bound)?;
        writeln!(f, "  swaps                {}", self.swaps)?;
        write!(
            f,
            "  first come, first served (simulated): {} swaps, longest wait {} ms; {:.1} times as many",
            self.swaps_by_arrival,
            self.longest_by_arrival,
            self.swaps_by_arrival as f64 / self.swaps.max(1) as f64
        )
    }
}

/// The worst-case wait in ms: every other model has a full turn first, and the gateway has to end each turn.
const fn bound() -> u64 {
    (MODELS.len() as u64 - 1) * (MAX_TURN + DRAIN_DEADLINE + SLEEP + WAKE)
}

fn arrivals() -> Vec<TraceArrival> {
    match std::env::var("ROUSE_SOAK_SECONDS") {
        Ok(seconds) => trace::open_loop(1, 200, MODELS.len() as u32, seconds.parse().unwrap()),
        Err(_) => trace::read(include_str!("../data/trace-200.csv")).unwrap(),
    }
}

/// Each accelerator has room for two awake models and for the residues of the others, however those are spread.
fn six_models_with_room_for_four() -> GatewayProcess {
    let turns = format!(
        "turns: {{residency: 1s, maxTurn: {MAX_TURN}ms, drain: {{deadline: {DRAIN_DEADLINE}ms, onDeadline: cut}}}}\n\
         queue: {{maxWaiting: 4096}}"
    );
    let flags = format!(
        "--sleep-time {SLEEP}ms --wake-time {WAKE}ms --ttft {FIRST_TOKEN}ms --itl {NEXT_TOKEN}ms --start-time 100ms"
    );
    let fixture = GatewayFixture::new(&["2400Mi", "2400Mi"]).settings(&turns);
    let with =
        |fixture: GatewayFixture, name| fixture.model(&SimModel { flags: &flags, ..SimModel::new(name) });
    MODELS.into_iter().fold(fixture, with).start()
}

/// Starts all models before the trace begins: cold starts are no swaps, and the bound is about wakes.
fn launch_all(gateway: &GatewayProcess) {
    for model in MODELS {
        let answer = gateway.client().chat(model, true, 1);
        assert!(answer.is_whole_stream(), "{model}: {}", answer.text());
    }
}

/// Counts the engines on each accelerator.
fn placed(gateway: &GatewayProcess) -> [usize; 2] {
    let fleet = gateway.fleet();
    let engines = fleet["engines"].as_array().unwrap();
    ["gpu-0", "gpu-1"].map(|id| engines.iter().filter(|e| e["accelerators"][0] == id).count())
}

/// Plays the trace. Returns for every arrival its wait in milliseconds, or an error.
async fn play(api: SocketAddr, arrivals: &[TraceArrival]) -> Vec<Result<u64, String>> {
    let start = Instant::now() + Duration::from_millis(100);
    let mut asked = JoinSet::new();
    for (number, arrival) in arrivals.iter().copied().enumerate() {
        let at = start + arrival.at.duration();
        sleep_until(at).await;
        asked.spawn(async move {
            let told = timeout(PATIENCE, ask(api, number, arrival, at)).await;
            told.unwrap_or_else(|_| Err("no end within the client's patience".to_owned()))
                .map_err(|why| format!("request {number} of client {}: {why}", arrival.client))
        });
    }
    asked.join_all().await
}

async fn ask(api: SocketAddr, number: usize, arrival: TraceArrival, at: Instant) -> Result<u64, String> {
    let model = MODELS.get(arrival.model as usize).ok_or("no such model")?;
    let (prompt, tokens) = (format!("request {number}"), tokens(arrival.stream));
    let body = chat_body(model, true, tokens).replace("hello", &prompt);
    let mut stream = TcpStream::connect(api).await.map_err(|e| e.to_string())?;
    let head = request("/v1/chat/completions", "", &body);
    stream.write_all(head.as_bytes()).await.map_err(|e| e.to_string())?;
    let mut bytes = Vec::with_capacity(16 << 10);
    stream.read_buf(&mut bytes).await.map_err(|e| e.to_string())?;
    let waited = at.elapsed().as_millis() as u64;
    stream.read_to_end(&mut bytes).await.map_err(|e| e.to_string())?;
    let answer = TestResponse::parse(&bytes).ok_or("no answer")?;
    if !answer.is_whole_stream() {
        return Err(format!("{} after {waited} ms: {}", answer.status, answer.text()));
    }
    if said(&answer) != content::text(model, &prompt, 0, u64::from(tokens)) {
        return Err(format!("not what {model} says: {}", answer.text()));
    }
    Ok(waited)
}

fn tokens(stream: Millis) -> u32 {
    (1 + stream.0.saturating_sub(FIRST_TOKEN) / NEXT_TOKEN) as u32
}

/// Returns the text of a stream.
fn said(answer: &TestResponse) -> String {
    let text = |event: &String| -> Option<String> {
        let chunk: serde_json::Value = serde_json::from_str(event).ok()?;
        Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())
    };
    answer.events().iter().filter_map(text).collect()
}

/// Counts the out-of-memory messages in the logs of the engines and of the gateway.
fn out_of_memory(dir: &Path) -> usize {
    let logs = std::fs::read_dir(dir.join("state/logs")).unwrap();
    let texts = logs.map(|entry| read(&entry.unwrap().path())).chain([read(&dir.join("gateway.log"))]);
    texts.map(|text| text.matches("OutOfMemory").count() + text.matches("out of memory").count()).sum()
}

fn swaps(gateway: &GatewayProcess) -> u64 {
    sum(gateway, "rouse_swaps_total", "")
}

/// Sums all samples of a metric whose labels contain this text.
fn sum(gateway: &GatewayProcess, name: &str, label: &str) -> u64 {
    let text = gateway.admin().get("/metrics").text();
    let samples = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
    samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).sum()
}
