//! A command whose outcome is awaited, and when a failed one is retried.
//!
//! Apart from the Pods and engines, because both wait for commands in the same way.

use crate::{
    pairing::ids::Uid,
    units::{Millis, Tick},
};

/// A command whose outcome is awaited, at most until `until`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingCommand {
    pub serial: u64,
    pub kind: PendingCommandKind,
    pub until: Tick,
    /// The stub container that the command addresses, where that matters.
    pub stub_container: Option<Uid>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingCommandKind {
    Create,
    Bind,
    Launch,
    SendCanary,
    OpenGate,
    CloseGate,
    Sleep,
    Wake,
    Unbind,
    Forget,
    Stop,
    Query,
    QueryAccelerators,
    Delete,
    SetFinalizer(bool),
    Release,
}

/// Consecutive failures of a retryable command, and the time of the next attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryState {
    pub failures: u32,
    pub at: Tick,
}

impl RetryState {
    pub(in crate::pairing) fn record_failure(&mut self, now: Tick) {
        self.failures += 1;
        // The first retry comes early: a container reported as running may not listen yet.
        self.at = now + if self.failures == 1 { FIRST_RETRY_DELAY } else { retry_delay(self.failures - 1) };
    }
}

/// Delay before the first retry.
const FIRST_RETRY_DELAY: Millis = Millis(20);

/// Retry delay: 100 ms, doubled with each failure, at most 30 s.
pub(super) fn retry_delay(failures: u32) -> Millis {
    Millis((50 << failures.min(10)).min(30_000))
}
