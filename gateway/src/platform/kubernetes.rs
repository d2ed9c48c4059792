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

mod actuation;
pub mod dcgm;
mod deployment_scaler;
mod engine_manager;
mod engine_steps;
mod engine_task;
mod external;
pub mod launcher;
mod ledger_writer;
mod observe;
mod occupancy;
mod placement;
mod stub;
mod takeover;

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::{ArcSwap, ArcSwapOption};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use rouse::{
    engine::last_outcome::EngineDiagnostics,
    fault::Fault,
    fleet::{Fleet, Plan, RoutingChanges, command::Command, event::Event},
    model::{EngineId, ModelName},
    units::Generation,
};
use rouse_net::lease::TickClock;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

use self::{
    dcgm::DcgmClient,
    engine_manager::{EngineManager, ManagerInputs, ManagerRequest},
    ledger_writer::LedgerChange,
    occupancy::OccupancyMap,
};
use super::{Platform, engine_client::PlatformContext};
use crate::{
    config::Config,
    controllers::{
        election::Leadership,
        index::{AcceleratorCapacities, ResolvedNode},
        ledger::{LocationError, PoolLedger, ReservationLocation},
        published::PublishedModel,
        status_inputs::StatusInputs,
        watch::{Delta, InitialLists},
        workload::Sidecar,
        writer::ObjectWriter,
    },
    metrics::MeterReadMetrics,
    routing::EngineActivity,
};

pub use external::ExternalBackend;
pub use placement::ModelPlacement;

/// Where each model's engines are to run, by the model's name.
pub type ModelPlacements = BTreeMap<ModelName, Arc<ModelPlacement>>;

/// The models that somebody else runs.
pub type ExternalBackends = BTreeMap<ModelName, Arc<ExternalBackend>>;

/// What is known of the nodes that are in pools.
pub type ResolvedNodes = BTreeMap<String, ResolvedNode>;

/// What a platform in a cluster is made of.
pub struct KubernetesDependencies {
    pub client: Client,
    pub pool_ledger: PoolLedger,
    pub writer: ObjectWriter,
    pub leadership: watch::Receiver<Option<Leadership>>,
    pub sidecar: Sidecar,
    /// The namespaces whose Pods are watched; `None` is the whole cluster.
    pub namespaces: Vec<Option<String>>,
    /// What of these is left out.
    pub initial_lists: InitialLists,
    /// What is seen of Pods.
    pub pods: mpsc::Receiver<Delta<Pod>>,
    /// Where it is told what is decided of each model.
    pub status_inputs: Arc<StatusInputs>,
    /// What the statuses of models say, whoever wrote them.
    pub published: mpsc::UnboundedReceiver<PublishedModel>,
    /// Who is asked about accelerators where stubs cannot say.
    pub dcgm: Option<Arc<DcgmClient>>,
    pub readings: MeterReadMetrics,
}

/// The engines of a cluster.
pub struct KubernetesPlatform {
    commands: mpsc::UnboundedSender<Command>,
    requests: mpsc::UnboundedSender<ManagerRequest>,
    shared: Arc<KubernetesContext>,
    engine_manager: JoinHandle<()>,
}

/// What every task of the platform uses.
struct KubernetesContext {
    common: Arc<PlatformContext>,
    client: Client,
    pool_ledger: PoolLedger,
    writer: ObjectWriter,
    sidecar: Sidecar,
    namespaces: Vec<Option<String>>,
    initial_lists: InitialLists,
    status_inputs: Arc<StatusInputs>,
    /// `None` before anything was heard of the cluster's objects.
    placements: ArcSwapOption<ModelPlacements>,
    externals: ArcSwap<ExternalBackends>,
    nodes: ArcSwap<ResolvedNodes>,
    requests: mpsc::UnboundedSender<ManagerRequest>,
    dcgm: Option<Arc<DcgmClient>>,
    readings: MeterReadMetrics,
    occupancy: Arc<OccupancyMap>,
}

/// Why this life comes to nothing, for its model's conditions and Events, and for whoever asks the decisions.
async fn report_failure(
    common: &PlatformContext,
    told: &StatusInputs,
    engine: &EngineId,
    generation: Generation,
    why: &str,
) {
    told.record_failure(engine, generation, why);
    let (engine, symptoms) = (engine.clone(), EngineDiagnostics::from_system(why));
    common.send_event(Event::Diagnostics { engine, generation, diagnostics: symptoms }).await;
}

impl KubernetesPlatform {
    /// Begins. On `events` come, whenever this gateway gets the lease: engines that already run (`Adopted`),
    /// `AdoptionDone`; then outcomes. Must be called inside a runtime, on which the platform's tasks run.
    #[must_use]
    pub fn start(
        config: Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        parts: KubernetesDependencies,
    ) -> Self {
        let KubernetesDependencies {
            client,
            pool_ledger: books,
            writer,
            leadership: claim,
            sidecar,
            namespaces: watched,
            initial_lists: awaited,
            pods,
            status_inputs: told,
            published,
            dcgm,
            readings,
        } = parts;
        let (commands, orders) = mpsc::unbounded_channel();
        let (requests, asked) = mpsc::unbounded_channel();
        let shared = Arc::new(KubernetesContext {
            common: PlatformContext::new(config, events, clock),
            client,
            pool_ledger: books,
            writer,
            sidecar,
            namespaces: watched,
            initial_lists: awaited,
            status_inputs: told,
            placements: ArcSwapOption::empty(),
            externals: ArcSwap::default(),
            nodes: ArcSwap::default(),
            requests: requests.clone(),
            dcgm,
            readings,
            occupancy: Arc::default(),
        });
        let steward = EngineManager::new(Arc::clone(&shared), requests.clone());
        let steward = tokio::spawn(steward.run(ManagerInputs {
            commands: orders,
            pods,
            requests: asked,
            published,
            leadership: claim,
        }));
        Self { commands, requests, shared, engine_manager: steward }
    }

    /// Where engines are to run from now on. Those that run are not touched.
    pub fn set_placements(
        &self,
        places: Arc<ModelPlacements>,
        externals: Arc<ExternalBackends>,
        nodes: Arc<ResolvedNodes>,
    ) {
        self.shared.externals.store(externals);
        self.shared.nodes.store(nodes);
        let first = self.shared.placements.swap(Some(places)).is_none();
        if first {
            self.requests.send(ManagerRequest::PlacementsSet).unwrap_or_default();
        }
    }

    /// Ends every task. Engines live on.
    pub async fn close(self) {
        let Self { commands, requests, shared, engine_manager: steward } = self;
        drop((commands, requests, shared));
        if let Err(error) = steward.await {
            tracing::error!(%error, "the platform's steward died");
        }
    }
}

impl Platform for KubernetesPlatform {
    fn submit(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("the platform's steward is gone");
        }
    }

    fn engine_activity(&self, engine: &EngineId, generation: Generation) -> Arc<EngineActivity> {
        self.shared.common.engine_activity(engine, generation)
    }

    fn reconfigure(&self, config: Arc<Config>) {
        self.shared.common.config.store(config);
    }

    fn has_stub_gates(&self) -> bool {
        true
    }

    fn turn_completed(&self, fleet: &Fleet, plan: &Plan, changes: &RoutingChanges) {
        self.shared.status_inputs.record_turn(fleet, plan, changes);
    }

    fn request_refused(&self, fleet: &Fleet, fault: &Fault) {
        self.shared.status_inputs.record_refusal(fleet, fault);
    }
}

impl KubernetesContext {
    fn placements(&self) -> Arc<ModelPlacements> {
        self.placements.load_full().unwrap_or_default()
    }

    fn has_placements(&self) -> bool {
        self.placements.load().is_some()
    }

    fn placement(&self, model: &ModelName) -> Option<Arc<ModelPlacement>> {
        self.placements.load().as_ref()?.get(model).cloned()
    }

    fn externals(&self) -> Arc<ExternalBackends> {
        self.externals.load_full()
    }

    fn external(&self, model: &ModelName) -> Option<Arc<ExternalBackend>> {
        self.externals.load().get(model).cloned()
    }

    /// What is known of this node's accelerators.
    fn node_capacities(&self, node: &str) -> AcceleratorCapacities {
        self.nodes.load().get(node).map(|place| place.capacities.clone()).unwrap_or_default()
    }

    /// The engine came to these accelerators; returns when that is written. Where it does not fit, why.
    async fn commit_location(
        &self,
        place: &ModelPlacement,
        replica: u32,
        spot: ReservationLocation,
    ) -> Result<(), LocationError> {
        let room = self.node_capacities(&spot.node);
        // An error is a clerk that is gone, and with it this gateway's lead.
        self.submit_location(place, replica, spot, room).await.unwrap_or(Ok(()))
    }

    /// The engine has these accelerators, whatever room there is on them.
    fn record_location(&self, place: &ModelPlacement, replica: u32, spot: ReservationLocation) {
        drop(self.submit_location(place, replica, spot, AcceleratorCapacities::default()));
    }

    fn submit_location(
        &self,
        place: &ModelPlacement,
        replica: u32,
        spot: ReservationLocation,
        room: AcceleratorCapacities,
    ) -> oneshot::Receiver<Result<(), LocationError>> {
        let (done, placed) = oneshot::channel();
        if let Some(pool) = place.pool.clone() {
            let entry = LedgerChange::SetLocation {
                model: place.owner.object.clone(),
                replica,
                location: spot,
                capacities: room,
                done,
            };
            self.requests.send(ManagerRequest::ChangeLedger { pool, change: entry }).unwrap_or_default();
        }
        placed
    }

    async fn report_failure(&self, engine: &EngineId, generation: Generation, why: &str) {
        report_failure(&self.common, &self.status_inputs, engine, generation, why).await;
    }

    /// The engine was told to go; what it has stays booked until [`Self::release`].
    fn mark_releasing(&self, place: &ModelPlacement, replica: u32) {
        if let Some(pool) = place.pool.clone() {
            let entry = LedgerChange::MarkReleasing { model: place.owner.object.clone(), replica };
            self.requests.send(ManagerRequest::ChangeLedger { pool, change: entry }).unwrap_or_default();
        }
    }

    /// What the engine had is free; returns when that is written.
    async fn release(&self, place: &ModelPlacement, replica: u32) {
        let Some(pool) = place.pool.clone() else { return };
        let (done, released) = oneshot::channel();
        let entry = LedgerChange::Release { model: place.owner.object.clone(), replica, done: Some(done) };
        self.requests.send(ManagerRequest::ChangeLedger { pool, change: entry }).unwrap_or_default();
        // An error is a clerk that is gone, and with it this gateway's lead: the next one looks for itself.
        drop(released.await);
    }
}
