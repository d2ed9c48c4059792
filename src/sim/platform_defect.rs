//! Defects of a gateway around the driver's turn, which tests put back to show that a world's checks find them.

use super::world::SimulatedWorld;

/// A defect of the simulated gateway. The product has none of them, and no scenario can ask for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlatformDefect {
    /// As many requests as a turn takes keep the platform's events out of that turn.
    RequestsFirst,
    /// The end of a lease wakes the driver only if the gate is closed, or if requests wait for the same model.
    ///
    /// ADR 2 describes what this leaves: a waiter beside an idle engine.
    MissedLeaseEnd,
    /// A turn opens the gates before it publishes the routes.
    OpensBeforeRoutes,
    /// A new request takes the place of each granted lease at the same moment.
    NoGrantSucceeds,
}

impl SimulatedWorld {
    /// Puts a defect back, which the world's checks must report. Call it before the first step.
    #[must_use]
    pub fn with_defect(mut self, defect: PlatformDefect) -> Self {
        self.inbox.set_requests_first(defect == PlatformDefect::RequestsFirst);
        self.defect = Some(defect);
        self
    }

    pub(super) fn has_defect(&self, defect: PlatformDefect) -> bool {
        self.defect == Some(defect)
    }
}
