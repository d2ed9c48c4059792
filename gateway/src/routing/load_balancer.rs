//! Which of a model's engines gets a request, when one can be had at once.
//!
//! In this order:
//! 1. The engine that made the response which the request goes on from: no other has it. When it is full the request
//!    parks for a place there, since all that the others could say is that they know no such response.
//! 2. The engine that its session, or else the beginning of its conversation, belongs to (the ring), because that engine
//!    has the beginning in its cache. A preference with a bound: an engine that is loaded above [`MAX_LOAD_QUARTERS`] times the mean is
//!    passed over for the next on the ring, so that one popular beginning cannot fill one engine while others idle.
//! 3. The less loaded of two that are drawn. Of all engines the least loaded one would be everybody's choice at the same
//!    instant, of a view that is a moment old; of two it is not, and nearly as good.
//! 4. Any that has room. None: the request parks.
//!
//! Engines that were left out ([`CircuitBreaker`](super::CircuitBreaker)) are passed over in 2 to 4, save for one request when their
//! time is over. They are not asked even when all others are full, since parking is better than failing.
//!
//! A model with one engine has nothing to choose: no lot, no ring, no clock.

use rouse::{model::EngineId, units::Tick};
use rouse_net::lease::Lease;

use super::{Endpoint, EngineGeneration, ModelRoute, Rng};

/// How much more than the mean a preferred engine may carry, in quarters: 1.25. And one request more, so that a mean below
/// one forbids nobody.
const MAX_LOAD_QUARTERS: u128 = 5;
const QUARTERS_PER_MEAN: u128 = 4;

/// What is known of a request when its engine is chosen.
#[derive(Clone, Copy)]
pub struct EndpointCriteria<'a> {
    /// Who made the response that it goes on from.
    pub owner: Option<&'a EngineGeneration>,
    /// Hash of the session it says it belongs to.
    pub session: Option<u64>,
    /// Hash of its conversation's beginning.
    pub prefix: Option<u64>,
    /// Has just been found to be absent.
    pub exclude: Option<&'a EngineId>,
    pub rng: &'a Rng,
    /// Asked only when an engine is left out.
    pub now: &'a dyn Fn() -> Tick,
}

impl ModelRoute {
    /// A lease on the engine that suits best, of those that give one.
    #[must_use]
    pub fn take_lease(&self, wanted: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        match self.endpoints.as_slice() {
            [] => None,
            [only] if wanted.exclude == Some(&only.engine) => None,
            [only] => only.gate.take().map(|lease| (only, lease)),
            _ => match wanted.owner.and_then(|author| self.endpoint_of(author)) {
                Some(author) if wanted.exclude != Some(&author.engine) => {
                    author.gate.take().map(|lease| (author, lease))
                }
                _ => self.pick_by_ring(wanted).or_else(|| self.pick_of_two(wanted)),
            },
        }
    }

    /// The engine of this life, while it is here.
    #[must_use]
    pub fn endpoint_of(&self, (engine, generation): &EngineGeneration) -> Option<&Endpoint> {
        self.endpoints.iter().find(|e| e.engine == *engine && e.generation == *generation)
    }

    fn pick_by_ring(&self, wanted: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        let key = wanted.session.or(wanted.prefix)?;
        let mut all = None;
        for at in self.ring.as_ref()?.walk(key) {
            let Some(candidate) = self.candidate(at, wanted) else { continue };
            let endpoint = candidate.endpoint;
            let load = endpoint.load();
            // An idle engine is within any bound: the others need not be looked at.
            if load > 0
                && !all.get_or_insert_with(|| self.total_load(wanted)).allows(load, endpoint.gate.limit())
            {
                continue;
            }
            if let Some(taken) = candidate.take_lease(wanted.now) {
                return Some(taken);
            }
        }
        None
    }

    fn pick_of_two(&self, wanted: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        let n = self.endpoints.len();
        let (one, other) = wanted.rng.two_distinct_below(n);
        let drawn = match (self.candidate(one, wanted), self.candidate(other, wanted)) {
            (Some(one), Some(other)) if other.endpoint.is_less_loaded(one.endpoint) => {
                [Some(other), Some(one)]
            }
            drawn => drawn.into(),
        };
        // Full, closed or left out: whichever comes next.
        let rest = (one + 1..n).chain(0..one).filter_map(|at| self.candidate(at, wanted));
        drawn.into_iter().flatten().chain(rest).find_map(|one| one.take_lease(wanted.now))
    }

    fn candidate(&self, at: usize, wanted: &EndpointCriteria<'_>) -> Option<EndpointCandidate<'_>> {
        let endpoint = self.endpoints.get(at).filter(|e| wanted.exclude != Some(&e.engine))?;
        let tries = endpoint.circuit_breaker.is_ejected() && {
            // Of those that are out, the first in line are: half of all at most.
            let before = self.endpoints.iter().take(at).filter(|e| e.circuit_breaker.is_ejected()).count();
            before < self.endpoints.len() / 2
        };
        (!tries || endpoint.circuit_breaker.is_trial_due((wanted.now)()))
            .then_some(EndpointCandidate { endpoint, is_trial: tries })
    }

    fn total_load(&self, wanted: &EndpointCriteria<'_>) -> TotalLoad {
        let usable = (0..self.endpoints.len()).filter_map(|at| self.candidate(at, wanted));
        usable.fold(TotalLoad { load: 1, limit: 0 }, |sum, EndpointCandidate { endpoint, .. }| TotalLoad {
            load: sum.load + endpoint.load(),
            limit: sum.limit + u64::from(endpoint.gate.limit()),
        })
    }
}

#[derive(Clone, Copy)]
struct EndpointCandidate<'a> {
    endpoint: &'a Endpoint,
    /// It was left out, and is due to be tried by one request.
    is_trial: bool,
}

impl<'a> EndpointCandidate<'a> {
    fn take_lease(self, now: &dyn Fn() -> Tick) -> Option<(&'a Endpoint, Lease)> {
        let lease = self.endpoint.gate.take()?;
        if self.is_trial && !self.endpoint.circuit_breaker.start_trial(now()) {
            // Of those that find it due, one tries; the lease of another goes back, and was no use of the engine.
            drop(lease.without_marking_use());
            return None;
        }
        Some((self.endpoint, lease))
    }
}

/// What all usable engines carry, the request to be placed included, and how much they may.
#[derive(Clone, Copy)]
struct TotalLoad {
    load: u64,
    limit: u64,
}

impl TotalLoad {
    /// An engine's share of the mean is as its share of the limits: they are alike on one machine, and need not be.
    fn allows(self, load: u64, limit: u32) -> bool {
        let (all, limits) = (u128::from(self.load), u128::from(self.limit));
        u128::from(load) * QUARTERS_PER_MEAN * limits <= MAX_LOAD_QUARTERS * all * u128::from(limit)
    }
}

impl Endpoint {
    /// Requests that hold it, from all cores, and those that it says wait in it.
    #[must_use]
    pub fn load(&self) -> u64 {
        u64::from(self.gate.leases()) + u64::from(self.activity.waiting())
    }

    fn is_less_loaded(&self, other: &Self) -> bool {
        let share = |of: &Self, than: &Self| u128::from(of.load()) * u128::from(than.gate.limit());
        share(self, other) < share(other, self)
    }
}

#[cfg(test)]
mod tests;
