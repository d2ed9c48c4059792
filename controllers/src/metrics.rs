//! Metrics of the controllers. The gateway's registry has them.

mod dual_pods;
mod meter_reads;
mod saturation;
mod slots;
mod takeover;
#[cfg(test)]
pub(crate) mod testing;
mod warmup;

pub use self::{
    dual_pods::{ActuationPath, CallLatencyObserver, DualPodMetrics, EngineBindingLabels, LauncherPhase},
    meter_reads::{MeterReadMetrics, MeterSource},
    saturation::{ModelReplicas, SaturationMetrics, VariantLoad, VariantReplicas},
    slots::{DeviceSlotGauges, DeviceSlotMetrics},
    takeover::{TakeoverMetrics, TakeoverTimes},
    warmup::{WarmSetGauge, WarmupMetrics, WarmupNodeGauges},
};

use prometheus::{IntCounterVec, Opts, Registry};
use rouse_platform::metric_builder::{expect_valid, register};

/// All metrics of the controllers.
#[derive(Clone)]
pub struct ControllerMetrics {
    pub dual_pods: DualPodMetrics,
    pub meter_reads: MeterReadMetrics,
    pub saturation: SaturationMetrics,
    pub slots: DeviceSlotMetrics,
    pub takeover: TakeoverMetrics,
    pub warmup: WarmupMetrics,
    /// Writes to the Kubernetes API, by object kind and outcome.
    pub writes: IntCounterVec,
}

impl ControllerMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        Self {
            dual_pods: DualPodMetrics::new(registry),
            meter_reads: MeterReadMetrics::new(registry),
            saturation: SaturationMetrics::new(registry),
            slots: DeviceSlotMetrics::new(registry),
            takeover: TakeoverMetrics::new(registry),
            warmup: WarmupMetrics::new(registry),
            writes: write_counters(registry),
        }
    }
}

/// Registers the counters of writes to the Kubernetes API, by object kind and outcome.
pub(crate) fn write_counters(registry: &Registry) -> IntCounterVec {
    let writes = Opts::new(
        "rouse_kubernetes_writes_total",
        "Writes to the Kubernetes API, by object kind and outcome",
    );
    register(registry, expect_valid(IntCounterVec::new(writes, &["kind", "outcome"])))
}
