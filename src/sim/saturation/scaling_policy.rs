//! What an autoscaler of the simulation sees, and the policy that runs Rouse's own.

use super::engine::EngineSpeed;
use crate::{
    model::VariantName,
    saturation::{
        Autoscaler, ModelLoad, ReplicaMetrics, SaturationPolicy, Thresholds, VariantState, ZeroRule,
    },
    units::{Millis, Tick},
};

/// One variant of the simulated model.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedVariant {
    pub name: VariantName,
    /// Cost of one replica for an hour, in any unit.
    pub cost: f64,
    pub min: u32,
    pub max: u32,
    pub speed: EngineSpeed,
}

/// Decides how many replicas each variant has. It is asked every 15 seconds.
pub(super) trait ScalingPolicy {
    /// Returns one number for each observed variant, in their order.
    fn decide(&mut self, observed: &ModelObservation<'_>, now: Tick) -> Vec<u32>;
}

/// The metrics of the model at one moment.
pub(super) struct ModelObservation<'a> {
    pub(super) variants: Vec<VariantObservation<'a>>,
    /// Requests that wait for a first replica.
    pub(super) parked: u32,
    /// How long no request has come and none has been in an engine.
    pub(super) idle_for: Millis,
}

pub(super) struct VariantObservation<'a> {
    pub(super) variant: &'a SimulatedVariant,
    /// Replicas that serve or start. Those that end are left out.
    pub(super) current: u32,
    /// The replicas that serve.
    pub(super) serving: Vec<ReplicaObservation>,
}

/// What one replica reports.
pub(super) struct ReplicaObservation {
    pub(super) number: u32,
    /// Requests in its queue at the last scrape.
    pub(super) waiting: u32,
    /// The highest values of the last minute.
    pub(super) peak: LoadReading,
}

/// The load of one engine at one moment, or the highest over a span.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LoadReading {
    /// Used fraction of the KV cache.
    pub(super) kv_use: f64,
    /// Requests in the queue.
    pub(super) waiting: u32,
}

/// [`Autoscaler`] as a policy of the simulation.
pub(super) struct RouseScaler {
    autoscaler: Autoscaler,
    thresholds: Thresholds,
}

/// As long as the cooldown of KEDA, so that both go to zero under the same condition.
pub(super) const IDLE_BEFORE_ZERO: Millis = Millis::secs(300);

impl VariantObservation<'_> {
    /// Requests that wait in all its engines.
    pub(super) fn waiting(&self) -> f64 {
        f64::from(self.serving.iter().map(|replica| replica.waiting).sum::<u32>())
    }

    fn state(&self) -> VariantState {
        let serving = self.serving.len() as u32;
        VariantState {
            variant: self.variant.name.clone(),
            cost: self.variant.cost,
            current: self.current,
            pending: self.current.saturating_sub(serving),
            min: self.variant.min,
            max: Some(self.variant.max),
            ..VariantState::default()
        }
    }

    fn metrics(&self) -> impl Iterator<Item = ReplicaMetrics> {
        self.serving.iter().map(|replica| ReplicaMetrics {
            replica: format!("{}-{}", self.variant.name, replica.number),
            variant: self.variant.name.clone(),
            kv_use: Some(replica.peak.kv_use),
            waiting: Some(f64::from(replica.peak.waiting)),
            ..ReplicaMetrics::default()
        })
    }
}

impl LoadReading {
    pub(super) fn max(self, other: Self) -> Self {
        Self { kv_use: self.kv_use.max(other.kv_use), waiting: self.waiting.max(other.waiting) }
    }

    /// Whether a replica with this load is saturated.
    pub(super) fn is_saturated(self, thresholds: &Thresholds) -> bool {
        self.kv_use >= thresholds.kv_cache || f64::from(self.waiting) >= thresholds.queue_length
    }
}

impl RouseScaler {
    pub(super) fn new(policy: SaturationPolicy, thresholds: Thresholds) -> Self {
        let policy = SaturationPolicy { zero: ZeroRule::After(IDLE_BEFORE_ZERO), ..policy };
        Self { autoscaler: Autoscaler::new(policy), thresholds }
    }
}

impl ScalingPolicy for RouseScaler {
    fn decide(&mut self, observed: &ModelObservation<'_>, now: Tick) -> Vec<u32> {
        let load = ModelLoad {
            replicas: observed.variants.iter().flat_map(|seen| seen.metrics()).collect(),
            states: observed.variants.iter().map(|seen| seen.state()).collect(),
            thresholds: self.thresholds,
            parked: observed.parked,
            idle_for: Some(observed.idle_for),
            ..ModelLoad::default()
        };
        let decision = self.autoscaler.decide(&load, now);
        let variants = observed.variants.iter();
        variants
            .map(|seen| decision.target(&seen.variant.name).map_or(seen.current, |target| target.replicas))
            .collect()
    }
}
