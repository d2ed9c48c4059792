//! The routes that the hot path reads: one immutable snapshot, which the driver replaces as a whole. Consecutive
//! snapshots share unchanged data: a change of one model makes one new route.

use std::{net::SocketAddr, sync::Arc};

use rouse::{
    engine::last_outcome::LastFailure,
    fleet::report::ModelState,
    model::{EngineId, ModelName, ModelNameIndex},
    shared_map::SharedMap,
    units::{Generation, Millis, Tick},
};
use rouse_net::lease::Gate;
use rouse_platform::EngineActivity;

mod circuit_breaker;
mod key_popularity;
mod load_balancer;
mod outlier_reporter;
mod response_owners;
mod ring;
mod rng;
#[cfg(test)]
mod testing;

pub use circuit_breaker::{BreakerTransition, CircuitBreaker};
use key_popularity::KeyPopularity;
pub use load_balancer::EndpointCriteria;
pub use outlier_reporter::OutlierReporter;
pub use response_owners::{EngineGeneration, ResponseOwners};
pub use ring::HashRing;
pub use rng::Rng;

/// Every model with its currently usable engines.
#[derive(Debug, Default)]
pub struct RouteTable {
    pub registry: Arc<ModelNameIndex>,
    pub models: SharedMap<ModelName, Arc<ModelRoute>>,
    /// Whether to accept requests at all; false while draining or before the first view is complete.
    pub ready: bool,
}

#[derive(Debug)]
pub struct ModelRoute {
    pub priority: i32,
    pub state: ModelState,
    /// The last failure, if the model has not served since.
    pub last_failure: Option<LastFailure>,
    /// The most engines that the model may have at once.
    pub replicas: u32,
    /// The longest wait for this model. `None`: the limit for all models applies.
    pub max_wait: Option<Millis>,
    /// Awake engines whose gates are open to every request.
    pub endpoints: Vec<Endpoint>,
    /// The hash ring of the endpoints, if there are several.
    ring: Option<Arc<HashRing>>,
    /// How often requests had each key, if there are several endpoints.
    popularity: Option<Arc<KeyPopularity>>,
}

#[derive(Clone, Debug)]
pub struct Endpoint {
    pub engine: EngineId,
    pub generation: Generation,
    /// The fingerprint of the configuration that the engine was started with. A reload may have replaced that
    /// configuration.
    pub fingerprint: u64,
    pub address: SocketAddr,
    pub gate: Arc<Gate>,
    pub circuit_breaker: Arc<CircuitBreaker>,
    pub activity: Arc<EngineActivity>,
}

impl Endpoint {
    /// Records that a request ended at `now` without a byte, after its allowed time.
    pub fn record_unanswered(&self, allowed: Millis, now: Tick) {
        self.activity.record_unanswered(allowed, self.gate.last_byte(), now);
    }
}

impl ModelRoute {
    /// Whether both routes have the same state and engines. Replacing one with the other then changes nothing.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self) -> bool {
        let facts = |route: &Self| (route.priority, route.state, route.replicas, route.max_wait);
        let failed = self.last_failure == other.last_failure;
        let ends = |endpoint: &Endpoint| (endpoint.address, Arc::as_ptr(&endpoint.gate));
        failed
            && facts(self) == facts(other)
            && self.endpoints.iter().map(ends).eq(other.endpoints.iter().map(ends))
    }

    /// Creates a route. `before`: the replaced route, whose counts of keys go on, and whose ring is reused if the engines
    /// are the same.
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
        let unchanged_ring =
            before.and_then(|route| route.ring.as_ref()).filter(|ring| ring.is_built_from(&endpoints));
        let ring = (endpoints.len() > 1)
            .then(|| unchanged_ring.map_or_else(|| Arc::new(HashRing::new(&endpoints)), Arc::clone));
        let counted = before.and_then(|route| route.popularity.as_ref());
        let popularity =
            (endpoints.len() > 1).then(|| counted.map_or_else(|| Arc::new(KeyPopularity::new()), Arc::clone));
        Self { priority, state, last_failure, replicas, max_wait, endpoints, ring, popularity }
    }

    /// The number of ejected engines, which get no new requests except single trials. Never more than half of the
    /// endpoints: the first of those that failed.
    #[must_use]
    pub fn ejected_count(&self) -> usize {
        let out = self.endpoints.iter().filter(|endpoint| endpoint.circuit_breaker.is_ejected()).count();
        out.min(self.endpoints.len() / 2)
    }
}
