//! Makes and registers metrics whose names and labels are constants.

use prometheus::{
    Registry,
    core::{Collector, Desc},
    proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType},
};
use rouse::units::Millis;

/// Buckets of a request's duration or wait, in seconds: from one token of a small model to a cold start of a large one.
pub const DURATION_BUCKETS: [f64; 16] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

pub fn register<C: Collector + Clone + 'static>(registry: &Registry, collector: C) -> C {
    expect_valid(registry.register(Box::new(collector.clone())));
    collector
}

/// Unwraps a result. Names and labels are constants of the callers, so the first test finds an error.
pub fn expect_valid<T>(result: prometheus::Result<T>) -> T {
    result.expect("the names and labels of metrics are valid and different")
}

/// A family of gauges whose samples a collector builds for each scrape.
///
/// For series that come and go together: a scrape then sees all of them, or none.
#[derive(Clone, Copy, Debug)]
pub struct GaugeFamily {
    pub name: &'static str,
    pub help: &'static str,
    /// In the order of their names, as in the library's own metrics.
    pub labels: &'static [&'static str],
}

impl GaugeFamily {
    pub fn desc(&self) -> Desc {
        let labels = self.labels.iter().map(|label| (*label).to_owned()).collect();
        expect_valid(Desc::new(self.name.to_owned(), self.help.to_owned(), labels, Default::default()))
    }

    /// Returns a sample with these values of the labels.
    pub fn sample(&self, values: &[&str], value: f64) -> Metric {
        let pair = |(name, value): (&&str, &&str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = Metric::from_label(self.labels.iter().zip(values).map(pair).collect());
        metric.set_gauge(gauge);
        metric
    }

    pub fn with_samples(&self, samples: Vec<Metric>) -> MetricFamily {
        let mut family = MetricFamily::default();
        family.set_name(self.name.to_owned());
        family.set_help(self.help.to_owned());
        family.set_field_type(MetricType::GAUGE);
        family.set_metric(samples);
        family
    }
}

/// Returns the families that have samples, for a scrape: a family without any is no valid one.
pub fn nonempty_families<const N: usize>(all: [(&GaugeFamily, Vec<Metric>); N]) -> Vec<MetricFamily> {
    let used = all.into_iter().filter(|(_, samples)| !samples.is_empty());
    used.map(|(family, samples)| family.with_samples(samples)).collect()
}

pub fn seconds(span: Millis) -> f64 {
    span.0 as f64 / 1e3
}

pub fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
