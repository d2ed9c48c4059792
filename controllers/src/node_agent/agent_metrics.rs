//! Metrics of the node agent, which has a registry of its own.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, IntCounterVec, Opts, Registry};
use rouse_platform::metric_builder::{expect_valid, register};

use super::{agent_view::PluginKey, allocator::AllocationError};
use crate::{metrics::write_counters, writer};

/// Buckets of an allocation's duration, in seconds: the kubelet waits for it.
const ALLOCATION_BUCKETS: [f64; 9] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0];

/// Counts what the agent does.
#[derive(Clone)]
pub(super) struct AgentMetrics {
    /// Counted by the plugin's kind and outcome.
    allocations: IntCounterVec,
    allocation_seconds: Histogram,
    /// Counted by action.
    reclaimed: IntCounterVec,
    /// Counted by outcome.
    usage_queries: IntCounterVec,
    /// Writes to the Kubernetes API, by object kind and outcome.
    pub(super) writes: IntCounterVec,
}

impl AgentMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let counters = |name: &str, help: &str, labels: &[&str]| {
            register(registry, expect_valid(IntCounterVec::new(Opts::new(name, help), labels)))
        };
        let seconds = HistogramOpts::new(
            "rouse_node_allocation_duration_seconds",
            "Time from the kubelet's request for slots to the answer",
        );
        let seconds = seconds.buckets(ALLOCATION_BUCKETS.to_vec());
        Self {
            allocations: counters(
                "rouse_node_allocations_total",
                "Requests of the kubelet for slots, by the kind of resource and outcome",
                &["resource", "outcome"],
            ),
            allocation_seconds: register(registry, expect_valid(Histogram::with_opts(seconds))),
            reclaimed: counters(
                "rouse_node_slots_reconciled_total",
                "Changes of this node's slots after a comparison with its containers, by action",
                &["action"],
            ),
            usage_queries: counters(
                "rouse_node_usage_queries_total",
                "Queries for the slots that containers use, by outcome",
                &["outcome"],
            ),
            writes: write_counters(registry),
        }
    }

    /// Counts an answer to the kubelet.
    pub(super) fn allocated(&self, key: &PluginKey, duration: Duration, error: Option<&AllocationError>) {
        let outcome = match error {
            None => "granted",
            Some(AllocationError::Timeout | AllocationError::Write(writer::Error::Timeout)) => "timeout",
            Some(AllocationError::Write(_)) => "failed",
            Some(_) => "refused",
        };
        self.allocations.with_label_values(&[key.kind(), outcome]).inc();
        self.allocation_seconds.observe(duration.as_secs_f64());
    }

    /// Counts a change of a slot.
    pub(super) fn reclaimed(&self, action: &str) {
        self.reclaimed.with_label_values(&[action]).inc();
    }

    /// Counts a query for the slots in use.
    pub(super) fn usage_queried(&self, answered: bool) {
        self.usage_queries.with_label_values(&[if answered { "done" } else { "failed" }]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::testing::scrape;

    #[test]
    fn an_allocation_is_counted_by_its_outcome() {
        let registry = Registry::new();
        let metrics = AgentMetrics::new(&registry);
        let (instance, took) = (PluginKey::Instance("lamp".into()), Duration::from_millis(3));
        metrics.allocated(&instance, took, None);
        let configuration = PluginKey::Configuration("lamps".into());
        metrics.allocated(&configuration, took, Some(&AllocationError::Contended));
        let text = scrape(&registry);
        for line in [
            r#"rouse_node_allocations_total{outcome="granted",resource="instance"} 1"#,
            r#"rouse_node_allocations_total{outcome="refused",resource="configuration"} 1"#,
            "rouse_node_allocation_duration_seconds_count 2",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}
