//! Metrics of shared devices and their slots.
//!
//! The gauges are those of the leader. One collector has them all, so that a scrape never sees half of a change.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus::{
    IntCounter, Registry,
    core::{Collector, Desc},
    proto::{Metric, MetricFamily},
};
use rouse::slots::ConfigurationName;
use rouse_platform::metric_builder::{GaugeFamily, expect_valid, nonempty_families, register};

static SLOTS: GaugeFamily = GaugeFamily {
    name: "rouse_device_slots",
    help: "Slots of the DeviceConfiguration's devices, by state",
    labels: &["configuration", "state"],
};
static INSTANCES: GaugeFamily = GaugeFamily {
    name: "rouse_device_instances",
    help: "Devices that were found of the DeviceConfiguration",
    labels: &["configuration"],
};

/// Numbers of the devices of one configuration, or of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSlotGauges {
    pub devices: u32,
    pub free: u32,
    /// Claimed, and not known to be without a container.
    pub used: u32,
    /// Claimed, and without a container for the time being.
    pub unused: u32,
}

/// Metrics of shared devices and their slots.
#[derive(Clone)]
pub struct DeviceSlotMetrics {
    gauges: SharedSlotGauges,
    rejected: IntCounter,
}

#[derive(Clone, Debug, Default)]
struct SharedSlotGauges(Arc<Mutex<BTreeMap<ConfigurationName, DeviceSlotGauges>>>);

impl SharedSlotGauges {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ConfigurationName, DeviceSlotGauges>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceSlotGauges {
    /// Returns the number of claimed slots.
    #[must_use]
    pub const fn claimed(self) -> u32 {
        self.used.saturating_add(self.unused)
    }

    /// Returns the number of all slots.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.claimed().saturating_add(self.free)
    }

    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            devices: self.devices.saturating_add(other.devices),
            free: self.free.saturating_add(other.free),
            used: self.used.saturating_add(other.used),
            unused: self.unused.saturating_add(other.unused),
        }
    }

    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self {
            devices: self.devices.saturating_sub(other.devices),
            free: self.free.saturating_sub(other.free),
            used: self.used.saturating_sub(other.used),
            unused: self.unused.saturating_sub(other.unused),
        }
    }
}

impl DeviceSlotMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let gauges = SharedSlotGauges::default();
        let collector =
            DeviceSlotCollector { gauges: gauges.clone(), descs: vec![SLOTS.desc(), INSTANCES.desc()] };
        expect_valid(registry.register(Box::new(collector)));
        let rejected = IntCounter::new(
            "rouse_slots_rejected_pods_total",
            "Pods that a kubelet rejected for want of a slot, and that were then deleted",
        );
        Self { gauges, rejected: register(registry, expect_valid(rejected)) }
    }

    /// Sets the numbers of one configuration. Without any device its series go.
    pub fn set(&self, configuration: &ConfigurationName, gauges: DeviceSlotGauges) {
        let mut all = self.gauges.lock();
        if gauges.devices == 0 {
            all.remove(configuration);
        } else {
            all.insert(configuration.clone(), gauges);
        }
    }

    /// Removes all gauges: a gateway that does not lead exports none.
    pub fn reset(&self) {
        self.gauges.lock().clear();
    }

    /// Counts a rejected Pod that was deleted.
    pub fn rejected_pod_deleted(&self) {
        self.rejected.inc();
    }
}

/// Builds the gauges for each scrape.
struct DeviceSlotCollector {
    gauges: SharedSlotGauges,
    descs: Vec<Desc>,
}

impl Collector for DeviceSlotCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let all = self.gauges.lock().clone();
        let (mut slots, mut instances): (Vec<Metric>, Vec<Metric>) = (Vec::new(), Vec::new());
        for (configuration, gauges) in &all {
            let DeviceSlotGauges { devices, free, used, unused } = *gauges;
            let states = [("free", free), ("unused", unused), ("used", used)];
            slots
                .extend(states.map(|(state, number)| {
                    SLOTS.sample(&[configuration.as_str(), state], f64::from(number))
                }));
            instances.push(INSTANCES.sample(&[configuration.as_str()], f64::from(devices)));
        }
        nonempty_families([(&SLOTS, slots), (&INSTANCES, instances)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::testing::scrape;

    #[test]
    fn a_configuration_has_its_series_while_it_has_devices_and_this_gateway_leads() {
        let registry = Registry::new();
        let metrics = DeviceSlotMetrics::new(&registry);
        let [camera, gpu] = ["camera", "gpu"].map(ConfigurationName::from);
        let gauges = DeviceSlotGauges { devices: 2, free: 7, used: 2, unused: 1 };
        assert_eq!((gauges.slots(), gauges.claimed()), (10, 3));
        metrics.set(&camera, gauges);
        metrics.set(&gpu, gauges.plus(gauges).minus(gauges));
        metrics.rejected_pod_deleted();
        let text = scrape(&registry);
        for line in [
            "rouse_device_slots{configuration=\"camera\",state=\"free\"} 7",
            "rouse_device_slots{configuration=\"camera\",state=\"used\"} 2",
            "rouse_device_slots{configuration=\"camera\",state=\"unused\"} 1",
            "rouse_device_instances{configuration=\"gpu\"} 2",
            "rouse_slots_rejected_pods_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        metrics.set(&gpu, DeviceSlotGauges::default());
        assert!(!scrape(&registry).contains("configuration=\"gpu\""));
        metrics.reset();
        assert!(!scrape(&registry).contains("rouse_device"));
    }
}
