//! What the hot path reads: one immutable snapshot, swapped whole by the driver.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use rouse::{
    fleet::report::ModelState,
    lease::{Gate, Lease},
    model::{EngineId, ModelName, Registry},
    units::Generation,
};

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
    /// Awake engines whose gates are open to everybody.
    pub endpoints: Vec<Endpoint>,
}

#[derive(Clone, Debug)]
pub struct Endpoint {
    pub engine: EngineId,
    pub generation: Generation,
    pub address: SocketAddr,
    pub gate: Arc<Gate>,
}

impl Routes {
    /// The same models in the same states with the same engines: nobody would notice an exchange.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let alike = |a: &Route, b: &Route| {
            let ends =
                |r: &Route| r.endpoints.iter().map(|e| (e.address, Arc::as_ptr(&e.gate))).collect::<Vec<_>>();
            a.priority == b.priority && a.state == b.state && ends(a) == ends(b)
        };
        self.ready == other.ready
            && self.registry == other.registry
            && self.models.len() == other.models.len()
            && self.models.iter().all(|(name, route)| other.models.get(name).is_some_and(|r| alike(route, r)))
    }
}

impl Route {
    /// A lease on the least used engine that gives one.
    #[must_use]
    pub fn take(&self) -> Option<(&Endpoint, Lease)> {
        let first = self.endpoints.iter().min_by_key(|e| e.gate.leases())?;
        first.gate.take().map(|lease| (first, lease)).or_else(|| {
            self.endpoints.iter().find_map(|endpoint| endpoint.gate.take().map(|lease| (endpoint, lease)))
        })
    }
}
