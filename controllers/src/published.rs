//! Reads the engines in a model's status, from which gateways that do not lead learn them.

mod mailbox;

use std::net::SocketAddr;

use rouse::{
    fault::FailureCause,
    fleet::event::{LearnedMeasurements, PublishedEngine as Told, PublishedEngineState, PublishedFailure},
    model::{AcceleratorId, ModelName, SleepLevel},
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
    /// Measurements of its engines.
    pub learned: Option<LearnedMeasurements>,
}

impl PublishedModel {
    #[must_use]
    pub fn of(object: &InferenceModel) -> Self {
        let status = object.status.as_ref();
        let last = status.and_then(|status| status.last_request_time.as_ref());
        Self {
            object: object_name(object),
            model: ModelName::from(object.spec.model_name.as_str()),
            engines: status.map(|status| status.engines.clone()).unwrap_or_default(),
            last_request: last.map(tick).unwrap_or_default(),
            learned: status.and_then(|status| status.learned.as_ref()).map(learned),
        }
    }

    /// Returns the state after the object's deletion: no engines, no last request, no measurements.
    #[must_use]
    pub fn after_deletion(self) -> Self {
        Self { engines: Vec::new(), last_request: Tick::default(), learned: None, ..self }
    }

    /// Whether it has no content: the object was deleted, or the model was never used.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.engines.is_empty() && self.last_request == Tick::default() && self.learned.is_none()
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
    }
}

/// Converts one engine for the decisions; `None` if its address is unreadable.
#[must_use]
pub fn published_engine(
    status: &EngineStatus,
    fingerprint: u64,
    accelerators: Vec<AcceleratorId>,
) -> Option<Told> {
    let address: Option<SocketAddr> = match &status.address {
        Some(text) => Some(text.parse().ok()?),
        None => None,
    };
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
