//! What a model's status says about saturation: the last targets and the conditions.
//!
//! A status is written when it differs, so nothing here changes with every decision: a target keeps the reason and the
//! time of its last change, and messages name no measured values.

use std::collections::BTreeSet;

use rouse::{
    model::VariantName,
    saturation::{MetricsAvailability, ModelScaling, RecordedTarget, SaturationVerdict, Thresholds},
};

use super::thresholds_config::ModelThresholds;
use crate::{
    condition::{self, INSUFFICIENT_MEMORY, METRICS_AVAILABLE, SATURATED, THRESHOLDS_ACCEPTED},
    crd::inference_model::{SaturationStatus, SaturationTarget},
    status::{SaturationCondition, SaturationFacts},
};

/// Returns the targets in a model's status.
pub(crate) fn recorded_targets(stored: &SaturationStatus) -> Vec<RecordedTarget> {
    let recorded = |target: &SaturationTarget| RecordedTarget {
        variant: target.variant.as_str().into(),
        replicas: target.replicas,
        reason: target.reason.clone(),
        decided: target.decided.as_ref().map(condition::tick),
    };
    stored.targets.iter().map(recorded).collect()
}

fn stored_target(target: &RecordedTarget) -> SaturationTarget {
    SaturationTarget {
        variant: target.variant.to_string(),
        replicas: target.replicas,
        reason: target.reason.clone(),
        decided: target.decided.map(condition::time),
    }
}

fn metrics_condition(availability: &MetricsAvailability) -> SaturationCondition {
    let (status, reason, message) = match availability {
        MetricsAvailability::Known => {
            (true, "MetricsFound", "the load of every awake engine is known".to_owned())
        }
        MetricsAvailability::SourceFailed(error) => {
            (false, "PrometheusError", format!("{error}, see the log; no target is lowered"))
        }
        MetricsAvailability::Missing { unknown, awake } => {
            (false, "MetricsMissing", format!("{unknown} of {awake} awake engines report no load"))
        }
        MetricsAvailability::Stale { unknown, awake, window } => {
            let message = format!("{unknown} of {awake} awake engines have reported no load for {window}");
            (false, "MetricsStale", message)
        }
    };
    SaturationCondition { kind: METRICS_AVAILABLE, status, reason, message }
}

fn saturated_condition(verdict: &SaturationVerdict) -> SaturationCondition {
    let reason = if verdict.needs_more { "NeedsReplicas" } else { "SpareCapacity" };
    SaturationCondition { kind: SATURATED, status: verdict.needs_more, reason, message: verdict.why.clone() }
}

/// Builds what the status says. `refused`: variants whose next engine gets no memory.
pub(crate) fn facts(
    scaling: &ModelScaling,
    thresholds: &ModelThresholds,
    availability: &MetricsAvailability,
    refused: &BTreeSet<VariantName>,
) -> SaturationFacts {
    let mut conditions = vec![metrics_condition(availability), memory_condition(refused)];
    conditions.extend(scaling.verdict().map(saturated_condition));
    conditions.extend(thresholds.refused.as_ref().map(|error| SaturationCondition {
        kind: THRESHOLDS_ACCEPTED,
        status: false,
        reason: "InvalidThresholds",
        message: error.clone(),
    }));
    let status = SaturationStatus {
        targets: scaling.targets().iter().map(stored_target).collect(),
        thresholds: Some(describe(&thresholds.thresholds)),
    };
    SaturationFacts { status, conditions }
}

fn memory_condition(refused: &BTreeSet<VariantName>) -> SaturationCondition {
    let (reason, message) = if refused.is_empty() {
        ("NotRefused", "no engine waits for memory".to_owned())
    } else {
        let names: Vec<&str> = refused.iter().map(VariantName::as_str).collect();
        let message = format!(
            "there is no memory for another engine of variant {}: it is tried again when memory is released, and \
             from time to time",
            names.join(", ")
        );
        ("InsufficientMemory", message)
    };
    SaturationCondition { kind: INSUFFICIENT_MEMORY, status: !refused.is_empty(), reason, message }
}

fn describe(thresholds: &Thresholds) -> String {
    let Thresholds { kv_cache, queue_length, kv_spare_trigger, queue_spare_trigger, .. } = thresholds;
    format!(
        "saturated from {kv_cache} of the KV cache or {queue_length} waiting; more engines below a spare of \
         {kv_spare_trigger} or {queue_spare_trigger}"
    )
}

#[cfg(test)]
mod tests {
    use rouse::units::{Millis, Tick};

    use super::*;

    #[test]
    fn a_target_in_the_status_is_the_one_that_a_new_leader_continues_from() {
        let target = |variant: &str, replicas, decided| RecordedTarget {
            variant: variant.into(),
            replicas,
            reason: "the queues are too long".to_owned(),
            decided,
        };
        let targets = vec![target("a", 2, Some(Tick(1_780_000_000_000))), target("b", 0, None)];
        let scaling = ModelScaling::restored(targets.clone());
        let thresholds = ModelThresholds { thresholds: Thresholds::default(), refused: None };
        let facts = facts(&scaling, &thresholds, &MetricsAvailability::Known, &BTreeSet::new());
        assert_eq!(recorded_targets(&facts.status), targets);
    }

    #[test]
    fn an_outage_and_refused_memory_are_conditions() {
        let thresholds = ModelThresholds { thresholds: Thresholds::default(), refused: None };
        let failed = MetricsAvailability::SourceFailed("cannot reach Prometheus".to_owned());
        let refused = BTreeSet::from(["l4".into()]);
        let facts = facts(&ModelScaling::default(), &thresholds, &failed, &refused);
        let words: Vec<_> = facts.conditions.iter().map(|it| (it.kind, it.status, it.reason)).collect();
        let expected = [
            (METRICS_AVAILABLE, false, "PrometheusError"),
            (INSUFFICIENT_MEMORY, true, "InsufficientMemory"),
        ];
        assert_eq!(words, expected);
        assert!(facts.conditions[0].message.contains("cannot reach Prometheus"));
        assert!(facts.conditions[1].message.contains("l4"));
    }

    #[test]
    fn metrics_that_are_too_old_say_for_how_long() {
        let stale = MetricsAvailability::Stale { unknown: 2, awake: 2, window: Millis::secs(60) };
        assert!(metrics_condition(&stale).message.ends_with("for 1m"));
    }
}
