//! What the hot path reads: one immutable snapshot, swapped whole by the driver. Snapshots share what is the same in both:
//! a change of one model makes one new route.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use rouse::{
    engine::last_outcome::LastFailure,
    fleet::report::ModelState,
    model::{EngineId, ModelName, ModelNameIndex},
    units::{Generation, Millis, Tick},
};
use rouse_net::lease::Gate;

mod circuit_breaker;
mod engine_activity;
mod load_balancer;
mod outlier_reporter;
mod response_owners;
mod ring;
mod rng;
#[cfg(test)]
mod testing;

pub use circuit_breaker::{BreakerTransition, CircuitBreaker};
pub use engine_activity::EngineActivity;
pub use load_balancer::EndpointCriteria;
pub use outlier_reporter::OutlierReporter;
pub use response_owners::{EngineGeneration, ResponseOwners};
pub use ring::HashRing;
pub use rng::Rng;

/// Every model with the engines that may be used right now.
#[derive(Debug, Default)]
pub struct RouteTable {
    pub registry: Arc<ModelNameIndex>,
    pub models: BTreeMap<ModelName, Arc<ModelRoute>>,
    /// Accept requests at all; false while draining or before the first view is complete.
    pub ready: bool,
}

#[derive(Debug)]
pub struct ModelRoute {
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
    ring: Option<Arc<HashRing>>,
}

#[derive(Clone, Debug)]
pub struct Endpoint {
    pub engine: EngineId,
    pub generation: Generation,
    /// Of what it was started with, which a reload may have replaced.
    pub fingerprint: u64,
    pub address: SocketAddr,
    pub gate: Arc<Gate>,
    pub circuit_breaker: Arc<CircuitBreaker>,
    pub activity: Arc<EngineActivity>,
}

impl Endpoint {
    /// A request to it ended at `now` without a byte, after as long as it was allowed.
    pub fn record_unanswered(&self, allowed: Millis, now: Tick) {
        self.activity.record_unanswered(allowed, self.gate.last_byte(), now);
    }
}

impl ModelRoute {
    /// In the same state with the same engines: nobody would notice an exchange.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self) -> bool {
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
        let kept = before.and_then(|route| route.ring.as_ref()).filter(|ring| ring.is_built_from(&endpoints));
        let ring = (endpoints.len() > 1)
            .then(|| kept.map_or_else(|| Arc::new(HashRing::new(&endpoints)), Arc::clone));
        Self { priority, state, last_failure, replicas, max_wait, endpoints, ring }
    }

    /// Engines that get no new requests but one to try them: never more than half, the first in line of those that failed.
    #[must_use]
    pub fn ejected_count(&self) -> usize {
        let out = self.endpoints.iter().filter(|endpoint| endpoint.circuit_breaker.is_ejected()).count();
        out.min(self.endpoints.len() / 2)
    }
}
