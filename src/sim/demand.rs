//! Who asks for what, when: sources that make requests.

use super::{client::Request, random::Random};
use crate::{
    model::ModelName,
    units::{Millis, Tick},
};

/// A stream of requests for one model.
#[derive(Clone, Debug)]
pub struct Source {
    pub model: ModelName,
    pub pattern: Pattern,
    pub habits: Habits,
    /// When it begins, after the world does.
    pub offset: Millis,
}

/// When a source's requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Independent of each other, on average so far apart.
    Poisson { gap: Millis },
    /// `size` at a time, spread over `spread`, and again every `every`. Two of them with offsets half a period apart
    /// are the alternating demand that makes a naive scheduler thrash.
    Bursts { size: u32, spread: Millis, every: Millis },
}

/// How a source's clients behave. Fractions in `0..=1`.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    pub streams: f64,
    /// Usual length of an exchange.
    pub exchange: (Millis, Millis),
    /// So many take `long` instead.
    pub long_share: f64,
    pub long: Millis,
    pub leave_parked: f64,
    pub leave_streaming: f64,
    pub stall: f64,
    /// So many come with a short `x-request-timeout`.
    pub hurry: f64,
    /// Keys and bands differ.
    pub keyed: bool,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            streams: 0.8,
            exchange: (Millis(50), Millis(2000)),
            long_share: 0.0,
            long: Millis::secs(60),
            leave_parked: 0.0,
            leave_streaming: 0.0,
            stall: 0.0,
            hurry: 0.0,
            keyed: false,
        }
    }
}

impl Pattern {
    /// When the next arrivals come: those of one batch, and when to ask again.
    pub(super) fn next(&self, now: Tick, random: &mut Random) -> (Vec<Tick>, Tick) {
        match *self {
            Self::Poisson { gap } => {
                let at = now + Millis(random.exponential(gap.0) + 1);
                (vec![at], at)
            }
            Self::Bursts { size, spread, every } => {
                let batch = (0..random.between(1, size.into()))
                    .map(|_| now + Millis(random.between(0, spread.0)))
                    .collect();
                (batch, now + every + Millis(random.between(0, every.0 / 8)))
            }
        }
    }
}

impl Habits {
    pub(super) fn request(&self, model: &ModelName, random: &mut Random) -> Request {
        let exchange = if random.chance(self.long_share) {
            self.long
        } else {
            Millis(random.between(self.exchange.0.0, self.exchange.1.0))
        };
        Request {
            model: model.clone(),
            band: if self.keyed { random.between(0, 2) as i32 - 1 } else { 0 },
            key: if self.keyed { format!("key-{}", random.between(0, 3)) } else { String::new() },
            // Not drawn: what is drawn decides what the seeds that are on file do.
            client: exchange.0 % 5,
            stream: random.chance(self.streams),
            exchange,
            tokens: exchange.0 / 10,
            timeout: random.chance(self.hurry).then(|| Millis(random.between(1, 4000))),
            patience: random.chance(self.leave_parked).then(|| Millis(random.between(0, 8000))),
            leaves_after: random.chance(self.leave_streaming).then(|| Millis(random.between(0, exchange.0))),
            again: Vec::new(),
            stalls: random.chance(self.stall),
        }
    }
}
