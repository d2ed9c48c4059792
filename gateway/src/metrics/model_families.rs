//! Builds one model's families.

use std::sync::{Arc, OnceLock};

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use rouse_platform::metric_builder::{DURATION_BUCKETS, expect_valid};

use super::traffic::TrafficMetrics;

pub(super) type MetricCollectors = Arc<[Box<dyn Collector>]>;

/// All families of one model, registered and unregistered as one.
#[derive(Clone)]
pub(super) struct ModelFamilies {
    pub(super) permanent: MetricCollectors,
    pub(super) traffic: Arc<OnceLock<TrafficMetrics>>,
}

impl Collector for ModelFamilies {
    /// The registry identifies the collector by these, so they must never change.
    fn desc(&self) -> Vec<&Desc> {
        self.permanent.iter().flat_map(|family| family.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let traffic = self.traffic.get().map(|traffic| &*traffic.families).unwrap_or_default();
        self.permanent.iter().chain(traffic).flat_map(|family| family.collect()).collect()
    }
}

pub(super) struct FamilyBuilder<'n> {
    pub(super) name: &'n str,
    pub(super) namespace: &'n str,
    pub(super) families: Vec<Box<dyn Collector>>,
}

impl FamilyBuilder<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model", self.name)
    }

    /// The families with the names of the earlier budget controller have a namespace.
    pub(super) fn namespaced_opts(&self, name: &str, help: &str) -> Opts {
        self.opts(name, help).const_label("namespace", self.namespace)
    }

    pub(super) fn add<C: Collector + Clone + 'static>(&mut self, family: C) -> C {
        self.families.push(Box::new(family.clone()));
        family
    }

    pub(super) fn counter(&mut self, name: &str, help: &str) -> IntCounter {
        let counter = expect_valid(IntCounter::with_opts(self.opts(name, help)));
        self.add(counter)
    }

    pub(super) fn counters(&mut self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        let counters = expect_valid(IntCounterVec::new(self.opts(name, help), labels));
        self.add(counters)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str) -> IntGauge {
        let gauge = expect_valid(IntGauge::with_opts(self.opts(name, help)));
        self.add(gauge)
    }

    pub(super) fn namespaced_gauge(&mut self, name: &str, help: &str) -> IntGauge {
        let gauge = expect_valid(IntGauge::with_opts(self.namespaced_opts(name, help)));
        self.add(gauge)
    }

    pub(super) fn gauges(&mut self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        let gauges = expect_valid(IntGaugeVec::new(self.opts(name, help), labels));
        self.add(gauges)
    }

    fn histogram_opts(&self, name: &str, help: &str) -> HistogramOpts {
        HistogramOpts::from(self.opts(name, help)).buckets(DURATION_BUCKETS.to_vec())
    }

    pub(super) fn histogram(&mut self, name: &str, help: &str) -> Histogram {
        let histogram = expect_valid(Histogram::with_opts(self.histogram_opts(name, help)));
        self.add(histogram)
    }

    pub(super) fn histograms(&mut self, name: &str, help: &str, label: &str) -> HistogramVec {
        let histograms = expect_valid(HistogramVec::new(self.histogram_opts(name, help), &[label]));
        self.add(histograms)
    }
}
