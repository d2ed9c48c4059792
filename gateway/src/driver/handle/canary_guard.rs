//! A guard that reports the result of an engine's canary exactly once.

use std::sync::Arc;

use rouse::{
    fleet::event::{CanaryVerdict, Event},
    model::EngineId,
    units::Generation,
};

use super::DriverState;

/// Reports the result of the first exchange after a start or wake.
///
/// A drop without a report counts as inconclusive: the client left, and the next request is tried.
pub struct CanaryGuard {
    shared: Arc<DriverState>,
    engine: EngineId,
    generation: Generation,
    reported: bool,
}

impl CanaryGuard {
    pub(in crate::driver) fn new(
        shared: &Arc<DriverState>,
        engine: EngineId,
        generation: Generation,
    ) -> Self {
        Self { shared: Arc::clone(shared), engine, generation, reported: false }
    }

    /// Reports that the first byte of a response came, or why none did.
    pub fn report(mut self, verdict: CanaryVerdict) {
        self.send(verdict);
    }

    fn send(&mut self, verdict: CanaryVerdict) {
        if !std::mem::replace(&mut self.reported, true) {
            let event = Event::Canary { engine: self.engine.clone(), generation: self.generation, verdict };
            self.shared.reports.add_event(event);
        }
    }
}

impl Drop for CanaryGuard {
    fn drop(&mut self) {
        self.send(CanaryVerdict::Inconclusive);
    }
}
