//! The analysis: from the load of each replica to the spare capacity of the model.

use std::{cmp::Ordering, collections::BTreeMap};

use serde::{Deserialize, Serialize};

use super::{Profile, ReplicaMetrics, Thresholds};
use crate::model::VariantName;

/// Without this many replicas to spread the load over, no replica is taken away.
const MIN_NON_SATURATED_TO_SCALE_DOWN: u32 = 2;
/// Keeps a quotient that is whole, but for the last bit of a sum, from being rounded up.
const ROUNDING: f64 = 1e-9;

/// What triggers a step up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleUpCause {
    #[default]
    None,
    /// Too little spare KV cache.
    Kv,
    /// Too few spare places in the queues.
    Queue,
    Both,
    /// Half of the replicas are saturated, although the others have spare capacity.
    Saturated,
}

/// The spare capacity of a model, or of one role of it. Fractions are from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelAnalysis {
    /// Replicas that report.
    pub total: u32,
    /// Replicas whose load is unknown: their metrics are missing or stale.
    pub unknown: u32,
    pub non_saturated: u32,
    /// Means over the replicas that are not saturated; 0 if all are.
    pub avg_spare_kv: f64,
    pub avg_spare_queue: f64,
    pub scale_up: bool,
    pub cause: ScaleUpCause,
    /// How many more replicas the load needs: 1 or more if `scale_up`, else 0.
    pub shortage: u32,
    pub scale_down_safe: bool,
    /// Mean spare capacity after one replica less; `None` with fewer than two that are not saturated.
    pub remaining_spare_kv: Option<f64>,
    pub remaining_spare_queue: Option<f64>,
    pub variants: BTreeMap<VariantName, VariantAnalysis>,
}

/// The spare capacity of one variant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VariantAnalysis {
    /// Replicas that report.
    pub replicas: u32,
    pub unknown: u32,
    pub non_saturated: u32,
    /// Names of the saturated replicas, sorted.
    pub saturated: Vec<String>,
    pub max_kv: f64,
    pub max_queue: f64,
    /// Mean over all replicas that report.
    pub avg_kv: f64,
    pub avg_spare_kv: f64,
    pub avg_spare_queue: f64,
}

impl ModelAnalysis {
    /// Whether every replica that reports is saturated, and there is one.
    #[must_use]
    pub const fn is_saturated(&self) -> bool {
        self.total > 0 && self.non_saturated == 0
    }
}

/// Analyses the replicas of a model, or of one role of it. Their order does not matter.
#[must_use]
pub fn analyze(profile: Profile, replicas: &[ReplicaMetrics], thresholds: &Thresholds) -> ModelAnalysis {
    let mut readings: Vec<Reading<'_>> =
        replicas.iter().filter_map(|metrics| Reading::new(profile, metrics, thresholds)).collect();
    // Sums of floating-point numbers depend on the order, and two gateways must come to the same.
    readings.sort_by(Reading::compare);
    let mut whole = LoadSums::default();
    let mut variants: BTreeMap<VariantName, (VariantAnalysis, LoadSums)> = BTreeMap::new();
    for reading in &readings {
        let (analysis, sums) = variants.entry(reading.metrics.variant.clone()).or_default();
        sums.add(reading, thresholds);
        whole.add(reading, thresholds);
        if reading.load.is_some_and(|load| load.saturated) {
            analysis.saturated.push(reading.metrics.replica.clone());
        }
    }
    let variants = variants.into_iter().map(|(name, (analysis, sums))| {
        let analysis = VariantAnalysis {
            replicas: sums.total,
            unknown: sums.unknown,
            non_saturated: sums.non_saturated,
            max_kv: sums.max_kv,
            max_queue: sums.max_queue,
            avg_kv: mean(sums.kv, sums.total),
            avg_spare_kv: mean(sums.spare_kv, sums.non_saturated),
            avg_spare_queue: mean(sums.spare_queue, sums.non_saturated),
            ..analysis
        };
        (name, analysis)
    });
    let mut analysis = ModelAnalysis {
        total: whole.total,
        unknown: whole.unknown,
        non_saturated: whole.non_saturated,
        avg_spare_kv: mean(whole.spare_kv, whole.non_saturated),
        avg_spare_queue: mean(whole.spare_queue, whole.non_saturated),
        variants: variants.collect(),
        ..ModelAnalysis::default()
    };
    analysis.cause = analysis.find_cause(profile, thresholds);
    analysis.scale_up = analysis.cause != ScaleUpCause::None;
    if analysis.scale_up {
        analysis.shortage = whole.shortage(thresholds);
    }
    analysis.simulate_scale_down(profile, thresholds);
    analysis
}

/// One replica's metrics, as a profile reads them.
struct Reading<'a> {
    metrics: &'a ReplicaMetrics,
    /// `None`: unknown.
    load: Option<ReplicaLoad>,
}

#[derive(Clone, Copy)]
struct ReplicaLoad {
    kv: f64,
    queue: f64,
    saturated: bool,
}

impl<'a> Reading<'a> {
    /// Returns `None` for a replica that the profile ignores.
    fn new(profile: Profile, metrics: &'a ReplicaMetrics, thresholds: &Thresholds) -> Option<Self> {
        let known = |value: Option<f64>| value.filter(|value| value.is_finite() && *value >= 0.0);
        let (kv, queue) = (known(metrics.kv_use), known(metrics.waiting));
        let saturated = kv.is_some_and(|kv| kv >= thresholds.kv_cache)
            || queue.is_some_and(|queue| queue >= thresholds.queue_length);
        let load = ReplicaLoad { kv: kv.unwrap_or_default(), queue: queue.unwrap_or_default(), saturated };
        if profile == Profile::Rouse {
            // One value is evidence enough that a replica is saturated. That it is not takes both.
            let is_known = saturated || kv.is_some() && queue.is_some();
            return Some(Self { metrics, load: is_known.then_some(load) });
        }
        // A value that is missing, or no number, reads as 0 here, so it may saturate a replica whose threshold is 0.
        let saturated = load.kv >= thresholds.kv_cache || load.queue >= thresholds.queue_length;
        let reports = metrics.kv_use.is_some() || metrics.waiting.is_some();
        reports.then_some(Self { metrics, load: Some(ReplicaLoad { saturated, ..load }) })
    }

    fn compare(&self, other: &Self) -> Ordering {
        let names = |metrics: &'a ReplicaMetrics| (&metrics.variant, &metrics.replica);
        let values = |reading: &Self| reading.load.map_or((-1.0, -1.0), |load| (load.kv, load.queue));
        let ((kv, queue), (other_kv, other_queue)) = (values(self), values(other));
        names(self.metrics)
            .cmp(&names(other.metrics))
            .then(kv.total_cmp(&other_kv))
            .then(queue.total_cmp(&other_queue))
    }
}

/// Sums over replicas.
#[derive(Default)]
struct LoadSums {
    total: u32,
    unknown: u32,
    non_saturated: u32,
    kv: f64,
    queue: f64,
    max_kv: f64,
    max_queue: f64,
    spare_kv: f64,
    spare_queue: f64,
}

impl LoadSums {
    fn add(&mut self, reading: &Reading<'_>, thresholds: &Thresholds) {
        let Some(load) = reading.load else {
            self.unknown += 1;
            return;
        };
        self.total += 1;
        self.kv += load.kv;
        self.queue += load.queue;
        self.max_kv = self.max_kv.max(load.kv);
        self.max_queue = self.max_queue.max(load.queue);
        if !load.saturated {
            self.non_saturated += 1;
            self.spare_kv += thresholds.kv_cache - load.kv;
            self.spare_queue += thresholds.queue_length - load.queue;
        }
    }

    /// How many more replicas bring the mean load back to where the triggers no longer fire. At least one.
    fn shortage(&self, thresholds: &Thresholds) -> u32 {
        let kv = replicas_for(self.kv, thresholds.kv_cache - thresholds.kv_spare_trigger);
        let queue = replicas_for(self.queue, thresholds.queue_length - thresholds.queue_spare_trigger);
        kv.max(queue).saturating_sub(self.total).max(1)
    }
}

/// How many replicas take this load, when each takes `capacity`; 0 if the capacity is none.
pub(super) fn replicas_for(load: f64, capacity: f64) -> u32 {
    if capacity <= 0.0 {
        return 0;
    }
    // Saturates, and is 0 for what is no number.
    (load / capacity - ROUNDING).ceil() as u32
}

pub(super) fn mean(sum: f64, count: u32) -> f64 {
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

impl ModelAnalysis {
    fn saturated(&self) -> u32 {
        self.total - self.non_saturated
    }

    fn find_cause(&self, profile: Profile, thresholds: &Thresholds) -> ScaleUpCause {
        // A mean over fewer than half of the replicas says too little about the others.
        let has_evidence = profile != Profile::Rouse || self.total >= self.unknown;
        if self.total > 0 && has_evidence {
            let kv = self.avg_spare_kv < thresholds.kv_spare_trigger;
            let queue = self.avg_spare_queue < thresholds.queue_spare_trigger;
            match (kv, queue) {
                (true, true) => return ScaleUpCause::Both,
                (true, false) => return ScaleUpCause::Kv,
                (false, true) => return ScaleUpCause::Queue,
                (false, false) => {}
            }
        }
        // With a threshold of 0 every replica is saturated, whatever its load.
        let is_measured = thresholds.kv_cache > 0.0 && thresholds.queue_length > 0.0;
        if profile == Profile::Rouse && is_measured && self.is_half_saturated(self.total + self.unknown) {
            return ScaleUpCause::Saturated;
        }
        ScaleUpCause::None
    }

    /// Whether the saturated replicas are half of this many.
    fn is_half_saturated(&self, replicas: u32) -> bool {
        self.saturated() > 0 && self.saturated().saturating_mul(2) >= replicas
    }

    /// Spreads the mean load over one replica less, and judges whether enough is spare then.
    fn simulate_scale_down(&mut self, profile: Profile, thresholds: &Thresholds) {
        if self.non_saturated < MIN_NON_SATURATED_TO_SCALE_DOWN {
            return;
        }
        let factor = f64::from(self.non_saturated) / f64::from(self.non_saturated - 1);
        let remaining = |threshold: f64, spare: f64| threshold - (threshold - spare) * factor;
        let kv = remaining(thresholds.kv_cache, self.avg_spare_kv);
        let queue = remaining(thresholds.queue_length, self.avg_spare_queue);
        self.remaining_spare_kv = Some(kv);
        self.remaining_spare_queue = Some(queue);
        self.scale_down_safe = kv >= thresholds.kv_spare_trigger && queue >= thresholds.queue_spare_trigger;
        if profile == Profile::Rouse {
            // A step that one of the two rules of this profile would take back at once is none.
            let is_kept = !self.scale_up && !self.is_half_saturated(self.total - 1);
            self.scale_down_safe &= self.unknown == 0 && is_kept;
        }
    }
}
