//! Test endpoints that consist only of a gate.

use std::{num::NonZeroU32, sync::Arc};

use rouse::{
    fleet::report::ModelState,
    model::EngineId,
    units::{Generation, Tick},
};
use rouse_net::lease::{Gate, TickClock};
use rouse_platform::EngineActivity;
use tokio::time::Instant;

use super::{CircuitBreaker, Endpoint, ModelRoute};

fn clock() -> TickClock {
    TickClock::new(Instant::now(), Tick(1_000_000))
}

/// An endpoint with an open gate and no limit.
pub(super) fn endpoint(replica: u32) -> Endpoint {
    limited(replica, None)
}

pub(super) fn limited(replica: u32, limit: Option<u32>) -> Endpoint {
    let gate = Gate::new(limit.and_then(NonZeroU32::new), clock(), Arc::default());
    gate.open();
    let activity = Arc::new(EngineActivity::default());
    activity.set_gate(&gate);
    Endpoint {
        engine: EngineId::new("m".into(), replica),
        generation: Generation(1),
        fingerprint: 0,
        address: ([127, 0, 0, 1], u16::try_from(replica).unwrap() + 1).into(),
        gate,
        circuit_breaker: CircuitBreaker::new(u64::from(replica), Arc::default()),
        activity,
    }
}

pub(super) fn endpoints(replicas: impl IntoIterator<Item = u32>) -> Vec<Endpoint> {
    replicas.into_iter().map(endpoint).collect()
}

pub(super) fn route(endpoints: Vec<Endpoint>) -> ModelRoute {
    let replicas = u32::try_from(endpoints.len()).unwrap();
    ModelRoute::new(0, ModelState::Awake, None, replicas, None, endpoints, None)
}
