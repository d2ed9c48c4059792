//! Builds one model's families, with its name as a constant label.

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    core::Collector,
};

use rouse_platform::metric_builder::{DURATION_BUCKETS, expect_valid};

pub(super) type MetricCollectors = Box<[Box<dyn Collector>]>;

pub(super) struct FamilyBuilder<'n> {
    pub(super) name: &'n str,
    pub(super) families: Vec<Box<dyn Collector>>,
}

impl FamilyBuilder<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model", self.name)
    }

    fn add<C: Collector + Clone + 'static>(&mut self, family: C) -> C {
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
