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

use futures_util::{StreamExt as _, stream::FuturesUnordered};
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
    stub::Stub,
};
use crate::{
    controllers::{
        booking::Error,
        condition::tick,
        crd::{inference_model::EngineState, ledger::ObjectName},
        pods::Seen,
        workload::{PROXY_PORT, SPI_PORT},
    },
    platform::contact::Contact,
};

/// For all questions to one engine. Engines are asked side by side.
const DEADLINE: Duration = Duration::from_millis(1500);

/// A pool's ledger is asked for so often, with pauses of up to a second.
const STAMPS: u32 = 10;

/// An engine that has something booked.
struct Booked {
    pool: String,
    model: ObjectName,
    replica: u32,
}

/// An engine that runs, and how it was found.
struct Runs {
    engine: EngineId,
    generation: Generation,
    place: Arc<Place>,
    pod: Arc<Seen>,
    address: SocketAddr,
    ready: bool,
}

pub(super) async fn take_over(steward: &mut Steward) {
    let shared = Arc::clone(&steward.shared);
    let booked = stamp(&shared).await;
    let mut runs = look(&shared, steward.pods.values()).await;
    for found in &mut runs {
        // It has proved itself to whoever led before, who has written that down.
        found.ready &=
            steward.is_published_awake(&found.place.owner.object, found.engine.replica, found.generation);
    }
    for found in runs {
        adopt(steward, &shared, found).await;
    }
    adopt_externals(steward, &shared).await;
    end_leftovers(steward, &shared, &booked).await;
}

/// Writes the epoch into every pool's ledger; which engines have something booked.
async fn stamp(shared: &Arc<Shared>) -> Vec<Booked> {
    let places = shared.places();
    let pools: BTreeSet<String> = places.values().filter_map(|place| place.pool.clone()).collect();
    let mut all = Vec::new();
    for pool in pools {
        let mut pauses = Pauses::new();
        for _ in 0..STAMPS {
            match shared.books.take_over(&BTreeSet::from([pool.clone()])).await {
                Ok(ledgers) => {
                    let booked = ledgers.into_values().flat_map(|ledger| ledger.reservations);
                    all.extend(booked.map(|entry| Booked {
                        pool: pool.clone(),
                        model: entry.model,
                        replica: entry.replica,
                    }));
                    break;
                }
                // Whoever leads instead has stamped them, or will.
                Err(Error::NotLeading | Error::Replaced { .. }) => return all,
                // One that cannot be read must not keep the others from being served. Nothing is booked in it either.
                Err(error) => tracing::warn!(pool, %error, "the pool was not taken over; it is tried again"),
            }
            pauses.pause().await;
        }
    }
    all
}

async fn look(shared: &Arc<Shared>, pods: impl Iterator<Item = &Arc<Seen>>) -> Vec<Runs> {
    let places = shared.places();
    let mut by_pod = FuturesUnordered::new();
    for pod in pods.filter(|pod| !pod.ending && !pod.over) {
        let place = places.values().find(|place| place.owns(pod));
        if let (Some(place), Some((replica, generation)), Some(ip)) = (place, pod.engine, pod.address) {
            let runs = Runs {
                engine: EngineId::new(place.engine.name.clone(), replica),
                generation,
                place: Arc::clone(place),
                pod: Arc::clone(pod),
                address: SocketAddr::new(ip, PROXY_PORT),
                ready: false,
            };
            by_pod.push(examine(shared, runs));
        }
    }
    let mut all: BTreeMap<EngineId, Runs> = BTreeMap::new();
    while let Some(runs) = by_pod.next().await {
        // Two Pods of one engine cannot be; should they, the newer life is the one that was meant.
        let older = all.get(&runs.engine).is_some_and(|known| known.generation > runs.generation);
        if !older {
            all.insert(runs.engine.clone(), runs);
        }
    }
    all.into_values().collect()
}

/// The stub hears the new leader, and the engine is asked whether it serves.
async fn examine(shared: &Arc<Shared>, mut runs: Runs) -> Runs {
    let asked = async {
        let epoch = shared.writer.claim().ok()?.epoch;
        let stub = Stub::new(SocketAddr::new(runs.address.ip(), SPI_PORT), epoch, runs.generation);
        stub.target(SocketAddr::new(runs.address.ip(), runs.place.pods.port)).await.ok()?;
        stub.open().await.ok()?;
        let (id, model) = (runs.engine.clone(), Arc::clone(&runs.place.engine));
        let contact = Contact::new(&shared.common, id, runs.generation, runs.address, model);
        Some(contact.adapter.health(DEADLINE).await == Health::Good)
    };
    runs.ready = time::timeout(DEADLINE, asked).await.ok().flatten().unwrap_or(false);
    runs
}

async fn adopt(steward: &mut Steward, shared: &Arc<Shared>, found: Runs) {
    let Runs { engine, generation, place, pod, address, ready } = found;
    tracing::info!(%engine, pod = %pod.name, ready, "adopted");
    let accelerators = place.pool.iter().map(|pool| pool.as_str().into()).collect();
    let event = Event::Adopted {
        engine: engine.clone(),
        generation,
        found: Found {
            address,
            accelerators,
            asleep: None,
            ready,
            fingerprint: pod.fingerprint,
            last_end: steward.last_request(&place.owner.object).max(pod.created),
            started: pod.created,
        },
    };
    if let (Some(wanted), Some(pool)) = (place.wanted(engine.replica), place.pool.clone()) {
        // It is there, whatever is booked.
        steward.clerk(&pool).send(Entry::Adopt { wanted }).unwrap_or_default();
    }
    shared.told.runs_in(&engine, generation, &pod.name.name);
    shared.common.tell(event).await;
    let start = if ready { Start::Awake } else { Start::Starting };
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
            steward.dismiss(place, replica, generation, Some(pod)).await;
        }
    }
    for Booked { pool, model, replica } in booked {
        if let Some(place) = places.values().find(|place| place.owner.object == *model) {
            steward.dismiss(place, *replica, Generation(0), None).await;
            continue;
        }
        // Its model is gone, and so are its Pods, but for those that are on their way out.
        let unowned = |pod: &Arc<Seen>| !places.values().any(|place| place.owns(pod));
        if !steward.pods.values().any(|pod| pod.name.namespace == model.namespace && unowned(pod)) {
            let entry = Entry::Release { model: model.clone(), replica: *replica, done: None };
            steward.clerk(pool).send(entry).unwrap_or_default();
        }
    }
    // Pods that nobody knows of are given up where their number is written.
    for pod in steward.pods.values().cloned().collect::<Vec<_>>() {
        if let Some(place) = places.values().find(|place| place.owns(&pod)) {
            steward.recount(&place.deployment_of(&pod.template), Some(Arc::clone(place)));
        }
    }
}
