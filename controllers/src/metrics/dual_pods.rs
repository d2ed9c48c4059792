//! Metrics of dual pods, under the public project's names.

mod call_latency;

use prometheus::{HistogramOpts, HistogramVec, IntGaugeVec, Opts, Registry};
use rouse::units::Millis;
use rouse_platform::metric_builder::{DURATION_BUCKETS, expect_valid, register, seconds};

pub use self::call_latency::CallLatencyObserver;

/// How a requester got its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActuationPath {
    /// A sleeping engine was woken.
    Hot,
    /// An existing launcher started an engine.
    Warm,
    /// A Pod was created for the engine.
    Cold,
}

/// What a launcher is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LauncherPhase {
    /// Has engines that are bound to requesters.
    Bound,
    /// Has no bound engine, and is ready or may still become ready.
    Unbound,
    /// Has no node for so long that it may never get one.
    StuckScheduling,
    /// Has a node, and is not ready for so long that it may never be.
    StuckStarting,
    /// Has no bound engine, and its LauncherConfig has changed since or is gone.
    Stale,
}

/// Labels of one accelerator of an engine that is bound to a requester.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EngineBindingLabels {
    pub namespace: String,
    pub requester: String,
    pub provider: String,
    pub container: &'static str,
    /// The instance id at its launcher; empty for an engine with its own Pod.
    pub instance: String,
    pub accelerator: String,
    pub node: String,
}

/// Counters, gauges and histograms of dual pods.
#[derive(Clone, Debug)]
pub struct DualPodMetrics {
    actuation: HistogramVec,
    call_latency: HistogramVec,
    launcher_creation: HistogramVec,
    duality: IntGaugeVec,
    requesters: IntGaugeVec,
    configs: IntGaugeVec,
    launchers: IntGaugeVec,
}

impl ActuationPath {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

impl LauncherPhase {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bound => "bound",
            Self::Unbound => "unbound",
            Self::StuckScheduling => "stuck_scheduling",
            Self::StuckStarting => "stuck_starting",
            Self::Stale => "stale",
        }
    }
}

impl EngineBindingLabels {
    fn labels(&self) -> [&str; 7] {
        [
            &self.namespace,
            &self.requester,
            &self.provider,
            self.container,
            &self.instance,
            &self.accelerator,
            &self.node,
        ]
    }
}

impl DualPodMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let spans = |name, help, labels: &[&str]| {
            let opts = HistogramOpts::new(name, help).buckets(DURATION_BUCKETS.to_vec());
            register(registry, expect_valid(HistogramVec::new(opts, labels)))
        };
        let gauges = |name, help, labels: &[&str]| {
            register(registry, expect_valid(IntGaugeVec::new(Opts::new(name, help), labels)))
        };
        Self {
            actuation: spans(
                "fma_actuation_seconds",
                "Time from when a requester's stub is first seen running until an engine serves the requester",
                &["exported_namespace", "path", "isc_name"],
            ),
            call_latency: spans(
                "fma_http_latency_seconds",
                "Duration of HTTP calls to stubs, launchers and engines",
                &["purpose", "method", "exported_namespace", "isc_name", "status_code"],
            ),
            launcher_creation: spans(
                "fma_launcher_create_seconds",
                "Duration of API server calls that create a launcher's Pod",
                &["exported_namespace", "lcfg_name", "success"],
            ),
            duality: gauges(
                "fma_duality",
                "1 while an engine on this accelerator serves this requester",
                &[
                    "exported_namespace",
                    "requester_name",
                    "exported_pod",
                    "exported_container",
                    "instance_id",
                    "UUID",
                    "node",
                ],
            ),
            requesters: gauges(
                "fma_requester_count",
                "Number of requesters, by the InferenceServerConfig that they name",
                &["isc_name"],
            ),
            configs: gauges(
                "fma_isc_count",
                "Number of InferenceServerConfigs, by the LauncherConfig that they name",
                &["launcher_config_name"],
            ),
            launchers: gauges(
                "fma_launcher_pod_count",
                "Number of launchers, by LauncherConfig and phase",
                &["lcfg_name", "phase"],
            ),
        }
    }

    /// Records the actuation of a requester in this namespace.
    ///
    /// `config` is the InferenceServerConfig that the requester names, if any.
    pub fn observe_actuation(
        &self,
        namespace: &str,
        path: ActuationPath,
        config: Option<&str>,
        took: Millis,
    ) {
        let labels = [namespace, path.as_str(), config.unwrap_or_default()];
        self.actuation.with_label_values(&labels).observe(seconds(took));
    }

    /// Returns the observer of calls for a Pod of this namespace; `config` as in [`Self::observe_actuation`].
    #[must_use]
    pub fn call_observer(&self, namespace: &str, config: Option<&str>) -> CallLatencyObserver {
        CallLatencyObserver::new(self.call_latency.clone(), namespace, config.unwrap_or_default())
    }

    /// Records a request to create a launcher. `success` means that the API server has answered.
    pub fn observe_launcher_creation(&self, namespace: &str, config: &str, success: bool, took: Millis) {
        let labels = [namespace, config, if success { "true" } else { "false" }];
        self.launcher_creation.with_label_values(&labels).observe(seconds(took));
    }

    pub fn set_bound(&self, labels: &EngineBindingLabels) {
        self.duality.with_label_values(&labels.labels()).set(1);
    }

    /// Removes the series: Pod names do not recur.
    pub fn remove_bound(&self, labels: &EngineBindingLabels) {
        // A series that does not exist needs no removal.
        drop(self.duality.remove_label_values(&labels.labels()));
    }

    /// Sets how many requesters name this InferenceServerConfig; an empty name stands for none.
    pub fn set_requesters(&self, config: &str, count: usize) {
        set(&self.requesters, &[config], count);
    }

    /// Sets how many InferenceServerConfigs name this LauncherConfig.
    pub fn set_configs(&self, launcher: &str, count: usize) {
        set(&self.configs, &[launcher], count);
    }

    pub fn set_launchers(&self, config: &str, phase: LauncherPhase, count: usize) {
        set(&self.launchers, &[config, phase.as_str()], count);
    }

    /// Removes all gauges: a gateway that does not lead reports no state.
    pub fn reset(&self) {
        for gauges in [&self.duality, &self.requesters, &self.configs, &self.launchers] {
            gauges.reset();
        }
    }
}

/// Sets a gauge, or removes its series if the count is zero.
fn set(gauges: &IntGaugeVec, labels: &[&str], count: usize) {
    match i64::try_from(count) {
        Ok(0) | Err(_) => drop(gauges.remove_label_values(labels)),
        Ok(count) => gauges.with_label_values(labels).set(count),
    }
}
