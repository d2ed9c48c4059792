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
mod confirmation;
mod context;
pub mod dcgm;
mod deployment_scaler;
mod engine_location;
mod engine_manager;
mod engine_steps;
mod engine_task;
mod external;
pub mod launcher;
mod ledger_writer;
mod model_placements;
mod observe;
mod occupancy;
mod placement;
mod takeover;
#[cfg(test)]
mod testing;
mod work_queue;

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::{ArcSwap, ArcSwapOption};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use rouse::{
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
    sync::{Notify, Semaphore, mpsc},
    task::JoinHandle,
};

use self::{
    context::KubernetesContext,
    dcgm::DcgmClient,
    engine_manager::{EngineManager, ManagerInputs},
    work_queue::{PlatformFailure, WorkQueue},
};
use crate::{
    cache::Subscription,
    dual_pods::engine_orders::EngineOrders,
    index::ResolvedNode,
    kit::Terms,
    ledger::PoolLedger,
    metrics::{MeterReadMetrics, TakeoverMetrics},
    published::PublishedMailbox,
    status_inputs::StatusInputs,
    watch::InitialLists,
    workload::Sidecar,
    writer::ObjectWriter,
};

pub use external::ExternalBackend;
pub use model_placements::ModelPlacements;
pub use placement::ModelPlacement;

/// Models on backends that Rouse does not manage.
pub type ExternalBackends = BTreeMap<ModelName, Arc<ExternalBackend>>;

/// Nodes that belong to pools.
pub type ResolvedNodes = BTreeMap<String, ResolvedNode>;

/// Inputs of [`KubernetesPlatform::start`].
pub(crate) struct KubernetesDependencies {
    pub client: Client,
    pub pool_ledger: PoolLedger,
    pub writer: ObjectWriter,
    pub terms: Terms,
    pub sidecar: Sidecar,
    /// The namespaces whose Pods are watched; `None` is the whole cluster.
    pub namespaces: Vec<Option<String>>,
    /// The initial lists, and which of them are skipped.
    pub initial_lists: InitialLists,
    /// Changes of Pods, while this gateway leads.
    pub pods: Subscription<Pod>,
    /// Receives the decisions about each model, for its status.
    pub status_inputs: Arc<StatusInputs>,
    /// Published statuses of models, from any gateway.
    pub published: Arc<PublishedMailbox>,
    /// Source of accelerator memory use where stubs cannot read it.
    pub dcgm: Option<Arc<DcgmClient>>,
    pub readings: MeterReadMetrics,
    pub takeovers: TakeoverMetrics,
    /// Orders to the pairing controller, if this gateway has one.
    pub engine_orders: Option<EngineOrders>,
}

/// Capacity of the queue of requests to the engine manager; the tasks that send further requests wait.
const REQUEST_QUEUE_CAPACITY: usize = 1024;

/// Runs engines in a cluster.
pub struct KubernetesPlatform {
    commands: WorkQueue<Command>,
    shared: Arc<KubernetesContext>,
    engine_manager: JoinHandle<()>,
}

impl KubernetesPlatform {
    /// Starts the platform's tasks.
    ///
    /// Whenever this gateway acquires the Lease, `events` receives `Adopted` for each engine that already runs, then
    /// `AdoptionDone`, then outcomes. Must be called inside a runtime, which runs the platform's tasks.
    #[must_use]
    pub(crate) fn start(
        config: Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        dependencies: KubernetesDependencies,
    ) -> Self {
        let KubernetesDependencies {
            client,
            pool_ledger,
            writer,
            terms,
            sidecar,
            namespaces: watched,
            initial_lists: awaited,
            pods,
            status_inputs,
            published,
            dcgm,
            readings,
            takeovers,
            engine_orders,
        } = dependencies;
        let failure = PlatformFailure::default();
        let (commands, commands_rx) =
            WorkQueue::new("fleet commands", work_queue::MAX_OF_ALL_ENGINES, &failure);
        let (requests, requests_rx) = mpsc::channel(REQUEST_QUEUE_CAPACITY);
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
            placements_changed: Notify::new(),
            externals: ArcSwap::default(),
            nodes: ArcSwap::default(),
            requests,
            failure,
            dcgm,
            readings,
            takeovers,
            engine_orders,
            occupancy: Arc::default(),
            confirmations: Semaphore::new(confirmation::MAX_CONCURRENT_CONFIRMATIONS),
            reassertions: Semaphore::new(deployment_scaler::MAX_CONCURRENT_REASSERTIONS),
        });
        let manager = EngineManager::new(Arc::clone(&shared));
        let manager_task = tokio::spawn(manager.run(ManagerInputs {
            commands: commands_rx,
            pods,
            requests: requests_rx,
            published,
            terms,
        }));
        Self { commands, shared, engine_manager: manager_task }
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
        self.shared.placements.store(Some(placements));
        self.shared.placements_changed.notify_one();
    }

    /// Returns once the platform cannot go on: this gateway must end, so that another one leads.
    pub async fn failed(&self) {
        self.shared.failure.reported().await;
    }

    /// Ends every task. Engines keep running.
    pub async fn close(self) {
        let Self { commands, shared, engine_manager: manager_task } = self;
        drop((commands, shared));
        if let Err(error) = manager_task.await {
            tracing::error!(%error, "engine manager failed");
        }
    }
}

impl Platform for KubernetesPlatform {
    fn submit(&self, command: Command) {
        if !self.commands.push(command) {
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
