//! What is told of dual pods, under the names that the public project has for it.

mod call_latency;

use prometheus::{HistogramOpts, HistogramVec, IntGaugeVec, Opts, Registry};
use rouse::units::Millis;

pub use self::call_latency::CallLatencyObserver;
use super::{DURATION_BUCKETS, expect_valid, register, seconds};

/// How a requester came to its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActuationPath {
    /// One that slept was woken.
    Hot,
    /// A launcher that was there started one.
    Warm,
    /// A Pod was made for it.
    Cold,
}

/// What a launcher is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LauncherPhase {
    /// It has engines that are somebody's.
    Bound,
    /// It has none, and is ready or may become so yet.
    Unbound,
    /// It has no node after so long that it may never have one.
    StuckScheduling,
    /// It has one, and is not ready after so long that it may never be.
    StuckStarting,
    /// It is nobody's, and of a LauncherConfig that was changed since, or is gone.
    Stale,
}

/// One accelerator of an engine that is a requester's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EngineBindingLabels {
    pub namespace: String,
    pub requester: String,
    pub provider: String,
    pub container: &'static str,
    /// Under which its launcher has the engine; empty for one with a Pod of its own.
    pub instance: String,
    pub accelerator: String,
    pub node: String,
}

/// Counts and measures.
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
    pub(super) fn new(registry: &Registry) -> Self {
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
                "From when a requester's stub was seen to run until its engine served it",
                &["exported_namespace", "path", "isc_name"],
            ),
            call_latency: spans(
                "fma_http_latency_seconds",
                "Calls to stubs, launchers and engines",
                &["purpose", "method", "exported_namespace", "isc_name", "status_code"],
            ),
            launcher_creation: spans(
                "fma_launcher_create_seconds",
                "Calls to the API server that make a launcher's Pod",
                &["exported_namespace", "lcfg_name", "success"],
            ),
            duality: gauges(
                "fma_duality",
                "1 while an engine on this accelerator is this requester's",
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
                "Requesters, by the InferenceServerConfig that they ask for",
                &["isc_name"],
            ),
            configs: gauges(
                "fma_isc_count",
                "InferenceServerConfigs, by the LauncherConfig that they name",
                &["launcher_config_name"],
            ),
            launchers: gauges(
                "fma_launcher_pod_count",
                "Launchers, by their LauncherConfig and what they are doing",
                &["lcfg_name", "phase"],
            ),
        }
    }

    /// A requester of this namespace is served. `config`: the InferenceServerConfig that it asks for, where it does.
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

    /// Where calls are told about a Pod of this namespace; `config` as in [`Self::observe_actuation`].
    #[must_use]
    pub fn call_observer(&self, namespace: &str, config: Option<&str>) -> CallLatencyObserver {
        CallLatencyObserver::new(self.call_latency.clone(), namespace, config.unwrap_or_default())
    }

    /// A launcher was asked for. `success`: the API server has answered.
    pub fn observe_launcher_creation(&self, namespace: &str, config: &str, success: bool, took: Millis) {
        let labels = [namespace, config, if success { "true" } else { "false" }];
        self.launcher_creation.with_label_values(&labels).observe(seconds(took));
    }

    pub fn set_bound(&self, pair: &EngineBindingLabels) {
        self.duality.with_label_values(&pair.labels()).set(1);
    }

    /// Nothing of it is left: names of Pods do not come again.
    pub fn remove_bound(&self, pair: &EngineBindingLabels) {
        // What is not there need not be taken away.
        drop(self.duality.remove_label_values(&pair.labels()));
    }

    /// So many ask for this InferenceServerConfig, or with an empty name for none.
    pub fn set_requesters(&self, config: &str, count: usize) {
        set(&self.requesters, &[config], count);
    }

    /// So many name this LauncherConfig.
    pub fn set_configs(&self, launcher: &str, count: usize) {
        set(&self.configs, &[launcher], count);
    }

    pub fn set_launchers(&self, config: &str, phase: LauncherPhase, count: usize) {
        set(&self.launchers, &[config, phase.as_str()], count);
    }

    /// Who does not lead tells nothing of how things are.
    pub fn reset(&self) {
        for gauges in [&self.duality, &self.requesters, &self.configs, &self.launchers] {
            gauges.reset();
        }
    }
}

/// One that is none any more has no series.
fn set(gauges: &IntGaugeVec, labels: &[&str], count: usize) {
    match i64::try_from(count) {
        Ok(0) | Err(_) => drop(gauges.remove_label_values(labels)),
        Ok(count) => gauges.with_label_values(labels).set(count),
    }
}
