//! What one attempt at an engine says about the engine.
//!
//! Against it count: a connection refused, one closed before an answer began, an answer of 5xx, and a connection not made
//! in time or silence until the deadline *while the engine moved nothing for anybody else either*: an engine whose accept
//! queue is full makes no connections, and a busy one may well have it full. Whatever load brings never counts:
//! time in a queue, a slow answer, 429, 503, 529. Nor does what is not its own: 501 (any engine of its kind would say
//! it), a lease that was revoked (those who decide know already), a client that left.

use std::sync::Arc;

use http::StatusCode;
use rouse::{fault::Fault, lease::Gate, relay::Outcome, units::Tick};

use super::{Change, Endpoint, Reported, Standing};

/// What some servers answer when they are overloaded.
const OVERLOADED: u16 = 529;

/// Watches one attempt; the first thing that tells is what counts.
#[derive(Debug)]
pub struct Witness {
    standing: Arc<Standing>,
    gate: Arc<Gate>,
    reported: Arc<Reported>,
    began: Tick,
    told: bool,
}

impl Witness {
    /// A request goes to this engine now.
    #[must_use]
    pub fn new(endpoint: &Endpoint, now: Tick) -> Self {
        Self {
            standing: Arc::clone(&endpoint.standing),
            gate: Arc::clone(&endpoint.gate),
            reported: Arc::clone(&endpoint.reported),
            began: now,
            told: false,
        }
    }

    /// The head came. A good one is no proof yet: there are servers that send it before they begin.
    pub fn head(&mut self, status: StatusCode, now: impl FnOnce() -> Tick) -> Option<Change> {
        let overload = matches!(status.as_u16(), 429 | 501 | 503 | OVERLOADED);
        if !overload && !status.is_server_error() {
            return None;
        }
        let first = !std::mem::replace(&mut self.told, true);
        (first && !overload).then(|| self.standing.failed(self.began, now()))?
    }

    /// The first byte of the answer came.
    pub fn first_byte(&mut self, now: impl FnOnce() -> Tick) -> Option<Change> {
        let first = !std::mem::replace(&mut self.told, true);
        first.then(|| self.standing.succeeded(self.began, now))?
    }

    pub fn ended(&mut self, outcome: &Outcome, now: impl FnOnce() -> Tick) -> Option<Change> {
        match outcome {
            Outcome::Complete => self.first_byte(now),
            Outcome::Failed(fault) if !self.told && self.blames(fault) => {
                self.standing.failed(self.began, now())
            }
            Outcome::Failed(_) | Outcome::ClientLeft(_) => None,
        }
    }

    fn blames(&self, fault: &Fault) -> bool {
        match fault {
            Fault::EngineUnreachable { .. } | Fault::EngineClosed { .. } => true,
            Fault::EngineTimeout { .. } => self.gate.last_byte().max(self.reported.progress()) <= self.began,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use rouse::{fault::Timer, units::Millis};

    use super::{super::testing::endpoint, *};

    /// Whether ten such ends leave the engine out, when it moved something for others meanwhile or not.
    fn leaves_out(fault: &Fault, moved: bool) -> bool {
        let endpoint = endpoint(0);
        let began = Tick(1_000_000);
        for _ in 0..10 {
            let mut witness = Witness::new(&endpoint, began);
            if moved {
                endpoint.reported.progressed(began + Millis(5));
            }
            witness.ended(&Outcome::Failed(fault.clone()), || began + Millis(10));
        }
        endpoint.standing.is_out()
    }

    #[test]
    fn who_lets_nobody_in_may_be_busy_and_who_refuses_is_not_there() {
        let timeout = |which| Fault::EngineTimeout { model: "m".into(), which, limit: Millis(9) };
        for which in [Timer::Connect, Timer::FirstByte] {
            assert!(leaves_out(&timeout(which), false) && !leaves_out(&timeout(which), true));
        }
        let refused = Fault::EngineUnreachable { model: "m".into() };
        assert!(leaves_out(&refused, false) && leaves_out(&refused, true));
    }
}
