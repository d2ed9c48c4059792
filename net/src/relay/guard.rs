//! Who is told how an exchange ended, and the lease that ends with it.
//!
//! One value holds both, so that there is one place where an exchange ends: by name, or by being dropped.

use tokio::time::Instant;

use super::{ExchangeOutcome, RelayObserver};
use crate::lease::Lease;
use rouse::fault::DisconnectPhase;

#[derive(Debug)]
pub(super) struct RelayGuard<O: RelayObserver> {
    live: Option<LiveExchange<O>>,
    pub(super) phase: DisconnectPhase,
    /// Some of the request went to the engine, over this connection or one before.
    pub(super) sent: bool,
    /// The engine may be working on it.
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

    /// `None` once it has ended.
    pub(super) const fn live(&mut self) -> Option<&mut LiveExchange<O>> {
        self.live.as_mut()
    }

    /// Ends it at `now`, by a whole answer.
    pub(super) fn complete(&mut self, now: Instant) {
        self.end_at(ExchangeOutcome::Complete, || now);
    }

    /// Ends it; a second time nothing happens. The caller has closed or given away the connection before.
    pub(super) fn end(&mut self, outcome: ExchangeOutcome) {
        self.end_at(outcome, Instant::now);
    }

    fn end_at(&mut self, outcome: ExchangeOutcome, now: impl FnOnce() -> Instant) {
        if let Some(LiveExchange { mut lease, mut observer }) = self.live.take() {
            let now = now();
            lease.set_end(now);
            drop(lease);
            observer.end(outcome, now);
        }
    }
}

impl<O: RelayObserver> Drop for RelayGuard<O> {
    fn drop(&mut self) {
        self.end(ExchangeOutcome::ClientLeft(self.phase));
    }
}
