//! The gate of one engine generation, and the exchanges that take its leases.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use rouse::units::Generation;
use rouse_net::lease::{Gate, Lease, TickClock};
use tokio::sync::Notify;

/// The gate and the counters of one engine generation.
#[derive(Debug)]
pub(crate) struct GateGeneration {
    pub(crate) generation: Generation,
    pub(crate) gate: Arc<Gate>,
    /// Exchanges whose end is not recorded yet. Their leases end a moment earlier.
    unfinished_exchanges: AtomicU32,
    /// Exchanges that a revocation ended.
    pub(super) cut_exchanges: AtomicU32,
    pub(super) notify: Arc<Notify>,
}

/// One request's exchange within a generation, from its lease until its end is recorded.
#[derive(Debug)]
pub(crate) struct ExchangeTracker(Arc<GateGeneration>);

impl GateGeneration {
    pub(super) fn new(generation: Generation, clock: TickClock, notify: &Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            generation,
            gate: Gate::new(None, clock, Arc::clone(notify)),
            unfinished_exchanges: AtomicU32::new(0),
            cut_exchanges: AtomicU32::new(0),
            notify: Arc::clone(notify),
        })
    }

    pub(super) fn is_used(&self) -> bool {
        self.gate.leases() > 0 || self.unfinished_exchanges.load(Ordering::Acquire) > 0
    }

    /// Takes a lease for one request if the gate is open.
    pub(crate) fn take_lease(self: &Arc<Self>) -> Option<(Lease, ExchangeTracker)> {
        self.unfinished_exchanges.fetch_add(1, Ordering::AcqRel);
        let part = ExchangeTracker(Arc::clone(self));
        Some((self.gate.take()?, part))
    }
}

impl ExchangeTracker {
    /// Records that the exchange did not end by itself. Returns whether a revocation ended it.
    pub(crate) fn record_abnormal_end(&self) -> bool {
        let cut = self.0.gate.revoked().is_some();
        if cut {
            self.0.cut_exchanges.fetch_add(1, Ordering::AcqRel);
        }
        cut
    }
}

impl Drop for ExchangeTracker {
    fn drop(&mut self) {
        if self.0.unfinished_exchanges.fetch_sub(1, Ordering::AcqRel) == 1 && !self.0.gate.is_open() {
            self.0.notify.notify_one();
        }
    }
}
