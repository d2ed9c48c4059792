//! A cluster: engines are Pods of Deployments, with a stub beside each, and memory is booked in pools.
//!
//! ```text
//!   submit ──▶ steward ──▶ one task per engine's life ──▶ events
//!                │  ▲         │ stub: gate, readiness
//!                │  Pods      └ adapter: through the stub
//!                ├──▶ crew: one per Deployment, its replicas
//!                └──▶ clerk: one per pool, its ledger
//! ```
//!
//! Only the gateway that holds the lease runs any of this; what it does is written down in the cluster before its effect
//! (a booking in the pool, an engine's name on its Pod), so that another can go on from there.

mod asleep;
mod clerk;
mod crew;
pub mod dcgm;
mod external;
pub mod launcher;
mod life;
mod observe;
mod place;
mod steward;
mod stub;
mod takeover;
mod tenants;
mod work;

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::{ArcSwap, ArcSwapOption};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use rouse::{
    engine::past::Symptoms,
    fault::Fault,
    fleet::{Changes, Fleet, Plan, command::Command, event::Event},
    lease::Clock,
    model::{EngineId, ModelName},
    units::Generation,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

use self::{
    clerk::Entry,
    dcgm::Dcgm,
    steward::{Inputs, Request, Steward},
    tenants::Tenants,
};
use super::{Platform, contact::Common};
use crate::{
    config::Config,
    controllers::{
        booking::{Books, NoRoom, Spot},
        election::Claim,
        index::{NodePlace, Room},
        published::Published,
        told::Told,
        watch::{Awaited, Change},
        workload::Sidecar,
        writer::Writer,
    },
    metrics::Readings,
    routes::Reported,
};

pub use external::External;
pub use place::Place;

/// Where each model's engines are to run, by the model's name.
pub type Places = BTreeMap<ModelName, Arc<Place>>;

/// The models that somebody else runs.
pub type Externals = BTreeMap<ModelName, Arc<External>>;

/// What is known of the nodes that are in pools.
pub type Nodes = BTreeMap<String, NodePlace>;

/// What a platform in a cluster is made of.
pub struct Parts {
    pub client: Client,
    pub books: Books,
    pub writer: Writer,
    pub claim: watch::Receiver<Option<Claim>>,
    pub sidecar: Sidecar,
    /// The namespaces whose Pods are watched; `None` is the whole cluster.
    pub watched: Vec<Option<String>>,
    /// What of these is left out.
    pub awaited: Awaited,
    /// What is seen of Pods.
    pub pods: mpsc::Receiver<Change<Pod>>,
    /// Where it is told what is decided of each model.
    pub told: Arc<Told>,
    /// What the statuses of models say, whoever wrote them.
    pub published: mpsc::UnboundedReceiver<Published>,
    /// Who is asked about accelerators where stubs cannot say.
    pub dcgm: Option<Arc<Dcgm>>,
    pub readings: Readings,
}

/// The engines of a cluster.
pub struct Kubernetes {
    commands: mpsc::UnboundedSender<Command>,
    requests: mpsc::UnboundedSender<Request>,
    shared: Arc<Shared>,
    steward: JoinHandle<()>,
}

/// What every task of the platform uses.
struct Shared {
    common: Arc<Common>,
    client: Client,
    books: Books,
    writer: Writer,
    sidecar: Sidecar,
    watched: Vec<Option<String>>,
    awaited: Awaited,
    told: Arc<Told>,
    /// `None` before anything was heard of the cluster's objects.
    places: ArcSwapOption<Places>,
    externals: ArcSwap<Externals>,
    nodes: ArcSwap<Nodes>,
    requests: mpsc::UnboundedSender<Request>,
    dcgm: Option<Arc<Dcgm>>,
    readings: Readings,
    tenants: Arc<Tenants>,
}

/// Why this life comes to nothing, for its model's conditions and Events, and for whoever asks the decisions.
async fn fails(common: &Common, told: &Told, engine: &EngineId, generation: Generation, why: &str) {
    told.fails(engine, generation, why);
    let (engine, symptoms) = (engine.clone(), Symptoms::of_system(why));
    common.tell(Event::Shows { engine, generation, symptoms }).await;
}

impl Kubernetes {
    /// Begins. On `events` come, whenever this gateway gets the lease: engines that already run (`Adopted`),
    /// `AdoptionDone`; then outcomes. Must be called inside a runtime, on which the platform's tasks run.
    #[must_use]
    pub fn start(config: Arc<Config>, events: mpsc::Sender<Event>, clock: Clock, parts: Parts) -> Self {
        let Parts {
            client,
            books,
            writer,
            claim,
            sidecar,
            watched,
            awaited,
            pods,
            told,
            published,
            dcgm,
            readings,
        } = parts;
        let (commands, orders) = mpsc::unbounded_channel();
        let (requests, asked) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            common: Common::new(config, events, clock),
            client,
            books,
            writer,
            sidecar,
            watched,
            awaited,
            told,
            places: ArcSwapOption::empty(),
            externals: ArcSwap::default(),
            nodes: ArcSwap::default(),
            requests: requests.clone(),
            dcgm,
            readings,
            tenants: Arc::default(),
        });
        let steward = Steward::new(Arc::clone(&shared), requests.clone());
        let steward =
            tokio::spawn(steward.run(Inputs { commands: orders, pods, requests: asked, published, claim }));
        Self { commands, requests, shared, steward }
    }

    /// Where engines are to run from now on. Those that run are not touched.
    pub fn place(&self, places: Arc<Places>, externals: Arc<Externals>, nodes: Arc<Nodes>) {
        self.shared.externals.store(externals);
        self.shared.nodes.store(nodes);
        let first = self.shared.places.swap(Some(places)).is_none();
        if first {
            self.requests.send(Request::Placed).unwrap_or_default();
        }
    }

    /// Ends every task. Engines live on.
    pub async fn close(self) {
        let Self { commands, requests, shared, steward } = self;
        drop((commands, requests, shared));
        if let Err(error) = steward.await {
            tracing::error!(%error, "the platform's steward died");
        }
    }
}

impl Platform for Kubernetes {
    fn submit(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("the platform's steward is gone");
        }
    }

    fn reported(&self, engine: &EngineId, generation: Generation) -> Arc<Reported> {
        self.shared.common.reported(engine, generation)
    }

    fn reconfigure(&self, config: Arc<Config>) {
        self.shared.common.config.store(config);
    }

    fn has_gates(&self) -> bool {
        true
    }

    fn follow(&self, fleet: &Fleet, plan: &Plan, changes: &Changes) {
        self.shared.told.follow(fleet, plan, changes);
    }

    fn refused(&self, fleet: &Fleet, fault: &Fault) {
        self.shared.told.refused(fleet, fault);
    }
}

impl Shared {
    fn places(&self) -> Arc<Places> {
        self.places.load_full().unwrap_or_default()
    }

    fn is_placed(&self) -> bool {
        self.places.load().is_some()
    }

    fn place(&self, model: &ModelName) -> Option<Arc<Place>> {
        self.places.load().as_ref()?.get(model).cloned()
    }

    fn externals(&self) -> Arc<Externals> {
        self.externals.load_full()
    }

    fn external(&self, model: &ModelName) -> Option<Arc<External>> {
        self.externals.load().get(model).cloned()
    }

    /// What is known of this node's accelerators.
    fn room(&self, node: &str) -> Room {
        self.nodes.load().get(node).map(|place| place.room.clone()).unwrap_or_default()
    }

    /// The engine came to these accelerators; returns when that is written. Where it does not fit, why.
    async fn placed(&self, place: &Place, replica: u32, spot: Spot) -> Result<(), NoRoom> {
        let room = self.room(&spot.node);
        // An error is a clerk that is gone, and with it this gateway's lead.
        self.place_within(place, replica, spot, room).await.unwrap_or(Ok(()))
    }

    /// The engine has these accelerators, whatever room there is on them.
    fn is_at(&self, place: &Place, replica: u32, spot: Spot) {
        drop(self.place_within(place, replica, spot, Room::default()));
    }

    fn place_within(
        &self,
        place: &Place,
        replica: u32,
        spot: Spot,
        room: Room,
    ) -> oneshot::Receiver<Result<(), NoRoom>> {
        let (done, placed) = oneshot::channel();
        if let Some(pool) = place.pool.clone() {
            let entry = Entry::Place { model: place.owner.object.clone(), replica, spot, room, done };
            self.requests.send(Request::Enter { pool, entry }).unwrap_or_default();
        }
        placed
    }

    async fn fails(&self, engine: &EngineId, generation: Generation, why: &str) {
        fails(&self.common, &self.told, engine, generation, why).await;
    }

    /// The engine was told to go; what it has stays booked until [`Self::release`].
    fn releasing(&self, place: &Place, replica: u32) {
        if let Some(pool) = place.pool.clone() {
            let entry = Entry::Releasing { model: place.owner.object.clone(), replica };
            self.requests.send(Request::Enter { pool, entry }).unwrap_or_default();
        }
    }

    /// What the engine had is free; returns when that is written.
    async fn release(&self, place: &Place, replica: u32) {
        let Some(pool) = place.pool.clone() else { return };
        let (done, released) = oneshot::channel();
        let entry = Entry::Release { model: place.owner.object.clone(), replica, done: Some(done) };
        self.requests.send(Request::Enter { pool, entry }).unwrap_or_default();
        // An error is a clerk that is gone, and with it this gateway's lead: the next one looks for itself.
        drop(released.await);
    }
}
