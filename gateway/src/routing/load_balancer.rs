//! Chooses which of a model's engines gets a request that need not park.
//!
//! The order of choice:
//! 1. The engine that made the response which the request continues: no other engine has that response. If the
//!    engine is full, the request parks for a place there, because all other engines would only report an unknown
//!    response.
//! 2. The engine of the request's session, or else of its conversation's beginning (the ring), because that engine has
//!    the beginning in its cache. A popular key has several engines ([`KeyPopularity`](super::KeyPopularity)), of which
//!    it takes the less loaded of two. The preference is bounded ([`LoadBound`]): an engine loaded above its bound is
//!    skipped for the next on the ring, so that one key cannot fill one engine while others idle.
//! 3. The less loaded of two random engines. With the least loaded of all, every core would choose the same engine
//!    at the same instant, on a view that is a moment old; the choice of two avoids that and is nearly as good.
//! 4. Any engine with room. If there is none, the request parks.
//!
//! Ejected engines ([`CircuitBreaker`](super::CircuitBreaker)) are skipped in steps 2 to 4, except for one trial
//! request when their time is over. They get no requests even when all other engines are full, since parking is better
//! than failing.
//!
//! A saturated engine ([`SaturationMonitor`](rouse_platform::SaturationMonitor)) is chosen only if all others are
//! saturated or full, and then first the one that step 2 prefers. At its limit it counts as full. So a model whose
//! engines all have queues queues at the gateway, and not in its engines.
//!
//! A model with one engine needs no choice: no random draw, no ring, and no clock unless the engine is saturated.

use std::cell::OnceCell;

use rouse::{model::EngineId, units::Tick};
use rouse_net::{lease::Lease, openai::routing_fields::ConversationKey};

use super::{Endpoint, EngineGeneration, ModelRoute, Rng};

mod load;

use load::{LoadBound, TotalLoad};

/// The facts of a request that its engine is chosen by.
#[derive(Clone, Copy)]
pub struct EndpointCriteria<'a> {
    /// The engine that made the response which the request continues.
    pub owner: Option<&'a EngineGeneration>,
    /// The hash of the session that the client names.
    pub session: Option<u64>,
    /// The key of the conversation's beginning.
    pub prefix: Option<ConversationKey>,
    /// An engine that was just found to be gone.
    pub exclude: Option<&'a EngineId>,
    /// Whether the request parks if no engine takes it. If not, saturation does not keep it from an engine.
    pub may_park: bool,
    pub rng: &'a Rng,
    /// Called at most once, and only if an engine is ejected or has reported its load.
    pub now: &'a dyn Fn() -> Tick,
}

impl EndpointCriteria<'_> {
    /// The key that prefers an engine, and how much of it.
    fn key(&self) -> Option<(u64, LoadBound)> {
        let session = self.session.map(|session| (session, LoadBound::CACHED));
        session.or_else(|| {
            let prefix = self.prefix?;
            Some((prefix.hash, if prefix.is_new { LoadBound::NEW } else { LoadBound::CACHED }))
        })
    }
}

impl ModelRoute {
    /// Takes a lease on the best engine that grants one.
    #[must_use]
    pub fn take_lease(&self, criteria: &EndpointCriteria<'_>) -> Option<(&Endpoint, Lease)> {
        let choice = EndpointChoice { route: self, criteria, now: OnceCell::new() };
        match self.endpoints.as_slice() {
            [] => None,
            [only] if criteria.exclude == Some(&only.engine) => None,
            [only] => choice.take_if_room(only),
            _ => match criteria.owner.and_then(|owner| self.endpoint_of(owner)) {
                Some(owner) if criteria.exclude != Some(&owner.engine) => choice.take_if_room(owner),
                _ => match choice.by_key() {
                    KeyPreference::Taken(taken) => Some(taken),
                    KeyPreference::Saturated(preferred) => choice.of_two(preferred),
                },
            },
        }
    }

    /// The endpoint of this engine generation, while it is in the route.
    #[must_use]
    pub fn endpoint_of(&self, (engine, generation): &EngineGeneration) -> Option<&Endpoint> {
        self.endpoints.iter().find(|e| e.engine == *engine && e.generation == *generation)
    }
}

/// The outcome of the preference of a request's key.
enum KeyPreference<'r> {
    Taken((&'r Endpoint, Lease)),
    /// No engine that is not saturated took the request. The first saturated one within its bound and its limit.
    Saturated(Option<EndpointCandidate<'r>>),
}

/// One choice among the engines of a route.
struct EndpointChoice<'r, 'c> {
    route: &'r ModelRoute,
    criteria: &'c EndpointCriteria<'c>,
    now: OnceCell<Tick>,
}

impl<'r> EndpointChoice<'r, '_> {
    fn now(&self) -> Tick {
        *self.now.get_or_init(self.criteria.now)
    }

    /// Takes a lease on this engine, whatever the others do.
    fn take_if_room(&self, endpoint: &'r Endpoint) -> Option<(&'r Endpoint, Lease)> {
        if self.is_saturated(endpoint) && !self.has_saturated_room(endpoint) {
            return None;
        }
        endpoint.gate.take().map(|lease| (endpoint, lease))
    }

    fn by_key(&self) -> KeyPreference<'r> {
        let ModelRoute { ring, popularity, .. } = self.route;
        let (Some((key, bound)), Some(ring), Some(popularity)) = (self.criteria.key(), ring, popularity)
        else {
            return KeyPreference::Saturated(None);
        };
        let drawn = match popularity.spread(key, self.route.endpoints.len()) {
            1 => None,
            spread => {
                let (one, other) = self.criteria.rng.two_distinct_below(spread);
                if spread == self.route.endpoints.len() {
                    less_loaded(self.candidate(one), self.candidate(other))
                } else {
                    let first = ring.walk(key).take(spread).enumerate();
                    let mut two = first.filter(|(nth, _)| *nth == one || *nth == other);
                    let mut next = || two.next().and_then(|(_, at)| self.candidate(at));
                    less_loaded(next(), next())
                }
            }
        };
        let mut total = None;
        let mut allows = |candidate: &EndpointCandidate<'_>| {
            let (load, limit) = (candidate.load, candidate.endpoint.gate.limit());
            bound.always_allows(load)
                || bound.allows(load, limit, *total.get_or_insert_with(|| self.total_load()))
        };
        let on_ring = ring.walk(key).filter_map(|at| self.candidate(at));
        let mut saturated = None;
        for candidate in drawn.into_iter().chain(on_ring) {
            let EndpointCandidate { endpoint, is_saturated, .. } = candidate;
            let is_passed_over = is_saturated && (saturated.is_some() || !self.has_saturated_room(endpoint));
            if is_passed_over || !allows(&candidate) {
                continue;
            }
            if is_saturated {
                saturated = Some(candidate);
            } else if let Some(taken) = self.take(candidate) {
                return KeyPreference::Taken(taken);
            }
        }
        KeyPreference::Saturated(saturated)
    }

    /// `preferred`: the saturated engine to try before the others that are saturated.
    fn of_two(&self, preferred: Option<EndpointCandidate<'r>>) -> Option<(&'r Endpoint, Lease)> {
        let n = self.route.endpoints.len();
        let (one, other) = self.criteria.rng.two_distinct_below(n);
        let best = less_loaded(self.candidate(one), self.candidate(other));
        if let Some(lease) = best.filter(|best| !best.is_saturated).and_then(|best| self.take(best)) {
            return Some(lease);
        }
        // Full, closed, ejected or saturated: try all in order, and the saturated ones last.
        let all = |saturated: bool| {
            let candidates = (one..n).chain(0..one).filter_map(move |at| self.candidate(at));
            candidates.filter(move |candidate| candidate.is_saturated == saturated)
        };
        let unsaturated = all(false).find_map(|candidate| self.take(candidate));
        unsaturated.or_else(|| {
            let first = preferred.into_iter().chain(best);
            first.chain(all(true)).find_map(|candidate| self.take(candidate))
        })
    }

    fn candidate(&self, at: usize) -> Option<EndpointCandidate<'r>> {
        let endpoints = &self.route.endpoints;
        let endpoint = endpoints.get(at).filter(|e| self.criteria.exclude != Some(&e.engine))?;
        let is_trial = endpoint.circuit_breaker.is_ejected() && {
            // At most half of all engines stay ejected: the first ones in order.
            let before = endpoints.iter().take(at).filter(|e| e.circuit_breaker.is_ejected()).count();
            before < endpoints.len() / 2
        };
        (!is_trial || endpoint.circuit_breaker.is_trial_due(self.now())).then(|| EndpointCandidate {
            endpoint,
            is_trial,
            is_saturated: self.is_saturated(endpoint),
            load: endpoint.weighted_load(|| self.now()),
        })
    }

    /// Takes a lease on a candidate.
    fn take(&self, candidate: EndpointCandidate<'r>) -> Option<(&'r Endpoint, Lease)> {
        let EndpointCandidate { endpoint, is_trial, is_saturated, .. } = candidate;
        if is_saturated && !self.has_saturated_room(endpoint) {
            return None;
        }
        let lease = endpoint.gate.take()?;
        if is_trial && !endpoint.circuit_breaker.start_trial(self.now()) {
            // Only one of the requests that find the trial due tries the engine. Another request's lease is returned
            // and does not count as use.
            drop(lease.without_marking_use());
            return None;
        }
        Some((endpoint, lease))
    }

    fn is_saturated(&self, endpoint: &Endpoint) -> bool {
        self.criteria.may_park && endpoint.activity.saturation().is_saturated(|| self.now())
    }

    fn has_saturated_room(&self, endpoint: &Endpoint) -> bool {
        endpoint.activity.saturation().has_room(endpoint.gate.leases())
    }

    fn total_load(&self) -> TotalLoad {
        let usable = (0..self.route.endpoints.len()).filter_map(|at| self.candidate(at));
        let loads = usable.map(|candidate| (candidate.load, candidate.endpoint.gate.limit()));
        loads.fold(TotalLoad::OF_THE_REQUEST, TotalLoad::plus)
    }
}

#[derive(Clone, Copy)]
struct EndpointCandidate<'a> {
    endpoint: &'a Endpoint,
    /// Whether the engine is ejected and due for one trial request.
    is_trial: bool,
    is_saturated: bool,
    /// As [`Endpoint::weighted_load`] has it.
    load: u64,
}

/// The one that is not saturated, or else the less loaded one.
fn less_loaded<'a>(
    one: Option<EndpointCandidate<'a>>,
    other: Option<EndpointCandidate<'a>>,
) -> Option<EndpointCandidate<'a>> {
    match (one, other) {
        (Some(one), Some(other)) if other.is_better_than(&one) => Some(other),
        (one, other) => one.or(other),
    }
}

impl EndpointCandidate<'_> {
    fn is_better_than(&self, other: &Self) -> bool {
        let share = |of: &Self, than: &Self| u128::from(of.load) * u128::from(than.endpoint.gate.limit());
        (self.is_saturated, share(self, other)) < (other.is_saturated, share(other, self))
    }
}

#[cfg(test)]
mod tests;
