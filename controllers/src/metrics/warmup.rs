//! Metrics of Warmups and of warm nodes.
//!
//! The gauges are those of the leader. One collector has them all, so that a scrape never sees half of a change.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry,
    core::{Collector, Desc},
    proto::{Metric, MetricFamily},
};
use rouse::{
    units::Millis,
    warmup::{WarmSet, WarmupPhase, WarmupReport},
};
use rouse_platform::metric_builder::{GaugeFamily, expect_valid, nonempty_families, register, seconds};

use crate::crd::ledger::ObjectName;

static NODES: GaugeFamily = GaugeFamily {
    name: "rouse_warmup_nodes",
    help: "Nodes of the Warmup, by state",
    labels: &["namespace", "state", "warmup"],
};
static WARM_NODES: GaugeFamily = GaugeFamily {
    name: "rouse_warm_nodes",
    help: "Nodes with the label of the set of warm nodes",
    labels: &["namespace", "set", "target"],
};

/// Bounds of the durations of attempts, in seconds: an image of a few megabytes up to the weights of a large model.
const ATTEMPT_BUCKETS: [f64; 11] = [1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];

/// Numbers of one Warmup's nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarmupNodeGauges {
    pub warm: u32,
    pub active: u32,
    pub waiting: u32,
    /// Waiting nodes of a Warmup that is paused.
    pub paused: u32,
    pub failed: u32,
}

/// Nodes that are warm for one Warmup or model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmSetGauge {
    pub namespace: String,
    /// `model/NAME` or `warmup/NAME`.
    pub target: String,
    pub nodes: u32,
}

/// Metrics of Warmups.
#[derive(Clone)]
pub struct WarmupMetrics {
    gauges: SharedGauges,
    attempts: IntCounterVec,
    durations: HistogramVec,
}

#[derive(Clone, Debug, Default)]
struct SharedGauges(Arc<Mutex<WarmupGauges>>);

#[derive(Clone, Debug, Default)]
struct WarmupGauges {
    warmups: BTreeMap<ObjectName, WarmupNodeGauges>,
    sets: BTreeMap<WarmSet, WarmSetGauge>,
}

impl SharedGauges {
    fn lock(&self) -> MutexGuard<'_, WarmupGauges> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WarmupNodeGauges {
    /// Returns the numbers of a report.
    #[must_use]
    pub fn of(report: &WarmupReport) -> Self {
        let WarmupReport { desired, active, succeeded, failed, .. } = *report;
        let others = desired.saturating_sub(active.saturating_add(succeeded).saturating_add(failed));
        let is_paused = report.progress.phase == WarmupPhase::Paused;
        let (waiting, paused) = if is_paused { (0, others) } else { (others, 0) };
        Self { warm: succeeded, active, waiting, paused, failed }
    }
}

impl WarmupMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let gauges = SharedGauges::default();
        let collector =
            WarmupCollector { gauges: gauges.clone(), descs: vec![NODES.desc(), WARM_NODES.desc()] };
        expect_valid(registry.register(Box::new(collector)));
        let attempts = Opts::new("rouse_warmup_attempts_total", "Pods of Warmups that ended, by outcome");
        let durations = HistogramOpts::new(
            "rouse_warmup_attempt_seconds",
            "From the creation of a Warmup's Pod until its image was present, its action was done, or it failed",
        );
        let durations = durations.buckets(ATTEMPT_BUCKETS.to_vec());
        Self {
            gauges,
            attempts: register(registry, expect_valid(IntCounterVec::new(attempts, &["outcome"]))),
            durations: register(registry, expect_valid(HistogramVec::new(durations, &["outcome"]))),
        }
    }

    /// Sets the numbers of one Warmup's nodes.
    pub fn set_warmup(&self, warmup: &ObjectName, nodes: WarmupNodeGauges) {
        self.gauges.lock().warmups.insert(warmup.clone(), nodes);
    }

    /// Removes the series of a Warmup that is gone.
    pub fn remove_warmup(&self, warmup: &ObjectName) {
        self.gauges.lock().warmups.remove(warmup);
    }

    /// Sets the numbers of warm nodes of all sets.
    pub fn set_sets(&self, sets: BTreeMap<WarmSet, WarmSetGauge>) {
        self.gauges.lock().sets = sets;
    }

    /// Removes all gauges: a gateway that does not lead exports none.
    pub fn reset(&self) {
        *self.gauges.lock() = WarmupGauges::default();
    }

    /// Counts a Pod that ended. `cause`: the reason of its failure; `None` if it is done.
    pub fn attempt_ended(&self, cause: Option<&str>, took: Millis) {
        self.attempts.with_label_values(&[cause.unwrap_or("done")]).inc();
        let outcome = if cause.is_some() { "failed" } else { "done" };
        self.durations.with_label_values(&[outcome]).observe(seconds(took));
    }
}

/// Builds the gauges for each scrape.
struct WarmupCollector {
    gauges: SharedGauges,
    descs: Vec<Desc>,
}

impl Collector for WarmupCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let WarmupGauges { warmups, sets } = self.gauges.lock().clone();
        let mut nodes: Vec<Metric> = Vec::new();
        for (warmup, numbers) in &warmups {
            let WarmupNodeGauges { warm, active, waiting, paused, failed } = *numbers;
            let states = [
                ("active", active),
                ("failed", failed),
                ("paused", paused),
                ("waiting", waiting),
                ("warm", warm),
            ];
            let samples = states.into_iter().map(|(state, number)| {
                NODES.sample(&[warmup.namespace.as_str(), state, warmup.name.as_str()], f64::from(number))
            });
            nodes.extend(samples);
        }
        let samples = sets.iter().map(|(set, gauge)| {
            let labels = [gauge.namespace.as_str(), set.as_str(), gauge.target.as_str()];
            WARM_NODES.sample(&labels, f64::from(gauge.nodes))
        });
        nonempty_families([(&NODES, nodes), (&WARM_NODES, samples.collect())])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::testing::scrape;

    #[test]
    fn a_warmup_has_all_five_states_until_it_is_gone_or_the_term_ends() {
        let registry = Registry::new();
        let metrics = WarmupMetrics::new(&registry);
        let warmup = ObjectName::new("chat", "qwen");
        metrics.set_warmup(&warmup, WarmupNodeGauges { warm: 2, waiting: 1, ..WarmupNodeGauges::default() });
        let set = WarmSetGauge { namespace: "chat".to_owned(), target: "model/qwen".to_owned(), nodes: 2 };
        metrics.set_sets(BTreeMap::from([(WarmSet::from("0123456789abcdef"), set)]));
        let text = scrape(&registry);
        for line in [
            "rouse_warmup_nodes{namespace=\"chat\",state=\"warm\",warmup=\"qwen\"} 2",
            "rouse_warmup_nodes{namespace=\"chat\",state=\"active\",warmup=\"qwen\"} 0",
            "rouse_warmup_nodes{namespace=\"chat\",state=\"waiting\",warmup=\"qwen\"} 1",
            "rouse_warmup_nodes{namespace=\"chat\",state=\"paused\",warmup=\"qwen\"} 0",
            "rouse_warmup_nodes{namespace=\"chat\",state=\"failed\",warmup=\"qwen\"} 0",
            "rouse_warm_nodes{namespace=\"chat\",set=\"0123456789abcdef\",target=\"model/qwen\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        metrics.remove_warmup(&warmup);
        assert!(!scrape(&registry).contains("rouse_warmup_nodes"));
        metrics.reset();
        assert!(!scrape(&registry).contains("rouse_warm_nodes"));
    }

    #[test]
    fn an_attempt_counts_by_its_cause_and_its_duration_by_its_outcome() {
        let registry = Registry::new();
        let metrics = WarmupMetrics::new(&registry);
        metrics.attempt_ended(None, Millis(1_500));
        metrics.attempt_ended(Some("NotFound"), Millis(500));
        let text = scrape(&registry);
        for line in [
            "rouse_warmup_attempts_total{outcome=\"done\"} 1",
            "rouse_warmup_attempts_total{outcome=\"NotFound\"} 1",
            "rouse_warmup_attempt_seconds_bucket{outcome=\"done\",le=\"1\"} 0",
            "rouse_warmup_attempt_seconds_bucket{outcome=\"done\",le=\"2\"} 1",
            "rouse_warmup_attempt_seconds_bucket{outcome=\"failed\",le=\"1\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
