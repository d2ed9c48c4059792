//! What the gateways of a cluster report to each other: the leader its engines, and each gateway its demand.
//!
//! Apart from the events, because these values also leave the process: gateways exchange them through objects of the
//! cluster.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::{
    engine::{Engine, state::LifecycleState},
    fault::FailureCause,
    model::{AcceleratorId, SleepLevel},
    units::Tick,
};

/// An engine as the leader publishes it to the other gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedEngine {
    pub state: PublishedEngineState,
    /// The engine's address, once known.
    pub address: Option<SocketAddr>,
    /// Fingerprint of the template that the engine was started from.
    pub fingerprint: u64,
    pub accelerators: Vec<AcceleratorId>,
    /// When the state was entered, in wall time.
    pub since: Tick,
    /// Present while the engine is in back-off after a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<PublishedFailure>,
}

/// Why an engine is in back-off, as waiters learn it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedFailure {
    pub cause: FailureCause,
    /// Failures in a row.
    pub failures: u32,
    /// Failures in a row since the engine last proved that it serves.
    pub failures_since_serving: u32,
    /// End of the back-off, in wall time.
    pub until: Tick,
}

/// An engine's state as other gateways need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PublishedEngineState {
    Launching,
    Loading,
    Awake,
    Draining,
    FallingAsleep,
    Asleep(SleepLevel),
    Waking,
    Failing,
    Stopping,
    Backoff,
}

impl PublishedEngine {
    /// Returns what the leader publishes of an engine; `None` if it is [`LifecycleState::Cold`].
    #[must_use]
    pub fn of(engine: &Engine) -> Option<Self> {
        let state = match &engine.state {
            LifecycleState::Cold => return None,
            LifecycleState::Launching => PublishedEngineState::Launching,
            LifecycleState::Loading => PublishedEngineState::Loading,
            LifecycleState::Awake => PublishedEngineState::Awake,
            LifecycleState::Draining { .. } => PublishedEngineState::Draining,
            LifecycleState::FallingAsleep { .. } => PublishedEngineState::FallingAsleep,
            LifecycleState::Asleep { level } => PublishedEngineState::Asleep(*level),
            LifecycleState::Waking { .. } => PublishedEngineState::Waking,
            LifecycleState::Failing { .. } => PublishedEngineState::Failing,
            LifecycleState::Stopping { .. } => PublishedEngineState::Stopping,
            LifecycleState::Backoff { .. } => PublishedEngineState::Backoff,
        };
        Some(Self {
            state,
            address: engine.address,
            fingerprint: engine.fingerprint,
            accelerators: engine.accelerators.clone(),
            since: engine.since,
            failure: PublishedFailure::of(engine),
        })
    }
}

impl PublishedFailure {
    /// Returns `None` unless the engine is in back-off.
    #[must_use]
    pub fn of(engine: &Engine) -> Option<Self> {
        let LifecycleState::Backoff { until, cause } = &engine.state else { return None };
        let (failures, fruitless) = (engine.failures, engine.failures_since_serving);
        Some(Self { cause: cause.clone(), failures, failures_since_serving: fruitless, until: *until })
    }
}

/// One gateway's demand for one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// Requests that wait at that gateway.
    pub waiting: u32,
    /// Requests at an engine.
    pub in_flight: u32,
    /// When the last request ended, in wall time.
    pub last_request: Tick,
}
