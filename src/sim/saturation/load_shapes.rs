//! Built-in traces: a day in an office, two bursts, a slow ramp, and one that a seed determines.
//!
//! Each is a Poisson process whose rate follows straight lines between points. Lengths of prompts and answers are
//! exponential, so a few requests are much longer than most. The seeds are fixed: the traces are the same everywhere.

use super::request_trace::{RequestTrace, TracedRequest};
use crate::{sim::SplitMix64, units::Millis};

/// Names of the traces that [`built_in`] returns.
pub const BUILT_IN: [&str; 3] = ["daily", "burst", "ramp"];

/// The rate at one moment of a trace.
#[derive(Clone, Copy, Debug)]
struct RatePoint {
    /// Seconds after the start.
    at: f64,
    /// Requests per second.
    rate: f64,
}

/// Requests per second in the busiest hour of the day.
const DAILY_PEAK: f64 = 8.0;
/// Share of the peak at each full hour of the day; the day ends as it begins.
const DAILY_SHARES: [f64; 25] = [
    0.15, 0.10, 0.08, 0.07, 0.07, 0.10, 0.20, 0.40, 0.70, 0.95, 1.0, 0.95, 0.80, 0.85, 0.97, 0.95, 0.85,
    0.70, 0.55, 0.50, 0.45, 0.38, 0.30, 0.20, 0.15,
];
/// A quiet model that is asked for seven times and five times as much, for 10 and for 15 minutes.
const BURST: [(f64, f64); 10] = [
    (0.0, 1.0),
    (1800.0, 1.0),
    (1801.0, 7.0),
    (2400.0, 7.0),
    (2401.0, 1.0),
    (4800.0, 1.0),
    (4801.0, 5.0),
    (5700.0, 5.0),
    (5701.0, 1.0),
    (7200.0, 1.0),
];
/// Ninety minutes up, fifteen at the top, fifteen down, and half an hour of rest.
const RAMP: [(f64, f64); 5] = [(0.0, 0.5), (5400.0, 8.0), (6300.0, 8.0), (7200.0, 1.0), (9000.0, 1.0)];
/// Mean and maximum of what a prompt has beyond its minimum, in tokens.
const PROMPT_TOKENS: LengthDistribution = LengthDistribution { min: 100, mean: 1900, max: 12_000 };
const OUTPUT_TOKENS: LengthDistribution = LengthDistribution { min: 16, mean: 400, max: 2000 };
/// Length of the trace of a seed, in seconds.
const SEEDED_LENGTH: f64 = 10_800.0;

/// The distribution of a length: a minimum plus an exponential part, cut at a maximum.
struct LengthDistribution {
    min: u64,
    mean: u64,
    max: u64,
}

/// Returns the trace of this name, if it is in [`BUILT_IN`].
#[must_use]
pub fn built_in(name: &str) -> Option<RequestTrace> {
    let (seed, points) = match name {
        "daily" => (1, daily_points()),
        "burst" => (2, rate_points(&BURST)),
        "ramp" => (3, rate_points(&RAMP)),
        _ => return None,
    };
    Some(generate(name, &points, &mut SplitMix64::new(seed)))
}

/// Returns three hours of load that the seed determines: slow changes, and now and then a burst.
#[must_use]
pub fn seeded(seed: u64) -> RequestTrace {
    let mut random = SplitMix64::new(seed);
    let mut at = 0.0;
    let mut points = vec![RatePoint { at, rate: random_rate(&mut random, 1, 3) }];
    while at < SEEDED_LENGTH {
        if random.chance(0.25) {
            let peak = random_rate(&mut random, 3, 8);
            points.push(RatePoint { at: at + 1.0, rate: peak });
            at += random.between(120, 600) as f64;
            points.push(RatePoint { at, rate: peak });
            at += 1.0;
            points.push(RatePoint { at, rate: random_rate(&mut random, 1, 3) });
        } else {
            at += random.between(300, 1500) as f64;
            points.push(RatePoint { at, rate: random_rate(&mut random, 1, 7) });
        }
    }
    points.retain(|point| point.at < SEEDED_LENGTH);
    let last = points.last().map_or(1.0, |point| point.rate);
    points.push(RatePoint { at: SEEDED_LENGTH, rate: last });
    generate(&format!("seed {seed}"), &points, &mut random)
}

/// A rate between two whole numbers.
fn random_rate(random: &mut SplitMix64, low: u64, high: u64) -> f64 {
    random.between(low * 100, high * 100) as f64 / 100.0
}

fn rate_points(points: &[(f64, f64)]) -> Vec<RatePoint> {
    points.iter().map(|(at, rate)| RatePoint { at: *at, rate: *rate }).collect()
}

fn daily_points() -> Vec<RatePoint> {
    let hours = DAILY_SHARES.iter().enumerate();
    hours.map(|(hour, share)| RatePoint { at: (hour * 3600) as f64, rate: share * DAILY_PEAK }).collect()
}

/// Draws arrivals at the highest rate, and keeps each with the probability that the rate at its time gives.
fn generate(name: &str, points: &[RatePoint], random: &mut SplitMix64) -> RequestTrace {
    let highest = points.iter().map(|point| point.rate).fold(f64::MIN_POSITIVE, f64::max);
    let lasts = points.last().map_or(0.0, |point| point.at);
    let mut requests = Vec::new();
    let mut seconds = 0.0;
    loop {
        seconds -= (1.0 - random.fraction()).ln() / highest;
        if seconds >= lasts {
            break;
        }
        if random.chance(rate_at(points, seconds) / highest) {
            requests.push(TracedRequest {
                at: Millis((seconds * 1000.0) as u64),
                prompt: PROMPT_TOKENS.draw(random),
                output: OUTPUT_TOKENS.draw(random),
            });
        }
    }
    RequestTrace { name: name.to_owned(), requests, lasts: Millis((lasts * 1000.0) as u64) }
}

fn rate_at(points: &[RatePoint], seconds: f64) -> f64 {
    let line = points.windows(2).find(|line| line[0].at <= seconds && seconds < line[1].at);
    line.map_or(0.0, |line| {
        let share = (seconds - line[0].at) / (line[1].at - line[0].at);
        line[0].rate + (line[1].rate - line[0].rate) * share
    })
}

impl LengthDistribution {
    fn draw(&self, random: &mut SplitMix64) -> u32 {
        (self.min + random.exponential(self.mean)).min(self.max) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(trace: &RequestTrace, from: u64, to: u64) -> f64 {
        let within = trace.requests.iter().filter(|request| (from * 1000..to * 1000).contains(&request.at.0));
        within.count() as f64 / (to - from) as f64
    }

    #[test]
    fn the_rates_of_the_traces_are_those_of_their_shapes() {
        let daily = built_in("daily").unwrap();
        let burst = built_in("burst").unwrap();
        for (trace, from, to, expected) in [
            (&daily, 9 * 3600, 11 * 3600, 7.8),
            (&daily, 3 * 3600, 4 * 3600, 0.56),
            (&burst, 0, 1800, 1.0),
            (&burst, 1801, 2400, 7.0),
            (&burst, 4801, 5700, 5.0),
        ] {
            let found = rate(trace, from, to);
            assert!((found / expected - 1.0).abs() < 0.15, "{} {from}: {found}", trace.name);
        }
        let ramp = built_in("ramp").unwrap();
        assert!(rate(&ramp, 0, 600) < 2.0 && rate(&ramp, 5400, 6300) > 7.0);
        assert_eq!(built_in("weekly"), None);
    }

    #[test]
    fn a_trace_is_in_order_and_the_same_each_time() {
        for trace in BUILT_IN.map(|name| built_in(name).unwrap()).into_iter().chain((0..20).map(seeded)) {
            assert!(trace.requests.len() > 5000, "{}: {} requests", trace.name, trace.requests.len());
            assert!(trace.requests.is_sorted_by_key(|request| request.at), "{}", trace.name);
            assert!(trace.requests.iter().all(|request| request.at < trace.lasts && request.output >= 16));
        }
        assert_eq!(built_in("burst"), built_in("burst"));
        assert_ne!(seeded(1).requests, seeded(2).requests);
    }
}
