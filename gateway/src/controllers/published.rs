//! What the status of a model says of its engines: how every gateway that does not lead knows them.

use std::net::SocketAddr;

use rouse::{
    fault::Cause,
    fleet::event::{Failure, Learned, Published as Told, PublishedState},
    model::{AcceleratorId, Level, ModelName},
    units::{Millis, Tick},
};

use super::{
    condition::tick,
    crd::{
        InferenceModel, Quantity,
        inference_model::{self as crd, EngineFailure, EngineState, EngineStatus},
        ledger::ObjectName,
    },
    settle::object_name,
};

/// What an object's status says.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    pub object: ObjectName,
    pub model: ModelName,
    pub engines: Vec<EngineStatus>,
    /// When it was last used.
    pub last_request: Tick,
    /// What was learned of its engines.
    pub learned: Option<Learned>,
}

impl Published {
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

    /// The object is gone, and what it said with it.
    #[must_use]
    pub fn gone(self) -> Self {
        Self { engines: Vec::new(), ..self }
    }
}

/// What cannot be read is not known.
fn learned(status: &crd::Learned) -> Learned {
    let bytes = |quantity: &Option<Quantity>| quantity.as_ref().and_then(|quantity| quantity.bytes().ok());
    Learned {
        peak: None,
        observed: bytes(&status.peak),
        residue: bytes(&status.residue),
        start: status.start_millis.map(Millis),
        wake: status.wake_millis.map(Millis),
        sleep: status.sleep_millis.map(Millis),
    }
}

/// One engine, for the decisions; `None` for what cannot be read.
#[must_use]
pub fn engine(status: &EngineStatus, fingerprint: u64, accelerators: Vec<AcceleratorId>) -> Option<Told> {
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

/// Of a cause that this version does not know the rest holds all the same.
fn failure(failure: &EngineFailure) -> Failure {
    Failure {
        cause: failure.cause.parse().unwrap_or(Cause::Unhealthy),
        failures: failure.failures,
        fruitless: failure.fruitless,
        until: tick(&failure.retry_after),
    }
}

const fn state(state: EngineState) -> PublishedState {
    match state {
        EngineState::Launching => PublishedState::Launching,
        EngineState::Loading => PublishedState::Loading,
        EngineState::Awake => PublishedState::Awake,
        EngineState::Draining => PublishedState::Draining,
        EngineState::FallingAsleep => PublishedState::FallingAsleep,
        // The status does not say how deep; whoever does not lead wakes nobody.
        EngineState::Asleep => PublishedState::Asleep(Level::One),
        EngineState::Waking => PublishedState::Waking,
        EngineState::Failing => PublishedState::Failing,
        EngineState::Stopping => PublishedState::Stopping,
        EngineState::Backoff => PublishedState::Backoff,
    }
}
