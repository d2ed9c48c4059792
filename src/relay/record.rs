//! Who is told how an exchange ended, and the lease that ends with it.
//!
//! One value holds both, so that there is one place where an exchange ends: by name, or by being dropped.

use tokio::time::Instant;

use super::{Observer, Outcome};
use crate::{fault::Phase, lease::Lease};

#[derive(Debug)]
pub(super) struct Record<O: Observer> {
    open: Option<Open<O>>,
    pub(super) phase: Phase,
    /// Some of the request went to the engine, over this connection or one before.
    pub(super) sent: bool,
    /// The engine may be working on it.
    pub(super) begun: bool,
}

#[derive(Debug)]
pub(super) struct Open<O> {
    pub(super) lease: Lease,
    pub(super) observer: O,
}

impl<O: Observer> Record<O> {
    pub(super) const fn new(lease: Lease, observer: O) -> Self {
        Self { open: Some(Open { lease, observer }), phase: Phase::Connecting, sent: false, begun: false }
    }

    /// `None` once it has ended.
    pub(super) const fn open(&mut self) -> Option<&mut Open<O>> {
        self.open.as_mut()
    }

    /// Ends it at `now`, by a whole answer.
    pub(super) fn complete(&mut self, now: Instant) {
        self.end_at(Outcome::Complete, || now);
    }

    /// Ends it; a second time nothing happens. The caller has closed or given away the connection before.
    pub(super) fn end(&mut self, outcome: Outcome) {
        self.end_at(outcome, Instant::now);
    }

    fn end_at(&mut self, outcome: Outcome, now: impl FnOnce() -> Instant) {
        if let Some(Open { mut lease, mut observer }) = self.open.take() {
            let now = now();
            lease.ends(now);
            drop(lease);
            observer.end(outcome, now);
        }
    }
}

impl<O: Observer> Drop for Record<O> {
    fn drop(&mut self) {
        self.end(Outcome::ClientLeft(self.phase));
    }
}
