//! What one attempt at an engine says about the engine.
//!
//! Against it count: a connection refused, one closed before an answer began, an answer of 5xx, and a connection not made
//! in time or silence until the deadline *while the engine moved nothing for anybody else either*: an engine whose accept
//! queue is full makes no connections, and a busy one may well have it full. Whatever load brings never counts:
//! time in a queue, a slow answer, 429, 503, 529. Nor does what is not its own: 501 (any engine of its kind would say
//! it), a lease that was revoked (those who decide know already), a client that left.

use std::sync::Arc;

use http::StatusCode;
use rouse::{fault::Fault, units::Tick};
use rouse_net::{lease::Gate, relay::ExchangeOutcome};

use super::{BreakerTransition, CircuitBreaker, Endpoint, EngineActivity};

/// What some servers answer when they are overloaded.
const SITE_OVERLOADED: u16 = 529;

/// Watches one attempt; the first thing that tells is what counts.
#[derive(Debug)]
pub struct OutlierReporter {
    circuit_breaker: Arc<CircuitBreaker>,
    gate: Arc<Gate>,
    activity: Arc<EngineActivity>,
    started_at: Tick,
    is_decided: bool,
}

impl OutlierReporter {
    /// A request goes to this engine now.
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

    /// The head came. A good one is no proof yet: there are servers that send it before they begin.
    pub fn head(&mut self, status: StatusCode, now: impl FnOnce() -> Tick) -> Option<BreakerTransition> {
        let overload = matches!(status.as_u16(), 429 | 501 | 503 | SITE_OVERLOADED);
        if !overload && !status.is_server_error() {
            return None;
        }
        let first = !std::mem::replace(&mut self.is_decided, true);
        (first && !overload).then(|| self.circuit_breaker.record_failure(self.started_at, now()))?
    }

    /// The first byte of the answer came.
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

    /// Whether ten such ends leave the engine out, when it moved something for others meanwhile or not.
    fn leaves_out(fault: &Fault, moved: bool) -> bool {
        let endpoint = endpoint(0);
        let began = Tick(1_000_000);
        for _ in 0..10 {
            let mut witness = OutlierReporter::new(&endpoint, began);
            if moved {
                endpoint.activity.note_progress(began + Millis(5));
            }
            witness.ended(&ExchangeOutcome::Failed(fault.clone()), || began + Millis(10));
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
