//! Judges an engine by the outcome of one attempt.
//!
//! Failures of the engine are: a refused connection, a connection closed before the response began, a 5xx response, and
//! a connect timeout or silence until the deadline *while the engine also moved nothing for any other request*. An
//! engine with a full accept queue makes no connections, and a busy engine may well have a full one. Effects of load
//! never count: time in a queue, a slow response, 429, 503, 529. Neither do outcomes that are not the engine's own
//! fault: 501 (any engine of its kind would send it), a revoked lease (the fleet already knows), a client that
//! disconnected.

use std::sync::Arc;

use http::StatusCode;
use rouse::{fault::Fault, units::Tick};
use rouse_net::{lease::Gate, relay::ExchangeOutcome};
use rouse_platform::EngineActivity;

use super::{BreakerTransition, CircuitBreaker, Endpoint};

/// The status that some servers send when they are overloaded.
const SITE_OVERLOADED: u16 = 529;

/// Watches one attempt; the first conclusive event decides.
#[derive(Debug)]
pub struct OutlierReporter {
    circuit_breaker: Arc<CircuitBreaker>,
    gate: Arc<Gate>,
    activity: Arc<EngineActivity>,
    started_at: Tick,
    is_decided: bool,
}

impl OutlierReporter {
    /// Starts watching a request that goes to this engine now.
    #[must_use]
    pub fn new(endpoint: &Endpoint, now: Tick) -> Self {
        Self {
            circuit_breaker: Arc::clone(&endpoint.circuit_breaker),
            gate: Arc::clone(&endpoint.gate),
            activity: Arc::clone(&endpoint.activity),
            started_at: now,
            is_decided: false,
        }
    }

    /// Judges the response's head. A successful head proves nothing yet: some servers send it before they begin to
    /// work.
    pub fn head(&mut self, status: StatusCode, now: impl FnOnce() -> Tick) -> Option<BreakerTransition> {
        let overload = matches!(status.as_u16(), 429 | 501 | 503 | SITE_OVERLOADED);
        if !overload && !status.is_server_error() {
            return None;
        }
        let first = !std::mem::replace(&mut self.is_decided, true);
        (first && !overload).then(|| self.circuit_breaker.record_failure(self.started_at, now()))?
    }

    /// Records the first byte of the response as a success.
    pub fn first_byte(&mut self, now: impl FnOnce() -> Tick) -> Option<BreakerTransition> {
        let first = !std::mem::replace(&mut self.is_decided, true);
        first.then(|| self.circuit_breaker.record_success(self.started_at, now))?
    }

    pub fn ended(
        &mut self,
        outcome: &ExchangeOutcome,
        now: impl FnOnce() -> Tick,
    ) -> Option<BreakerTransition> {
        match outcome {
            ExchangeOutcome::Complete => self.first_byte(now),
            ExchangeOutcome::Failed(fault) if !self.is_decided && self.is_engine_fault(fault) => {
                self.circuit_breaker.record_failure(self.started_at, now())
            }
            ExchangeOutcome::Failed(_) | ExchangeOutcome::ClientLeft(_) => None,
        }
    }

    fn is_engine_fault(&self, fault: &Fault) -> bool {
        match fault {
            Fault::EngineUnreachable { .. } | Fault::EngineClosedConnection { .. } => true,
            Fault::EngineTimeout { .. } => {
                self.gate.last_byte().max(self.activity.last_progress()) <= self.started_at
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use rouse::{fault::ExchangeTimeout, units::Millis};

    use super::{super::testing::endpoint, *};

    /// Whether ten such outcomes eject the engine. `moved`: the engine made progress for other requests meanwhile.
    fn leaves_out(fault: &Fault, moved: bool) -> bool {
        let endpoint = endpoint(0);
        let began = Tick(1_000_000);
        for _ in 0..10 {
            let mut reporter = OutlierReporter::new(&endpoint, began);
            if moved {
                endpoint.activity.note_progress(began + Millis(5));
            }
            reporter.ended(&ExchangeOutcome::Failed(fault.clone()), || began + Millis(10));
        }
        endpoint.circuit_breaker.is_ejected()
    }

    #[test]
    fn who_lets_nobody_in_may_be_busy_and_who_refuses_is_not_there() {
        let timeout = |which| Fault::EngineTimeout { model: "m".into(), timeout: which, limit: Millis(9) };
        for which in [ExchangeTimeout::Connect, ExchangeTimeout::FirstByte] {
            assert!(leaves_out(&timeout(which), false) && !leaves_out(&timeout(which), true));
        }
        let refused = Fault::EngineUnreachable { model: "m".into() };
        assert!(leaves_out(&refused, false) && leaves_out(&refused, true));
    }
}
