//! Who keeps the lives of a cluster's engines: the one task that knows which Pod is whose.
//!
//! Pods of a Deployment have names that nobody chose, so which engine runs in which is decided here, by one task, and
//! written to the Pod before anything is done with it. Commands, what is seen of Pods, and what lives ask for come on three
//! channels to this task alone; whatever takes time is done by others (`life`, `deployment_scaler`, `ledger_writer`).
//!
//! All of it exists only while this gateway leads. When it gets the lease it takes over what it finds (`takeover`); when it
//! loses it, lives, crews and clerks are dropped as they are.

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
use crate::controllers::{
    crd::ledger::ObjectName,
    election::Leadership,
    engine_pod::{self, EnginePod},
    ledger::SleepingMemory,
    published::PublishedModel,
    watch::{self as watches, Delta},
};

/// So often the Pods of a namespace are asked for, and so long it may take.
const MAX_LIST_TRIES: u32 = 10;
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bits of a generation below those of its leader's epoch: so many lives can one engine have under one leader.
const GENERATION_BITS: u32 = 16;

/// What a life or a crew wants of the steward.
#[derive(Debug)]
pub(super) enum ManagerRequest {
    /// The Pod that it was given is its own from now on: when that goes, it gets no other.
    Bound { engine: EngineId, generation: Generation },
    /// No Pod is to be kept for it; `done`, once that is written and no Pod is left that could be its own and is not.
    ReleasePod { engine: EngineId, generation: Generation, done: oneshot::Sender<()> },
    /// It is over.
    Ended { engine: EngineId, generation: Generation },
    /// The API server does not take this Deployment.
    DeploymentRefused { deployment: ObjectName, why: String },
    /// A Deployment was written.
    DeploymentApplied,
    /// It is known for the first time where models run.
    PlacementsSet,
    /// Something for the ledger of this pool.
    ChangeLedger { pool: String, change: LedgerChange },
}

/// Where the steward hears from.
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
    /// Deployments whose numbers are to be written once everything is taken over.
    pending: BTreeMap<ObjectName, Arc<ModelPlacement>>,
    /// Where engines that are not launched yet have something booked.
    reserved: BTreeMap<EngineId, Arc<ModelPlacement>>,
    pub(super) tasks: JoinSet<()>,
    requests: mpsc::UnboundedSender<ManagerRequest>,
    /// Its place in the cluster was taken over: commands are carried out.
    leading: bool,
    /// Pods that were nobody's and were given up, by their uids.
    surplus_pods: BTreeSet<String>,
    /// What is booked for models that are not served, until their Pods are gone.
    pub(super) orphans: Vec<EngineReservation>,
    /// What statuses say.
    pub(super) published: BTreeMap<ObjectName, PublishedModel>,
    /// Namespaces whose Pods were listed.
    listed_namespaces: BTreeSet<Option<String>>,
}

/// One life, as the steward knows it.
pub(super) struct EngineTask {
    generation: Generation,
    /// `None` of a backend.
    placement: Option<Arc<ModelPlacement>>,
    deployment: ObjectName,
    commands: mpsc::UnboundedSender<EngineTaskCommand>,
    pod: Option<ObjectName>,
    pod_sender: watch::Sender<Option<Arc<EnginePod>>>,
    bound: bool,
    release: PodRelease,
}

/// From which version of its Deployment no Pod is kept for it, and who waits for that.
type PodRelease = Option<(u64, Option<oneshot::Sender<()>>)>;

/// One Deployment.
pub(super) struct DeploymentScaler {
    /// Its Pods' labels.
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

    /// Until nobody can give commands any more.
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
                // Before commands: that a life is over was said before its engine was given the next one.
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
                        tracing::error!(%error, "a task of the platform died");
                    }
                }
            }
            let claimed = claim.borrow_and_update().filter(Leadership::is_valid).map(|claim| claim.epoch);
            // Whoever has not seen everything would take what it has not seen for gone.
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

    /// This gateway leads from now on, or does no longer.
    async fn change_leadership(
        &mut self,
        epoch: Option<u64>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        published: &mut mpsc::UnboundedReceiver<PublishedModel>,
    ) {
        let leads = epoch.is_some();
        self.leading = false;
        self.tasks.shutdown().await;
        let own: Vec<(EngineId, Generation)> =
            self.engines.iter().map(|(id, life)| (id.clone(), life.generation)).collect();
        self.engines.clear();
        self.scalers.clear();
        self.ledger_writers.clear();
        self.reserved.clear();
        self.pending.clear();
        self.surplus_pods.clear();
        self.orphans.clear();
        // Also between two leads that followed each other at once: what was under way in the first is over.
        self.shared.common.send_event(Event::LeadershipChanged { leads: false }).await;
        if let Some(epoch) = epoch {
            // Who comes to lead as soon as it begins may not have looked at what the former leader said of engines, by which it
            // knows those that serve.
            while let Ok(said) = published.try_recv() {
                self.apply_status(said).await;
            }
            self.forward_all().await;
            self.shared.common.send_event(Event::LeadershipChanged { leads }).await;
            // Lives that no gateway of today has heard of are older.
            let generation = Generation(epoch << GENERATION_BITS);
            self.shared.common.send_event(Event::GenerationFloor { generation }).await;
            self.relist_pods().await;
            takeover::take_over(self).await;
            // What was ordered before it was heard what runs was meant for another world, but for looking after a stub.
            let mut holds = Vec::new();
            while let Ok(command) = commands.try_recv() {
                holds.extend(Some(command).filter(|command| matches!(command, Command::AwaitStub { .. })));
            }
            self.shared.common.send_event(Event::AdoptionDone).await;
            self.leading = true;
            for hold in holds {
                self.execute(hold).await;
            }
            for (deployment, place) in std::mem::take(&mut self.pending) {
                self.update_replicas(&deployment, Some(place));
                self.assign(&deployment);
            }
        } else {
            self.forward_all().await;
            // What this gateway had begun and nobody speaks of is nothing that runs.
            for (engine, generation) in own.into_iter().filter(|(engine, _)| !self.is_published(engine)) {
                self.shared.common.send_event(Event::Published { engine, generation, published: None }).await;
            }
        }
    }

    /// What runs is taken over as it is now. A watch may have been cut without anybody's notice.
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
                    Ok(Err(error)) => tracing::warn!(%error, "the Pods were not listed; it is tried again"),
                    Err(_) => tracing::warn!("the Pods were not listed in time; it is tried again"),
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
                if let Some(place) = self.reserved.remove(&engine) {
                    let model = place.owner.object.clone();
                    self.change_ledger(
                        &place,
                        LedgerChange::Release { model, replica: engine.replica, done: None },
                    );
                }
            }
            Command::Shrink { engine, generation, bytes, host } => {
                if let Some(place) =
                    self.engine_task(&engine, generation).and_then(|life| life.placement.clone())
                {
                    let bytes =
                        Bytes(bytes.0.div_ceil(u64::from(place.variant.spec.accelerators.count().max(1))));
                    let (model, keeps) =
                        (place.owner.object.clone(), SleepingMemory { bytes, host_bytes: host });
                    self.change_ledger(
                        &place,
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
            // No meter of a pool is read at once; the rest is the driver's.
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
        let own = self.engine_task(&engine, generation).and_then(|life| life.placement.clone());
        let sleeps = own.is_some();
        let Some(place) = own.or_else(|| self.shared.placement(&engine.model)) else {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        };
        let Some(wanted) = place.reservation_request(engine.replica) else {
            // It takes no memory of any pool.
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        };
        if sleeps {
            let keeps = Some(place.sleeping_memory(SleepLevel::One));
            return self.change_ledger(
                &place,
                LedgerChange::Reserve { engine, generation, request: wanted, sleeping_memory: keeps },
            );
        }
        // What it had before is its own until that is seen gone: it would share that booking, and lose it with it.
        let had =
            |entry: &EngineReservation| entry.model == place.owner.object && entry.replica == engine.replica;
        if self.engines.contains_key(&engine) || self.orphans.iter().any(had) {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        }
        self.reserved.insert(engine.clone(), Arc::clone(&place));
        self.change_ledger(
            &place,
            LedgerChange::Reserve { engine, generation, request: wanted, sleeping_memory: None },
        );
    }

    /// To the one who changes this pool's ledger.
    fn change_ledger(&mut self, place: &ModelPlacement, entry: LedgerChange) {
        let Some(pool) = place.pool.clone() else { return };
        self.ledger_writer(&pool).send(entry).unwrap_or_default();
    }

    /// Who changes this pool's ledger; hired when first needed.
    pub(super) fn ledger_writer(&mut self, pool: &str) -> mpsc::UnboundedSender<LedgerChange> {
        if let Some(known) = self.ledger_writers.get(pool) {
            return known.clone();
        }
        let (entries, received) = mpsc::unbounded_channel();
        self.tasks.spawn(ledger_writer::run(Arc::clone(&self.shared), pool.to_owned(), received));
        self.ledger_writers.insert(pool.to_owned(), entries.clone());
        entries
    }

    /// An order to a life that is over has the outcome that it has for something that is gone.
    async fn send_command(&mut self, engine: EngineId, generation: Generation, order: EngineTaskCommand) {
        let life = self.engines.get(&engine).filter(|life| life.generation == generation);
        if life.is_some_and(|life| life.commands.send(order).is_ok()) {
            return;
        }
        let outcome = match order {
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
                if let Some(life) = self.engine_task(&engine, generation) {
                    life.bound = true;
                }
            }
            ManagerRequest::ReleasePod { engine, generation, done } => {
                let Some(life) = self.engine_task(&engine, generation) else { return };
                life.release = Some((u64::MAX, Some(done)));
                let deployment = life.deployment.clone();
                let version = self.update_replicas(&deployment, None);
                if let Some((from, _)) =
                    self.engine_task(&engine, generation).and_then(|life| life.release.as_mut())
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
        self.engines.get_mut(engine).filter(|life| life.generation == generation)
    }
}
