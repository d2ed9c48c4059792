//! What a simulated client wants, and how it behaves while it gets it.

use crate::{
    fleet::event::WaiterId,
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

/// One request, as the demand made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedRequest {
    pub model: ModelName,
    pub band: i32,
    pub key: String,
    /// The client, as [`crate::fleet::event::Waiter::client`] has it.
    pub client: u64,
    pub stream: bool,
    /// From the lease until the last byte, when the engine is well.
    pub exchange: Millis,
    /// What the whole answer is worth, in weighted tokens.
    pub tokens: u64,
    /// `x-request-timeout`: ends the wait earlier than the queue would.
    pub timeout: Option<Millis>,
    /// It leaves when it has been parked for so long.
    pub max_park_time: Option<Millis>,
    /// It leaves so long after it got its lease.
    pub leaves_after: Option<Millis>,
    /// Once it was answered or refused, the same client asks the same again after the first of these pauses, then after the
    /// next, round and round. None: it asks once.
    pub repeat_pauses: Vec<Millis>,
    /// It stops reading: no byte passes, though the engine is well, until the stall rule ends the exchange.
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
    /// Grows with each change of `state`: what was planned for an earlier one no longer happens.
    pub(super) serial: u32,
}

#[derive(Clone, Debug)]
pub(super) enum SimulatedClientState {
    Parked(WaiterId),
    HoldsLease {
        engine: EngineId,
        generation: Generation,
        /// It is the engine's first, and its verdict is still owed.
        canary: bool,
    },
}

impl SimulatedRequest {
    /// A plain stream of so long.
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

/// How an exchange or a wait ended, in the words of the tally.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExchangeEnd {
    Served,
    ClientLeft,
    Stalled,
    /// The engine died, hung or refused.
    EngineFailed,
    Revoked,
    /// By the stub in front of the engine, which lets nobody in.
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
