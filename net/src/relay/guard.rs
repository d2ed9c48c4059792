//! Ends an exchange: releases its lease and notifies its observer.
//!
//! One value holds both, so that an exchange ends in one place: explicitly, or by being dropped.

use tokio::time::Instant;

use super::{ExchangeOutcome, RelayObserver};
use crate::lease::Lease;
use rouse::fault::DisconnectPhase;

#[derive(Debug)]
pub(super) struct RelayGuard<O: RelayObserver> {
    live: Option<LiveExchange<O>>,
    pub(super) phase: DisconnectPhase,
    /// Part of the request was sent to the engine, on this connection or an earlier one.
    pub(super) sent: bool,
    /// The engine may be working on the request.
    pub(super) begun: bool,
}

#[derive(Debug)]
pub(super) struct LiveExchange<O> {
    pub(super) lease: Lease,
    pub(super) observer: O,
}

impl<O: RelayObserver> RelayGuard<O> {
    pub(super) const fn new(lease: Lease, observer: O) -> Self {
        Self {
            live: Some(LiveExchange { lease, observer }),
            phase: DisconnectPhase::Connecting,
            sent: false,
            begun: false,
        }
    }

    /// `None` once the exchange has ended.
    pub(super) const fn live(&mut self) -> Option<&mut LiveExchange<O>> {
        self.live.as_mut()
    }

    /// Ends the exchange at `now`, with a whole response.
    pub(super) fn complete(&mut self, now: Instant) {
        self.end_at(ExchangeOutcome::Complete, || now);
    }

    /// Ends the exchange; a second call does nothing. The caller has closed or handed over the connection before.
    pub(super) fn end(&mut self, outcome: ExchangeOutcome) {
        self.end_at(outcome, Instant::now);
    }

    fn end_at(&mut self, outcome: ExchangeOutcome, now: impl FnOnce() -> Instant) {
        if let Some(LiveExchange { lease, mut observer }) = self.live.take() {
            let now = now();
            lease.end_at(now);
            observer.end(outcome, now);
        }
    }
}

impl<O: RelayObserver> Drop for RelayGuard<O> {
    fn drop(&mut self) {
        self.end(ExchangeOutcome::ClientLeft(self.phase));
    }
}
