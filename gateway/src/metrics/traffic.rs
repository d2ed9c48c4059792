//! Metrics of one model's requests and transitions, which exist from the first one on.

use std::sync::OnceLock;

use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, core::Metric as _,
};
use rouse::units::Millis;

use rouse_platform::metric_builder::seconds;

use super::{
    labels::{self, ROUTE_COUNT, RouteLabel, START_COUNT, STATUS_COUNT, StatusClass},
    model_families::{FamilyBuilder, MetricCollectors},
};
use crate::driver::ColdStart;

/// What a model has served since the gateway started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrafficTotals {
    /// Completed requests.
    pub requests: u64,
    /// Tokens of completed answers.
    pub tokens: u64,
    /// Responses whose head went out.
    pub first_bytes: u64,
    /// How many of these heads took no longer than each of
    /// [`DURATION_BUCKETS`](rouse_platform::metric_builder::DURATION_BUCKETS).
    pub first_byte_buckets: Vec<u64>,
}

pub(super) struct TrafficMetrics {
    pub(super) families: MetricCollectors,
    requests: IntCounterVec,
    /// By route, status and start; each is looked up in `requests` once, at its first use.
    request_counters: Box<[OnceLock<IntCounter>]>,
    pub(super) first_byte: Histogram,
    duration: Histogram,
    pub(super) wait: Histogram,
    pub(super) bytes_in: IntCounter,
    pub(super) bytes_out: IntCounter,
    pub(super) retries: IntCounter,
    pub(super) transitions: IntCounterVec,
    pub(super) transition_seconds: HistogramVec,
    pub(super) evictions: IntCounterVec,
    pub(super) drain_deadlines: IntCounter,
    pub(super) ejections: IntCounter,
    pub(super) in_flight: IntGauge,
    pub(super) parked: IntGauge,
    pub(super) leases: IntGauge,
    pub(super) engine_state: IntGaugeVec,
    pub(super) engine_saturated: IntGaugeVec,
    pub(super) ejected_engines: IntGauge,
}

impl TrafficMetrics {
    pub(super) fn new(name: &str) -> Self {
        let mut builder = FamilyBuilder { name, families: Vec::new() };
        let bytes = builder.counters(
            "rouse_bytes_total",
            "Body bytes received from clients (in) and sent to clients (out)",
            &["direction"],
        );
        Self {
            requests: builder.counters(
                "rouse_requests_total",
                "Completed requests, by route, status class and the kind of cold start that they waited for",
                &["route", "status", "cold_start"],
            ),
            request_counters: (0..ROUTE_COUNT * STATUS_COUNT * START_COUNT)
                .map(|_| OnceLock::new())
                .collect(),
            first_byte: builder.histogram(
                "rouse_time_to_first_byte_seconds",
                "Time from the request's head to the response's head, including the wait",
            ),
            duration: builder.histogram(
                "rouse_request_duration_seconds",
                "Time from the request's head to the last byte of the answer",
            ),
            wait: builder
                .histogram("rouse_wait_seconds", "Time that parked requests waited, whatever the outcome"),
            bytes_in: bytes.with_label_values(&["in"]),
            bytes_out: bytes.with_label_values(&["out"]),
            retries: builder
                .counter("rouse_retries_total", "Requests that were retried because a kept connection was closed"),
            transitions: builder.counters(
                "rouse_transitions_total",
                "Launches, wakes, sleeps and stops of engines, by cause and outcome",
                &["transition", "cause", "outcome"],
            ),
            transition_seconds: builder.histograms(
                "rouse_transition_duration_seconds",
                "Duration of successful launches, wakes, sleeps and stops",
                "transition",
            ),
            evictions: builder.counters(
                "rouse_evictions_total",
                "Evictions of the model for another model's memory, by transition (sleep or stop)",
                &["transition"],
            ),
            drain_deadlines: builder.counter(
                "rouse_drain_deadlines_passed_total",
                "Drains of the model's engines that have passed turns.drain.deadline",
            ),
            ejections: builder.counter(
                "rouse_ejections_total",
                "Ejections of the model's engines because their requests failed",
            ),
            in_flight: builder.gauge(
                "rouse_in_flight",
                "Requests that have named their model and are not completely answered, including parked requests",
            ),
            parked: builder.gauge("rouse_parked", "Requests that wait for their model"),
            leases: builder.gauge("rouse_leases", "Requests that hold an engine of the model"),
            engine_state: builder.gauges(
                "rouse_engine_state",
                "1 for the current state of each engine",
                &["replica", "state"],
            ),
            engine_saturated: builder.gauges(
                "rouse_engine_saturated",
                "1 for each engine that reports a load from which on it gets requests last",
                &["engine"],
            ),
            ejected_engines: builder.gauge(
                "rouse_engines_ejected",
                "Engines that get no new requests because their requests failed",
            ),
            families: builder.families.into(),
        }
    }

    /// Returns the sums, without the tokens.
    pub(super) fn totals(&self) -> TrafficTotals {
        let first_byte = self.first_byte.metric();
        let first_byte = first_byte.get_histogram();
        TrafficTotals {
            requests: self.duration.get_sample_count(),
            tokens: 0,
            first_bytes: first_byte.get_sample_count(),
            first_byte_buckets: first_byte
                .get_bucket()
                .iter()
                .map(|bucket| bucket.cumulative_count())
                .collect(),
        }
    }

    /// Counts a completed request.
    pub(super) fn request_ended(
        &self,
        route: RouteLabel,
        status: StatusClass,
        start: Option<ColdStart>,
        duration: Millis,
    ) {
        let (start_index, start) = labels::cold_start_label(start);
        let index = (route as usize * STATUS_COUNT + status as usize) * START_COUNT + start_index;
        let count = || self.requests.with_label_values(&[route.as_str(), status.as_str(), start]);
        match self.request_counters.get(index) {
            Some(cell) => cell.get_or_init(count).inc(),
            None => count().inc(),
        }
        self.duration.observe(seconds(duration));
    }
}
