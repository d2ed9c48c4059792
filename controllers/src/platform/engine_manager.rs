//! Manages all engine tasks of a cluster; this one task decides which engine gets which Pod.
//!
//! Pods of a Deployment have generated names. So this task decides which engine runs in which Pod, and writes that to
//! the Pod before anything else happens with the Pod. Commands, Pod changes and requests of engine tasks all arrive at
//! this task alone. Slow work happens in other tasks (`engine_task`, `deployment_scaler`, `ledger_writer`).
//!
//! Engine tasks exist only while this gateway leads. When it acquires the Lease, it takes over what it finds
//! (`takeover`). When it loses the Lease, it drops engine tasks, scalers and ledger writers as they are.

mod launch;
mod orphans;
mod pod_assignment;
mod status_sync;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    fault::FailureCause,
    fleet::{
        command::Command,
        event::{CanaryVerdict, Event},
    },
    model::{EngineId, SleepLevel},
    units::{Bytes, Generation},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time,
};

use super::{
    KubernetesContext, ModelPlacement,
    deployment_scaler::DesiredDeployment,
    engine_task::{EngineTaskCommand, RetryBackoff},
    ledger_writer::{self, LedgerChange},
    takeover::{self, EngineReservation},
};
use crate::{
    crd::ledger::ObjectName,
    election::Leadership,
    engine_pod::{self, EnginePod},
    ledger::SleepingMemory,
    published::PublishedModel,
    watch::{self as watches, Delta},
};

/// Maximum number of tries to list a namespace's Pods, and the timeout of each.
const MAX_LIST_TRIES: u32 = 10;
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Low bits of a generation, below its leader's epoch: an engine can have 2^16 generations under one leader.
const GENERATION_BITS: u32 = 16;

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
    /// A Deployment was written, or was refused.
    DeploymentApplied,
    /// The placements of models are known for the first time.
    PlacementsSet,
    /// Change the ledger of this pool.
    ChangeLedger { pool: String, change: LedgerChange },
}

/// Inputs of the engine manager.
pub(super) struct ManagerInputs {
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    pub(super) pods: mpsc::Receiver<Delta<Pod>>,
    pub(super) requests: mpsc::UnboundedReceiver<ManagerRequest>,
    pub(super) published: mpsc::UnboundedReceiver<PublishedModel>,
    pub(super) leadership: watch::Receiver<Option<Leadership>>,
}

pub(super) struct EngineManager {
    pub(super) shared: Arc<KubernetesContext>,
    pub(super) engines: BTreeMap<EngineId, EngineTask>,
    pub(super) pods: BTreeMap<ObjectName, Arc<EnginePod>>,
    pub(super) scalers: BTreeMap<ObjectName, DeploymentScaler>,
    ledger_writers: BTreeMap<String, mpsc::UnboundedSender<LedgerChange>>,
    /// Deployments to scale once the takeover is complete.
    pending: BTreeMap<ObjectName, Arc<ModelPlacement>>,
    /// Placements of engines that have a reservation but are not launched yet.
    reserved: BTreeMap<EngineId, Arc<ModelPlacement>>,
    pub(super) tasks: JoinSet<()>,
    requests: mpsc::UnboundedSender<ManagerRequest>,
    /// The takeover is complete, and the manager executes commands.
    leading: bool,
    /// UIDs of Pods that no engine needed and that were already given up.
    surplus_pods: BTreeSet<String>,
    /// Reservations of models that are not served, until their Pods are gone.
    pub(super) orphans: Vec<EngineReservation>,
    /// Published statuses, by InferenceModel.
    pub(super) published: BTreeMap<ObjectName, PublishedModel>,
    /// Namespaces whose Pods were listed.
    listed_namespaces: BTreeSet<Option<String>>,
}

/// The manager's record of one engine generation.
pub(super) struct EngineTask {
    generation: Generation,
    /// `None` for an external backend.
    placement: Option<Arc<ModelPlacement>>,
    deployment: ObjectName,
    commands: mpsc::UnboundedSender<EngineTaskCommand>,
    pod: Option<ObjectName>,
    pod_sender: watch::Sender<Option<Arc<EnginePod>>>,
    bound: bool,
    release: PodRelease,
}

/// A release: the Deployment's version without the engine's Pod, and the sender that waits for that.
type PodRelease = Option<(u64, Option<oneshot::Sender<()>>)>;

/// The manager's record of one Deployment.
pub(super) struct DeploymentScaler {
    /// Model label and template hash of its Pods.
    model: String,
    template_hash: String,
    desired: watch::Sender<DesiredDeployment>,
    applied: watch::Receiver<u64>,
}

impl EngineManager {
    pub(super) fn new(
        shared: Arc<KubernetesContext>,
        requests: mpsc::UnboundedSender<ManagerRequest>,
    ) -> Self {
        Self {
            shared,
            engines: BTreeMap::new(),
            pods: BTreeMap::new(),
            scalers: BTreeMap::new(),
            ledger_writers: BTreeMap::new(),
            pending: BTreeMap::new(),
            reserved: BTreeMap::new(),
            tasks: JoinSet::new(),
            requests,
            leading: false,
            surplus_pods: BTreeSet::new(),
            orphans: Vec::new(),
            published: BTreeMap::new(),
            listed_namespaces: BTreeSet::new(),
        }
    }

    /// Runs until the command sender is dropped.
    pub(super) async fn run(mut self, inputs: ManagerInputs) {
        let ManagerInputs { mut commands, mut pods, mut requests, mut published, leadership: mut claim } =
            inputs;
        let mut epoch = None;
        loop {
            tokio::select! {
                biased;
                changed = claim.changed() => {
                    if changed.is_err() {
                        break;
                    }
                }
                // Before commands: the end of a generation is reported before the engine's next command is sent.
                Some(request) = requests.recv() => self.handle_request(request).await,
                command = commands.recv() => match command {
                    Some(command) => self.execute(command).await,
                    None => break,
                },
                Some(change) = pods.recv() => self.apply(change),
                Some(said) = published.recv() => self.apply_status(said).await,
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended
                        && !error.is_cancelled()
                    {
                        tracing::error!(%error, "an engine manager task panicked");
                    }
                }
            }
            let claimed = claim.borrow_and_update().filter(Leadership::is_valid).map(|claim| claim.epoch);
            // A gateway that has not listed everything would take unseen Pods for gone.
            let now = claimed.filter(|_| epoch.is_some() || self.has_synced());
            if now != epoch {
                epoch = now;
                self.change_leadership(now, &mut commands, &mut published).await;
            }
        }
        self.tasks.shutdown().await;
    }

    fn has_synced(&self) -> bool {
        self.shared.has_placements()
            && self.shared.namespaces.iter().all(|namespace| self.listed_namespaces.contains(namespace))
    }

    /// Starts or ends leading. `epoch` is `None` when this gateway no longer leads.
    async fn change_leadership(
        &mut self,
        epoch: Option<u64>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        published: &mut mpsc::UnboundedReceiver<PublishedModel>,
    ) {
        let leads = epoch.is_some();
        self.leading = false;
        self.tasks.shutdown().await;
        let own_engines: Vec<(EngineId, Generation)> =
            self.engines.iter().map(|(id, task)| (id.clone(), task.generation)).collect();
        self.engines.clear();
        self.scalers.clear();
        self.ledger_writers.clear();
        self.reserved.clear();
        self.pending.clear();
        self.surplus_pods.clear();
        self.orphans.clear();
        // Sent even between two successive terms of this gateway: work of the first term has ended.
        self.shared.common.send_event(Event::LeadershipChanged { leads: false }).await;
        if let Some(epoch) = epoch {
            // A gateway that leads right after its start may not have processed the former leader's statuses yet. They
            // show which engines serve.
            while let Ok(published_model) = published.try_recv() {
                self.apply_status(published_model).await;
            }
            self.forward_all().await;
            self.shared.common.send_event(Event::LeadershipChanged { leads }).await;
            // Generations from before this epoch, unknown to any current gateway, are older.
            let generation = Generation(epoch << GENERATION_BITS);
            self.shared.common.send_event(Event::GenerationFloor { generation }).await;
            self.relist_pods().await;
            takeover::take_over(self).await;
            // Commands from before the takeover did not know what runs. Only `AwaitStub` still applies.
            let mut holds = Vec::new();
            while let Ok(command) = commands.try_recv() {
                holds.extend(Some(command).filter(|command| matches!(command, Command::AwaitStub { .. })));
            }
            self.shared.common.send_event(Event::AdoptionDone).await;
            self.leading = true;
            for done in holds {
                self.execute(done).await;
            }
            for (deployment, placement) in std::mem::take(&mut self.pending) {
                self.update_replicas(&deployment, Some(placement));
                self.assign(&deployment);
            }
        } else {
            self.forward_all().await;
            // Engines that this gateway had begun and no status mentions do not run.
            for (engine, generation) in
                own_engines.into_iter().filter(|(engine, _)| !self.is_published(engine))
            {
                self.shared.common.send_event(Event::Published { engine, generation, published: None }).await;
            }
        }
    }

    /// Lists all Pods again before the takeover: a watch may have been cut unnoticed.
    async fn relist_pods(&mut self) {
        for namespace in self.shared.namespaces.clone() {
            let pods = engine_pod::watch_target(&self.shared.client, namespace);
            let mut pauses = RetryBackoff::new();
            for _ in 0..MAX_LIST_TRIES {
                match time::timeout(LIST_TIMEOUT, watches::list(&pods)).await {
                    Ok(Ok(all)) => {
                        self.apply(all);
                        break;
                    }
                    Ok(Err(_))
                        if pods
                            .namespace
                            .as_ref()
                            .is_some_and(|n| self.shared.initial_lists.is_skipped(n)) =>
                    {
                        break;
                    }
                    Ok(Err(error)) => tracing::warn!(%error, "Pod list failed, retrying"),
                    Err(_) => tracing::warn!("Pod list timed out, retrying"),
                }
                pauses.pause().await;
            }
        }
    }

    async fn execute(&mut self, command: Command) {
        if !self.leading {
            return;
        }
        match command {
            Command::Reserve { engine, generation, .. } => self.reserve(engine, generation).await,
            Command::Shrink { engine, bytes: Bytes::ZERO, .. } => {
                if let Some(placement) = self.reserved.remove(&engine) {
                    let model = placement.owner.object.clone();
                    self.change_ledger(
                        &placement,
                        LedgerChange::Release { model, replica: engine.replica, done: None },
                    );
                }
            }
            Command::Shrink { engine, generation, bytes, host } => {
                if let Some(placement) =
                    self.engine_task(&engine, generation).and_then(|task| task.placement.clone())
                {
                    let bytes = Bytes(
                        bytes.0.div_ceil(u64::from(placement.variant.spec.accelerators.count().max(1))),
                    );
                    let (model, keeps) =
                        (placement.owner.object.clone(), SleepingMemory { bytes, host_bytes: host });
                    self.change_ledger(
                        &placement,
                        LedgerChange::MarkAsleep { model, replica: engine.replica, sleeping_memory: keeps },
                    );
                }
            }
            Command::Launch { engine, generation, .. } => self.launch(engine, generation).await,
            Command::Probe { engine, generation } => {
                self.send_command(engine, generation, EngineTaskCommand::Probe).await
            }
            Command::AwaitStub { engine, generation } => {
                self.send_command(engine, generation, EngineTaskCommand::Hold).await
            }
            Command::CloseGate { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::CloseGate).await;
            }
            Command::OpenGate { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::OpenGate).await;
            }
            Command::RevokeLeases { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::Revoke).await
            }
            Command::Stop { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::Stop).await
            }
            Command::Sleep { engine, generation, level } => {
                self.send_command(engine, generation, EngineTaskCommand::Sleep(level)).await;
            }
            Command::Wake { engine, generation, level } => {
                self.send_command(engine, generation, EngineTaskCommand::Wake(level)).await;
            }
            // A pool has no meter to read on demand. The driver handles the others.
            Command::ReadMeter { .. }
            | Command::Grant { .. }
            | Command::Refuse { .. }
            | Command::FinishOperation { .. } => {}
        }
    }

    async fn reserve(&mut self, engine: EngineId, generation: Generation) {
        if self.shared.external(&engine.model).is_some() {
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        }
        let task_placement = self.engine_task(&engine, generation).and_then(|task| task.placement.clone());
        let sleeps = task_placement.is_some();
        let Some(placement) = task_placement.or_else(|| self.shared.placement(&engine.model)) else {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        };
        let Some(request) = placement.reservation_request(engine.replica) else {
            // The engine takes no memory of any pool.
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        };
        if sleeps {
            let keeps = Some(placement.sleeping_memory(SleepLevel::One));
            return self.change_ledger(
                &placement,
                LedgerChange::Reserve { engine, generation, request, sleeping_memory: keeps },
            );
        }
        // The engine's former reservation lasts until the engine is seen gone. A new reservation would share it and
        // vanish with it.
        let had = |entry: &EngineReservation| {
            entry.model == placement.owner.object && entry.replica == engine.replica
        };
        if self.engines.contains_key(&engine) || self.orphans.iter().any(had) {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        }
        self.reserved.insert(engine.clone(), Arc::clone(&placement));
        self.change_ledger(
            &placement,
            LedgerChange::Reserve { engine, generation, request, sleeping_memory: None },
        );
    }

    /// Sends a change to this pool's ledger writer.
    fn change_ledger(&mut self, placement: &ModelPlacement, entry: LedgerChange) {
        let Some(pool) = placement.pool.clone() else { return };
        self.ledger_writer(&pool).send(entry).unwrap_or_default();
    }

    /// Returns this pool's ledger writer; starts one on first use.
    pub(super) fn ledger_writer(&mut self, pool: &str) -> mpsc::UnboundedSender<LedgerChange> {
        if let Some(known) = self.ledger_writers.get(pool) {
            return known.clone();
        }
        let (entries, received) = mpsc::unbounded_channel();
        self.tasks.spawn(ledger_writer::run(Arc::clone(&self.shared), pool.to_owned(), received));
        self.ledger_writers.insert(pool.to_owned(), entries.clone());
        entries
    }

    /// Sends a command to an engine task. If that generation has ended, sends the outcome of a vanished engine instead.
    async fn send_command(&mut self, engine: EngineId, generation: Generation, command: EngineTaskCommand) {
        let task = self.engines.get(&engine).filter(|task| task.generation == generation);
        if task.is_some_and(|task| task.commands.send(command).is_ok()) {
            return;
        }
        let outcome = match command {
            EngineTaskCommand::Probe => Event::Canary {
                engine,
                generation,
                verdict: CanaryVerdict::Failed(FailureCause::Unreachable),
            },
            EngineTaskCommand::CloseGate | EngineTaskCommand::Revoke => Event::Drained { engine, generation },
            EngineTaskCommand::Sleep(_) => {
                Event::SleepFailed { engine, generation, cause: FailureCause::Unreachable }
            }
            EngineTaskCommand::Wake(_) => {
                Event::WakeFailed { engine, generation, cause: FailureCause::Unreachable }
            }
            EngineTaskCommand::Stop => Event::Gone { engine, generation, cause: FailureCause::Stopped },
            EngineTaskCommand::Hold | EngineTaskCommand::OpenGate => return,
        };
        self.shared.common.send_event(outcome).await;
    }

    async fn handle_request(&mut self, request: ManagerRequest) {
        match request {
            ManagerRequest::Bound { engine, generation } => {
                if let Some(task) = self.engine_task(&engine, generation) {
                    task.bound = true;
                }
            }
            ManagerRequest::ReleasePod { engine, generation, done } => {
                let Some(task) = self.engine_task(&engine, generation) else { return };
                task.release = Some((u64::MAX, Some(done)));
                let deployment = task.deployment.clone();
                let version = self.update_replicas(&deployment, None);
                if let Some((from, _)) =
                    self.engine_task(&engine, generation).and_then(|task| task.release.as_mut())
                {
                    *from = version;
                }
                self.complete_releases();
            }
            ManagerRequest::Ended { engine, generation } => {
                if self.engine_task(&engine, generation).is_some() {
                    self.engines.remove(&engine);
                }
            }
            ManagerRequest::DeploymentRefused { deployment, why } => {
                self.deployment_refused(&deployment, &why).await
            }
            ManagerRequest::DeploymentApplied => self.complete_releases(),
            ManagerRequest::PlacementsSet if self.leading => {}
            ManagerRequest::PlacementsSet => self.forward_all().await,
            ManagerRequest::ChangeLedger { pool, change: entry } => {
                self.ledger_writer(&pool).send(entry).unwrap_or_default();
            }
        }
    }

    fn engine_task(&mut self, engine: &EngineId, generation: Generation) -> Option<&mut EngineTask> {
        self.engines.get_mut(engine).filter(|task| task.generation == generation)
    }
}
