//! One model's families, with its name as a constant label.

use std::sync::OnceLock;

use prometheus::{
    Gauge, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
};
use rouse::{
    fleet::report::{EngineView, ModelState, ModelView},
    units::{Bytes, Millis},
};

use super::{
    families::{Families, Make},
    labels::{self, Cause, Outcome, ROUTES, Route, STARTS, STATUSES, Status, Transition},
    seconds, valid,
};
use crate::driver::ColdStart;

const STATES: [ModelState; 5] =
    [ModelState::Awake, ModelState::Asleep, ModelState::Launching, ModelState::Cold, ModelState::Failed];

/// Handles for one model. Everything that a request touches is an atomic that is already looked up.
pub struct ModelMetrics {
    families: Families,
    requests: IntCounterVec,
    /// By route, status and start: looked up in `requests` once, at first use.
    resolved: Box<[OnceLock<IntCounter>]>,
    in_flight: IntGauge,
    parked: IntGauge,
    first_byte: Histogram,
    duration: Histogram,
    waited: Histogram,
    bytes_in: IntCounter,
    bytes_out: IntCounter,
    replays: IntCounter,
    transitions: IntCounterVec,
    transition_seconds: HistogramVec,
    evictions: IntCounterVec,
    declared: IntGauge,
    peak: IntGauge,
    utilization: Gauge,
    ready: IntGauge,
    replicas: IntGauge,
    leases: IntGauge,
    state: IntGaugeVec,
    engine_state: IntGaugeVec,
    left_out: IntGauge,
    ejections: IntCounter,
}

impl ModelMetrics {
    pub(super) fn new(registry: &Registry, name: &str) -> Self {
        let metrics = Self::unregistered(name);
        valid(registry.register(Box::new(metrics.families.clone())));
        metrics
    }

    fn unregistered(name: &str) -> Self {
        let mut make = Make { name, families: Vec::new() };
        let bytes = make.counters(
            "rouse_bytes_total",
            "Bytes of bodies, from clients (in) and to clients (out)",
            &["direction"],
        );
        Self {
            requests: make.counters(
                "rouse_requests_total",
                "Requests that ended, by route, status class and kind of cold start they waited for",
                &["route", "status", "cold_start"],
            ),
            resolved: (0..ROUTES * STATUSES * STARTS).map(|_| OnceLock::new()).collect(),
            in_flight: make.gauge(
                "rouse_in_flight",
                "Requests between the naming of their model and the last byte of their answer",
            ),
            parked: make.gauge("rouse_parked", "Requests that wait for their model"),
            first_byte: make.histogram(
                "rouse_time_to_first_byte_seconds",
                "From the request's head to the response's, the wait included",
            ),
            duration: make.histogram(
                "rouse_request_duration_seconds",
                "From the request's head to the last byte of the answer",
            ),
            waited: make.histogram("rouse_wait_seconds", "How long parked requests waited, however it ended"),
            bytes_in: bytes.with_label_values(&["in"]),
            bytes_out: bytes.with_label_values(&["out"]),
            replays: make
                .counter("rouse_replays_total", "Requests sent a second time, on a fresh connection"),
            transitions: make.counters(
                "rouse_transitions_total",
                "Launches, wakes, sleeps and stops of engines, by cause and outcome",
                &["transition", "cause", "outcome"],
            ),
            transition_seconds: make.histograms(
                "rouse_transition_duration_seconds",
                "How long launches, wakes, sleeps and stops took that went well",
                "transition",
            ),
            evictions: make.counters(
                "rouse_evictions_total",
                "Times the model was put away for another one's memory, by how",
                &["transition"],
            ),
            declared: make
                .seed_gauge("inference_model_memory_declared_bytes", "Declared memory, per accelerator"),
            peak: make.seed_gauge(
                "inference_model_memory_observed_peak_bytes",
                "Highest memory seen, per accelerator; 0: not known yet",
            ),
            utilization: {
                let opts = make.seed_opts(
                    "inference_model_memory_utilization_ratio",
                    "Highest memory seen as a share of the declared",
                );
                make.keep(valid(Gauge::with_opts(opts)))
            },
            ready: make.seed_gauge("inference_model_ready", "1 when the model answers without a wait"),
            replicas: make
                .seed_gauge("inference_model_replicas", "Engines of the model that exist, asleep or not"),
            leases: make.gauge("rouse_leases", "Requests that hold an engine of the model"),
            state: make.gauges("rouse_model_state", "1 for the state that the model is in", &["state"]),
            engine_state: make.gauges(
                "rouse_engine_state",
                "1 for the state that each engine is in",
                &["replica", "state"],
            ),
            left_out: make.gauge(
                "rouse_engines_left_out",
                "Engines that get no new requests because those they got failed",
            ),
            ejections: make.counter(
                "rouse_ejections_total",
                "Times an engine of the model was left out because requests to it failed",
            ),
            families: Families(make.families.into()),
        }
    }

    pub(super) fn unregister(&self, registry: &Registry) {
        valid(registry.unregister(Box::new(self.families.clone())));
    }

    /// So many more (or, negative, less) requests are in flight.
    pub fn in_flight(&self, change: i64) {
        self.in_flight.add(change);
    }

    /// So many more (or, negative, less) requests are parked. How long they were is told to [`Self::waited`].
    pub fn parked(&self, change: i64) {
        self.parked.add(change);
    }

    /// How long a parked request waited, however that ended.
    pub fn waited(&self, wait: Millis) {
        self.waited.observe(seconds(wait));
    }

    pub fn first_byte(&self, after: Millis) {
        self.first_byte.observe(seconds(after));
    }

    /// A request is over.
    pub fn ended(&self, route: Route, status: Status, start: Option<ColdStart>, duration: Millis) {
        let (start_index, start) = labels::start(start);
        let index = (route as usize * STATUSES + status as usize) * STARTS + start_index;
        let count = || self.requests.with_label_values(&[route.as_str(), status.as_str(), start]);
        match self.resolved.get(index) {
            Some(cell) => cell.get_or_init(count).inc(),
            None => count().inc(),
        }
        self.duration.observe(seconds(duration));
    }

    /// Bytes of a request's body.
    pub fn bytes_in(&self, bytes: u64) {
        self.bytes_in.inc_by(bytes);
    }

    /// Bytes of an answer's body.
    pub fn bytes_out(&self, bytes: u64) {
        self.bytes_out.inc_by(bytes);
    }

    /// A request was sent so many times more.
    pub fn replayed(&self, times: u32) {
        // Hardly any is, and what is not written need not leave the caches of other cores.
        if times > 0 {
            self.replays.inc_by(u64::from(times));
        }
    }

    /// An engine was launched, woken, put to sleep or stopped, or could not be.
    pub fn transition(&self, transition: Transition, cause: Cause, outcome: Outcome, took: Millis) {
        let name = transition.as_str();
        self.transitions.with_label_values(&[name, cause.as_str(), outcome.as_str()]).inc();
        if outcome == Outcome::Done {
            self.transition_seconds.with_label_values(&[name]).observe(seconds(took));
        }
    }

    /// The model was put away for another one's memory.
    pub fn evicted(&self, transition: Transition) {
        self.evictions.with_label_values(&[transition.as_str()]).inc();
    }

    /// So many engines are left out now.
    pub fn left_out(&self, engines: usize) {
        self.left_out.set(i64::try_from(engines).unwrap_or(i64::MAX));
    }

    /// An engine is left out from now on.
    pub fn ejected(&self) {
        self.ejections.inc();
    }

    /// `engines`: its own.
    pub(super) fn observe(&self, model: &ModelView, engines: &[EngineView]) {
        self.declared.set(integer(model.declared.0));
        let peak = model.learned.peak.unwrap_or_default();
        self.peak.set(integer(peak.0));
        self.utilization.set(ratio(peak, model.declared));
        self.ready.set(i64::from(model.state == ModelState::Awake));
        self.leases.set(i64::from(model.leases));
        for state in STATES {
            let is = i64::from(state == model.state);
            self.state.with_label_values(&[state.as_str()]).set(is);
        }
        self.engine_state.reset();
        let mut replicas = 0;
        for engine in engines {
            replicas += i64::from(engine.state != "Cold");
            let state = short(&engine.state);
            let replica = engine.engine.replica.to_string();
            self.engine_state.with_label_values(&[replica.as_str(), &state]).set(1);
        }
        self.replicas.set(replicas);
    }
}

/// `Asleep(1)` → `asleep`: the level is in the report, and a label set should be small.
fn short(state: &str) -> String {
    let name = state.split('(').next().unwrap_or(state);
    name.to_ascii_lowercase()
}

fn ratio(part: Bytes, whole: Bytes) -> f64 {
    if whole == Bytes::ZERO {
        return 0.0;
    }
    part.0 as f64 / whole.0 as f64
}

pub(super) fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
