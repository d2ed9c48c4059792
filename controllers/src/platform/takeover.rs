//! A new leader's takeover: adopts running engines and ends what belongs to no engine.
//!
//! 1. Write this leader's epoch into every pool's ledger: a late write of a former leader then fails on its version.
//! 2. Query every Pod that a former leader bound to an engine, through its stub. The stub obeys the new epoch from then
//!    on. Report the result as `Adopted`.
//! 3. Release the reservations of engines that do not exist.
//!
//! Then `AdoptionDone` is sent, and decisions begin.
//!
//! Unbound Pods go when their Deployment's replica count is written again. The engine that such a Pod was made for
//! starts again in its turn.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use rouse::{
    fleet::event::{AdoptedEngine, Event},
    model::EngineId,
    units::{Generation, Tick},
};
use rouse_net::adapter::EngineHealth;
use rouse_platform::engine_client::EngineClient;
use tokio::time;

use super::{
    KubernetesContext, ModelPlacement,
    engine_manager::EngineManager,
    engine_steps,
    engine_task::{EngineTaskStart, RetryBackoff},
    ledger_writer::LedgerChange,
};
use crate::{
    condition::tick,
    crd::{
        inference_model::EngineState,
        ledger::{ObjectName, ReservationState},
    },
    engine_pod::EnginePod,
    ledger::{Error, ReservationLocation},
    stub_client::StubClient,
    workload::{PROXY_PORT, SPI_PORT},
};

/// Timeout of all queries to one engine. Engines are queried concurrently.
const CHECK_TIMEOUT: Duration = Duration::from_millis(1500);

/// Maximum number of engines, or pools, queried concurrently.
const MAX_CONCURRENT_CHECKS: usize = 64;

/// Maximum number of tries to read a pool's ledger, with pauses of up to a second.
const MAX_STAMP_TRIES: u32 = 10;

/// An engine that has a reservation.
#[derive(Clone, Debug)]
pub(super) struct EngineReservation {
    pub(super) pool: String,
    pub(super) model: ObjectName,
    pub(super) replica: u32,
    /// A former leader saw the engine asleep, and released the memory that the engine no longer holds.
    asleep: bool,
}

/// A running engine, and how the takeover found it.
struct RunningEngine {
    engine: EngineId,
    generation: Generation,
    placement: Arc<ModelPlacement>,
    pod: Arc<EnginePod>,
    address: SocketAddr,
    ready: bool,
    /// The former leader's status shows the engine as serving.
    served: bool,
    /// The stub has another key and obeys no orders.
    unauthorized: bool,
    location: Option<ReservationLocation>,
}

pub(super) async fn take_over(manager: &mut EngineManager) {
    let shared = Arc::clone(&manager.shared);
    let booked = stamp(&shared).await;
    manager.send_all_learned().await;
    let mut runs = find_running(&shared, &booked, manager.pods.values()).await;
    for found in &mut runs {
        // An engine that a former leader saw serving has proved itself.
        found.served = manager.is_published_serving(
            &found.placement.owner.object,
            found.engine.replica,
            found.generation,
        );
        found.ready &= found.served;
    }
    for found in runs {
        adopt(manager, &shared, &booked, found).await;
    }
    adopt_externals(manager, &shared).await;
    end_unadopted(manager, &shared, &booked).await;
}

/// Writes the epoch into every pool's ledger; returns which engines have a reservation.
async fn stamp(shared: &Arc<KubernetesContext>) -> Vec<EngineReservation> {
    let placements = shared.placements();
    let mut pools: BTreeSet<String> =
        placements.values().filter_map(|placement| placement.pool.clone()).collect();
    pools.extend(reserved_pools(shared).await);
    let stamped =
        stream::iter(pools).map(|pool| stamp_one(shared, pool)).buffer_unordered(MAX_CONCURRENT_CHECKS);
    stamped.collect::<Vec<_>>().await.concat()
}

async fn stamp_one(shared: &Arc<KubernetesContext>, pool: String) -> Vec<EngineReservation> {
    let mut pauses = RetryBackoff::new();
    for _ in 0..MAX_STAMP_TRIES {
        match shared.pool_ledger.take_over(&BTreeSet::from([pool.clone()])).await {
            Ok(ledgers) => {
                let booked = ledgers.into_values().flat_map(|ledger| ledger.reservations);
                let booked = booked.map(|entry| EngineReservation {
                    pool: pool.clone(),
                    asleep: entry.state == ReservationState::Asleep,
                    model: entry.model,
                    replica: entry.replica,
                });
                return booked.collect();
            }
            // The current leader has written its epoch, or will.
            Err(Error::NotLeading) => return Vec::new(),
            Err(error @ Error::Replaced { .. }) => {
                tracing::error!(pool, %error, "cannot take over the pool: nothing can be reserved in it");
                return Vec::new();
            }
            // An unreadable pool must not block the other pools. Nothing can be reserved in it either.
            Err(error) => tracing::warn!(pool, %error, "pool takeover failed, retrying"),
        }
        pauses.pause().await;
    }
    Vec::new()
}

/// Returns the pools with reservations of models in watched namespaces. Models need not name them today.
async fn reserved_pools(shared: &Arc<KubernetesContext>) -> BTreeSet<String> {
    let watched = |namespace: &String| {
        shared.namespaces.iter().any(|watched| watched.as_ref().is_none_or(|watched| watched == namespace))
    };
    let mut pauses = RetryBackoff::new();
    for _ in 0..MAX_STAMP_TRIES {
        match shared.pool_ledger.pools_with_reservations().await {
            Ok(pools) => {
                let of_ours = |(_, namespaces): &(String, BTreeSet<String>)| namespaces.iter().any(watched);
                return pools.into_iter().filter(of_ours).map(|(pool, _)| pool).collect();
            }
            Err(error) => tracing::warn!(%error, "pool list failed, retrying"),
        }
        pauses.pause().await;
    }
    BTreeSet::new()
}

/// Returns the placement in the pool of the engine's reservation, even if its model now names another.
fn with_reserved_pool(
    placement: &Arc<ModelPlacement>,
    replica: u32,
    reservations: &[EngineReservation],
) -> Arc<ModelPlacement> {
    let object = &placement.owner.object;
    let own_entries = reservations.iter().filter(|entry| entry.model == *object && entry.replica == replica);
    let pools: Vec<&String> = own_entries.map(|entry| &entry.pool).collect();
    match pools.first() {
        Some(pool) if !placement.pool.as_ref().is_some_and(|named| pools.contains(&named)) => {
            placement.in_pool(pool)
        }
        _ => Arc::clone(placement),
    }
}

async fn find_running(
    shared: &Arc<KubernetesContext>,
    reservations: &[EngineReservation],
    pods: impl Iterator<Item = &Arc<EnginePod>>,
) -> Vec<RunningEngine> {
    let placements = shared.placements();
    let mut by_pod = Vec::new();
    for pod in pods.filter(|pod| !pod.terminating && !pod.finished) {
        let placement = placements.values().find(|placement| placement.owns(pod));
        if let (Some(placement), Some((replica, generation)), Some(ip)) = (placement, pod.engine, pod.address)
        {
            let runs = RunningEngine {
                engine: EngineId::new(placement.engine.name.clone(), replica),
                generation,
                placement: with_reserved_pool(placement, replica, reservations),
                pod: Arc::clone(pod),
                address: SocketAddr::new(ip, PROXY_PORT),
                ready: false,
                served: false,
                unauthorized: false,
                location: None,
            };
            by_pod.push(check_engine(shared, runs));
        }
    }
    let mut all: BTreeMap<EngineId, RunningEngine> = BTreeMap::new();
    let mut by_pod = stream::iter(by_pod).buffer_unordered(MAX_CONCURRENT_CHECKS);
    while let Some(running) = by_pod.next().await {
        // One engine cannot have two Pods. If it does, the newer generation counts.
        let older = all.get(&running.engine).is_some_and(|known| known.generation > running.generation);
        if !older {
            all.insert(running.engine.clone(), running);
        }
    }
    all.into_values().collect()
}

/// Result of the queries; absent if there was no good answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StubCheck {
    Healthy,
    Unauthorized,
}

/// Announces the new leader to the stub, and checks whether the engine serves.
async fn check_engine(shared: &Arc<KubernetesContext>, mut running: RunningEngine) -> RunningEngine {
    let check = async {
        let epoch = shared.writer.leadership().ok()?.epoch;
        let token = shared.sidecar.key.token(&running.placement.owner);
        let spi = SocketAddr::new(running.address.ip(), SPI_PORT);
        let stub = StubClient::new(spi, Some(token), epoch, running.generation);
        let target = SocketAddr::new(running.address.ip(), running.placement.pod_template.port);
        // The pairing controller sets up a requester's stub.
        if running.placement.dual_pods {
            if stub.accelerators().await.is_err_and(|error| error.is_unauthorized()) {
                return Some(StubCheck::Unauthorized);
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
        time::timeout(CHECK_TIMEOUT, locate(shared, &running))
    );
    let check = ready.ok().flatten();
    (running.ready, running.unauthorized) =
        (check == Some(StubCheck::Healthy), check == Some(StubCheck::Unauthorized));
    running.location = location.ok().flatten();
    running
}

async fn locate(shared: &Arc<KubernetesContext>, running: &RunningEngine) -> Option<ReservationLocation> {
    let epoch = shared.writer.leadership().ok()?.epoch;
    let token = shared.sidecar.key.token(&running.placement.owner);
    let stub = StubClient::new(
        SocketAddr::new(running.address.ip(), SPI_PORT),
        Some(token),
        epoch,
        running.generation,
    );
    Some(engine_steps::location(&stub, running.pod.node.clone()?).await)
}

async fn adopt(
    manager: &mut EngineManager,
    shared: &Arc<KubernetesContext>,
    reservations: &[EngineReservation],
    running: RunningEngine,
) {
    let RunningEngine { engine, generation, placement, pod, address, ready, served, unauthorized, location } =
        running;
    // The Pod records the order to sleep before it is sent, and the ledger that the engine sleeps. In between it may be
    // awake.
    let is_own =
        |entry: &&EngineReservation| entry.model == placement.owner.object && entry.replica == engine.replica;
    let sleeps =
        placement.pool.is_none() || reservations.iter().find(is_own).is_some_and(|entry| entry.asleep);
    if unauthorized {
        tracing::warn!(%engine, pod = %pod.name, "replacing the engine: its stub was started with another key");
        return manager.stop_unadopted(&placement, engine.replica, generation, Some(pod)).await;
    }
    tracing::info!(%engine, pod = %pod.name, ready, "engine adopted");
    let accelerators = placement.pool.iter().map(|pool| pool.as_str().into()).collect();
    let event = Event::Adopted {
        engine: engine.clone(),
        generation,
        found: AdoptedEngine {
            address,
            accelerators,
            asleep: pod.asleep,
            ready: if pod.asleep.is_some() { sleeps } else { ready },
            fingerprint: pod.fingerprint,
            last_lease_end: manager.last_request(&placement.owner.object).max(pod.created),
            started: pod.created,
        },
    };
    if let (Some(request), Some(pool)) =
        (placement.reservation_request(engine.replica), placement.pool.clone())
    {
        // The engine runs, whatever is reserved.
        let ledger_writer = manager.ledger_writer(&pool);
        ledger_writer.send(LedgerChange::Adopt { request, location }).unwrap_or_default();
        if let Some(level) = pod.asleep.filter(|_| sleeps) {
            let (model, keeps) = (placement.owner.object.clone(), placement.sleeping_memory(level));
            let entry = LedgerChange::MarkAsleep { model, replica: engine.replica, sleeping_memory: keeps };
            ledger_writer.send(entry).unwrap_or_default();
        }
    }
    shared.status_inputs.set_pod(&engine, generation, &pod.name.name, &placement.variant.name);
    shared.common.send_event(event).await;
    let start = match (pod.asleep, ready, served) {
        (Some(_), ..) if sleeps => EngineTaskStart::Asleep,
        (Some(level), ..) => EngineTaskStart::FallingAsleep(level),
        (None, true, _) => EngineTaskStart::Awake,
        (None, false, true) => EngineTaskStart::Unconfirmed,
        (None, false, false) => EngineTaskStart::Starting,
    };
    manager.start_task(engine, generation, placement, Some(pod), start);
}

/// Adopts backends that the former leader saw serving.
async fn adopt_externals(manager: &mut EngineManager, shared: &Arc<KubernetesContext>) {
    let externals = shared.externals();
    for (model, external) in externals.iter() {
        let published_model =
            manager.published.values().find(|published_model| published_model.model == *model);
        let awake = published_model.and_then(|published_model| {
            published_model
                .engines
                .iter()
                .find(|status| status.state == EngineState::Awake && status.replica == 0)
                .cloned()
        });
        let Some((status, address)) = awake.and_then(|status| {
            let address = status.address.as_ref()?.parse().ok()?;
            Some((status, address))
        }) else {
            continue;
        };
        let engine = EngineId::new(model.clone(), 0);
        let generation = Generation(status.generation);
        let found = AdoptedEngine {
            address,
            accelerators: Vec::new(),
            asleep: None,
            ready: true,
            fingerprint: external.engine.fingerprint,
            last_lease_end: Tick(0),
            started: status.since.as_ref().map(tick).unwrap_or_default(),
        };
        shared.common.send_event(Event::Adopted { engine: engine.clone(), generation, found }).await;
        manager.start_external(engine, generation, Arc::clone(external), Some(address));
    }
}

/// Ends what belongs to no adopted engine: Pods that leave or are unbound, and reservations.
async fn end_unadopted(
    manager: &mut EngineManager,
    shared: &Arc<KubernetesContext>,
    reservations: &[EngineReservation],
) {
    let placements = shared.placements();
    let leaving_pods =
        manager.pods.values().filter(|pod| pod.terminating || pod.finished).cloned().collect::<Vec<_>>();
    for pod in leaving_pods {
        let Some(placement) = placements.values().find(|placement| placement.owns(&pod)) else { continue };
        if let Some((replica, generation)) = pod.engine {
            manager
                .stop_unadopted(
                    &with_reserved_pool(placement, replica, reservations),
                    replica,
                    generation,
                    Some(pod),
                )
                .await;
        }
    }
    for entry in reservations {
        let EngineReservation { pool, model, replica, .. } = entry;
        if let Some(placement) = placements.values().find(|placement| placement.owner.object == *model) {
            let reserved_placement = with_reserved_pool(placement, *replica, reservations);
            if reserved_placement.pool.as_ref() == Some(pool) {
                manager.stop_unadopted(&reserved_placement, *replica, Generation(0), None).await;
            } else {
                // An engine is in one pool only: nothing of it is left in this pool.
                let entry = LedgerChange::Release { model: model.clone(), replica: *replica, done: None };
                manager.ledger_writer(pool).send(entry).unwrap_or_default();
            }
            continue;
        }
        if shared.initial_lists.is_skipped(&model.namespace) {
            // Its Pods are not visible, so assume that they hold their reservations.
            continue;
        }
        manager.orphans.push(entry.clone());
    }
    manager.scale_down_orphans();
    manager.release_orphans();
    // Writing a Deployment's replica count gives up its unknown Pods.
    for pod in manager.pods.values().cloned().collect::<Vec<_>>() {
        if let Some(placement) = placements.values().find(|placement| placement.owns(&pod)) {
            manager
                .update_replicas(&placement.deployment_of(&pod.template_hash), Some(Arc::clone(placement)));
        }
    }
}
