//! What the hot path reads: one immutable snapshot, swapped whole by the driver.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use rouse::{
    fleet::report::ModelState,
    lease::Gate,
    model::{EngineId, ModelName, Registry},
    units::Generation,
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
    pub registry: Registry,
    pub models: BTreeMap<ModelName, Route>,
    /// Accept requests at all; false while draining or before the first view is complete.
    pub ready: bool,
}

#[derive(Debug)]
pub struct Route {
    pub priority: i32,
    pub state: ModelState,
    /// How many engines the model may have at once.
    pub replicas: u32,
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

impl Routes {
    /// The same models in the same states with the same engines: nobody would notice an exchange.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let alike = |a: &Route, b: &Route| {
            let ends =
                |r: &Route| r.endpoints.iter().map(|e| (e.address, Arc::as_ptr(&e.gate))).collect::<Vec<_>>();
            let facts = |r: &Route| (r.priority, r.state, r.replicas);
            facts(a) == facts(b) && ends(a) == ends(b)
        };
        self.ready == other.ready
            && self.registry == other.registry
            && self.models.len() == other.models.len()
            && self.models.iter().all(|(name, route)| other.models.get(name).is_some_and(|r| alike(route, r)))
    }
}

impl Route {
    /// `before`: the route that this one replaces, whose ring is taken over when the engines are the same.
    #[must_use]
    pub fn new(
        priority: i32,
        state: ModelState,
        replicas: u32,
        endpoints: Vec<Endpoint>,
        before: Option<&Self>,
    ) -> Self {
        let kept = before.and_then(|route| route.ring.as_ref()).filter(|ring| ring.is_of(&endpoints));
        let ring =
            (endpoints.len() > 1).then(|| kept.map_or_else(|| Arc::new(Ring::new(&endpoints)), Arc::clone));
        Self { priority, state, replicas, endpoints, ring }
    }

    /// Engines that get no new requests but one to try them: never more than half, the first in line of those that failed.
    #[must_use]
    pub fn left_out(&self) -> usize {
        let out = self.endpoints.iter().filter(|endpoint| endpoint.standing.is_out()).count();
        out.min(self.endpoints.len() / 2)
    }
}
