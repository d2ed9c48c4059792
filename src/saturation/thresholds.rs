//! Thresholds: when a replica is saturated, and how much spare capacity triggers a step.

use serde::{Deserialize, Serialize};

/// The thresholds of one model. The default has the built-in values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Thresholds {
    /// Used fraction of the KV cache from which a replica is saturated.
    pub kv_cache: f64,
    /// Number of waiting requests from which a replica is saturated.
    pub queue_length: f64,
    /// Mean spare fraction of the KV cache below which a replica is added.
    pub kv_spare_trigger: f64,
    /// Mean spare places in the queue below which a replica is added.
    pub queue_spare_trigger: f64,
    /// Used fraction of the token capacity that a step up aims at.
    pub scale_up: f64,
    /// Used fraction of the token capacity below which the rest is spare.
    pub scale_down: f64,
    /// Weight of the model where models compete for accelerators.
    pub priority: f64,
}

/// Why thresholds are refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ThresholdError {
    #[error("{field} is {value}: it must be from 0 to 1")]
    NoFraction { field: &'static str, value: f64 },
    #[error("{field} is {value}: it must be above 0, and 1 at most")]
    NoBoundary { field: &'static str, value: f64 },
    #[error("{field} is {value}: it must be a number from 0")]
    Negative { field: &'static str, value: f64 },
    #[error(
        "{trigger_field} ({trigger}) is above {field} ({threshold}): spare capacity would always be too small, and \
         replicas would be added for ever"
    )]
    TriggerAboveThreshold { trigger_field: &'static str, trigger: f64, field: &'static str, threshold: f64 },
    #[error("scaleUpThreshold ({up}) must be above scaleDownBoundary ({down})")]
    UpNotAboveDown { up: f64, down: f64 },
    #[error("unknown field '{0}'")]
    UnknownField(String),
    /// The entry is not a mapping with the known fields. The text is the parser's.
    #[error("{0}")]
    Unreadable(String),
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            kv_cache: 0.80,
            queue_length: 5.0,
            kv_spare_trigger: 0.10,
            queue_spare_trigger: 3.0,
            scale_up: 0.85,
            scale_down: 0.70,
            priority: 1.0,
        }
    }
}

impl Thresholds {
    /// Absent thresholds of [`super::Profile::Doc`]: every replica counts as saturated, and nothing scales.
    pub const UNSET: Self = Self {
        kv_cache: 0.0,
        queue_length: 0.0,
        kv_spare_trigger: 0.0,
        queue_spare_trigger: 0.0,
        scale_up: 0.85,
        scale_down: 0.70,
        priority: 1.0,
    };

    /// Whether all values are the built-in ones.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Checks each value and each pair.
    ///
    /// # Errors
    ///
    /// The first of [`problems`](Self::problems).
    pub fn validate(&self) -> Result<(), ThresholdError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// Returns every value that is out of its range, and every pair of others that contradicts itself.
    #[must_use]
    pub fn problems(&self) -> Vec<ThresholdError> {
        let fractions = [("kvCacheThreshold", self.kv_cache), ("kvSpareTrigger", self.kv_spare_trigger)];
        let no_fraction = |(field, value): (&'static str, f64)| {
            (!is_fraction(value)).then_some(ThresholdError::NoFraction { field, value })
        };
        let amounts = [
            ("queueLengthThreshold", self.queue_length),
            ("queueSpareTrigger", self.queue_spare_trigger),
            ("priority", self.priority),
        ];
        let negative = |(field, value): (&'static str, f64)| {
            (!is_amount(value)).then_some(ThresholdError::Negative { field, value })
        };
        let boundaries = [("scaleUpThreshold", self.scale_up), ("scaleDownBoundary", self.scale_down)];
        let no_boundary = |(field, value): (&'static str, f64)| {
            (!is_boundary(value)).then_some(ThresholdError::NoBoundary { field, value })
        };
        let values = fractions.into_iter().filter_map(no_fraction);
        let values = values.chain(amounts.into_iter().filter_map(negative));
        let values = values.chain(boundaries.into_iter().filter_map(no_boundary));
        values.chain(self.contradictions()).collect()
    }

    /// Returns the pairs that contradict themselves. A value out of its range contradicts nothing.
    fn contradictions(&self) -> impl Iterator<Item = ThresholdError> {
        let (kv_cache, kv_spare) = (self.kv_cache, self.kv_spare_trigger);
        let (queue, queue_spare) = (self.queue_length, self.queue_spare_trigger);
        let kv_in_range = is_fraction(kv_cache) && is_fraction(kv_spare);
        let queue_in_range = is_amount(queue) && is_amount(queue_spare);
        let triggers = [
            (kv_in_range, "kvCacheThreshold", kv_cache, "kvSpareTrigger", kv_spare),
            (queue_in_range, "queueLengthThreshold", queue, "queueSpareTrigger", queue_spare),
        ];
        let too_high = |(in_range, field, threshold, trigger_field, trigger)| {
            let error = ThresholdError::TriggerAboveThreshold { trigger_field, trigger, field, threshold };
            (in_range && trigger > threshold).then_some(error)
        };
        let (up, down) = (self.scale_up, self.scale_down);
        let is_crossed = is_boundary(up) && is_boundary(down) && up <= down;
        let crossed = is_crossed.then_some(ThresholdError::UpNotAboveDown { up, down });
        triggers.into_iter().filter_map(too_high).chain(crossed)
    }
}

fn is_fraction(value: f64) -> bool {
    (0.0..=1.0).contains(&value)
}

fn is_amount(value: f64) -> bool {
    (0.0..f64::INFINITY).contains(&value)
}

fn is_boundary(value: f64) -> bool {
    (f64::MIN_POSITIVE..=1.0).contains(&value)
}
