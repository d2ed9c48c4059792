//! What a new leader does first: it takes over what runs, and ends what nobody knows.
//!
//! 1. Every pool's ledger is stamped with its epoch, so that what a former leader has on its way is refused for its version.
//! 2. Every Pod that the former leader made an engine is asked through its stub, which obeys the new epoch from then on.
//!    What is known of it is told as `Adopted`.
//! 3. What is booked for engines that there are not is given back.
//!
//! Then `AdoptionDone` is told, and decisions begin.
//!
//! A Pod that is nobody's yet is given up by its Deployment, which is written anew for each; the engine that it was made for
//! starts again, in its turn.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use rouse::{
    adapter::Health,
    fleet::event::{Event, Found},
    model::EngineId,
    units::{Generation, Tick},
};
use tokio::time;

use super::{
    Place, Shared,
    clerk::Entry,
    life::{Pauses, Start},
    steward::Steward,
    stub::{self, Stub},
    work,
};
use crate::{
    controllers::{
        booking::{Error, Spot},
        condition::tick,
        crd::{
            inference_model::EngineState,
            ledger::{ObjectName, ReservationState},
        },
        pods::Seen,
        workload::{PROXY_PORT, SPI_PORT},
    },
    platform::contact::Contact,
};

/// For all questions to one engine. Engines are asked side by side.
const DEADLINE: Duration = Duration::from_millis(1500);

/// So many engines, and pools, are asked side by side.
const AT_ONCE: usize = 64;

/// A pool's ledger is asked for so often, with pauses of up to a second.
const STAMPS: u32 = 10;

/// An engine that has something booked.
#[derive(Clone, Debug)]
pub(super) struct Booked {
    pub(super) pool: String,
    pub(super) model: ObjectName,
    pub(super) replica: u32,
    /// A former leader saw the engine asleep, and released the memory that the engine no longer holds.
    asleep: bool,
}

/// An engine that runs, and how it was found.
struct Runs {
    engine: EngineId,
    generation: Generation,
    place: Arc<Place>,
    pod: Arc<Seen>,
    address: SocketAddr,
    ready: bool,
    /// It served for whoever led before, who has written that down.
    served: bool,
    /// Its stub was made by another key, and takes no orders.
    stranger: bool,
    spot: Option<Spot>,
}

pub(super) async fn take_over(steward: &mut Steward) {
    let shared = Arc::clone(&steward.shared);
    let booked = stamp(&shared).await;
    steward.recall_all().await;
    let mut runs = look(&shared, &booked, steward.pods.values()).await;
    for found in &mut runs {
        // It has proved itself.
        found.served =
            steward.is_published_serving(&found.place.owner.object, found.engine.replica, found.generation);
        found.ready &= found.served;
    }
    for found in runs {
        adopt(steward, &shared, &booked, found).await;
    }
    adopt_externals(steward, &shared).await;
    end_leftovers(steward, &shared, &booked).await;
}

/// Writes the epoch into every pool's ledger; which engines have something booked.
async fn stamp(shared: &Arc<Shared>) -> Vec<Booked> {
    let places = shared.places();
    let mut pools: BTreeSet<String> = places.values().filter_map(|place| place.pool.clone()).collect();
    pools.extend(formerly(shared).await);
    let stamped = stream::iter(pools).map(|pool| stamp_one(shared, pool)).buffer_unordered(AT_ONCE);
    stamped.collect::<Vec<_>>().await.concat()
}

async fn stamp_one(shared: &Arc<Shared>, pool: String) -> Vec<Booked> {
    let mut pauses = Pauses::new();
    for _ in 0..STAMPS {
        match shared.books.take_over(&BTreeSet::from([pool.clone()])).await {
            Ok(ledgers) => {
                let booked = ledgers.into_values().flat_map(|ledger| ledger.reservations);
                let booked = booked.map(|entry| Booked {
                    pool: pool.clone(),
                    asleep: entry.state == ReservationState::Asleep,
                    model: entry.model,
                    replica: entry.replica,
                });
                return booked.collect();
            }
            // Whoever leads instead has stamped it, or will.
            Err(Error::NotLeading) => return Vec::new(),
            Err(error @ Error::Replaced { .. }) => {
                tracing::error!(pool, %error, "nothing can be booked in this pool");
                return Vec::new();
            }
            // One that cannot be read must not keep the others from being served. Nothing is booked in it either.
            Err(error) => tracing::warn!(pool, %error, "the pool was not taken over; it is tried again"),
        }
        pauses.pause().await;
    }
    Vec::new()
}

/// Pools in which models of the watched namespaces have something booked, whether or not a model names them today.
async fn formerly(shared: &Arc<Shared>) -> BTreeSet<String> {
    let watched = |namespace: &String| {
        shared.watched.iter().any(|watched| watched.as_ref().is_none_or(|watched| watched == namespace))
    };
    let mut pauses = Pauses::new();
    for _ in 0..STAMPS {
        match shared.books.who_books().await {
            Ok(pools) => {
                let of_ours = |(_, namespaces): &(String, BTreeSet<String>)| namespaces.iter().any(watched);
                return pools.into_iter().filter(of_ours).map(|(pool, _)| pool).collect();
            }
            Err(error) => tracing::warn!(%error, "the pools were not listed; it is tried again"),
        }
        pauses.pause().await;
    }
    BTreeSet::new()
}

/// The engine's memory stays in the pool in which it is booked, also when its model names another today.
fn at_home(place: &Arc<Place>, replica: u32, booked: &[Booked]) -> Arc<Place> {
    let object = &place.owner.object;
    let own = booked.iter().filter(|entry| entry.model == *object && entry.replica == replica);
    let pools: Vec<&String> = own.map(|entry| &entry.pool).collect();
    match pools.first() {
        Some(pool) if !place.pool.as_ref().is_some_and(|named| pools.contains(&named)) => place.within(pool),
        _ => Arc::clone(place),
    }
}

async fn look(shared: &Arc<Shared>, booked: &[Booked], pods: impl Iterator<Item = &Arc<Seen>>) -> Vec<Runs> {
    let places = shared.places();
    let mut by_pod = Vec::new();
    for pod in pods.filter(|pod| !pod.ending && !pod.over) {
        let place = places.values().find(|place| place.owns(pod));
        if let (Some(place), Some((replica, generation)), Some(ip)) = (place, pod.engine, pod.address) {
            let runs = Runs {
                engine: EngineId::new(place.engine.name.clone(), replica),
                generation,
                place: at_home(place, replica, booked),
                pod: Arc::clone(pod),
                address: SocketAddr::new(ip, PROXY_PORT),
                ready: false,
                served: false,
                stranger: false,
                spot: None,
            };
            by_pod.push(examine(shared, runs));
        }
    }
    let mut all: BTreeMap<EngineId, Runs> = BTreeMap::new();
    let mut by_pod = stream::iter(by_pod).buffer_unordered(AT_ONCE);
    while let Some(runs) = by_pod.next().await {
        // Two Pods of one engine cannot be; should they, the newer life is the one that was meant.
        let older = all.get(&runs.engine).is_some_and(|known| known.generation > runs.generation);
        if !older {
            all.insert(runs.engine.clone(), runs);
        }
    }
    all.into_values().collect()
}

/// What came of the questions; neither: no good answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Good,
    Stranger,
}

/// The stub hears the new leader, and the engine is asked whether it serves.
async fn examine(shared: &Arc<Shared>, mut runs: Runs) -> Runs {
    let asked = async {
        let epoch = shared.writer.claim().ok()?.epoch;
        let token = shared.sidecar.key.token(&runs.place.owner);
        let spi = SocketAddr::new(runs.address.ip(), SPI_PORT);
        let stub = Stub::new(spi, token, epoch, runs.generation);
        let target = SocketAddr::new(runs.address.ip(), runs.place.pods.port);
        // A requester's stub is told by who pairs it with an engine.
        if runs.place.dual {
            if stub.accelerators().await == Err(stub::Error::Stranger) {
                return Some(Asked::Stranger);
            }
        } else if runs.pod.asleep.is_some() {
            // Nobody is let in; that it sleeps is written down, and it cannot be asked how deep.
            return (stub.close(true).await == Err(stub::Error::Stranger)).then_some(Asked::Stranger);
        } else {
            if let Err(error) = stub.target(target).await {
                return (error == stub::Error::Stranger).then_some(Asked::Stranger);
            }
            stub.open().await.ok()?;
        }
        let (id, model) = (runs.engine.clone(), Arc::clone(&runs.place.engine));
        let contact = Contact::new(&shared.common, id, runs.generation, runs.address, model);
        (contact.adapter.health(DEADLINE).await == Health::Good).then_some(Asked::Good)
    };
    let (ready, spot) =
        tokio::join!(time::timeout(DEADLINE, asked), time::timeout(DEADLINE, spot(shared, &runs)));
    let asked = ready.ok().flatten();
    (runs.ready, runs.stranger) = (asked == Some(Asked::Good), asked == Some(Asked::Stranger));
    runs.spot = spot.ok().flatten();
    runs
}

async fn spot(shared: &Arc<Shared>, runs: &Runs) -> Option<Spot> {
    let epoch = shared.writer.claim().ok()?.epoch;
    let token = shared.sidecar.key.token(&runs.place.owner);
    let stub = Stub::new(SocketAddr::new(runs.address.ip(), SPI_PORT), token, epoch, runs.generation);
    Some(work::spot(&stub, runs.pod.node.clone()?).await)
}

async fn adopt(steward: &mut Steward, shared: &Arc<Shared>, booked: &[Booked], found: Runs) {
    let Runs { engine, generation, place, pod, address, ready, served, stranger, spot } = found;
    // That it was told to sleep is written on its Pod before the order, and that it does in the ledger. In between it may be awake.
    let own = |entry: &&Booked| entry.model == place.owner.object && entry.replica == engine.replica;
    let sleeps = place.pool.is_none() || booked.iter().find(own).is_some_and(|entry| entry.asleep);
    if stranger {
        tracing::warn!(%engine, pod = %pod.name, "its stub was made by another key: it is replaced");
        return steward.dismiss(&place, engine.replica, generation, Some(pod)).await;
    }
    tracing::info!(%engine, pod = %pod.name, ready, "adopted");
    let accelerators = place.pool.iter().map(|pool| pool.as_str().into()).collect();
    let event = Event::Adopted {
        engine: engine.clone(),
        generation,
        found: Found {
            address,
            accelerators,
            asleep: pod.asleep,
            ready: if pod.asleep.is_some() { sleeps } else { ready },
            fingerprint: pod.fingerprint,
            last_end: steward.last_request(&place.owner.object).max(pod.created),
            started: pod.created,
        },
    };
    if let (Some(wanted), Some(pool)) = (place.wanted(engine.replica), place.pool.clone()) {
        // It is there, whatever is booked.
        let clerk = steward.clerk(&pool);
        clerk.send(Entry::Adopt { wanted, spot }).unwrap_or_default();
        if let Some(level) = pod.asleep.filter(|_| sleeps) {
            let (model, keeps) = (place.owner.object.clone(), place.keeps(level));
            let entry = Entry::FallsAsleep { model, replica: engine.replica, keeps };
            clerk.send(entry).unwrap_or_default();
        }
    }
    shared.told.runs_in(&engine, generation, &pod.name.name, &place.variant.name);
    shared.common.tell(event).await;
    let start = match (pod.asleep, ready, served) {
        (Some(_), ..) if sleeps => Start::Asleep,
        (Some(level), ..) => Start::FallingAsleep(level),
        (None, true, _) => Start::Awake,
        (None, false, true) => Start::Doubtful,
        (None, false, false) => Start::Starting,
    };
    steward.enlist(engine, generation, place, Some(pod), start);
}

/// Backends that the former leader found serving go on as they are.
async fn adopt_externals(steward: &mut Steward, shared: &Arc<Shared>) {
    let externals = shared.externals();
    for (model, external) in externals.iter() {
        let said = steward.published.values().find(|said| said.model == *model);
        let awake = said.and_then(|said| {
            said.engines
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
        let found = Found {
            address,
            accelerators: Vec::new(),
            asleep: None,
            ready: true,
            fingerprint: external.engine.fingerprint,
            last_end: Tick(0),
            started: status.since.as_ref().map(tick).unwrap_or_default(),
        };
        shared.common.tell(Event::Adopted { engine: engine.clone(), generation, found }).await;
        steward.visit(engine, generation, Arc::clone(external), Some(address));
    }
}

/// Ends what belongs to no engine that was taken over: Pods that are on their way out or nobody's, and bookings.
async fn end_leftovers(steward: &mut Steward, shared: &Arc<Shared>, booked: &[Booked]) {
    let places = shared.places();
    let leaving = steward.pods.values().filter(|pod| pod.ending || pod.over).cloned().collect::<Vec<_>>();
    for pod in leaving {
        let Some(place) = places.values().find(|place| place.owns(&pod)) else { continue };
        if let Some((replica, generation)) = pod.engine {
            steward.dismiss(&at_home(place, replica, booked), replica, generation, Some(pod)).await;
        }
    }
    for entry in booked {
        let Booked { pool, model, replica, .. } = entry;
        if let Some(place) = places.values().find(|place| place.owner.object == *model) {
            let home = at_home(place, *replica, booked);
            if home.pool.as_ref() == Some(pool) {
                steward.dismiss(&home, *replica, Generation(0), None).await;
            } else {
                // One engine is in one pool: here nothing of it is left.
                let entry = Entry::Release { model: model.clone(), replica: *replica, done: None };
                steward.clerk(pool).send(entry).unwrap_or_default();
            }
            continue;
        }
        if shared.awaited.is_left_out(&model.namespace) {
            // Its Pods are not seen: they hold what is booked, for all that is known.
            continue;
        }
        steward.orphans.push(entry.clone());
    }
    steward.end_strays();
    steward.release_orphans();
    // Pods that nobody knows of are given up where their number is written.
    for pod in steward.pods.values().cloned().collect::<Vec<_>>() {
        if let Some(place) = places.values().find(|place| place.owns(&pod)) {
            steward.recount(&place.deployment_of(&pod.template), Some(Arc::clone(place)));
        }
    }
}
