//! Rates over the last minute, from the totals that the metrics have anyway.

use std::collections::{BTreeMap, VecDeque};

use rouse::{
    model::ModelName,
    units::{Millis, Tick},
};
use rouse_platform::metric_builder::DURATION_BUCKETS;
use serde::Serialize;

use crate::metrics::TrafficTotals;

/// The span that rates cover, once a page has been open for so long.
const WINDOW: Millis = Millis::secs(60);
/// The shortest time between two samples.
pub(super) const SAMPLE_INTERVAL: Millis = Millis::secs(1);

/// Samples of the last minute.
#[derive(Default)]
pub(super) struct RateWindow {
    samples: VecDeque<TrafficSample>,
}

struct TrafficSample {
    at: Tick,
    totals: BTreeMap<ModelName, TrafficTotals>,
}

/// What a model serves now.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ModelRate {
    model: ModelName,
    requests_per_second: f64,
    /// `None`: no response has begun.
    first_token: Option<FirstTokenTimes>,
    tokens_per_second: f64,
}

/// From a request's head to the response's head, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct FirstTokenTimes {
    p50: f64,
    p95: f64,
}

impl RateWindow {
    /// Whether another sample is due.
    pub(super) fn is_due(&self, now: Tick) -> bool {
        self.samples.back().is_none_or(|last| now.since(last.at) >= SAMPLE_INTERVAL)
    }

    /// Adds the totals as of now.
    pub(super) fn add(&mut self, at: Tick, totals: BTreeMap<ModelName, TrafficTotals>) {
        self.samples.push_back(TrafficSample { at, totals });
        // The oldest sample that is kept is at least as old as the window, as soon as there is one.
        while self.samples.get(1).is_some_and(|second| at.since(second.at) >= WINDOW) {
            self.samples.pop_front();
        }
    }

    /// Returns the rates of the models that have served anything, by name.
    pub(super) fn rates(&self) -> Vec<ModelRate> {
        let (Some(first), Some(last)) = (self.samples.front(), self.samples.back()) else {
            return Vec::new();
        };
        let seconds = last.at.since(first.at).0 as f64 / 1000.0;
        if seconds <= 0.0 {
            return Vec::new();
        }
        let none = TrafficTotals::default();
        let rate = |(model, after): (&ModelName, &TrafficTotals)| {
            let before = first.totals.get(model).unwrap_or(&none);
            ModelRate::between(model, before, after, seconds)
        };
        last.totals.iter().filter_map(rate).collect()
    }
}

impl ModelRate {
    /// Returns `None` if the model has served nothing in these seconds.
    fn between(
        model: &ModelName,
        before: &TrafficTotals,
        after: &TrafficTotals,
        seconds: f64,
    ) -> Option<Self> {
        // A model that was removed and added again has counted from 0.
        let requests = after.requests.saturating_sub(before.requests);
        let tokens = after.tokens.saturating_sub(before.tokens);
        let begun = after.first_bytes.saturating_sub(before.first_bytes);
        if requests == 0 && tokens == 0 && begun == 0 {
            return None;
        }
        let earlier = before.first_byte_buckets.iter().copied().chain(std::iter::repeat(0));
        let counts: Vec<u64> = after
            .first_byte_buckets
            .iter()
            .zip(earlier)
            .map(|(after, before)| after.saturating_sub(before))
            .collect();
        let times = FirstTokenTimes {
            p50: rounded(quantile(&counts, begun, 0.5)),
            p95: rounded(quantile(&counts, begun, 0.95)),
        };
        Some(Self {
            model: model.clone(),
            requests_per_second: rounded(requests as f64 / seconds),
            first_token: (begun > 0).then_some(times),
            tokens_per_second: rounded(tokens as f64 / seconds),
        })
    }
}

/// Estimates a quantile as Prometheus does: evenly spread within its bucket. `counts`: how many of the `total` values
/// are at most as large as each of [`DURATION_BUCKETS`]. A value beyond the last bucket counts as its bound.
fn quantile(counts: &[u64], total: u64, q: f64) -> f64 {
    let rank = q * total as f64;
    let (mut bound_below, mut count_below) = (0.0, 0.0);
    for (bound, count) in DURATION_BUCKETS.into_iter().zip(counts.iter().map(|count| *count as f64)) {
        if count >= rank && count > count_below {
            return bound_below + (bound - bound_below) * ((rank - count_below) / (count - count_below));
        }
        (bound_below, count_below) = (bound, count);
    }
    bound_below
}

/// Rounds to three decimals: a page shows no more, and an equal rate is then an equal text.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(requests: u64, tokens: u64, buckets: &[(usize, u64)]) -> TrafficTotals {
        let mut first_byte_buckets = vec![0; DURATION_BUCKETS.len()];
        for (from, count) in buckets {
            for cumulative in &mut first_byte_buckets[*from..] {
                *cumulative += count;
            }
        }
        let first_bytes = buckets.iter().map(|(_, count)| count).sum();
        TrafficTotals { requests, tokens, first_bytes, first_byte_buckets }
    }

    fn window(samples: Vec<(u64, TrafficTotals)>) -> RateWindow {
        let mut window = RateWindow::default();
        for (second, totals) in samples {
            window.add(Tick(second * 1000), BTreeMap::from([("m".into(), totals)]));
        }
        window
    }

    #[test]
    fn rates_are_the_growth_of_the_totals_by_the_time_between_them() {
        // 0.25 s is the upper bound of bucket 5, 0.5 s of bucket 6.
        let before = totals(100, 9000, &[(2, 100)]);
        let after = totals(130, 12_000, &[(2, 100), (5, 20), (6, 20)]);
        let rates = window(vec![(10, before), (40, after)]).rates();
        assert_eq!(rates.len(), 1);
        assert_eq!(
            serde_json::to_value(&rates[0]).unwrap(),
            serde_json::json!({
                "model": "m", "requestsPerSecond": 1.0, "tokensPerSecond": 100.0,
                // The last of 20 values between 0.1 and 0.25 s, and the 18th of 20 between 0.25 and 0.5 s.
                "firstToken": {"p50": 0.25, "p95": 0.475},
            })
        );
    }

    #[test]
    fn a_model_without_traffic_has_no_rate_and_one_sample_is_none() {
        let same = || totals(5, 5, &[(3, 5)]);
        assert!(window(vec![(1, same())]).rates().is_empty());
        assert!(window(vec![(1, same()), (2, same())]).rates().is_empty());
        let only_begun = window(vec![(1, totals(0, 0, &[])), (2, totals(0, 0, &[(3, 1)]))]).rates();
        assert_eq!(only_begun.len(), 1, "a stream that has begun and not ended");
    }

    #[test]
    fn only_the_last_minute_counts() {
        let samples = (0..300).map(|second| (second, totals(second * second, 0, &[])));
        let window = window(samples.collect());
        assert_eq!(window.samples.len(), 61);
        // 299 squared minus 239 squared, by 60.
        assert!((window.rates()[0].requests_per_second - 538.0).abs() < 0.001);
        assert!(!window.is_due(Tick(299_999)) && window.is_due(Tick(300_000)));
    }

    #[test]
    fn values_beyond_the_last_bucket_count_as_its_bound() {
        let counts = vec![0; DURATION_BUCKETS.len()];
        assert!((quantile(&counts, 4, 0.5) - 600.0).abs() < f64::EPSILON);
    }
}
