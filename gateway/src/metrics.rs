//! The gateway's Prometheus metrics.
//!
//! The registry is an ordinary value and not the library's global one, so that tests, and two gateways in one process,
//! do not share counts. Only configured models become labels: one collector emits the families of those that are
//! configured now. So a removed model leaves no series behind, and clients cannot create series by naming models.
//! Everything on the hot path is resolved when the routes are built, and costs one atomic operation.

mod fleet_gauges;
mod keys;
mod labels;
mod model;
mod model_families;
mod model_gauges;
mod request_metrics;
mod telemetry_drops;
mod traffic;

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

pub(crate) use self::labels::{cold_start_label, phase_label};
use arc_swap::{ArcSwap, ArcSwapOption};

use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    process_collector::ProcessCollector,
};
use rouse::{
    fault::DisconnectPhase,
    fleet::report::{EngineView, FleetView},
    model::ModelName,
};
use rouse_controllers::metrics::ControllerMetrics;
use rouse_platform::metric_builder::{expect_valid, register};

use self::model_gauges::{ModelCollector, ModelMap};
pub use self::{
    keys::{KeyMetrics, KeyOutcome},
    labels::{OutcomeLabel, RouteLabel, StatusClass, TransitionCause, TransitionKind},
    model::ModelMetrics,
    telemetry_drops::TelemetryDropCounters,
    traffic::TrafficTotals,
};

/// Buckets of the latency that the gateway itself adds to a request, in seconds.
const ADDED_LATENCY_BUCKETS: [f64; 10] =
    [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.25];

/// Value of the label `model` for models that are not configured.
const OTHER_MODEL: &str = "other";

/// Value of the labels `node_pool` and `namespace` on one machine.
pub(crate) const LOCAL_LABEL: &str = "local";

/// All of the gateway's metrics.
pub struct Metrics {
    registry: Registry,
    models: Arc<ArcSwap<ModelMap>>,
    /// Serialises exchanges of the models: the metrics of each are created once.
    configure_lock: Mutex<()>,
    /// Metrics of requests that belong to no configured model.
    other: Arc<ModelMetrics>,
    fleet_gauges: fleet_gauges::FleetGauges,
    added_latency: Histogram,
    refusals: IntCounterVec,
    disconnects: [IntCounter; 4],
    connections: IntGauge,
    connections_moved: IntCounter,
    swaps: IntCounter,
    reloads: IntCounterVec,
    /// Has no labels, and no series without a certificate: 0 would mean one that expired long ago.
    certificate_expiry: IntGaugeVec,
    keys: Arc<keys::KeyFamilies>,
    controllers: ControllerMetrics,
    /// The namespace of each model, in a cluster.
    namespaces: ArcSwapOption<BTreeMap<ModelName, String>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    #[must_use]
    pub fn new() -> Self {
        Self::with_drop_counters(&TelemetryDropCounters::new())
    }

    /// Returns the metrics of the cluster's controllers.
    #[must_use]
    pub const fn controllers(&self) -> &ControllerMetrics {
        &self.controllers
    }

    /// Sets the namespaces of a cluster's models.
    ///
    /// They apply from the next configuration on. From now on each accelerator counts as a pool.
    pub fn set_namespaces(&self, namespaces: BTreeMap<ModelName, String>) {
        self.namespaces.store(Some(Arc::new(namespaces)));
    }

    /// Creates the metrics with existing drop counters.
    #[must_use]
    pub fn with_drop_counters(drop_counters: &TelemetryDropCounters) -> Self {
        let registry = Registry::new();
        drop_counters.register(&registry);
        expect_valid(registry.register(Box::new(ProcessCollector::for_self())));
        let build = build_info(&registry);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let disconnects = counters(
            &registry,
            "rouse_client_disconnects_total",
            "Clients that disconnected before their response was complete, by phase",
            "phase",
        );
        let other = Arc::new(ModelMetrics::new(OTHER_MODEL, LOCAL_LABEL));
        let models = Arc::<ArcSwap<ModelMap>>::default();
        let collector = ModelCollector::new(Arc::clone(&models), Arc::clone(&other));
        expect_valid(registry.register(Box::new(collector)));
        Self {
            other,
            models,
            configure_lock: Mutex::default(),
            fleet_gauges: fleet_gauges::FleetGauges::new(&registry),
            added_latency: register(
                &registry,
                expect_valid(Histogram::with_opts(
                    HistogramOpts::new(
                        "rouse_added_latency_seconds",
                        "Time that the gateway itself added to a request that found its model awake",
                    )
                    .buckets(ADDED_LATENCY_BUCKETS.to_vec()),
                )),
            ),
            refusals: counters(
                &registry,
                "rouse_admission_refusals_total",
                "Refused requests, by error code",
                "reason",
            ),
            disconnects: labels::PHASES
                .map(|phase| disconnects.with_label_values(&[labels::phase_label(phase)])),
            connections: register(
                &registry,
                expect_valid(IntGauge::new("rouse_connections", "Open client connections to the API")),
            ),
            connections_moved: register(
                &registry,
                expect_valid(IntCounter::new(
                    "rouse_connections_moved_total",
                    "Connections that were moved from the thread that accepted them to another thread",
                )),
            ),
            swaps: register(
                &registry,
                expect_valid(IntCounter::new(
                    "rouse_swaps_total",
                    "Evictions that made room for another model",
                )),
            ),
            reloads: counters(
                &registry,
                "rouse_config_reloads_total",
                "Reloads of the configuration, by outcome",
                "outcome",
            ),
            certificate_expiry: register(
                &registry,
                expect_valid(IntGaugeVec::new(
                    Opts::new(
                        "rouse_tls_certificate_expiry_seconds",
                        "Expiry of the certificate that clients see, in seconds of Unix time",
                    ),
                    &[],
                )),
            ),
            keys: keys::KeyFamilies::new(&registry),
            controllers: ControllerMetrics::new(&registry),
            namespaces: ArcSwapOption::empty(),
            registry,
        }
    }

    /// Sets the configured models.
    ///
    /// Series of other models disappear; models that stay keep counting.
    pub fn configure<'a>(&self, names: impl IntoIterator<Item = &'a ModelName>) {
        let _alone = self.configure_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.models.load_full();
        let namespaces = self.namespaces.load_full().unwrap_or_default();
        let after = names.into_iter().map(|name| {
            let namespace = namespaces.get(name).map_or(LOCAL_LABEL, String::as_str);
            let stays = before.get(name).filter(|metrics| metrics.namespace() == namespace);
            (name.clone(), stays.cloned().unwrap_or_else(|| self.new_metrics(name, namespace)))
        });
        self.models.store(Arc::new(after.collect()));
    }

    fn new_metrics(&self, name: &ModelName, namespace: &str) -> Arc<ModelMetrics> {
        if name.as_str() == OTHER_MODEL {
            // The series of `other` exist already.
            return Arc::clone(&self.other);
        }
        Arc::new(ModelMetrics::new(name.as_str(), namespace))
    }

    /// Returns a model's metrics, or those of `other` if it is not configured.
    #[must_use]
    pub fn model(&self, name: &ModelName) -> Arc<ModelMetrics> {
        Arc::clone(self.models.load().get(name).unwrap_or(&self.other))
    }

    /// Returns the metrics of a configured model.
    #[must_use]
    pub fn configured_model(&self, name: &ModelName) -> Option<Arc<ModelMetrics>> {
        self.models.load().get(name).cloned()
    }

    /// Returns what each configured model has served so far, without those that have had no request.
    #[must_use]
    pub fn traffic_totals(&self) -> BTreeMap<ModelName, TrafficTotals> {
        let models = self.models.load();
        let totals = |(name, metrics): (&ModelName, &Arc<ModelMetrics>)| {
            metrics.traffic_totals().map(|totals| (name.clone(), totals))
        };
        models.iter().filter_map(totals).collect()
    }

    /// Returns the metrics for requests that name no configured model.
    #[must_use]
    pub fn other(&self) -> Arc<ModelMetrics> {
        Arc::clone(&self.other)
    }

    /// Returns the counters of a configured key. Its series disappear with the last reference.
    #[must_use]
    pub fn key_metrics(&self, name: &str) -> Arc<KeyMetrics> {
        self.keys.for_key(name)
    }

    /// Sets every gauge of the fleet's state. A view's engines are sorted by name.
    pub fn observe_fleet(&self, view: &FleetView) {
        self.fleet_gauges.observe(view, self.namespaces.load().is_some());
        let by_model = view.engines.chunk_by(|a, b| a.engine.model == b.engine.model);
        let by_model: BTreeMap<&ModelName, &[EngineView]> =
            by_model.filter_map(|engines| Some((&engines.first()?.engine.model, engines))).collect();
        for model in &view.models {
            if let Some(metrics) = self.configured_model(&model.name) {
                metrics.observe(model, by_model.get(&model.name).copied().unwrap_or_default());
            }
        }
    }

    /// Counts a request that the gateway refused with this code of `openai::error`.
    pub fn request_refused(&self, code: &'static str) {
        self.refusals.with_label_values(&[code]).inc();
    }

    pub fn client_left(&self, phase: DisconnectPhase) {
        if let Some(counter) = self.disconnects.get(labels::phase_index(phase)) {
            counter.inc();
        }
    }

    /// Records the latency in microseconds that the gateway itself added to a request.
    pub fn observe_added_latency(&self, micros: u64) {
        self.added_latency.observe(micros as f64 / 1e6);
    }

    /// Changes the number of open client connections.
    pub fn add_connections(&self, change: i64) {
        self.connections.add(change);
    }

    /// Counts a connection that another thread serves than the one that accepted it.
    pub fn connection_moved(&self) {
        self.connections_moved.inc();
    }

    /// Counts a model that was evicted so that another could be awake.
    pub fn swapped(&self) {
        self.swaps.inc();
    }

    pub fn reloaded(&self, outcome: OutcomeLabel) {
        self.reloads.with_label_values(&[outcome.as_str()]).inc();
    }

    /// Sets the expiry of the served certificate, in seconds of Unix time.
    pub fn set_certificate_expiry(&self, at: Option<u64>) {
        match at.and_then(|at| i64::try_from(at).ok()) {
            Some(at) => self.certificate_expiry.with_label_values::<&str>(&[]).set(at),
            None => self.certificate_expiry.reset(),
        }
    }

    /// Encodes the metrics in Prometheus' text format, version 0.0.4.
    #[must_use]
    pub fn encode(&self) -> String {
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}

fn build_info(registry: &Registry) -> IntGaugeVec {
    let opts = Opts::new("rouse_build_info", "Always 1; the label names the version of this build");
    register(registry, expect_valid(IntGaugeVec::new(opts, &["version"])))
}

fn counters(registry: &Registry, name: &str, help: &str, label: &str) -> IntCounterVec {
    register(registry, expect_valid(IntCounterVec::new(Opts::new(name, help), &[label])))
}
