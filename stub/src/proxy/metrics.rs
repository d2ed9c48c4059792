//! What is counted, for Prometheus: `GET /metrics` on the metrics port.
//!
//! The registry is a value and is passed down. What the relays touch once in a request costs one atomic operation each. Bytes
//! are counted with every frame, so that a long stream is seen while it runs; for them each thread has a place of its own,
//! and they are added up when somebody asks. What follows from a state (the gate, the readiness) is read then, too, so it
//! cannot be forgotten where the state changes.

use std::{
    cell::Cell,
    marker::PhantomData,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use axum::{Router, http::header, response::IntoResponse, routing::get};
use prometheus::{
    IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder, core::Collector,
    process_collector::ProcessCollector,
};
use rouse::{units::Generation, wire::Epoch};

/// How a request at a relay port ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The engine's answer was passed on whole.
    Complete,
    /// The client left first.
    Left,
    /// The engine gave no answer, or broke off.
    Failed,
    /// It was under way at a drain's deadline.
    Cut,
    /// The gate was closed: no engine has seen it.
    Gated,
    /// There was no target: no engine has seen it.
    NotReady,
    /// What it asked for does not pass.
    Refused,
}

/// Which way bytes of bodies go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToEngine,
    ToClient,
}

/// What is true at the moment of a scrape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Now {
    pub(crate) leases: u32,
    pub(crate) gated: bool,
    pub(crate) epoch: Epoch,
    pub(crate) generation: Generation,
    pub(crate) ready: bool,
    /// How often `ready` has changed.
    pub(crate) changes: u64,
    /// Bytes of the engine's log that came by set-log.
    pub(crate) log: u64,
}

/// All of the proxy's metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: [IntCounter; Outcome::ALL.len()],
    connections: IntGauge,
    streams: IntGauge,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    bytes: [IntCounter; Direction::ALL.len()],
    traffic: Vec<Arc<Passed>>,
    leases: IntGauge,
    gated: IntGauge,
    epoch: IntGauge,
    generation: IntGauge,
    ready: IntGauge,
    changes: IntCounter,
    log: IntCounter,
}

/// Counts the bytes of bodies that one thread passes on.
#[derive(Debug)]
pub(crate) struct Traffic {
    passed: Arc<Passed>,
    /// For one thread alone: what it counts is read and written in two steps.
    _here: PhantomData<Cell<()>>,
}

/// By direction. Apart from those of other threads, whose processors would wait for each other else.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Passed([AtomicU64; Direction::ALL.len()]);

/// One of those that are there now; gone when dropped.
#[derive(Debug)]
pub(crate) struct Present(IntGauge);

impl Outcome {
    const ALL: [Self; 7] =
        [Self::Complete, Self::Left, Self::Failed, Self::Cut, Self::Gated, Self::NotReady, Self::Refused];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Left => "left",
            Self::Failed => "failed",
            Self::Cut => "cut",
            Self::Gated => "gated",
            Self::NotReady => "not_ready",
            Self::Refused => "refused",
        }
    }
}

impl Direction {
    const ALL: [Self; 2] = [Self::ToEngine, Self::ToClient];

    const fn as_str(self) -> &'static str {
        match self {
            Self::ToEngine => "to_engine",
            Self::ToClient => "to_client",
        }
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let registry = Registry::new();
        valid(registry.register(Box::new(ProcessCollector::for_self())));
        let build = Opts::new("rouse_stub_build_info", "Always 1; the label says which build this is");
        let build = register(&registry, valid(IntGaugeVec::new(build, &["version"])));
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let requests =
            Opts::new("rouse_stub_requests_total", "Requests at the relay ports, by how they ended");
        let requests = register(&registry, valid(IntCounterVec::new(requests, &["outcome"])));
        let bytes =
            Opts::new("rouse_stub_relayed_bytes_total", "Bytes of bodies that were passed on, by direction");
        let bytes = register(&registry, valid(IntCounterVec::new(bytes, &["direction"])));
        let gauge = |name, help| register(&registry, valid(IntGauge::new(name, help)));
        let counter = |name, help| register(&registry, valid(IntCounter::new(name, help)));
        Self {
            requests: Outcome::ALL.map(|outcome| requests.with_label_values(&[outcome.as_str()])),
            connections: gauge("rouse_stub_connections", "Open connections of clients to the relay ports"),
            streams: gauge("rouse_stub_open_streams", "Answers of the engine that are being passed on"),
            state: Mutex::new(State {
                bytes: Direction::ALL.map(|direction| bytes.with_label_values(&[direction.as_str()])),
                traffic: Vec::new(),
                leases: gauge("rouse_stub_leases", "Requests that hold the engine"),
                gated: gauge("rouse_stub_gated", "1 while the gate is closed"),
                epoch: gauge("rouse_stub_epoch", "The newest epoch that was heard of; 0 before any"),
                generation: gauge("rouse_stub_generation", "Which life of the engine the gate belongs to"),
                ready: gauge("rouse_stub_ready", "1 while the engine is said to be ready"),
                changes: counter(
                    "rouse_stub_readiness_changes_total",
                    "How often rouse_stub_ready has changed",
                ),
                log: counter("rouse_stub_log_bytes_total", "Bytes of the engine's log that came by set-log"),
            }),
            registry,
        }
    }

    /// Requests that ended so.
    #[expect(clippy::indexing_slicing, reason = "there is a counter for each outcome")]
    pub(crate) fn requests(&self, outcome: Outcome) -> IntCounter {
        self.requests[outcome as usize].clone()
    }

    /// For one thread of the relays.
    pub(crate) fn traffic(&self) -> Traffic {
        let passed = Arc::<Passed>::default();
        self.state().traffic.push(Arc::clone(&passed));
        Traffic { passed, _here: PhantomData }
    }

    /// A client's connection, as long as it is open.
    pub(crate) fn connection(&self) -> Present {
        Present::new(&self.connections)
    }

    /// An answer, as long as it is passed on.
    pub(crate) fn stream(&self) -> Present {
        Present::new(&self.streams)
    }

    /// Open connections of clients, and answers that are being passed on.
    pub(crate) fn open(&self) -> (i64, i64) {
        (self.connections.get(), self.streams.get())
    }

    /// Prometheus's text format, version 0.0.4.
    pub(crate) fn encode(&self, now: &Now) -> String {
        // Held until all is gathered: else a second scrape could set a counter between the two halves of the first.
        let state = self.state();
        state.set(now);
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Traffic {
    /// Bytes of a body passed on.
    pub(crate) fn passed(&self, direction: Direction, bytes: usize) {
        let Some(passed) = self.passed.0.get(direction as usize) else { return };
        passed.store(passed.load(Relaxed) + bytes as u64, Relaxed);
    }
}

impl State {
    fn set(&self, now: &Now) {
        let large = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.leases.set(i64::from(now.leases));
        self.gated.set(i64::from(now.gated));
        self.epoch.set(large(now.epoch));
        self.generation.set(large(now.generation.0));
        self.ready.set(i64::from(now.ready));
        reach(&self.changes, now.changes);
        reach(&self.log, now.log);
        for (direction, counter) in self.bytes.iter().enumerate() {
            reach(
                counter,
                self.traffic
                    .iter()
                    .filter_map(|passed| passed.0.get(direction))
                    .map(|n| n.load(Relaxed))
                    .sum(),
            );
        }
    }
}

impl Present {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Has a counter show what was counted elsewhere.
fn reach(counter: &IntCounter, count: u64) {
    counter.inc_by(count.saturating_sub(counter.get()));
}

fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
    valid(registry.register(Box::new(collector.clone())));
    collector
}

/// Names and labels are constants of this module: an error is a defect that the first test finds.
fn valid<T>(result: prometheus::Result<T>) -> T {
    result.expect("the names and labels of metrics are valid and different")
}

/// Answers `/metrics`; `now` is asked at each scrape.
pub(crate) fn routes(metrics: Arc<Metrics>, now: Arc<dyn Fn() -> Now + Send + Sync>) -> Router {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    let scrape = move || std::future::ready((kind, metrics.encode(&now())).into_response());
    Router::new().route("/metrics", get(scrape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_there_and_says_what_is() {
        let metrics = Metrics::new();
        for (number, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, number);
            metrics.requests(outcome).inc_by(number as u64 + 1);
        }
        let threads = [metrics.traffic(), metrics.traffic()];
        for (thread, bytes) in threads.iter().zip([100, 40]) {
            thread.passed(Direction::ToEngine, bytes);
            thread.passed(Direction::ToClient, 30 * bytes);
            thread.passed(Direction::ToClient, 20 * bytes);
        }
        let (connection, stream) = (metrics.connection(), metrics.stream());
        drop(metrics.stream());
        let now = Now {
            leases: 3,
            gated: true,
            epoch: 17,
            generation: Generation(4),
            ready: true,
            changes: 5,
            log: 1 << 20,
        };
        let text = metrics.encode(&now);
        for line in [
            "rouse_stub_requests_total{outcome=\"complete\"} 1",
            "rouse_stub_requests_total{outcome=\"left\"} 2",
            "rouse_stub_requests_total{outcome=\"failed\"} 3",
            "rouse_stub_requests_total{outcome=\"cut\"} 4",
            "rouse_stub_requests_total{outcome=\"gated\"} 5",
            "rouse_stub_requests_total{outcome=\"not_ready\"} 6",
            "rouse_stub_requests_total{outcome=\"refused\"} 7",
            "rouse_stub_relayed_bytes_total{direction=\"to_engine\"} 140",
            "rouse_stub_relayed_bytes_total{direction=\"to_client\"} 7000",
            "rouse_stub_connections 1",
            "rouse_stub_open_streams 1",
            "rouse_stub_leases 3",
            "rouse_stub_gated 1",
            "rouse_stub_epoch 17",
            "rouse_stub_generation 4",
            "rouse_stub_ready 1",
            "rouse_stub_readiness_changes_total 5",
            "rouse_stub_log_bytes_total 1048576",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
        assert!(text.contains("rouse_stub_build_info{version=\""));
        assert!(text.lines().any(|line| line.starts_with("process_resident_memory_bytes ")));
        drop((connection, stream));

        threads[1].passed(Direction::ToClient, 1);
        let text = metrics.encode(&Now { changes: 6, ..Now::default() });
        for line in [
            "rouse_stub_relayed_bytes_total{direction=\"to_engine\"} 140",
            "rouse_stub_relayed_bytes_total{direction=\"to_client\"} 7001",
            "rouse_stub_connections 0",
            "rouse_stub_open_streams 0",
            "rouse_stub_gated 0",
            "rouse_stub_readiness_changes_total 6",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
        assert_eq!(metrics.open(), (0, 0));
    }
}
