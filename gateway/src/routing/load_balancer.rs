//! Chooses which of a model's engines gets a request that need not park.
//!
//! The order of choice:
//! 1. The engine that made the response which the request continues: no other engine has that response. If the
//!    engine is full, the request parks for a place there, because all other engines would only report an unknown
//!    response.
//! 2. The engine of the request's session, or else of its conversation's prefix (the ring), because that engine has
//!    the prefix in its cache. The preference is bounded: an engine loaded above [`MAX_LOAD_QUARTERS`] quarters of the
//!    mean is skipped for the next on the ring, so that one popular prefix cannot fill one engine while others idle.
//! 3. The less loaded of two random engines. With the least loaded of all, every core would choose the same engine
//!    at the same instant, on a view that is a moment old; the choice of two avoids that and is nearly as good.
//! 4. Any engine with room. If there is none, the request parks.
//!
//! Ejected engines ([`CircuitBreaker`](super::CircuitBreaker)) are skipped in steps 2 to 4, except for one trial
//! request when their time is over. They get no requests even when all other engines are full, since parking is better
//! than failing.
//!
//! A model with one engine needs no choice: no random draw, no ring, no clock.

use rouse::{model::EngineId, units::Tick};
use rouse_net::lease::Lease;

use super::{Endpoint, EngineGeneration, ModelRoute, Rng};

/// The most load of a preferred engine, in quarters of the mean: 1.25. The mean includes the request to be placed, so
/// that a mean below one excludes no engine.
const MAX_LOAD_QUARTERS: u128 = 5;
const QUARTERS_PER_MEAN: u128 = 4;

/// The facts of a request that its engine is chosen by.
#[derive(Clone, Copy)]
pub struct EndpointCriteria<'a> {
    /// The engine that made the response which the request continues.
    pub owner: Option<&'a EngineGeneration>,
    /// The hash of the session that the client names.
    pub session: Option<u64>,
    /// The hash of the conversation's prefix.
    pub prefix: Option<u64>,
    /// An engine that was just found to be gone.
    pub exclude: Option<&'a EngineId>,
    pub rng: &'a Rng,
    /// Called only when an engine is ejected.
    pub now: &'a dyn Fn() -> Tick,
}

impl ModelRoute {
    /// Takes a lease on the best engine that grants one.
    #[must_use]
    pub fn take_lease(&self, criteria: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        match self.endpoints.as_slice() {
            [] => None,
            [only] if criteria.exclude == Some(&only.engine) => None,
            [only] => only.gate.take().map(|lease| (only, lease)),
            _ => match criteria.owner.and_then(|owner| self.endpoint_of(owner)) {
                Some(owner) if criteria.exclude != Some(&owner.engine) => {
                    owner.gate.take().map(|lease| (owner, lease))
                }
                _ => self.pick_by_ring(criteria).or_else(|| self.pick_of_two(criteria)),
            },
        }
    }

    /// The endpoint of this engine generation, while it is in the route.
    #[must_use]
    pub fn endpoint_of(&self, (engine, generation): &EngineGeneration) -> Option<&Endpoint> {
        self.endpoints.iter().find(|e| e.engine == *engine && e.generation == *generation)
    }

    fn pick_by_ring(&self, criteria: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        let key = criteria.session.or(criteria.prefix)?;
        let mut all = None;
        for at in self.ring.as_ref()?.walk(key) {
            let Some(candidate) = self.candidate(at, criteria) else { continue };
            let endpoint = candidate.endpoint;
            let load = endpoint.load();
            // An idle engine is within any bound, so the others need no check.
            if load > 0
                && !all.get_or_insert_with(|| self.total_load(criteria)).allows(load, endpoint.gate.limit())
            {
                continue;
            }
            if let Some(lease) = candidate.take_lease(criteria.now) {
                return Some(lease);
            }
        }
        None
    }

    fn pick_of_two(&self, criteria: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        let n = self.endpoints.len();
        let (one, other) = criteria.rng.two_distinct_below(n);
        let drawn = match (self.candidate(one, criteria), self.candidate(other, criteria)) {
            (Some(one), Some(other)) if other.endpoint.is_less_loaded(one.endpoint) => {
                [Some(other), Some(one)]
            }
            drawn => drawn.into(),
        };
        // Full, closed or ejected: try the others in order.
        let rest = (one + 1..n).chain(0..one).filter_map(|at| self.candidate(at, criteria));
        drawn.into_iter().flatten().chain(rest).find_map(|one| one.take_lease(criteria.now))
    }

    fn candidate(&self, at: usize, criteria: &EndpointCriteria<'_>) -> Option<EndpointCandidate<'_>> {
        let endpoint = self.endpoints.get(at).filter(|e| criteria.exclude != Some(&e.engine))?;
        let tries = endpoint.circuit_breaker.is_ejected() && {
            // At most half of all engines stay ejected: the first ones in order.
            let before = self.endpoints.iter().take(at).filter(|e| e.circuit_breaker.is_ejected()).count();
            before < self.endpoints.len() / 2
        };
        (!tries || endpoint.circuit_breaker.is_trial_due((criteria.now)()))
            .then_some(EndpointCandidate { endpoint, is_trial: tries })
    }

    fn total_load(&self, criteria: &EndpointCriteria<'_>) -> TotalLoad {
        let usable = (0..self.endpoints.len()).filter_map(|at| self.candidate(at, criteria));
        usable.fold(TotalLoad { load: 1, limit: 0 }, |sum, EndpointCandidate { endpoint, .. }| TotalLoad {
            load: sum.load + endpoint.load(),
            limit: sum.limit + u64::from(endpoint.gate.limit()),
        })
    }
}

#[derive(Clone, Copy)]
struct EndpointCandidate<'a> {
    endpoint: &'a Endpoint,
    /// Whether the engine is ejected and due for one trial request.
    is_trial: bool,
}

impl<'a> EndpointCandidate<'a> {
    fn take_lease(self, now: &dyn Fn() -> Tick) -> Option<(&'a Endpoint, Lease)> {
        let lease = self.endpoint.gate.take()?;
        if self.is_trial && !self.endpoint.circuit_breaker.start_trial(now()) {
            // Only one of the requests that find the trial due tries the engine. Another request's lease is returned
            // and does not count as use.
            drop(lease.without_marking_use());
            return None;
        }
        Some((self.endpoint, lease))
    }
}

/// The load of all usable engines, including the request to be placed, and their total limit.
#[derive(Clone, Copy)]
struct TotalLoad {
    load: u64,
    limit: u64,
}

impl TotalLoad {
    /// Whether an engine's load is within its bound. The mean is weighted by the engines' limits, which usually match
    /// on one machine but need not.
    fn allows(self, load: u64, limit: u32) -> bool {
        let (all, limits) = (u128::from(self.load), u128::from(self.limit));
        u128::from(load) * QUARTERS_PER_MEAN * limits <= MAX_LOAD_QUARTERS * all * u128::from(limit)
    }
}

impl Endpoint {
    /// The requests that hold the engine, from all cores, and those that the engine reports as waiting.
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
