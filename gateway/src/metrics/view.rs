//! Gauges of the machine: accelerators, host RAM, and the budget under the names of the controller that came before.

use prometheus::{IntGauge, IntGaugeVec, Opts, Registry};
use rouse::{
    fleet::report::{AcceleratorView, View},
    units::Bytes,
};

use super::{model::integer, register, valid};

/// What the label `node_pool` says on one machine.
const POOL: &str = "local";

pub(super) struct Gauges {
    total: IntGauge,
    allocated: IntGauge,
    available: IntGauge,
    memory: IntGaugeVec,
    healthy: IntGaugeVec,
    host: IntGaugeVec,
}

impl Gauges {
    pub(super) fn new(registry: &Registry) -> Self {
        let budget = |name: &str, help: &str| {
            let opts = Opts::new(name, help).const_label("node_pool", POOL);
            register(registry, valid(IntGauge::with_opts(opts)))
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            register(registry, valid(IntGaugeVec::new(Opts::new(name, help), labels)))
        };
        Self {
            total: budget(
                "inference_budget_total_bytes",
                "Memory that may be granted, all accelerators together",
            ),
            allocated: budget("inference_budget_allocated_bytes", "Memory that is reserved"),
            available: budget("inference_budget_available_bytes", "Memory that is not reserved"),
            memory: gauges(
                "rouse_accelerator_memory_bytes",
                "Memory of each accelerator: capacity that may be granted, reserved, observed in use",
                &["accelerator", "kind"],
            ),
            healthy: gauges(
                "rouse_accelerator_healthy",
                "0 when nothing new is granted on the accelerator because of a fault",
                &["accelerator"],
            ),
            host: gauges(
                "rouse_host_memory_bytes",
                "Host RAM for sleepers: capacity that may be granted, reserved",
                &["kind"],
            ),
        }
    }

    pub(super) fn observe(&self, view: &View) {
        let sum = |bytes: fn(&AcceleratorView) -> Bytes| view.accelerators.iter().map(bytes).sum::<Bytes>();
        let (capacity, reserved) = (sum(|a| a.capacity), sum(|a| a.reserved));
        self.total.set(integer(capacity.0));
        self.allocated.set(integer(reserved.0));
        self.available.set(integer(capacity.saturating_sub(reserved).0));
        // An accelerator that is gone from the view is gone from here.
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
}
