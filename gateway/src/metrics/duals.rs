//! What is told of dual pods, under the names that the public project has for it.

mod calls;

use prometheus::{HistogramOpts, HistogramVec, IntGaugeVec, Opts, Registry};
use rouse::units::Millis;

pub use self::calls::Calls;
use super::{SECONDS, register, seconds, valid};

/// How a requester came to its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// One that slept was woken.
    Hot,
    /// A launcher that was there started one.
    Warm,
    /// A Pod was made for it.
    Cold,
}

/// What a launcher is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
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
pub struct Pair {
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
pub struct Duals {
    actuation: HistogramVec,
    calls: HistogramVec,
    creation: HistogramVec,
    duality: IntGaugeVec,
    requesters: IntGaugeVec,
    configs: IntGaugeVec,
    launchers: IntGaugeVec,
}

impl Path {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

impl Phase {
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

impl Pair {
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

impl Duals {
    pub(super) fn new(registry: &Registry) -> Self {
        let spans = |name, help, labels: &[&str]| {
            let opts = HistogramOpts::new(name, help).buckets(SECONDS.to_vec());
            register(registry, valid(HistogramVec::new(opts, labels)))
        };
        let gauges = |name, help, labels: &[&str]| {
            register(registry, valid(IntGaugeVec::new(Opts::new(name, help), labels)))
        };
        Self {
            actuation: spans(
                "fma_actuation_seconds",
                "From when a requester's stub was seen to run until its engine served it",
                &["exported_namespace", "path", "isc_name"],
            ),
            calls: spans(
                "fma_http_latency_seconds",
                "Calls to stubs, launchers and engines",
                &["purpose", "method", "exported_namespace", "isc_name", "status_code"],
            ),
            creation: spans(
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
    pub fn served(&self, namespace: &str, path: Path, config: Option<&str>, took: Millis) {
        let labels = [namespace, path.as_str(), config.unwrap_or_default()];
        self.actuation.with_label_values(&labels).observe(seconds(took));
    }

    /// Where calls are told about a Pod of this namespace; `config` as in [`Self::served`].
    #[must_use]
    pub fn calls(&self, namespace: &str, config: Option<&str>) -> Calls {
        Calls::new(self.calls.clone(), namespace, config.unwrap_or_default())
    }

    /// A launcher was asked for. `success`: the API server has answered.
    pub fn created(&self, namespace: &str, config: &str, success: bool, took: Millis) {
        let labels = [namespace, config, if success { "true" } else { "false" }];
        self.creation.with_label_values(&labels).observe(seconds(took));
    }

    pub fn bound(&self, pair: &Pair) {
        self.duality.with_label_values(&pair.labels()).set(1);
    }

    /// Nothing of it is left: names of Pods do not come again.
    pub fn unbound(&self, pair: &Pair) {
        // What is not there need not be taken away.
        drop(self.duality.remove_label_values(&pair.labels()));
    }

    /// So many ask for this InferenceServerConfig, or with an empty name for none.
    pub fn requesters(&self, config: &str, count: usize) {
        set(&self.requesters, &[config], count);
    }

    /// So many name this LauncherConfig.
    pub fn configs(&self, launcher: &str, count: usize) {
        set(&self.configs, &[launcher], count);
    }

    pub fn launchers(&self, config: &str, phase: Phase, count: usize) {
        set(&self.launchers, &[config, phase.as_str()], count);
    }

    /// Who does not lead tells nothing of how things are.
    pub fn forget(&self) {
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
