//! What the hot path reads: one immutable snapshot, swapped whole by the driver. Snapshots share what is the same in both:
//! a change of one model makes one new route.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use rouse::{
    engine::past::LastFailure,
    fleet::report::ModelState,
    lease::Gate,
    model::{EngineId, ModelName, Registry},
    units::{Generation, Millis, Tick},
};

mod authors;
mod choice;
mod lots;
mod reported;
mod ring;
mod standing;
#[cfg(test)]
mod testing;
mod witness;

pub use authors::{Author, Authors};
pub use choice::Wanted;
pub use lots::Lots;
pub use reported::Reported;
pub use ring::Ring;
pub use standing::{Change, Standing};
pub use witness::Witness;

/// Every model with the engines that may be used right now.
#[derive(Debug, Default)]
pub struct Routes {
    pub registry: Arc<Registry>,
    pub models: BTreeMap<ModelName, Arc<Route>>,
    /// Accept requests at all; false while draining or before the first view is complete.
    pub ready: bool,
}

#[derive(Debug)]
pub struct Route {
    pub priority: i32,
    pub state: ModelState,
    /// Where it has not served since.
    pub last_failure: Option<LastFailure>,
    /// How many engines the model may have at once.
    pub replicas: u32,
    /// The longest a request waits for it; `None`: as for all.
    pub max_wait: Option<Millis>,
    /// Awake engines whose gates are open to everybody.
    pub endpoints: Vec<Endpoint>,
    /// Over the endpoints, where there are several.
    ring: Option<Arc<Ring>>,
}

#[derive(Clone, Debug)]
pub struct Endpoint {
    pub engine: EngineId,
    pub generation: Generation,
    /// Of what it was started with, which a reload may have replaced.
    pub fingerprint: u64,
    pub address: SocketAddr,
    pub gate: Arc<Gate>,
    pub standing: Arc<Standing>,
    pub reported: Arc<Reported>,
}

impl Endpoint {
    /// A request to it ended at `now` without a byte, after as long as it was allowed.
    pub fn unanswered(&self, allowed: Millis, now: Tick) {
        self.reported.unanswered(allowed, self.gate.last_byte(), now);
    }
}

impl Route {
    /// In the same state with the same engines: nobody would notice an exchange.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let facts = |route: &Self| (route.priority, route.state, route.replicas, route.max_wait);
        let failed = self.last_failure == other.last_failure;
        let ends = |endpoint: &Endpoint| (endpoint.address, Arc::as_ptr(&endpoint.gate));
        failed
            && facts(self) == facts(other)
            && self.endpoints.iter().map(ends).eq(other.endpoints.iter().map(ends))
    }

    /// `before`: the route that this one replaces, whose ring is taken over when the engines are the same.
    #[must_use]
    pub fn new(
        priority: i32,
        state: ModelState,
        last_failure: Option<LastFailure>,
        replicas: u32,
        max_wait: Option<Millis>,
        endpoints: Vec<Endpoint>,
        before: Option<&Self>,
    ) -> Self {
        let kept = before.and_then(|route| route.ring.as_ref()).filter(|ring| ring.is_of(&endpoints));
        let ring =
            (endpoints.len() > 1).then(|| kept.map_or_else(|| Arc::new(Ring::new(&endpoints)), Arc::clone));
        Self { priority, state, last_failure, replicas, max_wait, endpoints, ring }
    }

    /// Engines that get no new requests but one to try them: never more than half, the first in line of those that failed.
    #[must_use]
    pub fn left_out(&self) -> usize {
        let out = self.endpoints.iter().filter(|endpoint| endpoint.standing.is_out()).count();
        out.min(self.endpoints.len() / 2)
    }
}
