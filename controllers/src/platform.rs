//! The cluster platform: engines are Pods of Deployments with a stub beside each, and pools reserve their memory.
//!
//! ```text
//!   submit ──▶ engine_manager ──▶ one task per engine generation ──▶ events
//!                │  ▲                │ stub: gate, readiness
//!                │  Pods             └ adapter: through the stub
//!                ├──▶ deployment_scaler: one per Deployment, its replicas
//!                └──▶ ledger_writer: one per pool, its ledger
//! ```
//!
//! Only the gateway that holds the Lease executes commands. It records each action in the cluster before the action
//! takes effect (a reservation in the pool, an engine's name on its Pod), so the next leader can continue from there.

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
use rouse_config::Config;
use rouse_net::lease::TickClock;
use rouse_platform::EngineActivity;
use rouse_platform::{Platform, engine_client::PlatformContext};
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
use crate::{
    election::Leadership,
    index::{AcceleratorCapacities, ResolvedNode},
    ledger::{LocationError, PoolLedger, ReservationLocation},
    metrics::MeterReadMetrics,
    published::PublishedModel,
    status_inputs::StatusInputs,
    watch::{Delta, InitialLists},
    workload::Sidecar,
    writer::ObjectWriter,
};

pub use external::ExternalBackend;
pub use placement::ModelPlacement;

/// Placement of each model's engines, by model name.
pub type ModelPlacements = BTreeMap<ModelName, Arc<ModelPlacement>>;

/// Models on backends that Rouse does not manage.
pub type ExternalBackends = BTreeMap<ModelName, Arc<ExternalBackend>>;

/// Nodes that belong to pools.
pub type ResolvedNodes = BTreeMap<String, ResolvedNode>;

/// Inputs of [`KubernetesPlatform::start`].
pub struct KubernetesDependencies {
    pub client: Client,
    pub pool_ledger: PoolLedger,
    pub writer: ObjectWriter,
    pub leadership: watch::Receiver<Option<Leadership>>,
    pub sidecar: Sidecar,
    /// The namespaces whose Pods are watched; `None` is the whole cluster.
    pub namespaces: Vec<Option<String>>,
    /// The initial lists, and which of them are skipped.
    pub initial_lists: InitialLists,
    /// Changes of Pods.
    pub pods: mpsc::Receiver<Delta<Pod>>,
    /// Receives the decisions about each model, for its status.
    pub status_inputs: Arc<StatusInputs>,
    /// Published statuses of models, from any gateway.
    pub published: mpsc::UnboundedReceiver<PublishedModel>,
    /// Source of accelerator memory use where stubs cannot read it.
    pub dcgm: Option<Arc<DcgmClient>>,
    pub readings: MeterReadMetrics,
}

/// Runs engines in a cluster.
pub struct KubernetesPlatform {
    commands: mpsc::UnboundedSender<Command>,
    requests: mpsc::UnboundedSender<ManagerRequest>,
    shared: Arc<KubernetesContext>,
    engine_manager: JoinHandle<()>,
}

/// State shared by all tasks of the platform.
struct KubernetesContext {
    common: Arc<PlatformContext>,
    client: Client,
    pool_ledger: PoolLedger,
    writer: ObjectWriter,
    sidecar: Sidecar,
    namespaces: Vec<Option<String>>,
    initial_lists: InitialLists,
    status_inputs: Arc<StatusInputs>,
    /// `None` until the cluster's objects were read for the first time.
    placements: ArcSwapOption<ModelPlacements>,
    externals: ArcSwap<ExternalBackends>,
    nodes: ArcSwap<ResolvedNodes>,
    requests: mpsc::UnboundedSender<ManagerRequest>,
    dcgm: Option<Arc<DcgmClient>>,
    readings: MeterReadMetrics,
    occupancy: Arc<OccupancyMap>,
}

/// Reports why this generation fails: to its model's conditions and Events, and to the fleet as diagnostics.
async fn report_failure(
    common: &PlatformContext,
    status_inputs: &StatusInputs,
    engine: &EngineId,
    generation: Generation,
    reason: &str,
) {
    status_inputs.record_failure(engine, generation, reason);
    let (engine, diagnostics) = (engine.clone(), EngineDiagnostics::from_system(reason));
    common.send_event(Event::Diagnostics { engine, generation, diagnostics }).await;
}

impl KubernetesPlatform {
    /// Starts the platform's tasks.
    ///
    /// Whenever this gateway acquires the Lease, `events` receives `Adopted` for each engine that already runs, then
    /// `AdoptionDone`, then outcomes. Must be called inside a runtime, which runs the platform's tasks.
    #[must_use]
    pub fn start(
        config: Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        dependencies: KubernetesDependencies,
    ) -> Self {
        let KubernetesDependencies {
            client,
            pool_ledger,
            writer,
            leadership: claim,
            sidecar,
            namespaces: watched,
            initial_lists: awaited,
            pods,
            status_inputs,
            published,
            dcgm,
            readings,
        } = dependencies;
        let (commands, commands_rx) = mpsc::unbounded_channel();
        let (requests, requests_rx) = mpsc::unbounded_channel();
        let shared = Arc::new(KubernetesContext {
            common: PlatformContext::new(config, events, clock),
            client,
            pool_ledger,
            writer,
            sidecar,
            namespaces: watched,
            initial_lists: awaited,
            status_inputs,
            placements: ArcSwapOption::empty(),
            externals: ArcSwap::default(),
            nodes: ArcSwap::default(),
            requests: requests.clone(),
            dcgm,
            readings,
            occupancy: Arc::default(),
        });
        let manager = EngineManager::new(Arc::clone(&shared), requests.clone());
        let manager_task = tokio::spawn(manager.run(ManagerInputs {
            commands: commands_rx,
            pods,
            requests: requests_rx,
            published,
            leadership: claim,
        }));
        Self { commands, requests, shared, engine_manager: manager_task }
    }

    /// Replaces the placements for later launches. Running engines are not touched.
    pub fn set_placements(
        &self,
        placements: Arc<ModelPlacements>,
        externals: Arc<ExternalBackends>,
        nodes: Arc<ResolvedNodes>,
    ) {
        self.shared.externals.store(externals);
        self.shared.nodes.store(nodes);
        let first = self.shared.placements.swap(Some(placements)).is_none();
        if first {
            self.requests.send(ManagerRequest::PlacementsSet).unwrap_or_default();
        }
    }

    /// Ends every task. Engines keep running.
    pub async fn close(self) {
        let Self { commands, requests, shared, engine_manager: manager_task } = self;
        drop((commands, requests, shared));
        if let Err(error) = manager_task.await {
            tracing::error!(%error, "engine manager failed");
        }
    }
}

impl Platform for KubernetesPlatform {
    fn submit(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("command dropped: the engine manager has ended");
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

    /// Returns the memory of this node's accelerators; empty if the node is unknown.
    fn node_capacities(&self, node: &str) -> AcceleratorCapacities {
        self.nodes.load().get(node).map(|node| node.capacities.clone()).unwrap_or_default()
    }

    /// Records which accelerators the engine got, and returns once that is written.
    ///
    /// # Errors
    /// The engine does not fit there.
    async fn commit_location(
        &self,
        placement: &ModelPlacement,
        replica: u32,
        location: ReservationLocation,
    ) -> Result<(), LocationError> {
        let capacities = self.node_capacities(&location.node);
        // An error means that the ledger writer ended, and with it this gateway's leadership.
        self.submit_location(placement, replica, location, capacities).await.unwrap_or(Ok(()))
    }

    /// Records which accelerators the engine has, whether or not there is room on them.
    fn record_location(&self, placement: &ModelPlacement, replica: u32, location: ReservationLocation) {
        drop(self.submit_location(placement, replica, location, AcceleratorCapacities::default()));
    }

    fn submit_location(
        &self,
        placement: &ModelPlacement,
        replica: u32,
        location: ReservationLocation,
        capacities: AcceleratorCapacities,
    ) -> oneshot::Receiver<Result<(), LocationError>> {
        let (done, placed) = oneshot::channel();
        if let Some(pool) = placement.pool.clone() {
            let entry = LedgerChange::SetLocation {
                model: placement.owner.object.clone(),
                replica,
                location,
                capacities,
                done,
            };
            self.requests.send(ManagerRequest::ChangeLedger { pool, change: entry }).unwrap_or_default();
        }
        placed
    }

    async fn report_failure(&self, engine: &EngineId, generation: Generation, reason: &str) {
        report_failure(&self.common, &self.status_inputs, engine, generation, reason).await;
    }

    /// Marks the engine as releasing; its memory stays reserved until [`Self::release`].
    fn mark_releasing(&self, placement: &ModelPlacement, replica: u32) {
        if let Some(pool) = placement.pool.clone() {
            let entry = LedgerChange::MarkReleasing { model: placement.owner.object.clone(), replica };
            self.requests.send(ManagerRequest::ChangeLedger { pool, change: entry }).unwrap_or_default();
        }
    }

    /// Releases the engine's reservation, and returns once that is written.
    async fn release(&self, placement: &ModelPlacement, replica: u32) {
        let Some(pool) = placement.pool.clone() else { return };
        let (done, released) = oneshot::channel();
        let entry =
            LedgerChange::Release { model: placement.owner.object.clone(), replica, done: Some(done) };
        self.requests.send(ManagerRequest::ChangeLedger { pool, change: entry }).unwrap_or_default();
        // An error means that the ledger writer ended, and with it this gateway's leadership. The next leader checks
        // again.
        drop(released.await);
    }
}
