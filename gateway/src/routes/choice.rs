//! Which of a model's engines gets a request, when one can be had at once.
//!
//! In this order:
//! 1. The engine that made the response which the request goes on from: no other has it. When it is full the request
//!    parks for a place there, since all that the others could say is that they know no such response.
//! 2. The engine that its session, or else the beginning of its conversation, belongs to (the ring), because that engine
//!    has the beginning in its cache. A preference with a bound: an engine that is loaded above [`BOUND`] times the mean is
//!    passed over for the next on the ring, so that one popular beginning cannot fill one engine while others idle.
//! 3. The less loaded of two that are drawn. Of all engines the least loaded one would be everybody's choice at the same
//!    instant, of a view that is a moment old; of two it is not, and nearly as good.
//! 4. Any that has room. None: the request parks.
//!
//! Engines that were left out ([`Standing`](super::Standing)) are passed over in 2 to 4, save for one request when their
//! time is over. They are not asked even when all others are full, since parking is better than failing.
//!
//! A model with one engine has nothing to choose: no lot, no ring, no clock.

use rouse::{lease::Lease, model::EngineId, units::Tick};

use super::{Author, Endpoint, Lots, Route};

/// How much more than the mean a preferred engine may carry, in quarters: 1.25. And one request more, so that a mean below
/// one forbids nobody.
const BOUND: u128 = 5;
const QUARTERS: u128 = 4;

/// What is known of a request when its engine is chosen.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Who made the response that it goes on from.
    pub author: Option<&'a Author>,
    /// Hash of the session it says it belongs to.
    pub session: Option<u64>,
    /// Hash of its conversation's beginning.
    pub prefix: Option<u64>,
    /// Has just been found to be absent.
    pub avoid: Option<&'a EngineId>,
    pub lots: &'a Lots,
    /// Asked only when an engine is left out.
    pub now: &'a dyn Fn() -> Tick,
}

impl Route {
    /// A lease on the engine that suits best, of those that give one.
    #[must_use]
    pub fn take(&self, wanted: &Wanted<'_>) -> Option<(&Endpoint, Lease)> {
        match self.endpoints.as_slice() {
            [] => None,
            [only] if wanted.avoid == Some(&only.engine) => None,
            [only] => only.gate.take().map(|lease| (only, lease)),
            _ => match wanted.author.and_then(|author| self.author(author)) {
                Some(author) if wanted.avoid != Some(&author.engine) => {
                    author.gate.take().map(|lease| (author, lease))
                }
                _ => self.of_ring(wanted).or_else(|| self.of_two(wanted)),
            },
        }
    }

    /// The engine of this life, while it is here.
    #[must_use]
    pub fn author(&self, (engine, generation): &Author) -> Option<&Endpoint> {
        self.endpoints.iter().find(|e| e.engine == *engine && e.generation == *generation)
    }

    fn of_ring(&self, wanted: &Wanted<'_>) -> Option<(&Endpoint, Lease)> {
        let key = wanted.session.or(wanted.prefix)?;
        let mut all = None;
        for at in self.ring.as_ref()?.walk(key) {
            let Some(candidate) = self.candidate(at, wanted) else { continue };
            let endpoint = candidate.endpoint;
            let load = endpoint.load();
            // An idle engine is within any bound: the others need not be looked at.
            if load > 0 && !all.get_or_insert_with(|| self.sum(wanted)).allows(load, endpoint.gate.limit()) {
                continue;
            }
            if let Some(taken) = candidate.take(wanted.now) {
                return Some(taken);
            }
        }
        None
    }

    fn of_two(&self, wanted: &Wanted<'_>) -> Option<(&Endpoint, Lease)> {
        let n = self.endpoints.len();
        let (one, other) = wanted.lots.two_below(n);
        let drawn = match (self.candidate(one, wanted), self.candidate(other, wanted)) {
            (Some(one), Some(other)) if other.endpoint.is_less_loaded(one.endpoint) => {
                [Some(other), Some(one)]
            }
            drawn => drawn.into(),
        };
        // Full, closed or left out: whichever comes next.
        let rest = (one + 1..n).chain(0..one).filter_map(|at| self.candidate(at, wanted));
        drawn.into_iter().flatten().chain(rest).find_map(|one| one.take(wanted.now))
    }

    fn candidate(&self, at: usize, wanted: &Wanted<'_>) -> Option<Candidate<'_>> {
        let endpoint = self.endpoints.get(at).filter(|e| wanted.avoid != Some(&e.engine))?;
        let tries = endpoint.standing.is_out() && {
            // Of those that are out, the first in line are: half of all at most.
            let before = self.endpoints.iter().take(at).filter(|e| e.standing.is_out()).count();
            before < self.endpoints.len() / 2
        };
        (!tries || endpoint.standing.is_due((wanted.now)())).then_some(Candidate { endpoint, tries })
    }

    fn sum(&self, wanted: &Wanted<'_>) -> Sum {
        let usable = (0..self.endpoints.len()).filter_map(|at| self.candidate(at, wanted));
        usable.fold(Sum { load: 1, limit: 0 }, |sum, Candidate { endpoint, .. }| Sum {
            load: sum.load + endpoint.load(),
            limit: sum.limit + u64::from(endpoint.gate.limit()),
        })
    }
}

#[derive(Clone, Copy)]
struct Candidate<'a> {
    endpoint: &'a Endpoint,
    /// It was left out, and is due to be tried by one request.
    tries: bool,
}

impl<'a> Candidate<'a> {
    fn take(self, now: &dyn Fn() -> Tick) -> Option<(&'a Endpoint, Lease)> {
        let lease = self.endpoint.gate.take()?;
        if self.tries && !self.endpoint.standing.try_again(now()) {
            // Of those that find it due, one tries; the lease of another goes back, and was no use of the engine.
            drop(lease.unnoted());
            return None;
        }
        Some((self.endpoint, lease))
    }
}

/// What all usable engines carry, the request to be placed included, and how much they may.
#[derive(Clone, Copy)]
struct Sum {
    load: u64,
    limit: u64,
}

impl Sum {
    /// An engine's share of the mean is as its share of the limits: they are alike on one machine, and need not be.
    fn allows(self, load: u64, limit: u32) -> bool {
        let (all, limits) = (u128::from(self.load), u128::from(self.limit));
        u128::from(load) * QUARTERS * limits <= BOUND * all * u128::from(limit)
    }
}

impl Endpoint {
    /// Requests that hold it, from all cores, and those that it says wait in it.
    #[must_use]
    pub fn load(&self) -> u64 {
        u64::from(self.gate.leases()) + u64::from(self.reported.waiting())
    }

    fn is_less_loaded(&self, other: &Self) -> bool {
        let share = |of: &Self, than: &Self| u128::from(of.load()) * u128::from(than.gate.limit());
        share(self, other) < share(other, self)
    }
}

#[cfg(test)]
mod tests;
