//! Converts how saturation scales a model.

use rouse::{
    model::ScaleUpEviction,
    saturation::{ThresholdEntry, Thresholds},
    units::Millis,
};

use super::{Rejection, spec_reader::SpecReader};
use crate::crd::{
    InferenceModelSpec,
    inference_model::{ActuationSpec, MayEvictSpec, SaturationSpec},
};

/// How saturation scales one model.
#[derive(Clone, Debug, PartialEq)]
pub struct SaturationSettings {
    /// The profile, and the thresholds that the object sets itself.
    pub written: SaturationSpec,
    /// How long fewer engines must have been enough before the model has fewer; `None` is the gateway's time.
    pub stabilisation: Option<Millis>,
    /// Number of engines that an autoscaler asks for, if one sets the number: [`ActuationSpec::External`].
    pub replicas: Option<u32>,
}

/// Reads the settings; `None` if saturation does not scale the model.
pub(super) fn settings(reader: &mut SpecReader, spec: &InferenceModelSpec) -> Option<SaturationSettings> {
    let external = spec.saturation.as_ref().is_some_and(|own| own.actuation == ActuationSpec::External);
    match spec.replicas {
        Some(_) if !external => reader.reject_spec(
            "replicas is only for saturation.actuation external: remove it, and use minReplicas and maxReplicas",
        ),
        None if external => reader.reject_spec(
            "saturation.actuation external needs replicas: set the number of engines that the autoscaler starts from",
        ),
        _ => {}
    }
    let written = spec.saturation.as_ref()?;
    thresholds(reader, written);
    let stabilisation = written.stabilisation.as_ref().and_then(|span| {
        let reject = |error| {
            let field = "saturation.stabilisation".to_owned();
            reader.reject(Rejection::Duration { field, error });
        };
        span.millis().map_err(reject).ok()
    });
    let replicas = spec.replicas.filter(|_| external);
    written.enabled.then(|| SaturationSettings { written: written.clone(), stabilisation, replicas })
}

/// Rejects thresholds that contradict each other or are out of range.
///
/// Only those that the object sets: the others are known where the ConfigMap is.
fn thresholds(reader: &mut SpecReader, written: &SaturationSpec) {
    let SaturationSpec {
        kv_cache_threshold: kv_cache,
        queue_length_threshold: queue_length,
        kv_spare_trigger: kv_spare,
        queue_spare_trigger: queue_spare,
        ..
    } = written;
    for (field, value, most) in [
        ("kvCacheThreshold", kv_cache, 1.0),
        ("kvSpareTrigger", kv_spare, 1.0),
        ("queueLengthThreshold", queue_length, f64::MAX),
        ("queueSpareTrigger", queue_spare, f64::MAX),
    ] {
        let Some(value) = value.filter(|value| !(0.0..=most).contains(value)) else { continue };
        let range = if most > 1.0 { "a number from 0" } else { "between 0 and 1" };
        reader.reject_spec(format!("saturation.{field} ({value}) must be {range}"));
    }
    for (trigger, spare, threshold, limit) in [
        ("kvSpareTrigger", kv_spare, "kvCacheThreshold", kv_cache),
        ("queueSpareTrigger", queue_spare, "queueLengthThreshold", queue_length),
    ] {
        if let (Some(spare), Some(limit)) = (spare, limit)
            && spare > limit
        {
            reader.reject_spec(format!(
                "saturation.{trigger} ({spare}) must be at most saturation.{threshold} ({limit}): not even an idle \
                 engine has more spare, so the model would always need another one"
            ));
        }
    }
}

/// Returns the thresholds that an object sets.
pub(crate) fn threshold_entry(written: &SaturationSpec) -> ThresholdEntry {
    ThresholdEntry {
        kv_cache_threshold: written.kv_cache_threshold,
        queue_length_threshold: written.queue_length_threshold,
        kv_spare_trigger: written.kv_spare_trigger,
        queue_spare_trigger: written.queue_spare_trigger,
        ..ThresholdEntry::default()
    }
}

/// Returns the thresholds by which gateways send a saturated engine no further request.
///
/// Those that the object does not set are the built-in ones: only the leader reads the ConfigMap.
pub(super) fn gateway_thresholds(spec: &InferenceModelSpec) -> Thresholds {
    let written = spec.saturation.as_ref().map(threshold_entry).unwrap_or_default();
    written.onto(Thresholds::default())
}

/// Returns what may be put away for another engine of the model.
pub(super) const fn may_evict(spec: &InferenceModelSpec) -> ScaleUpEviction {
    match &spec.saturation {
        Some(SaturationSpec { may_evict: MayEvictSpec::Never, .. }) => ScaleUpEviction::Never,
        _ => ScaleUpEviction::Idle,
    }
}
