//! Simulated clients: what they request, and how they behave.

use crate::{
    fleet::event::{Waiter, WaiterId},
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

/// One request, as its source generated it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedRequest {
    pub model: ModelName,
    pub band: i32,
    pub key: String,
    /// The client, as in [`crate::fleet::event::Waiter::client`].
    pub client: u64,
    pub stream: bool,
    /// From the lease until the last byte, if the engine is healthy.
    pub exchange: Millis,
    /// Cost of the whole answer, in weighted tokens.
    pub tokens: u64,
    /// `x-request-timeout`: ends the wait earlier than the queue would.
    pub timeout: Option<Millis>,
    /// Parked time after which the client leaves.
    pub max_park_time: Option<Millis>,
    /// Time after the lease at which the client leaves.
    pub leaves_after: Option<Millis>,
    /// Pauses before the client repeats the request after an answer or a refusal, used in rotation. Empty: the client
    /// sends it once.
    pub repeat_pauses: Vec<Millis>,
    /// The client stops reading. No byte passes although the engine is healthy, until the stall rule ends the exchange.
    pub stalls: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SimulatedClientId(pub(super) u64);

#[derive(Clone, Debug)]
pub(super) struct SimulatedClient {
    pub(super) request: SimulatedRequest,
    pub(super) arrived: Tick,
    pub(super) deadline: Tick,
    pub(super) state: SimulatedClientState,
    /// Grows with each change of `state` and so invalidates events scheduled for an earlier state.
    pub(super) serial: u32,
}

impl SimulatedClient {
    /// The client's request as the fleet knows it while it waits. `priority`: that of its model.
    pub(super) fn as_waiter(&self, id: WaiterId, priority: i32) -> Waiter {
        let request = &self.request;
        Waiter {
            id,
            model: request.model.clone(),
            band: request.band + priority,
            key: request.key.clone(),
            client: request.client,
            arrived: self.arrived,
            deadline: self.deadline,
            stream: request.stream,
            required_engine: None,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum SimulatedClientState {
    Parked(WaiterId),
    HoldsLease {
        engine: EngineId,
        generation: Generation,
        /// This lease is the engine's first, and its canary verdict is pending.
        canary: bool,
    },
}

impl SimulatedRequest {
    /// A plain stream with this exchange time.
    #[must_use]
    pub fn stream(model: &str, exchange: Millis) -> Self {
        Self {
            model: model.into(),
            band: 0,
            key: String::new(),
            client: 0,
            stream: true,
            exchange,
            tokens: 0,
            timeout: None,
            max_park_time: None,
            leaves_after: None,
            repeat_pauses: Vec::new(),
            stalls: false,
        }
    }
}

/// How an exchange ended. [`Self::name`] is the name in the tally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExchangeEnd {
    Served,
    ClientLeft,
    Stalled,
    /// The engine died, hung or refused.
    EngineFailed,
    Revoked,
    /// Rejected by the engine's stub, whose gate is closed.
    StubRejected,
}

impl ExchangeEnd {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Served => "requests served",
            Self::ClientLeft => "clients left mid-stream",
            Self::Stalled => "exchanges ended by the stall rule",
            Self::EngineFailed => "exchanges broken by their engine",
            Self::Revoked => "exchanges revoked",
            Self::StubRejected => "requests turned away by a stub at their end",
        }
    }
}
