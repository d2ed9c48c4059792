//! Measures how long a request is parked.

use std::rc::Rc;

use rouse::{
    fault::DisconnectPhase,
    units::{Millis, Tick},
};

use super::RequestContext;

/// Adds the time until its drop to the request's time parked.
pub(crate) struct ParkedTimer {
    context: Rc<RequestContext>,
    since: Tick,
}

impl RequestContext {
    /// Starts a guard that measures the time parked.
    pub(crate) fn park(self: &Rc<Self>) -> ParkedTimer {
        self.set_phase(DisconnectPhase::Parked);
        if let Some(metrics) = self.model_metrics.get() {
            metrics.add_parked(1);
        }
        let since = self.now();
        self.phase_began.set(since);
        ParkedTimer { context: Rc::clone(self), since }
    }
}

impl Drop for ParkedTimer {
    fn drop(&mut self) {
        let parked_for = &self.context.exceptions().parked_for;
        let before = parked_for.get().unwrap_or_default();
        let now = self.context.now();
        self.context.phase_began.set(now);
        parked_for.set(Some(Millis(before.0 + now.since(self.since).0)));
        if let Some(metrics) = self.context.model_metrics.get() {
            metrics.add_parked(-1);
        }
    }
}
