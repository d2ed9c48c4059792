//! Sources that generate requests: the model, the time, and the client behaviour.

use super::{client::SimulatedRequest, random::SplitMix64};
use crate::{
    model::ModelName,
    units::{Millis, Tick},
};

/// A stream of requests for one model.
#[derive(Clone, Debug)]
pub struct RequestSource {
    pub model: ModelName,
    pub pattern: ArrivalPattern,
    pub behaviour: ClientBehaviour,
    /// When the source starts, after the start of the world.
    pub offset: Millis,
}

/// When a source's requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalPattern {
    /// Independent arrivals with this mean gap.
    Poisson { mean_gap: Millis },
    /// Bursts of up to `size` requests over `spread`, repeated every `period` plus up to an eighth. Two sources with
    /// offsets half a period apart are the alternating demand that makes a naive scheduler thrash.
    Bursts { size: u32, spread: Millis, period: Millis },
}

/// How a source's clients behave. Shares are in `0..=1`.
#[derive(Clone, Copy, Debug)]
pub struct ClientBehaviour {
    pub stream_share: f64,
    /// Usual length of an exchange.
    pub exchange: (Millis, Millis),
    /// Share of requests that take `long_exchange` instead.
    pub long_share: f64,
    pub long_exchange: Millis,
    pub leave_parked_share: f64,
    pub leave_streaming_share: f64,
    pub stall_share: f64,
    /// Share of requests with a short `x-request-timeout`.
    pub short_timeout_share: f64,
    /// Keys and bands differ between requests.
    pub keyed: bool,
}

impl Default for ClientBehaviour {
    fn default() -> Self {
        Self {
            stream_share: 0.8,
            exchange: (Millis(50), Millis(2000)),
            long_share: 0.0,
            long_exchange: Millis::secs(60),
            leave_parked_share: 0.0,
            leave_streaming_share: 0.0,
            stall_share: 0.0,
            short_timeout_share: 0.0,
            keyed: false,
        }
    }
}

impl ArrivalPattern {
    /// The next arrivals: those of one batch, and when to ask for the next.
    pub(super) fn next_arrivals(&self, now: Tick, random: &mut SplitMix64) -> (Vec<Tick>, Tick) {
        match *self {
            Self::Poisson { mean_gap: gap } => {
                let at = now + Millis(random.exponential(gap.0) + 1);
                (vec![at], at)
            }
            Self::Bursts { size, spread, period: every } => {
                let batch = (0..random.between(1, size.into()))
                    .map(|_| now + Millis(random.between(0, spread.0)))
                    .collect();
                (batch, now + every + Millis(random.between(0, every.0 / 8)))
            }
        }
    }
}

impl ClientBehaviour {
    pub(super) fn random_request(&self, model: &ModelName, random: &mut SplitMix64) -> SimulatedRequest {
        let exchange = if random.chance(self.long_share) {
            self.long_exchange
        } else {
            Millis(random.between(self.exchange.0.0, self.exchange.1.0))
        };
        SimulatedRequest {
            model: model.clone(),
            band: if self.keyed { random.between(0, 2) as i32 - 1 } else { 0 },
            key: if self.keyed { format!("key-{}", random.between(0, 3)) } else { String::new() },
            // Derived, not drawn: a further draw would change what the recorded seeds do.
            client: exchange.0 % 5,
            stream: random.chance(self.stream_share),
            exchange,
            tokens: exchange.0 / 10,
            timeout: random.chance(self.short_timeout_share).then(|| Millis(random.between(1, 4000))),
            max_park_time: random.chance(self.leave_parked_share).then(|| Millis(random.between(0, 8000))),
            leaves_after: random
                .chance(self.leave_streaming_share)
                .then(|| Millis(random.between(0, exchange.0))),
            repeat_pauses: Vec::new(),
            stalls: random.chance(self.stall_share),
        }
    }
}
