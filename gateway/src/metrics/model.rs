//! The metrics of one model.

use std::sync::{
    Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use prometheus::core::Collector;
use rouse::{
    fleet::report::{EngineView, ModelView},
    units::Millis,
};

use rouse_platform::metric_builder::seconds;

use super::{
    labels::{OutcomeLabel, RouteLabel, StatusClass, TransitionCause, TransitionKind},
    model_gauges::GaugeValues,
    traffic::{TrafficMetrics, TrafficTotals},
};
use crate::driver::ColdStart;

/// Metrics of one model. Everything on a request's path is an atomic that is already looked up.
pub struct ModelMetrics {
    name: Box<str>,
    namespace: Box<str>,
    gauges: Mutex<GaugeValues>,
    /// Created with the first request, engine or transition: most of thousands of models have none, and these families
    /// take more than ten kilobytes per model.
    traffic: OnceLock<Box<TrafficMetrics>>,
    /// Tokens of finished answers. For pages that watch: the metrics of keys count tokens as they are charged.
    tokens: AtomicU64,
}

impl ModelMetrics {
    pub(super) fn new(name: &str, namespace: &str) -> Self {
        Self {
            name: name.into(),
            namespace: namespace.into(),
            gauges: Mutex::default(),
            traffic: OnceLock::new(),
            tokens: AtomicU64::new(0),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(super) fn gauges(&self) -> MutexGuard<'_, GaugeValues> {
        self.gauges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the families that exist from the first request, engine or transition on.
    pub(super) fn traffic_families(&self) -> &[Box<dyn Collector>] {
        self.traffic.get().map(|traffic| &*traffic.families).unwrap_or_default()
    }

    fn traffic(&self) -> &TrafficMetrics {
        self.traffic.get_or_init(|| Box::new(TrafficMetrics::new(&self.name)))
    }

    /// Changes the number of requests in flight.
    pub fn add_in_flight(&self, change: i64) {
        self.traffic().in_flight.add(change);
    }

    /// Changes the number of parked requests. [`Self::observe_wait`] records their wait.
    pub fn add_parked(&self, change: i64) {
        self.traffic().parked.add(change);
    }

    /// Records how long a parked request waited, however the wait ended.
    pub fn observe_wait(&self, wait: Millis) {
        self.traffic().wait.observe(seconds(wait));
    }

    pub fn observe_first_byte(&self, after: Millis) {
        self.traffic().first_byte.observe(seconds(after));
    }

    /// Counts a completed request.
    pub fn request_ended(
        &self,
        route: RouteLabel,
        status: StatusClass,
        start: Option<ColdStart>,
        duration: Millis,
    ) {
        self.traffic().request_ended(route, status, start, duration);
    }

    /// Adds bytes of request bodies.
    pub fn add_bytes_in(&self, bytes: u64) {
        self.traffic().bytes_in.inc_by(bytes);
    }

    /// Adds bytes of response bodies.
    pub fn add_bytes_out(&self, bytes: u64) {
        self.traffic().bytes_out.inc_by(bytes);
    }

    /// Adds the tokens of a finished answer, as far as they are known.
    pub fn add_tokens(&self, tokens: u64) {
        if tokens > 0 {
            self.tokens.fetch_add(tokens, Ordering::Relaxed);
        }
    }

    /// Returns what the model has served so far; `None` before its first request.
    pub(super) fn traffic_totals(&self) -> Option<TrafficTotals> {
        let totals = self.traffic.get()?.totals();
        Some(TrafficTotals { tokens: self.tokens.load(Ordering::Relaxed), ..totals })
    }

    /// Counts the retries of a request.
    pub fn add_retries(&self, times: u32) {
        // Almost no request is retried, and without a write the line stays in other cores' caches.
        if times > 0 {
            self.traffic().retries.inc_by(u64::from(times));
        }
    }

    /// Counts an engine's launch, wake, sleep or stop, successful or not.
    pub fn record_transition(
        &self,
        transition: TransitionKind,
        cause: TransitionCause,
        outcome: OutcomeLabel,
        took: Millis,
    ) {
        let name = transition.as_str();
        self.traffic().transitions.with_label_values(&[name, cause.as_str(), outcome.as_str()]).inc();
        if outcome == OutcomeLabel::Done {
            self.traffic().transition_seconds.with_label_values(&[name]).observe(seconds(took));
        }
    }

    /// Counts an eviction of the model for another one's memory.
    pub fn evicted(&self, transition: TransitionKind) {
        self.traffic().evictions.with_label_values(&[transition.as_str()]).inc();
    }

    /// Counts a drain that has passed its deadline.
    pub fn drain_deadline_passed(&self) {
        self.traffic().drain_deadlines.inc();
    }

    /// Sets the number of ejected engines.
    pub fn set_ejected(&self, engines: usize) {
        if engines > 0 || self.traffic.get().is_some() {
            self.traffic().ejected_engines.set(i64::try_from(engines).unwrap_or(i64::MAX));
        }
    }

    /// Counts an ejection.
    pub fn ejected(&self) {
        self.traffic().ejections.inc();
    }

    /// Sets the model's gauges. `engines` has its engines.
    pub(super) fn observe(&self, model: &ModelView, engines: &[EngineView]) {
        let exist = engines.iter().filter(|engine| engine.state != "Cold").count();
        *self.gauges() = GaugeValues::of(model, exist);
        if exist == 0 && self.traffic.get().is_none() {
            return;
        }
        let traffic = self.traffic();
        traffic.leases.set(i64::from(model.leases));
        traffic.engine_state.reset();
        traffic.engine_saturated.reset();
        for engine in engines {
            let state = state_label(&engine.state);
            let replica = engine.engine.name_in_model();
            traffic.engine_state.with_label_values(&[replica.as_str(), &state]).set(1);
            let name = engine.engine.to_string();
            let saturated = i64::from(engine.saturation.is_some());
            traffic.engine_saturated.with_label_values(&[name.as_str()]).set(saturated);
        }
    }
}

/// Turns `Asleep(1)` into `asleep`: the report has the level, and a label set should be small.
fn state_label(state: &str) -> String {
    let name = state.split('(').next().unwrap_or(state);
    name.to_ascii_lowercase()
}
