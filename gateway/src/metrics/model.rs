//! One model's families, with its name as a constant label.

use std::sync::{Arc, OnceLock};

use prometheus::{Gauge, IntGauge, IntGaugeVec, Registry};
use rouse::{
    engine::last_outcome::{EngineOutcome, LastOutcome},
    fleet::report::{EngineView, ModelState, ModelView},
    units::{Bytes, Millis},
};

use rouse_platform::metric_builder::{expect_valid, integer, seconds};

use super::{
    labels::{OutcomeLabel, RouteLabel, StatusClass, TransitionCause, TransitionKind},
    model_families::{FamilyBuilder, ModelFamilies},
    traffic::TrafficMetrics,
};
use crate::driver::ColdStart;

const STATES: [ModelState; 6] = [
    ModelState::Awake,
    ModelState::Asleep,
    ModelState::Launching,
    ModelState::Cold,
    ModelState::Failed,
    ModelState::Unplaceable,
];

/// Metrics of one model. Everything on a request's path is an atomic that is already looked up.
pub struct ModelMetrics {
    families: ModelFamilies,
    name: Box<str>,
    namespace: Box<str>,
    /// Created with the first request, engine or transition: most of thousands of models have none, and these families
    /// take more than ten kilobytes per model.
    traffic: Arc<OnceLock<TrafficMetrics>>,
    declared: IntGauge,
    peak: IntGauge,
    utilization: Gauge,
    ready: IntGauge,
    replicas: IntGauge,
    state: IntGaugeVec,
    failures: IntGauge,
    last_failure_at: IntGaugeVec,
}

impl ModelMetrics {
    pub(super) fn new(registry: &Registry, name: &str, namespace: &str) -> Self {
        let metrics = Self::unregistered(name, namespace);
        expect_valid(registry.register(Box::new(metrics.families.clone())));
        metrics
    }

    fn unregistered(name: &str, namespace: &str) -> Self {
        let mut builder = FamilyBuilder { name, namespace, families: Vec::new() };
        let traffic = Arc::default();
        Self {
            declared: builder.namespaced_gauge(
                "inference_model_memory_declared_bytes",
                "Declared memory per accelerator",
            ),
            peak: builder.namespaced_gauge(
                "inference_model_memory_observed_peak_bytes",
                "Highest observed memory per accelerator; 0 while unknown",
            ),
            utilization: {
                let opts = builder.namespaced_opts(
                    "inference_model_memory_utilization_ratio",
                    "Highest observed memory as a ratio of the declared memory",
                );
                builder.add(expect_valid(Gauge::with_opts(opts)))
            },
            ready: builder.namespaced_gauge("inference_model_ready", "1 while the model answers without a wait"),
            replicas: builder.namespaced_gauge(
                "inference_model_replicas",
                "Engines of the model that exist, asleep or not",
            ),
            state: builder.gauges("rouse_model_state", "1 for the current state of the model", &["state"]),
            failures: builder.gauge(
                "rouse_model_failures",
                "Consecutive failures of the model's engines since an engine last served",
            ),
            last_failure_at: builder.gauges(
                "rouse_model_last_failure_timestamp_seconds",
                "Time of the last engine failure by cause, while no engine has served since, in seconds of Unix time",
                &["cause"],
            ),
            families: ModelFamilies { permanent: builder.families.into(), traffic: Arc::clone(&traffic) },
            name: name.into(),
            namespace: namespace.into(),
            traffic,
        }
    }

    pub(super) fn unregister(&self, registry: &Registry) {
        expect_valid(registry.unregister(Box::new(self.families.clone())));
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    fn traffic(&self) -> &TrafficMetrics {
        self.traffic.get_or_init(|| TrafficMetrics::new(&self.name, &self.namespace))
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
        self.declared.set(integer(model.declared.0));
        let peak = model.learned.peak.max(model.learned.observed).unwrap_or_default();
        self.peak.set(integer(peak.0));
        self.utilization.set(ratio(peak, model.declared));
        self.ready.set(i64::from(model.state == ModelState::Awake));
        for state in STATES {
            let is = i64::from(state == model.state);
            self.state.with_label_values(&[state.as_str()]).set(is);
        }
        self.failures
            .set(model.last_outcome.as_ref().map_or(0, |last| i64::from(last.consecutive_failures())));
        self.last_failure_at.reset();
        if let Some(LastOutcome { at, outcome: EngineOutcome::Failed(failure), .. }) = &model.last_outcome {
            self.last_failure_at
                .with_label_values(&[failure.cause.class().as_str()])
                .set(integer(at.0 / 1000));
        }
        let exist = engines.iter().filter(|engine| engine.state != "Cold").count();
        self.replicas.set(i64::try_from(exist).unwrap_or(i64::MAX));
        if exist == 0 && self.traffic.get().is_none() {
            return;
        }
        let traffic = self.traffic();
        traffic.leases.set(i64::from(model.leases));
        traffic.engine_state.reset();
        for engine in engines {
            let state = state_label(&engine.state);
            let replica = engine.engine.replica.to_string();
            traffic.engine_state.with_label_values(&[replica.as_str(), &state]).set(1);
        }
    }
}

/// Turns `Asleep(1)` into `asleep`: the report has the level, and a label set should be small.
fn state_label(state: &str) -> String {
    let name = state.split('(').next().unwrap_or(state);
    name.to_ascii_lowercase()
}

fn ratio(part: Bytes, whole: Bytes) -> f64 {
    if whole == Bytes::ZERO {
        return 0.0;
    }
    part.0 as f64 / whole.0 as f64
}
