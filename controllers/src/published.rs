//! Reads the engines in a model's status, from which gateways that do not lead learn them.

mod mailbox;

use std::{collections::BTreeMap, net::SocketAddr};

use rouse::{
    fault::FailureCause,
    fleet::{
        event::{LearnedMeasurements, PublishedEngine as Told, PublishedEngineState, PublishedFailure},
        quote::LearnedTimes,
    },
    model::{AcceleratorId, ModelName, SleepLevel, VariantName},
    units::{Millis, Tick},
};

use super::{
    condition::tick,
    conflicts::object_name,
    crd::{
        InferenceModel, Quantity,
        inference_model::{self as crd, EngineFailure, EngineState, EngineStatus},
        ledger::ObjectName,
    },
};

pub use mailbox::PublishedMailbox;

/// The content of a model's status.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedModel {
    pub object: ObjectName,
    pub model: ModelName,
    pub engines: Vec<EngineStatus>,
    /// Time of the last request.
    pub last_request: Tick,
    /// Measurements of its engines; of the cheapest variant's, if it has several.
    pub learned: Option<LearnedMeasurements>,
    /// Measurements of the engines of each variant that has some. Statuses of earlier versions have none.
    pub learned_of_variants: BTreeMap<VariantName, LearnedMeasurements>,
}

impl PublishedModel {
    #[must_use]
    pub fn of(object: &InferenceModel) -> Self {
        let status = object.status.as_ref();
        let last = status.and_then(|status| status.last_request_time.as_ref());
        let variants = status.into_iter().flat_map(|status| &status.variants);
        let of_variant = |variant: &crd::VariantStatus| {
            Some((VariantName::from(variant.name.as_str()), learned(variant.learned.as_ref()?)))
        };
        Self {
            object: object_name(object),
            model: ModelName::from(object.spec.model_name.as_str()),
            engines: status.map(|status| status.engines.clone()).unwrap_or_default(),
            last_request: last.map(tick).unwrap_or_default(),
            learned: status.and_then(|status| status.learned.as_ref()).map(learned),
            learned_of_variants: variants.filter_map(of_variant).collect(),
        }
    }

    /// Returns the state after the object's deletion: no engines, no last request, no measurements.
    #[must_use]
    pub fn after_deletion(self) -> Self {
        Self {
            engines: Vec::new(),
            last_request: Tick::default(),
            learned: None,
            learned_of_variants: BTreeMap::new(),
            ..self
        }
    }

    /// Returns the measurements of each variant. The model's own are of the cheapest, unless variants have theirs.
    #[must_use]
    pub fn measurements(&self, cheapest: VariantName) -> BTreeMap<VariantName, LearnedMeasurements> {
        if self.learned_of_variants.is_empty() {
            return self.learned.map(|learned| (cheapest, learned)).into_iter().collect();
        }
        self.learned_of_variants.clone()
    }

    /// Whether it has no content: the object was deleted, or the model was never used.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.engines.is_empty()
            && self.last_request == Tick::default()
            && self.learned.is_none()
            && self.learned_of_variants.is_empty()
    }
}

/// Reads the measurements; unreadable ones are unknown.
fn learned(status: &crd::LearnedStatus) -> LearnedMeasurements {
    let bytes = |quantity: &Option<Quantity>| quantity.as_ref().and_then(|quantity| quantity.bytes().ok());
    LearnedMeasurements {
        peak: None,
        observed: bytes(&status.peak),
        residue: bytes(&status.residue),
        start: status.start_millis.map(Millis),
        wake: status.wake_millis.map(Millis),
        sleep: status.sleep_millis.map(Millis),
        // The spread of the times stays with the gateway that measured them.
        times: LearnedTimes::default(),
    }
}

/// Converts one engine for the decisions; `None` if its address is unreadable.
///
/// `accounts`: those on which all engines of its variant are. In a pool of slots there are none, and the status names
/// the accelerators of each engine.
#[must_use]
pub fn published_engine(
    status: &EngineStatus,
    fingerprint: u64,
    accounts: Vec<AcceleratorId>,
) -> Option<Told> {
    let address: Option<SocketAddr> = match &status.address {
        Some(text) => Some(text.parse().ok()?),
        None => None,
    };
    let chosen = status.accelerators.iter().map(|uuid| AcceleratorId::from(uuid.as_str()));
    let accelerators = if accounts.is_empty() { chosen.collect() } else { accounts };
    Some(Told {
        state: state(status.state),
        address,
        fingerprint,
        accelerators,
        since: status.since.as_ref().map(tick).unwrap_or_default(),
        failure: status.failure.as_ref().map(failure),
    })
}

/// A cause that this version does not know becomes `Unhealthy`; the other fields are valid all the same.
fn failure(failure: &EngineFailure) -> PublishedFailure {
    PublishedFailure {
        cause: failure.cause.parse().unwrap_or(FailureCause::Unhealthy),
        failures: failure.failures,
        failures_since_serving: failure.fruitless,
        until: tick(&failure.retry_after),
    }
}

const fn state(state: EngineState) -> PublishedEngineState {
    match state {
        EngineState::Launching => PublishedEngineState::Launching,
        EngineState::Loading => PublishedEngineState::Loading,
        EngineState::Awake => PublishedEngineState::Awake,
        EngineState::Draining => PublishedEngineState::Draining,
        EngineState::FallingAsleep => PublishedEngineState::FallingAsleep,
        // The status does not include the level, and only the leader wakes engines.
        EngineState::Asleep => PublishedEngineState::Asleep(SleepLevel::One),
        EngineState::Waking => PublishedEngineState::Waking,
        EngineState::Failing => PublishedEngineState::Failing,
        EngineState::Stopping => PublishedEngineState::Stopping,
        EngineState::Backoff => PublishedEngineState::Backoff,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_measurements_of_an_earlier_versions_status_are_the_cheapest_variants() {
        let read = |variants: serde_json::Value| {
            let object = json!({
                "apiVersion": "rouse.dev/v1alpha1",
                "kind": "InferenceModel",
                "metadata": {"name": "m", "namespace": "chat"},
                "spec": {"modelName": "m", "memory": "80Gi", "containerImage": "vllm:1"},
                "status": {"learned": {"startMillis": 7}, "variants": variants},
            });
            let published = PublishedModel::of(&serde_json::from_value(object).unwrap());
            let starts = published.measurements("cheap".into()).into_iter();
            starts.map(|(variant, learned)| (variant.to_string(), learned.start)).collect::<Vec<_>>()
        };
        let of = |variant: &str, millis| (variant.to_owned(), Some(Millis(millis)));
        assert_eq!(read(json!([{"name": "cheap"}, {"name": "dear"}])), [of("cheap", 7)]);
        let variants = json!([
            {"name": "cheap", "learned": {"startMillis": 8}},
            {"name": "dear", "learned": {"startMillis": 9}},
        ]);
        assert_eq!(read(variants), [of("cheap", 8), of("dear", 9)]);
        // After a change of costs the model's own may be those of another variant.
        assert_eq!(read(json!([{"name": "dear", "learned": {"startMillis": 9}}])), [of("dear", 9)]);
    }

    #[test]
    fn an_engine_is_on_the_accelerators_that_its_status_names_only_if_its_pool_has_no_account() {
        let engine = |accelerators: &[&str]| {
            let status = json!({
                "pod": "p", "replica": 0, "generation": 1, "state": "Asleep", "accelerators": accelerators,
            });
            serde_json::from_value::<EngineStatus>(status).unwrap()
        };
        let on = |status: EngineStatus, accounts: &[&str]| {
            let accounts = accounts.iter().map(|id| AcceleratorId::from(*id)).collect();
            let published = published_engine(&status, 7, accounts).unwrap();
            published.accelerators.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(on(engine(&["GPU-1", "GPU-2"]), &[]), ["GPU-1", "GPU-2"]);
        assert_eq!(on(engine(&[]), &["pool"]), ["pool"]);
        assert_eq!(on(engine(&["GPU-1"]), &["pool"]), ["pool"], "the pool has lost its slots");
        assert_eq!(on(engine(&[]), &[]), [""; 0], "an earlier version has written the status");
    }
}
