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
    /// The first value that is out of its range, or the first pair that contradicts itself.
    pub fn validate(&self) -> Result<(), ThresholdError> {
        for (field, value) in [("kvCacheThreshold", self.kv_cache), ("kvSpareTrigger", self.kv_spare_trigger)]
        {
            if !(0.0..=1.0).contains(&value) {
                return Err(ThresholdError::NoFraction { field, value });
            }
        }
        for (field, value) in [
            ("queueLengthThreshold", self.queue_length),
            ("queueSpareTrigger", self.queue_spare_trigger),
            ("priority", self.priority),
        ] {
            if !(0.0..f64::INFINITY).contains(&value) {
                return Err(ThresholdError::Negative { field, value });
            }
        }
        for (field, value) in [("scaleUpThreshold", self.scale_up), ("scaleDownBoundary", self.scale_down)] {
            if !(f64::MIN_POSITIVE..=1.0).contains(&value) {
                return Err(ThresholdError::NoBoundary { field, value });
            }
        }
        self.validate_pairs()
    }

    fn validate_pairs(&self) -> Result<(), ThresholdError> {
        for (field, threshold, trigger_field, trigger) in [
            ("kvCacheThreshold", self.kv_cache, "kvSpareTrigger", self.kv_spare_trigger),
            ("queueLengthThreshold", self.queue_length, "queueSpareTrigger", self.queue_spare_trigger),
        ] {
            if trigger > threshold {
                return Err(ThresholdError::TriggerAboveThreshold {
                    trigger_field,
                    trigger,
                    field,
                    threshold,
                });
            }
        }
        if self.scale_up <= self.scale_down {
            return Err(ThresholdError::UpNotAboveDown { up: self.scale_up, down: self.scale_down });
        }
        Ok(())
    }
}
