//! Prometheus metrics: `GET /metrics` on the metrics port.
//!
//! The registry is a value that is passed down. Metrics that the relays touch once a request cost one atomic operation
//! each. Bytes are counted with every frame, so that long streams show while they run. Each thread counts bytes in its
//! own counters, and a scrape adds them up. Metrics that mirror state (the gate, the readiness) are read at the scrape,
//! so no state change can miss an update.

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
use rouse::units::Generation;
use rouse_net::stub_api::Epoch;

/// How a request at a relay port ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RelayRequestOutcome {
    /// The whole response was relayed.
    Complete,
    /// The client disconnected first.
    ClientLeft,
    /// The engine did not respond, or its response broke off.
    Failed,
    /// A drain's deadline cut it.
    Cut,
    /// The gate was closed; the engine did not see the request.
    Gated,
    /// There was no target; no engine saw the request.
    NotReady,
    /// The policy does not let the request pass.
    Refused,
}

/// The direction of body bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByteDirection {
    ToEngine,
    ToClient,
}

/// The state at a scrape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScrapeSnapshot {
    pub(crate) leases: u32,
    pub(crate) gated: bool,
    pub(crate) epoch: Epoch,
    pub(crate) generation: Generation,
    pub(crate) ready: bool,
    /// How often `ready` has changed.
    pub(crate) readiness_changes: u64,
    /// Bytes of the engine's log received by set-log.
    pub(crate) log_bytes: u64,
}

/// All of the proxy's metrics.
#[derive(Debug)]
pub(crate) struct ProxyMetrics {
    registry: Registry,
    requests: [IntCounter; RelayRequestOutcome::ALL.len()],
    connections: IntGauge,
    streams: IntGauge,
    scraped: Mutex<ScrapedMetrics>,
}

#[derive(Debug)]
struct ScrapedMetrics {
    bytes: [IntCounter; ByteDirection::ALL.len()],
    thread_counts: Vec<Arc<ThreadByteCounts>>,
    leases: IntGauge,
    gated: IntGauge,
    epoch: IntGauge,
    generation: IntGauge,
    ready: IntGauge,
    readiness_changes: IntCounter,
    log_bytes: IntCounter,
}

/// Counts the body bytes that one thread relays.
#[derive(Debug)]
pub(crate) struct ThreadTraffic {
    counts: Arc<ThreadByteCounts>,
    /// For one thread only: the counter is read and written in two steps.
    _not_sync: PhantomData<Cell<()>>,
}

/// Counts by direction. Separate for each thread, because processors would contend for shared counters.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ThreadByteCounts([AtomicU64; ByteDirection::ALL.len()]);

/// Counts one open item in a gauge until dropped.
#[derive(Debug)]
pub(crate) struct GaugeGuard(IntGauge);

impl RelayRequestOutcome {
    const ALL: [Self; 7] = [
        Self::Complete,
        Self::ClientLeft,
        Self::Failed,
        Self::Cut,
        Self::Gated,
        Self::NotReady,
        Self::Refused,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::ClientLeft => "left",
            Self::Failed => "failed",
            Self::Cut => "cut",
            Self::Gated => "gated",
            Self::NotReady => "not_ready",
            Self::Refused => "refused",
        }
    }
}

impl ByteDirection {
    const ALL: [Self; 2] = [Self::ToEngine, Self::ToClient];

    const fn as_str(self) -> &'static str {
        match self {
            Self::ToEngine => "to_engine",
            Self::ToClient => "to_client",
        }
    }
}

impl ProxyMetrics {
    pub(crate) fn new() -> Self {
        let registry = Registry::new();
        expect_valid(registry.register(Box::new(ProcessCollector::for_self())));
        let build = Opts::new("rouse_stub_build_info", "Always 1; the label names the build");
        let build = register(&registry, expect_valid(IntGaugeVec::new(build, &["version"])));
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let requests = Opts::new("rouse_stub_requests_total", "Requests at the relay ports, by outcome");
        let requests = register(&registry, expect_valid(IntCounterVec::new(requests, &["outcome"])));
        let bytes = Opts::new("rouse_stub_relayed_bytes_total", "Bytes of relayed bodies, by direction");
        let bytes = register(&registry, expect_valid(IntCounterVec::new(bytes, &["direction"])));
        let gauge = |name, help| register(&registry, expect_valid(IntGauge::new(name, help)));
        let counter = |name, help| register(&registry, expect_valid(IntCounter::new(name, help)));
        Self {
            requests: RelayRequestOutcome::ALL.map(|outcome| requests.with_label_values(&[outcome.as_str()])),
            connections: gauge("rouse_stub_connections", "Open client connections to the relay ports"),
            streams: gauge("rouse_stub_open_streams", "Engine responses being relayed"),
            scraped: Mutex::new(ScrapedMetrics {
                bytes: ByteDirection::ALL.map(|direction| bytes.with_label_values(&[direction.as_str()])),
                thread_counts: Vec::new(),
                leases: gauge("rouse_stub_leases", "Requests that hold a lease on the engine"),
                gated: gauge("rouse_stub_gated", "1 while the gate is closed"),
                epoch: gauge(
                    "rouse_stub_epoch",
                    "Newest epoch that the stub has accepted; 0 before the first",
                ),
                generation: gauge(
                    "rouse_stub_generation",
                    "Generation of the engine that the gate belongs to",
                ),
                ready: gauge("rouse_stub_ready", "1 while the stub reports the engine ready"),
                readiness_changes: counter(
                    "rouse_stub_readiness_changes_total",
                    "Changes of rouse_stub_ready",
                ),
                log_bytes: counter(
                    "rouse_stub_log_bytes_total",
                    "Bytes of the engine's log appended through set-log",
                ),
            }),
            registry,
        }
    }

    /// The counter of requests with this outcome.
    #[expect(clippy::indexing_slicing, reason = "there is a counter for each outcome")]
    pub(crate) fn request_counter(&self, outcome: RelayRequestOutcome) -> IntCounter {
        self.requests[outcome as usize].clone()
    }

    /// Creates the counters of one relay thread.
    pub(crate) fn thread_traffic(&self) -> ThreadTraffic {
        let passed = Arc::<ThreadByteCounts>::default();
        self.scraped().thread_counts.push(Arc::clone(&passed));
        ThreadTraffic { counts: passed, _not_sync: PhantomData }
    }

    /// Counts a client's connection while it is open.
    pub(crate) fn connection(&self) -> GaugeGuard {
        GaugeGuard::new(&self.connections)
    }

    /// Counts a response while it is relayed.
    pub(crate) fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.streams)
    }

    /// Open client connections, and responses being relayed.
    pub(crate) fn open_counts(&self) -> (i64, i64) {
        (self.connections.get(), self.streams.get())
    }

    /// Renders Prometheus's text format, version 0.0.4.
    pub(crate) fn encode(&self, now: &ScrapeSnapshot) -> String {
        // Hold the lock until all metrics are gathered. A concurrent scrape could otherwise change a counter halfway.
        let state = self.scraped();
        state.set(now);
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }

    fn scraped(&self) -> MutexGuard<'_, ScrapedMetrics> {
        self.scraped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ThreadTraffic {
    /// Adds bytes of a relayed body.
    pub(crate) fn add(&self, direction: ByteDirection, bytes: usize) {
        let Some(passed) = self.counts.0.get(direction as usize) else { return };
        passed.store(passed.load(Relaxed) + bytes as u64, Relaxed);
    }
}

impl ScrapedMetrics {
    fn set(&self, now: &ScrapeSnapshot) {
        let large = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.leases.set(i64::from(now.leases));
        self.gated.set(i64::from(now.gated));
        self.epoch.set(large(now.epoch));
        self.generation.set(large(now.generation.0));
        self.ready.set(i64::from(now.ready));
        raise_to(&self.readiness_changes, now.readiness_changes);
        raise_to(&self.log_bytes, now.log_bytes);
        for (direction, counter) in self.bytes.iter().enumerate() {
            raise_to(
                counter,
                self.thread_counts
                    .iter()
                    .filter_map(|passed| passed.0.get(direction))
                    .map(|n| n.load(Relaxed))
                    .sum(),
            );
        }
    }
}

impl GaugeGuard {
    fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Raises a counter to a count kept in another place.
fn raise_to(counter: &IntCounter, count: u64) {
    counter.inc_by(count.saturating_sub(counter.get()));
}

fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
    expect_valid(registry.register(Box::new(collector.clone())));
    collector
}

/// Unwraps a registration. Names and labels are constants of this module, so the first test finds an error.
fn expect_valid<T>(result: prometheus::Result<T>) -> T {
    result.expect("the names and labels of metrics are valid and different")
}

/// Serves `/metrics`; every scrape calls `now`.
pub(crate) fn routes(
    metrics: Arc<ProxyMetrics>,
    now: Arc<dyn Fn() -> ScrapeSnapshot + Send + Sync>,
) -> Router {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    let scrape = move || std::future::ready((kind, metrics.encode(&now())).into_response());
    Router::new().route("/metrics", get(scrape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_there_and_says_what_is() {
        let metrics = ProxyMetrics::new();
        for (number, outcome) in RelayRequestOutcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, number);
            metrics.request_counter(outcome).inc_by(number as u64 + 1);
        }
        let threads = [metrics.thread_traffic(), metrics.thread_traffic()];
        for (thread, bytes) in threads.iter().zip([100, 40]) {
            thread.add(ByteDirection::ToEngine, bytes);
            thread.add(ByteDirection::ToClient, 30 * bytes);
            thread.add(ByteDirection::ToClient, 20 * bytes);
        }
        let (connection, stream) = (metrics.connection(), metrics.stream());
        drop(metrics.stream());
        let now = ScrapeSnapshot {
            leases: 3,
            gated: true,
            epoch: 17,
            generation: Generation(4),
            ready: true,
            readiness_changes: 5,
            log_bytes: 1 << 20,
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

        threads[1].add(ByteDirection::ToClient, 1);
        let text = metrics.encode(&ScrapeSnapshot { readiness_changes: 6, ..ScrapeSnapshot::default() });
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
        assert_eq!(metrics.open_counts(), (0, 0));
    }
}
