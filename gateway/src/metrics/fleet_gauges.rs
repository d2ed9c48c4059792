//! Gauges of the machine: accelerators, host RAM, and the budget under the names of an earlier controller.

use prometheus::{IntGaugeVec, Opts, Registry};
use rouse::{
    fleet::report::{AcceleratorView, FleetView},
    units::Bytes,
};

use rouse_platform::metric_builder::{expect_valid, integer, register};

use super::LOCAL_LABEL;

pub(super) struct FleetGauges {
    total: IntGaugeVec,
    allocated: IntGaugeVec,
    available: IntGaugeVec,
    memory: IntGaugeVec,
    healthy: IntGaugeVec,
    host: IntGaugeVec,
}

impl FleetGauges {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            register(registry, expect_valid(IntGaugeVec::new(Opts::new(name, help), labels)))
        };
        let budget = |name: &str, help: &str| gauges(name, help, &["node_pool"]);
        let total = "Memory that may be granted on all accelerators together, without headroom";
        Self {
            total: budget("inference_budget_total_bytes", total),
            allocated: budget("inference_budget_allocated_bytes", "Reserved memory of all engines"),
            available: budget("inference_budget_available_bytes", "Unreserved memory"),
            memory: gauges(
                "rouse_accelerator_memory_bytes",
                "Memory of each accelerator by kind: capacity (may be granted), reserved, observed (in use)",
                &["accelerator", "kind"],
            ),
            healthy: gauges(
                "rouse_accelerator_healthy",
                "0 while a fault blocks new grants on the accelerator, 1 otherwise",
                &["accelerator"],
            ),
            host: gauges(
                "rouse_host_memory_bytes",
                "Host RAM for asleep engines by kind: capacity (may be granted), reserved",
                &["kind"],
            ),
        }
    }

    /// Sets the gauges. `pools` means that each accelerator of the view is a pool, as in a cluster.
    pub(super) fn observe(&self, view: &FleetView, pools: bool) {
        [&self.total, &self.allocated, &self.available].iter().for_each(|gauge| gauge.reset());
        if pools {
            for pool in &view.accelerators {
                self.budget(pool.id.as_str(), pool.capacity, pool.reserved);
            }
        } else {
            let sum =
                |bytes: fn(&AcceleratorView) -> Bytes| view.accelerators.iter().map(bytes).sum::<Bytes>();
            self.budget(LOCAL_LABEL, sum(|a| a.capacity), sum(|a| a.reserved));
        }
        // The reset removes accelerators that are gone from the view.
        self.memory.reset();
        self.healthy.reset();
        for accelerator in &view.accelerators {
            let id = accelerator.id.as_str();
            let set = |kind, bytes: Bytes| self.memory.with_label_values(&[id, kind]).set(integer(bytes.0));
            set("capacity", accelerator.capacity);
            set("reserved", accelerator.reserved);
            if let Some(observed) = accelerator.observed {
                set("observed", observed);
            }
            self.healthy.with_label_values(&[id]).set(i64::from(accelerator.healthy));
        }
        let host = |kind, bytes: Bytes| self.host.with_label_values(&[kind]).set(integer(bytes.0));
        host("capacity", view.host.capacity);
        host("reserved", view.host.reserved);
    }

    fn budget(&self, pool: &str, total: Bytes, allocated: Bytes) {
        let set = |gauge: &IntGaugeVec, bytes: Bytes| gauge.with_label_values(&[pool]).set(integer(bytes.0));
        set(&self.total, total);
        set(&self.allocated, allocated);
        set(&self.available, total.saturating_sub(allocated));
    }
}
