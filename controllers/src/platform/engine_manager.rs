//! Manages all engine tasks of a cluster; this one task decides which engine gets which Pod.
//!
//! Pods of a Deployment have generated names. So this task decides which engine runs in which Pod, and writes that to
//! the Pod before anything else happens with the Pod. Commands, Pod changes and requests of engine tasks all arrive at
//! this task alone. Slow work happens in other tasks (`engine_task`, `deployment_scaler`, `ledger_writer`). A change
//! concerns one engine, Pod or Deployment, and the indexes find what belongs to it without a walk over all.
//!
//! Engine tasks exist only while this gateway leads. When it acquires the Lease, it takes over what it finds
//! (`takeover`). When it loses the Lease, it drops engine tasks, scalers and ledger writers as they are.
//!
//! No tasks wait for each other in a circle. Engine tasks and scalers wait for this task, when its request queue is
//! full. This task waits for the driver, when the event channel is full, and during a takeover for the API server and
//! stubs, with timeouts. The driver waits for neither: it submits through a `WorkQueue`. This task reaches all its
//! tasks through a `WorkQueue`, a watch channel or a one-shot channel, none of which waits, and it sends itself no
//! requests. It waits for its tasks only after it has aborted them (`JoinSet::shutdown`), and an aborted task ends at
//! whatever it waits for.

mod commands;
mod engine_index;
mod launch;
mod leadership;
mod ledger_writers;
mod orphans;
mod pod_assignment;
mod pod_events;
mod pod_index;
mod replicas;
mod scaler_index;
mod status_sync;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    fleet::command::Command,
    model::EngineId,
    units::{Generation, Tick},
};
use rouse_net::stub_api::Epoch;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use self::{
    engine_index::{EngineIndex, PodNeed, PodUser},
    ledger_writers::LedgerWriters,
    pod_index::PodIndex,
    scaler_index::ScalerIndex,
};
use super::{
    KubernetesContext, ModelPlacement,
    engine_task::EngineTaskCommand,
    ledger_writer::LedgerChange,
    takeover::{EngineReservation, LedgerTakeover},
    work_queue::WorkQueue,
};
use crate::{
    cache::{Subscription, TermDelta},
    crd::ledger::ObjectName,
    engine_pod::EnginePod,
    kit::Terms,
    published::PublishedMailbox,
};

pub(super) use self::status_sync::PublishedIndex;

/// A request of an engine task or a scaler to the engine manager.
#[derive(Debug)]
pub(super) enum ManagerRequest {
    /// The Pod of this engine is bound: when that Pod is gone, the engine gets no other.
    Bound { engine: EngineId, generation: Generation },
    /// Release its Pod; `done` fires after the scale-down is applied and no surplus Pod remains.
    ReleasePod { engine: EngineId, generation: Generation, done: oneshot::Sender<()> },
    /// The engine's task has ended.
    Ended { engine: EngineId, generation: Generation },
    /// The API server refused this Deployment.
    DeploymentRefused { deployment: ObjectName, why: String },
    /// This Deployment was written, or was refused.
    DeploymentApplied { deployment: ObjectName },
    /// Change the ledger of this pool.
    ChangeLedger { pool: String, change: Box<LedgerChange> },
}

/// Inputs of the engine manager.
pub(super) struct ManagerInputs {
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) pods: Subscription<Pod>,
    pub(super) requests: mpsc::Receiver<ManagerRequest>,
    pub(super) published: Arc<PublishedMailbox>,
    pub(super) terms: Terms,
}

pub(super) struct EngineManager {
    pub(super) shared: Arc<KubernetesContext>,
    engines: EngineIndex<EngineTask>,
    pub(super) pods: PodIndex,
    scalers: ScalerIndex,
    ledger_writers: LedgerWriters,
    /// Deployments to scale once the takeover is complete.
    pending: BTreeMap<ObjectName, Arc<ModelPlacement>>,
    /// Placements of engines that have a reservation but are not launched yet.
    reserved: BTreeMap<EngineId, Arc<ModelPlacement>>,
    tasks: JoinSet<()>,
    /// Epoch of the term, while this gateway leads.
    term: Option<u64>,
    /// When this manager saw that the term, or the time without one, began.
    term_since: Tick,
    /// The takeover of this term's ledgers, until the takeover of the engines needs the outcome. Its drop ends it.
    ledger_takeover: Option<LedgerTakeover>,
    /// The takeover of this term has begun.
    term_begun: bool,
    /// The takeover is complete, and the manager executes commands.
    leading: bool,
    /// Reservations of models that are not served, by model, until the model's Pods are gone.
    orphans: BTreeMap<ObjectName, Vec<EngineReservation>>,
    pub(super) published: PublishedIndex,
    /// The placements of models were known at the last look.
    placements_known: bool,
    /// Namespaces whose Pods were listed in this term.
    listed_namespaces: BTreeSet<Option<String>>,
}

/// The manager's record of one engine generation.
struct EngineTask {
    generation: Generation,
    /// `None` for an external backend.
    placement: Option<Arc<ModelPlacement>>,
    /// `None` for an external backend.
    deployment: Option<ObjectName>,
    commands: WorkQueue<EngineTaskCommand>,
    pod: Option<ObjectName>,
    pod_sender: watch::Sender<Option<Arc<EnginePod>>>,
    bound: bool,
    release: PodRelease,
}

/// A release: the Deployment's version without the engine's Pod, and the sender that waits for that.
type PodRelease = Option<(u64, Option<oneshot::Sender<()>>)>;

impl PodUser for EngineTask {
    fn deployment(&self) -> Option<&ObjectName> {
        self.deployment.as_ref()
    }

    fn pod(&self) -> Option<&ObjectName> {
        self.pod.as_ref()
    }

    fn need(&self) -> PodNeed {
        match &self.release {
            Some(_) => PodNeed::Leaving,
            None if self.bound => PodNeed::Bound,
            None => PodNeed::Seeking,
        }
    }
}

impl EngineManager {
    pub(super) fn new(shared: Arc<KubernetesContext>) -> Self {
        Self {
            shared,
            engines: EngineIndex::default(),
            pods: PodIndex::default(),
            scalers: ScalerIndex::default(),
            ledger_writers: LedgerWriters::default(),
            pending: BTreeMap::new(),
            reserved: BTreeMap::new(),
            tasks: JoinSet::new(),
            term: None,
            term_since: Tick(0),
            ledger_takeover: None,
            term_begun: false,
            leading: false,
            orphans: BTreeMap::new(),
            published: PublishedIndex::default(),
            placements_known: false,
            listed_namespaces: BTreeSet::new(),
        }
    }

    /// Runs until the command sender is dropped.
    pub(super) async fn run(mut self, inputs: ManagerInputs) {
        let ManagerInputs { mut commands, mut pods, mut requests, published, mut terms } = inputs;
        let shared = Arc::clone(&self.shared);
        loop {
            let mut pod_change = None;
            tokio::select! {
                biased;
                changed = terms.changed() => {
                    if changed.is_err() {
                        break;
                    }
                }
                () = shared.placements_changed.notified() => self.placements_changed().await,
                // Before commands: the end of a generation is reported before the engine's next command is sent.
                Some(request) = requests.recv() => self.handle_request(request).await,
                command = commands.recv() => match command {
                    Some(command) => self.execute(command).await,
                    None => break,
                },
                change = pods.recv() => pod_change = Some(change),
                status = published.take() => self.apply_status(status).await,
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended
                        && !error.is_cancelled()
                    {
                        tracing::error!(%error, "an engine manager task panicked");
                    }
                }
            }
            // A term that began meanwhile comes first: the change may be of that term already.
            if let Some(term) = terms.take_change() {
                self.end_term().await;
                (self.term, self.term_since) = (term, shared.common.clock.now());
            }
            if let Some(TermDelta { epoch, delta }) = pod_change
                && self.term == Some(epoch)
            {
                self.apply(delta);
            }
            self.prepare_term();
            // A gateway that has not listed everything would take unseen Pods for gone.
            if let Some(epoch) = self.term.filter(|_| self.has_synced())
                && let Some(ledgers) = self.ledger_takeover.take()
            {
                self.term_begun = true;
                self.begin_term(epoch, ledgers, &mut commands, &published).await;
            }
        }
        self.tasks.shutdown().await;
    }

    /// Handles a change of the placements of models.
    async fn placements_changed(&mut self) {
        let first = !std::mem::replace(&mut self.placements_known, true);
        if self.leading {
            self.placements_changed_while_leading();
        } else if first {
            self.forward_all().await;
        }
    }

    async fn handle_request(&mut self, request: ManagerRequest) {
        match request {
            ManagerRequest::Bound { engine, generation } => {
                self.change_engine(&engine, generation, |task| task.bound = true);
            }
            ManagerRequest::ReleasePod { engine, generation, done } => {
                self.release_pod(&engine, generation, done);
            }
            ManagerRequest::Ended { engine, generation } => {
                if self.engine(&engine, generation).is_some()
                    && let Some(deployment) = self.engines.remove(&engine).and_then(|task| task.deployment)
                {
                    self.end_unused_scaler(&deployment);
                }
            }
            ManagerRequest::DeploymentRefused { deployment, why } => {
                self.deployment_refused(&deployment, &why).await
            }
            ManagerRequest::DeploymentApplied { deployment } => {
                self.complete_releases(&deployment);
                self.end_unused_scaler(&deployment);
            }
            ManagerRequest::ChangeLedger { pool, change } => self.change_pool_ledger(&pool, *change),
        }
    }

    /// The epoch of the term in which this gateway leads.
    pub(super) fn epoch(&self) -> Epoch {
        self.term.unwrap_or_default()
    }

    /// Returns the record of this engine generation, if the engine has no other.
    fn engine(&self, engine: &EngineId, generation: Generation) -> Option<&EngineTask> {
        self.engines.get(engine).filter(|task| task.generation == generation)
    }

    /// Changes the record of this engine generation, if the engine has no other.
    fn change_engine(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        change: impl FnOnce(&mut EngineTask),
    ) {
        if self.engine(engine, generation).is_some() {
            self.engines.change(engine, change);
        }
    }
}
