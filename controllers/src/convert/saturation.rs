//! Converts how saturation scales a model.

use std::collections::BTreeSet;

use rouse::{
    model::ScaleUpEviction,
    saturation::{Role, ThresholdEntry, Thresholds, ZeroRule},
    units::Millis,
};

use super::{ModelVariant, Rejection, spec_reader::SpecReader};
use crate::crd::{
    InferenceModelSpec,
    inference_model::{ActuationSpec, EngineRoleSpec, MayEvictSpec, SaturationSpec, ScaleToZeroSpec},
};

/// Time without requests after which a model may have no engine, if neither it nor its cooldownPeriod says one.
const DEFAULT_ZERO_AFTER: Millis = Millis::secs(600);

/// How saturation scales one model.
#[derive(Clone, Debug, PartialEq)]
pub struct SaturationSettings {
    /// The profile, and the thresholds that the object sets itself.
    pub written: SaturationSpec,
    /// How long fewer engines must have been enough before the model has fewer; `None` is the gateway's time.
    pub stabilisation: Option<Millis>,
    /// When the model has no engine.
    pub zero: ZeroRule,
    /// Number of engines that an autoscaler asks for, if one sets the number: [`ActuationSpec::External`].
    pub replicas: Option<u32>,
}

/// Reads the settings; `None` if saturation does not scale the model. `zero`: what [`zero_rule`] returned.
pub(super) fn settings(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    zero: ZeroRule,
) -> Option<SaturationSettings> {
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
    written.enabled.then(|| SaturationSettings { written: written.clone(), stabilisation, zero, replicas })
}

/// Reads when the model has no engine. `cooldown`: its cooldownPeriod, or `None` for never.
///
/// [`ZeroRule::Fleet`] where saturation does not scale the model.
pub(super) fn zero_rule(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    cooldown: Option<Millis>,
) -> ZeroRule {
    let written = spec.saturation.as_ref().filter(|own| own.enabled);
    let Some(ScaleToZeroSpec { enabled, after }) = written.and_then(|own| own.scale_to_zero.as_ref()) else {
        return ZeroRule::Fleet;
    };
    if !enabled {
        if after.is_some() {
            reader.reject_spec(
                "saturation.scaleToZero.after is only for enabled true: remove it, because with enabled false one \
                 engine always runs",
            );
        }
        return ZeroRule::KeepOne;
    }
    let contradiction = if spec.pinned {
        Some("pinned")
    } else if spec.min_replicas > 0 {
        Some("minReplicas")
    } else {
        let has_floor = spec.variants.iter().any(|own| own.min_replicas > Some(0));
        has_floor.then_some("minReplicas of a variant")
    };
    if let Some(field) = contradiction {
        reader.reject_spec(format!(
            "saturation.scaleToZero contradicts {field}, which keeps engines without requests: remove one of the two"
        ));
    }
    let written = after.as_ref().map(|after| reader.positive_span("saturation.scaleToZero.after", after));
    ZeroRule::After(written.or(cooldown).unwrap_or(DEFAULT_ZERO_AFTER))
}

/// Gives the cheapest variant of each role an engine that always runs. `variants`: the cheapest first.
pub(super) fn keep_one_of_each_role(variants: &mut [ModelVariant]) {
    let mut roles = BTreeSet::new();
    for variant in variants {
        if roles.insert(variant.role) {
            variant.spec.min_replicas = variant.spec.min_replicas.max(1);
            variant.kept_awake_by.push("saturation.scaleToZero.enabled false");
        }
    }
}

pub(super) const fn role(written: EngineRoleSpec) -> Role {
    match written {
        EngineRoleSpec::Both => Role::Both,
        EngineRoleSpec::Decode => Role::Decode,
        EngineRoleSpec::Prefill => Role::Prefill,
    }
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
