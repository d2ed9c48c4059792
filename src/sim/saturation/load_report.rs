//! What a simulated load costs, and how well it is served.

use super::{AutoscalerKind, scaling_policy::LoadReading};
use crate::{saturation::Thresholds, units::Millis};

/// The result of one autoscaler on one trace.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    pub autoscaler: AutoscalerKind,
    /// Seconds at whose end the model was saturated, by the built-in thresholds whatever the autoscaler uses.
    ///
    /// A replica is saturated if its KV cache or its queue reaches its threshold. The model is saturated if at least
    /// half of the replicas that serve are, or if more requests wait, in all queues, than the threshold of a queue
    /// times the replicas that serve. So a model that no replica serves is saturated while a request waits.
    pub saturated_seconds: u64,
    /// Hours of all replicas, from their start order to their end.
    pub replica_hours: f64,
    /// The same times the cost of each replica's variant.
    pub cost: f64,
    /// Seconds from a request's arrival to the first token of its answer.
    pub ttft_mean: f64,
    pub ttft_p99: f64,
    /// Mean number of requests that wait.
    pub mean_queue: f64,
    /// One for each interval of 15 seconds.
    pub samples: Vec<LoadSample>,
}

/// The state at the end of one interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadSample {
    /// After the start of the trace.
    pub at: Millis,
    /// Replicas that serve, start or end.
    pub replicas: u32,
    /// Requests that wait, in all queues.
    pub waiting: u32,
    /// Mean seconds to the first tokens of this interval; `None` without any.
    pub ttft: Option<f64>,
    /// Cost since the start.
    pub cost: f64,
}

/// What is measured at the end of one second.
pub(super) struct SecondReading {
    /// The loads of the replicas that serve.
    pub(super) serving: Vec<LoadReading>,
    /// Replicas that serve, start or end.
    pub(super) replicas: u32,
    /// Requests that wait, in all queues.
    pub(super) waiting: u32,
    /// Cost of the replicas for an hour.
    pub(super) hourly_cost: f64,
}

/// Sums the readings of a simulation.
#[derive(Default)]
pub(super) struct LoadRecorder {
    seconds: u64,
    saturated_seconds: u64,
    replica_seconds: u64,
    /// Requests that waited, times the seconds.
    waiting_seconds: u64,
    cost: f64,
    /// Seconds to the first token of every request answered so far.
    ttfts: Vec<f64>,
    /// How many of them were there at the last sample.
    sampled: usize,
    samples: Vec<LoadSample>,
}

/// Whether a model is saturated at one moment: see [`LoadReport::saturated_seconds`].
fn is_saturated(reading: &SecondReading) -> bool {
    let thresholds = Thresholds::default();
    let saturated = reading.serving.iter().filter(|load| load.is_saturated(&thresholds)).count();
    let room = thresholds.queue_length * reading.serving.len() as f64;
    (saturated > 0 && saturated * 2 >= reading.serving.len()) || f64::from(reading.waiting) > room
}

impl LoadRecorder {
    /// Adds the reading of the next second.
    pub(super) fn add(&mut self, reading: &SecondReading) {
        self.seconds += 1;
        self.saturated_seconds += u64::from(is_saturated(reading));
        self.replica_seconds += u64::from(reading.replicas);
        self.waiting_seconds += u64::from(reading.waiting);
        self.cost += reading.hourly_cost / 3600.0;
    }

    /// Where the waits for first tokens are collected, in seconds.
    pub(super) const fn ttfts(&mut self) -> &mut Vec<f64> {
        &mut self.ttfts
    }

    /// Ends an interval with its last reading.
    pub(super) fn sample(&mut self, reading: &SecondReading) {
        let recent = self.ttfts.get(self.sampled..).unwrap_or_default();
        let ttft = (!recent.is_empty()).then(|| mean(recent));
        self.sampled = self.ttfts.len();
        self.samples.push(LoadSample {
            at: Millis::secs(self.seconds),
            replicas: reading.replicas,
            waiting: reading.waiting,
            ttft,
            cost: self.cost,
        });
    }

    pub(super) fn finish(mut self, autoscaler: AutoscalerKind) -> LoadReport {
        self.ttfts.sort_by(f64::total_cmp);
        let seconds = self.seconds.max(1) as f64;
        LoadReport {
            autoscaler,
            saturated_seconds: self.saturated_seconds,
            replica_hours: self.replica_seconds as f64 / 3600.0,
            cost: self.cost,
            ttft_mean: mean(&self.ttfts),
            ttft_p99: percentile(&self.ttfts, 99),
            mean_queue: self.waiting_seconds as f64 / seconds,
            samples: self.samples,
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The smallest value that this percentage of the sorted values does not exceed.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(loads: &[(f64, u32)], parked: u32) -> SecondReading {
        let load = |(kv_use, waiting): &(f64, u32)| LoadReading { kv_use: *kv_use, waiting: *waiting };
        let serving: Vec<LoadReading> = loads.iter().map(load).collect();
        let waiting = parked + serving.iter().map(|load| load.waiting).sum::<u32>();
        SecondReading { replicas: serving.len() as u32, serving, waiting, hourly_cost: 1.0 }
    }

    #[test]
    fn half_of_the_replicas_or_a_long_queue_saturate_a_model() {
        let (idle, full, queue) = ((0.1, 0), (0.80, 0), (0.1, 5));
        for (loads, parked, expected) in [
            (vec![idle, full], 0, true),
            (vec![idle, queue], 0, true),
            (vec![idle, idle, full], 0, false),
            (vec![idle, idle, full], 15, false),
            (vec![idle, idle, full], 16, true),
            (vec![(0.79, 4); 3], 0, false),
            (vec![], 0, false),
            (vec![], 1, true),
        ] {
            assert_eq!(is_saturated(&reading(&loads, parked)), expected, "{loads:?} {parked}");
        }
    }

    #[test]
    fn a_report_has_the_sums_of_its_readings() {
        let mut recorder = LoadRecorder::default();
        for second in 0..3600 {
            let loads = if second < 1800 { vec![(0.1, 0)] } else { vec![(0.9, 1); 2] };
            let now = reading(&loads, 0);
            recorder.add(&now);
            recorder.ttfts().push(f64::from(second % 100 + 1));
            if second % 15 == 14 {
                recorder.sample(&now);
            }
        }
        let report = recorder.finish(AutoscalerKind::Hpa);
        assert_eq!((report.saturated_seconds, report.samples.len()), (1800, 240));
        assert!((report.replica_hours - 1.5).abs() < 1e-9, "{}", report.replica_hours);
        assert!((report.mean_queue - 1.0).abs() < 1e-9, "{}", report.mean_queue);
        assert!((report.cost - 1.0).abs() < 1e-9, "{}", report.cost);
        assert!((report.ttft_mean - 50.5).abs() < 1e-9 && (report.ttft_p99 - 99.0).abs() < 1e-9);
        let first = report.samples[0];
        assert_eq!((first.at, first.replicas, first.ttft), (Millis::secs(15), 1, Some(8.0)));
    }
}
