//! What Rouse is compared with: an HPA and a KEDA scaler on the number of waiting requests per replica.
//!
//! Both follow the Kubernetes documentation of the HorizontalPodAutoscaler, with its default behaviour. They differ in
//! the kind of the metric. The HPA has a Pods metric, so it knows which replicas do not report yet, and assumes for
//! each step what makes it smaller. KEDA feeds its HPA an External metric, one sum for all replicas, and itself
//! switches between no replica and one.
//!
//! A variant is a Deployment, so it has an HPA or a ScaledObject of its own. A ScaledObject that sees only the queues
//! of its own variant would start none at zero, however long the queues of the others are. So its query is the sum over
//! the model, times the variant's part of the replicas that the model may have: together the ScaledObjects ask for as
//! many replicas as one would, and all variants reach their bounds with the same queue.

use std::collections::VecDeque;

use super::scaling_policy::{IDLE_BEFORE_ZERO, ModelObservation, ScalingPolicy, VariantObservation};
use crate::units::{Millis, Tick};

/// Waiting requests per replica that both aim at (`AverageValue`).
const TARGET_WAITING: f64 = 5.0;
/// Deviation from the target that changes nothing.
const TOLERANCE: f64 = 0.1;
/// A step down goes no lower than the highest recommendation of this span.
const STABILIZATION: Millis = Millis::secs(300);
/// Within this span a step up adds 4 replicas, or as many as there were.
const SCALE_UP_PERIOD: Millis = Millis::secs(15);
const SCALE_UP_PODS: u32 = 4;

/// How the autoscaler gets the number of waiting requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueMetric {
    /// One value of each Pod of the variant, as an HPA reads it.
    Pods,
    /// The variant's part of the model's sum, as KEDA gives it to its HPA.
    External,
}

/// An HPA for each variant.
pub(super) struct HpaScaler {
    metric: QueueMetric,
    loops: Vec<HpaLoop>,
}

/// What the autoscaler of one variant reads.
struct QueueReading<'a> {
    seen: &'a VariantObservation<'a>,
    /// Value of the metric: waiting requests.
    waiting: f64,
    /// Requests that wait for a first replica of the model.
    parked: u32,
}

#[derive(Default)]
struct HpaLoop {
    /// Of the last five minutes, oldest first.
    recommendations: VecDeque<(Tick, u32)>,
    /// Replicas added in the last 15 seconds.
    added: VecDeque<(Tick, u32)>,
    /// When a request last waited.
    active_at: Option<Tick>,
}

impl HpaScaler {
    pub(super) const fn new(metric: QueueMetric) -> Self {
        Self { metric, loops: Vec::new() }
    }
}

impl ScalingPolicy for HpaScaler {
    fn decide(&mut self, observed: &ModelObservation<'_>, now: Tick) -> Vec<u32> {
        let metric = self.metric;
        self.loops.resize_with(observed.variants.len(), HpaLoop::default);
        let variants = self.loops.iter_mut().zip(&observed.variants);
        let decide = |(own, seen): (&mut HpaLoop, &VariantObservation<'_>)| {
            let waiting = metric.waiting(seen, observed);
            own.decide(metric, &QueueReading { seen, waiting, parked: observed.parked }, now)
        };
        variants.map(decide).collect()
    }
}

impl HpaLoop {
    fn decide(&mut self, metric: QueueMetric, reading: &QueueReading<'_>, now: Tick) -> u32 {
        let variant = reading.seen.variant;
        if metric == QueueMetric::External
            && variant.min == 0
            && let Some(switched) = self.switch(reading, now)
        {
            return switched;
        }
        // An HPA has no zero.
        let floor = variant.min.max(1);
        let wanted = metric.recommend(reading).clamp(floor, variant.max.max(floor));
        self.stabilize(wanted, reading.seen.current, now)
    }

    /// KEDA's part: to one replica when a request waits, to none when none has waited for the cooldown.
    fn switch(&mut self, reading: &QueueReading<'_>, now: Tick) -> Option<u32> {
        let is_active = reading.parked > 0 || reading.waiting > 0.0;
        let active_at = *self.active_at.get_or_insert(now);
        if is_active {
            self.active_at = Some(now);
        }
        match (reading.seen.current, is_active) {
            (0, _) => Some(u32::from(is_active)),
            (_, false) if now.since(active_at) >= IDLE_BEFORE_ZERO => Some(0),
            _ => None,
        }
    }

    fn stabilize(&mut self, wanted: u32, current: u32, now: Tick) -> u32 {
        if self.recommendations.is_empty() {
            self.recommendations.push_back((now, current));
        }
        self.recommendations.push_back((now, wanted));
        forget(&mut self.recommendations, now, STABILIZATION);
        forget(&mut self.added, now, SCALE_UP_PERIOD);
        if wanted < current {
            let highest = self.recommendations.iter().map(|(_, replicas)| *replicas).fold(wanted, u32::max);
            return highest.min(current);
        }
        let before = current.saturating_sub(self.added.iter().map(|(_, added)| added).sum());
        let limit = (before * 2).max(before + SCALE_UP_PODS).max(current);
        let raised = wanted.min(limit);
        if raised > current {
            self.added.push_back((now, raised - current));
        }
        raised
    }
}

/// Drops what is as old as the span or older.
fn forget(entries: &mut VecDeque<(Tick, u32)>, now: Tick, span: Millis) {
    while entries.front().is_some_and(|(at, _)| now.since(*at) >= span) {
        entries.pop_front();
    }
}

impl QueueMetric {
    /// The value that the autoscaler of this variant reads.
    fn waiting(self, seen: &VariantObservation<'_>, observed: &ModelObservation<'_>) -> f64 {
        match self {
            Self::Pods => seen.waiting(),
            Self::External => {
                let waiting: f64 = observed.variants.iter().map(|each| each.waiting()).sum();
                let most: f64 = observed.variants.iter().map(|each| f64::from(each.variant.max)).sum();
                waiting * f64::from(seen.variant.max) / most
            }
        }
    }

    fn recommend(self, reading: &QueueReading<'_>) -> u32 {
        let QueueReading { seen, waiting, .. } = *reading;
        let (current, serving) = (seen.current, seen.serving.len() as u32);
        match self {
            Self::External if current == 0 => 0,
            Self::External if is_tolerated(waiting / TARGET_WAITING / f64::from(current)) => current,
            Self::External => (waiting / TARGET_WAITING).ceil() as u32,
            // Without metrics an HPA does nothing.
            Self::Pods if serving == 0 => current,
            Self::Pods => recommend_by_pods(current, serving, waiting),
        }
    }
}

/// What an HPA recommends if `serving` of its `current` Pods report this many waiting requests.
fn recommend_by_pods(current: u32, serving: u32, waiting: f64) -> u32 {
    let reported = waiting / TARGET_WAITING / f64::from(serving);
    // A Pod that does not report is assumed idle where the others are above the target, else at the target.
    let missing = if reported < 1.0 { f64::from(current.saturating_sub(serving)) } else { 0.0 };
    let ratio = (waiting / TARGET_WAITING + missing) / f64::from(current.max(serving));
    let turns = (reported < 1.0 && ratio > 1.0) || (reported > 1.0 && ratio < 1.0);
    if is_tolerated(ratio) || turns {
        return current;
    }
    let wanted = (ratio * f64::from(current.max(serving))).ceil() as u32;
    if ratio < 1.0 { wanted.min(current) } else { wanted.max(current) }
}

fn is_tolerated(ratio: f64) -> bool {
    (1.0 - TOLERANCE..=1.0 + TOLERANCE).contains(&ratio)
}

#[cfg(test)]
mod tests {
    use super::super::{
        engine::EngineSpeed,
        scaling_policy::{LoadReading, ReplicaObservation, SimulatedVariant},
    };
    use super::*;
    use crate::model::VariantName;

    fn variant(min: u32) -> SimulatedVariant {
        let (name, speed) = (VariantName::default(), EngineSpeed::default());
        SimulatedVariant { name, cost: 1.0, min, max: 50, speed }
    }

    /// Asks once, with this many replicas and these queues of the replicas that serve.
    fn ask(scaler: &mut HpaScaler, min: u32, current: u32, queues: &[u32], seconds: u64) -> u32 {
        let variant = variant(min);
        let serving = queues.iter().map(|waiting| ReplicaObservation {
            number: 0,
            waiting: *waiting,
            peak: LoadReading::default(),
        });
        let seen = VariantObservation { variant: &variant, current, serving: serving.collect() };
        let observed = ModelObservation { variants: vec![seen], parked: 0, idle_for: Millis::ZERO };
        scaler.decide(&observed, Tick(seconds * 1000))[0]
    }

    #[test]
    fn the_queue_over_the_target_is_the_number_within_the_tolerance_and_four_more_at_once() {
        for metric in [QueueMetric::Pods, QueueMetric::External] {
            let new = || HpaScaler::new(metric);
            assert_eq!(ask(&mut new(), 1, 2, &[9, 6], 0), 3, "{metric:?}");
            assert_eq!(ask(&mut new(), 1, 2, &[6, 5], 0), 2, "{metric:?}: ten per cent are tolerated");
            assert_eq!(ask(&mut new(), 1, 1, &[100], 0), 5, "{metric:?}: four more");
            let mut scaler = new();
            assert_eq!(ask(&mut scaler, 1, 8, &[20; 8], 0), 16, "{metric:?}: twice as many");
            assert_eq!(ask(&mut scaler, 1, 16, &[20; 16], 5), 16, "{metric:?}: not again within the period");
            assert_eq!(ask(&mut scaler, 1, 16, &[20; 16], 15), 32, "{metric:?}");
        }
    }

    #[test]
    fn a_step_down_waits_for_five_minutes_and_then_goes_all_the_way() {
        for metric in [QueueMetric::Pods, QueueMetric::External] {
            let mut scaler = HpaScaler::new(metric);
            assert_eq!(ask(&mut scaler, 1, 4, &[5; 4], 0), 4);
            for seconds in (15..300).step_by(15) {
                assert_eq!(ask(&mut scaler, 1, 4, &[0; 4], seconds), 4, "{metric:?} {seconds}");
            }
            assert_eq!(ask(&mut scaler, 1, 4, &[0; 4], 300), 1, "{metric:?}");
        }
    }

    #[test]
    fn replicas_that_start_hold_an_hpa_up_and_not_keda() {
        // One of four serves; its queue is below the target.
        let after_five_minutes = |metric| {
            let mut scaler = HpaScaler::new(metric);
            ask(&mut scaler, 1, 4, &[2], 0);
            ask(&mut scaler, 1, 4, &[2], 300)
        };
        assert_eq!(after_five_minutes(QueueMetric::Pods), 4);
        assert_eq!(after_five_minutes(QueueMetric::External), 1);
    }

    #[test]
    fn keda_sees_the_queues_of_the_model_and_an_hpa_those_of_its_variant() {
        let [small, large] = [("small", 1, 2), ("large", 0, 8)].map(|(name, min, max)| SimulatedVariant {
            name: name.into(),
            min,
            max,
            ..SimulatedVariant::default()
        });
        let replica = |waiting| ReplicaObservation { number: 0, waiting, peak: LoadReading::default() };
        let decide = |scaler: &mut HpaScaler, replicas: u32, waiting: u32, seconds: u64| {
            let serving = (0..replicas).map(|_| replica(0)).collect();
            let variants = vec![
                VariantObservation { variant: &small, current: 1, serving: vec![replica(waiting)] },
                VariantObservation { variant: &large, current: replicas, serving },
            ];
            let observed = ModelObservation { variants, parked: 0, idle_for: Millis::ZERO };
            scaler.decide(&observed, Tick(seconds * 1000))
        };
        let mut keda = HpaScaler::new(QueueMetric::External);
        assert_eq!(decide(&mut keda, 0, 1, 0), [1, 1], "a request waits, if not for the large variant");
        assert_eq!(decide(&mut keda, 1, 25, 15), [1, 4], "five replicas, and the large variant has most");
        assert_eq!(decide(&mut keda, 4, 50, 30), [2, 8], "both reach their bounds with the same queue");
        assert_eq!(decide(&mut HpaScaler::new(QueueMetric::Pods), 0, 25, 0), [2, 1], "an HPA has no zero");
    }

    #[test]
    fn only_keda_goes_to_zero_and_only_after_its_cooldown() {
        let mut keda = HpaScaler::new(QueueMetric::External);
        assert_eq!(ask(&mut keda, 0, 1, &[3], 0), 1);
        assert_eq!(ask(&mut keda, 0, 1, &[0], 285), 1);
        assert_eq!(ask(&mut keda, 0, 1, &[0], 300), 0);
        assert_eq!(ask(&mut keda, 0, 0, &[], 315), 0);
        assert_eq!(ask(&mut HpaScaler::new(QueueMetric::Pods), 0, 0, &[], 0), 1);
    }
}
