//! Makes and registers metrics whose names and labels are constants.

use prometheus::{Registry, core::Collector};
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

pub fn seconds(span: Millis) -> f64 {
    span.0 as f64 / 1e3
}

pub fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
