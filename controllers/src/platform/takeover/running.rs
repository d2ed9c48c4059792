//! Finds the engines that run, and queries the stubs of those that may not serve.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use rouse::{model::EngineId, units::Generation};
use rouse_net::{adapter::EngineHealth, stub_api::Epoch};
use rouse_platform::engine_client::EngineClient;
use tokio::time;

use super::{EngineReservations, TakeoverTask, evidence};
use crate::{
    crd::inference_model::EngineState,
    engine_pod::EnginePod,
    ledger::ReservationLocation,
    platform::{KubernetesContext, ModelPlacement, engine_location, engine_manager::PublishedIndex},
    stub_client::StubClient,
    workload::{PROXY_PORT, SPI_PORT},
};

/// Timeout of all queries to one engine. Engines are queried concurrently.
const CHECK_TIMEOUT: Duration = Duration::from_millis(1500);
/// Maximum number of engines that are queried at once.
///
/// An engine that does not answer takes [`CHECK_TIMEOUT`]. So 500 engines on lost nodes delay the decisions by 3 s.
const MAX_CONCURRENT_CHECKS: usize = 256;

/// A running engine, and how the takeover found it.
pub(super) struct RunningEngine {
    pub(super) engine: EngineId,
    pub(super) generation: Generation,
    pub(super) placement: Arc<ModelPlacement>,
    pub(super) pod: Arc<EnginePod>,
    pub(super) address: SocketAddr,
    /// The takeover asked the engine. If not, all records show that the engine serves.
    pub(super) asked: bool,
    /// The engine serves, by its answer or by the records.
    pub(super) ready: bool,
    /// The former leader's status shows the engine as serving: the engine has proved itself.
    pub(super) served: bool,
    /// The stub has another key and obeys no orders.
    pub(super) unauthorized: bool,
    pub(super) location: Option<ReservationLocation>,
}

/// Returns the engines that run by the records. Those that are `asked` have not been asked yet.
///
/// One engine cannot have two Pods. If it does, the newer generation counts.
pub(super) fn find<'a>(
    shared: &KubernetesContext,
    reservations: &EngineReservations,
    pods: impl Iterator<Item = &'a Arc<EnginePod>>,
    published: &PublishedIndex,
) -> Vec<RunningEngine> {
    let placements = shared.placements();
    let mut all: BTreeMap<EngineId, RunningEngine> = BTreeMap::new();
    for pod in pods.filter(|pod| !pod.terminating && !pod.finished) {
        let placement = placements.of_pod(pod);
        if let (Some(placement), Some((replica, generation)), Some(ip)) = (placement, pod.engine, pod.address)
        {
            let owner = placement.reservation_owner(replica);
            let state = published.state(&owner, generation);
            let reserved = reservations.reserved_placement(placement, replica, &shared.sidecar);
            // The ledger has lost where an engine of slots is: its stub knows.
            let asked =
                !evidence::shows_serving(pod, state, reservations.of(&owner)) || !reserved.is_placed();
            let running = RunningEngine {
                engine: placement.engine_id(replica),
                generation,
                placement: reserved,
                pod: Arc::clone(pod),
                address: SocketAddr::new(ip, PROXY_PORT),
                asked,
                ready: !asked,
                served: matches!(state, Some(EngineState::Awake | EngineState::Draining)),
                unauthorized: false,
                location: None,
            };
            keep_newer(&mut all, running);
        }
    }
    all.into_values().collect()
}

fn keep_newer(all: &mut BTreeMap<EngineId, RunningEngine>, running: RunningEngine) {
    let older = all.get(&running.engine).is_some_and(|known| known.generation > running.generation);
    if !older {
        all.insert(running.engine.clone(), running);
    }
}

/// Asks these engines, in a task of its own.
pub(super) fn ask(
    shared: &Arc<KubernetesContext>,
    epoch: Epoch,
    engines: Vec<RunningEngine>,
) -> TakeoverTask<Vec<RunningEngine>> {
    let shared = Arc::clone(shared);
    TakeoverTask::start(async move { ask_all(&shared, epoch, engines).await })
}

async fn ask_all(
    shared: &Arc<KubernetesContext>,
    epoch: Epoch,
    engines: Vec<RunningEngine>,
) -> Vec<RunningEngine> {
    let answers = stream::iter(engines)
        .map(|running| check_engine(shared, epoch, running))
        .buffer_unordered(MAX_CONCURRENT_CHECKS);
    answers.collect().await
}

/// Result of the queries; absent if there was no good answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StubCheck {
    Healthy,
    Unauthorized,
}

/// Announces the new leader to the stub, and checks whether the engine serves.
async fn check_engine(
    shared: &Arc<KubernetesContext>,
    epoch: Epoch,
    mut running: RunningEngine,
) -> RunningEngine {
    let check = async {
        shared.writer.leadership_in(epoch).ok()?;
        let token = shared.sidecar.key.token(&running.placement.owner);
        let spi = SocketAddr::new(running.address.ip(), SPI_PORT);
        let stub = StubClient::new(spi, Some(token), epoch, running.generation);
        let target = SocketAddr::new(running.address.ip(), running.placement.pod_template.port);
        // The pairing controller sets up a requester's stub.
        if running.placement.dual_pods {
            if stub.accelerators().await.is_err_and(|error| error.is_unauthorized()) {
                return Some(StubCheck::Unauthorized);
            }
            if running.pod.asleep.is_some() {
                return None;
            }
        } else if running.pod.asleep.is_some() {
            // The gate stays closed. The Pod records that the engine sleeps; the engine cannot report how deep.
            let unauthorized = stub.close().await.is_err_and(|error| error.is_unauthorized());
            return unauthorized.then_some(StubCheck::Unauthorized);
        } else {
            if let Err(error) = stub.set_target(target).await {
                return error.is_unauthorized().then_some(StubCheck::Unauthorized);
            }
            stub.open().await.ok()?;
        }
        let (id, model) = (running.engine.clone(), Arc::clone(&running.placement.engine));
        let client = EngineClient::new(&shared.common, id, running.generation, running.address, model);
        (client.adapter.health(CHECK_TIMEOUT).await == EngineHealth::Healthy).then_some(StubCheck::Healthy)
    };
    let (ready, location) = tokio::join!(
        time::timeout(CHECK_TIMEOUT, check),
        time::timeout(CHECK_TIMEOUT, locate(shared, epoch, &running))
    );
    let check = ready.ok().flatten();
    (running.ready, running.unauthorized) =
        (running.served && check == Some(StubCheck::Healthy), check == Some(StubCheck::Unauthorized));
    running.location = location.ok().flatten();
    if let Some(location) = running.location.clone().filter(|_| !running.placement.is_placed()) {
        running.placement = running.placement.on(location, &shared.sidecar);
    }
    running
}

async fn locate(
    shared: &Arc<KubernetesContext>,
    epoch: Epoch,
    running: &RunningEngine,
) -> Option<ReservationLocation> {
    shared.writer.leadership_in(epoch).ok()?;
    let token = shared.sidecar.key.token(&running.placement.owner);
    let stub = StubClient::new(
        SocketAddr::new(running.address.ip(), SPI_PORT),
        Some(token),
        epoch,
        running.generation,
    );
    Some(engine_location::location(&stub, running.pod.node.clone()?).await)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::testing;

    fn running(pod: &str, replica: u32, generation: u64) -> RunningEngine {
        let placement = Arc::new(testing::placement("m0", "chat"));
        RunningEngine {
            engine: placement.engine_id(replica),
            generation: Generation(generation),
            placement,
            pod: Arc::new(testing::pod("chat", pod, "m0", "t0")),
            address: SocketAddr::from(([127, 0, 0, 1], PROXY_PORT)),
            asked: true,
            ready: false,
            served: false,
            unauthorized: false,
            location: None,
        }
    }

    #[test]
    fn of_two_pods_of_an_engine_the_newer_generation_counts() {
        let mut all = BTreeMap::new();
        for (pod, replica, generation) in [("a", 0, 2), ("b", 1, 1), ("c", 0, 3), ("d", 0, 1), ("e", 1, 2)] {
            keep_newer(&mut all, running(pod, replica, generation));
        }
        let kept: Vec<(&str, u64)> =
            all.values().map(|kept| (&*kept.pod.name.name, kept.generation.0)).collect();
        assert_eq!(kept, [("c", 3), ("e", 2)]);
    }
}
