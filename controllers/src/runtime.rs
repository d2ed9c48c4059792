//! Runs a gateway in a cluster: its watches, its election, and the platform of its engines.

mod pairing_watches;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::Client;
use rouse::{fleet::event::Event, model::ModelName, units::Millis};
use rouse_config::{Config, ShutdownConfig, WatchedNamespaces as Namespaces};
use rouse_net::lease::TickClock;
use rouse_platform::{DriverClient, ReadinessCheck};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{AbortHandle, JoinHandle, JoinSet},
    time,
};

use crate::{
    compose,
    convert::{ConversionPolicy, ModelHosting},
    crd::ledger::ObjectName,
    dual_pods,
    election::{Election, KubeLeaseStore},
    engine_pod,
    gateway_replica::{self, DemandReporter},
    index::{ClusterIndex, Resolved, ServedModel, WatchScope},
    ledger::PoolLedger,
    metrics::ControllerMetrics,
    model_controller::{self, ModelController},
    own_pod::OwnPod,
    platform::{
        ExternalBackend, ExternalBackends, KubernetesDependencies, KubernetesPlatform, ModelPlacement,
        ModelPlacements, dcgm::DcgmClient,
    },
    recorder::EventRecorder,
    status_inputs::StatusInputs,
    status_writer::StatusWriter,
    stub_key::StubKey,
    watch::{Delta, InitialLists, WatchTarget, watch as follow},
    workload::Sidecar,
    writer::ObjectWriter,
};

/// A change that concerns a gateway in a cluster as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterChange {
    /// The meaning of the objects changed.
    ObjectsChanged,
    /// A vital task ended, such as the one that holds the Lease: this gateway would miss a new leader and must stop.
    TaskEnded,
}

/// Name of the Lease that the leader holds.
const LEASE_NAME: &str = "rouse-controller";
/// Capacity of the platform's queue of Pod changes; further changes wait at the API server.
const POD_QUEUE_CAPACITY: usize = 1024;
/// Capacity of the queue of GatewayReplica changes.
const REPLICA_QUEUE_CAPACITY: usize = 64;
/// How often the log repeats which lists the API server has not returned yet.
const SYNC_WARN_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between attempts to read the stub key, which the gateway cannot do without.
const STUB_KEY_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A gateway's part in a cluster: its watches, controllers, election and platform.
pub struct ClusterRuntime {
    pub platform: Arc<KubernetesPlatform>,
    /// Present while this gateway takes part in the election.
    election: Option<Election>,
    writer: ObjectWriter,
    /// Releases the Lease.
    release_task: Option<JoinHandle<()>>,
    /// Writes this gateway's own GatewayReplica.
    demand_report_task: Option<AbortHandle>,
    resolved: watch::Receiver<Option<Arc<Resolved>>>,
    /// The objects that [`Self::compose`] used last, and where their models run.
    last_composed: (Arc<Resolved>, Arc<ModelPlacements>),
    initial_lists: InitialLists,
    tasks: JoinSet<()>,
    client: Client,
    sidecar: Sidecar,
    status_inputs: Arc<StatusInputs>,
    /// The name by which other gateways know this one, and its namespace.
    name: String,
    namespace: String,
    pod: OwnPod,
}

impl ClusterRuntime {
    /// Starts all watches and controllers.
    ///
    /// Engine events arrive on `events` once [`Self::wait_until_synced`] has returned and [`Self::compose`] has run.
    pub async fn start(
        config: &Arc<Config>,
        settings: &rouse_config::KubernetesConfig,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        metrics: &ControllerMetrics,
    ) -> anyhow::Result<Self> {
        let client = Client::try_default().await.context(
            "cannot find the Kubernetes API: run in a Pod with a service account, or set KUBECONFIG",
        )?;
        let reached = client.clone();
        let own_namespace =
            settings.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let namespaces: Vec<Option<String>> = match &settings.watched_namespaces {
            Namespaces::Own => vec![Some(own_namespace.clone())],
            Namespaces::Named(names) => names.iter().cloned().map(Some).collect(),
            Namespaces::All => vec![None],
        };
        let name = settings.name.clone().map_or_else(hostname, Ok)?;
        let key = stub_key(&client, &own_namespace).await?;
        let pod = OwnPod::find(client.clone(), &own_namespace, &name, settings.pod_uid.as_deref()).await;
        warn_if_grace_exceeds_pod(&config.shutdown, &pod);
        let dcgm = settings.prometheus.clone();
        let dcgm = dcgm
            .map(|asked| DcgmClient::new(asked, clock, metrics.meter_reads.clone()).map(Arc::new))
            .transpose()?;
        let mut tasks = JoinSet::new();
        let (resolved_tx, resolved) = watch::channel(None);
        let dual = settings.dual_pods;
        let policy =
            ConversionPolicy { any_backend: settings.any_backend, dual_pods: dual.map(|dual| dual.mode) };
        let lists = namespaces.iter().collect::<BTreeSet<_>>().len();
        let awaited = InitialLists::default();
        let deltas = model_controller::watch_all(&client, &namespaces, true, &awaited, &mut tasks);
        let pods = watch_pods(&client, &namespaces, &awaited, &mut tasks);
        // A restarted container is a new candidate and needs a new identity.
        let identity = format!("{name}_{}", Timestamp::now().as_nanosecond());
        let election =
            Election::start(KubeLeaseStore::new(client.clone(), &own_namespace, LEASE_NAME), identity);
        let pool_ledger = PoolLedger::new(client.clone(), election.leadership());
        let writer = ObjectWriter::new(election.leadership(), metrics.writes.clone());
        let status_inputs = Arc::new(StatusInputs::default());
        let (published_tx, published) = mpsc::unbounded_channel();
        let (event_sender, recorder) = EventRecorder::new(client.clone(), writer.clone(), name.clone());
        tasks.spawn(recorder.run());
        let model_controller = ModelController {
            index: ClusterIndex::new(WatchScope { policy, nodes: true, namespaces: lists }),
            deltas,
            status_inputs: Arc::clone(&status_inputs),
            leadership: election.leadership(),
            status_writer: StatusWriter::new(
                client.clone(),
                writer.clone(),
                pool_ledger.clone(),
                clock,
                event_sender.clone(),
            ),
            published: published_tx,
            last_published: BTreeMap::new(),
            resolved: resolved_tx,
        };
        tasks.spawn(model_controller.run());
        if let Some(dual) = &settings.dual_pods {
            let seen = pairing_watches::watch(&client, &namespaces, &own_namespace, &awaited, &mut tasks);
            tasks.spawn(dual_pods::PairingController::run(dual_pods::PairingControllerParts {
                client: client.clone(),
                writer: writer.clone(),
                claim: election.leadership(),
                clock,
                settings: pairing_watches::settings(dual, key.clone()),
                watches: seen,
                resolved: resolved.clone(),
                metrics: metrics.dual_pods.clone(),
                events: event_sender,
                meter: dcgm.clone(),
            }));
        }
        let sidecar = Sidecar {
            image: settings.stub_image.clone(),
            pull_policy: settings.stub_pull_policy.clone(),
            key,
            timing: dual.map(|dual| dual.timing).unwrap_or_default(),
        };
        let writes = writer.clone();
        let dependencies = KubernetesDependencies {
            pool_ledger,
            writer,
            status_inputs: Arc::clone(&status_inputs),
            published,
            leadership: election.leadership(),
            sidecar: sidecar.clone(),
            namespaces,
            initial_lists: awaited.clone(),
            pods,
            client,
            dcgm,
            readings: metrics.meter_reads.clone(),
        };
        let platform = Arc::new(KubernetesPlatform::start(Arc::clone(config), events, clock, dependencies));
        let placed = Default::default();
        Ok(Self {
            platform,
            election: Some(election),
            writer: writes,
            release_task: None,
            demand_report_task: None,
            resolved,
            last_composed: placed,
            initial_lists: awaited,
            tasks,
            client: reached,
            sidecar,
            status_inputs,
            name,
            namespace: own_namespace,
            pod,
        })
    }

    /// Reports which lists are still missing; `None` once all have arrived.
    pub fn not_ready_reason(&self) -> Arc<ReadinessCheck> {
        let (resolved, awaited) = (self.resolved.clone(), self.initial_lists.clone());
        Arc::new(move || {
            let waits = resolved.borrow().is_none();
            waits.then(|| format!("waiting for lists from the API server: {awaited}"))
        })
    }

    /// Reports what the gateway runs without, because it may not read it.
    pub fn degraded_reason(&self) -> Arc<ReadinessCheck> {
        let awaited = self.initial_lists.clone();
        Arc::new(move || awaited.skipped_message().map(|lists| format!("this gateway may not read {lists}")))
    }

    /// Returns once all objects to serve have arrived.
    pub async fn wait_until_synced(&mut self) {
        let mut every = time::interval_at(time::Instant::now() + SYNC_WARN_INTERVAL, SYNC_WARN_INTERVAL);
        loop {
            tokio::select! {
                // The sender outlives this call.
                _ = self.resolved.wait_for(Option::is_some) => return,
                _ = every.tick() => {
                    let awaited = &self.initial_lists;
                    tracing::warn!(%awaited, "still waiting for lists of models, pools and nodes from the API server");
                }
            }
        }
    }

    pub async fn next_event(&mut self) -> ClusterChange {
        let Some(election) = &mut self.election else { return std::future::pending().await };
        tokio::select! {
            changed = self.resolved.changed() => match changed {
                Ok(()) => ClusterChange::ObjectsChanged,
                Err(_) => ClusterChange::TaskEnded,
            },
            () = election.ended() => ClusterChange::TaskEnded,
        }
    }

    /// Reports this gateway's demand to other gateways, and their demand to the driver.
    pub fn start_reporting(&mut self, handle: &impl DriverClient, api: SocketAddr) {
        let replica = DemandReporter {
            client: self.client.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            pod_uid: self.pod.uid().map(str::to_owned),
            address: api.to_string(),
            handle: handle.clone(),
            status_inputs: Arc::clone(&self.status_inputs),
            initial_lists: self.initial_lists.clone(),
        };
        let (first_report_tx, written) = oneshot::channel();
        self.demand_report_task = Some(self.tasks.spawn(replica.run(first_report_tx)));
        if let Some(election) = &self.election {
            self.tasks.spawn(report_api_server_availability(election.api_reachable(), handle.clone()));
        }
        let (tx, rx) = mpsc::channel(REPLICA_QUEUE_CAPACITY);
        let api = model_controller::namespaced(&self.client, Some(&self.namespace));
        let namespace = Some(self.namespace.clone());
        self.tasks.spawn(async move {
            // Compared with the write time of its own object, the write times of other objects show their age.
            written.await.unwrap_or_default();
            // The write times are in the managed fields, which other watches drop.
            let replicas = WatchTarget { api, namespace, labels: None, fields: None, slim: |_| {} };
            follow(replicas, tx, InitialLists::default(), |change| change).await;
        });
        self.tasks.spawn(gateway_replica::watch_peers(self.name.clone(), handle.clone(), rx));
    }

    /// Combines the file's configuration with the current objects, and updates the platform's placements.
    ///
    /// Returns the namespaces of the models, too.
    pub fn compose(&mut self, base: &Config) -> (Config, BTreeMap<ModelName, String>) {
        let resolved = self.resolved.borrow_and_update().clone().unwrap_or_default();
        let (served, refused, pools) = (resolved.served.len(), resolved.rejected.len(), resolved.pools.len());
        tracing::debug!(served, refused, pools, "cluster objects resolved");
        let namespace = |(object, served): (&ObjectName, &ServedModel)| {
            (served.spec.name.clone(), object.namespace.clone())
        };
        let namespaces = resolved.served.iter().map(namespace).collect();
        let placements = Arc::new(self.model_placements(&resolved));
        let externals = Arc::new(external_backends(&resolved));
        self.platform.set_placements(Arc::clone(&placements), externals, Arc::clone(&resolved.nodes));
        let composed = compose::compose(base, &resolved);
        self.last_composed = (resolved, placements);
        (composed, namespaces)
    }

    /// Returns where each served model runs. External models have no placement.
    ///
    /// A placement contains the hash of a whole Pod, so unchanged placements are reused.
    fn model_placements(&self, now: &Resolved) -> ModelPlacements {
        let (before, placements) = &self.last_composed;
        let placement = |(object, served): (&ObjectName, &ServedModel)| {
            let same = before.served.get(object) == Some(served) && before.terms(served) == now.terms(served);
            let known = placements.get(&served.spec.name).filter(|_| same);
            known.cloned().or_else(|| ModelPlacement::of(object, served, now, &self.sidecar).map(Arc::new))
        };
        let placements = now.served.iter().filter_map(placement);
        placements.map(|placement| (placement.engine.name.clone(), placement)).collect()
    }

    /// Releases the Lease once the writes in flight complete. From now on this gateway only serves.
    pub fn step_down(&mut self) {
        let Some(election) = self.election.take() else { return };
        let writer = self.writer.clone();
        self.release_task = Some(tokio::spawn(election.release(async move { writer.wait_idle().await })));
    }

    /// Time from SIGTERM to the kubelet's kill of this process, if known.
    pub async fn termination_grace(&self) -> Option<Millis> {
        self.pod.current_termination_grace().await
    }

    /// Withdraws this gateway's demand, so that the leader starts nothing more for its waiting requests.
    pub async fn withdraw_demand(&mut self) {
        if let Some(speaks) = self.demand_report_task.take() {
            speaks.abort();
            gateway_replica::remove(self.client.clone(), &self.namespace, &self.name).await;
        }
    }

    pub async fn close(mut self) {
        self.step_down();
        self.withdraw_demand().await;
        let Self { platform, release_task: released, mut tasks, .. } = self;
        tasks.shutdown().await;
        if let Ok(platform) = Arc::try_unwrap(platform) {
            platform.close().await;
        }
        if let Some(released) = released {
            drop(released.await);
        }
    }
}

/// Reads the stub key and retries transient errors. Errors that need an operator are returned.
async fn stub_key(client: &Client, namespace: &str) -> anyhow::Result<StubKey> {
    loop {
        match StubKey::load_or_create(client, namespace).await {
            Err(error) if error.is_transient() => {
                tracing::warn!(%error, "cannot load the stub token key, retrying");
                time::sleep(STUB_KEY_RETRY_INTERVAL).await;
            }
            outcome => return Ok(outcome?),
        }
    }
}

/// Warns if the file gives streams more time than the Pod has.
fn warn_if_grace_exceeds_pod(shutdown: &ShutdownConfig, pod: &OwnPod) {
    let (Some(configured), Some(pod_grace)) = (shutdown.grace, pod.termination_grace()) else { return };
    let grace = shutdown.effective_grace(Some(pod_grace));
    if grace < configured {
        tracing::warn!(
            %configured,
            killed_after = %pod_grace,
            %grace,
            "shutdown.grace is longer than this gateway's Pod allows, so streams end sooner: set \
             terminationGracePeriodSeconds to shutdown.grace plus ten seconds"
        );
    }
}

/// Reports to the driver when the API server stops or resumes answering.
async fn report_api_server_availability(mut answers: watch::Receiver<bool>, handle: impl DriverClient) {
    let mut reachable = true;
    while answers.wait_for(|answers| *answers != reachable).await.is_ok() {
        reachable = !reachable;
        handle.send_event(Event::ApiServerChanged { answers: reachable });
    }
}

fn watch_pods(
    client: &Client,
    namespaces: &[Option<String>],
    awaited: &InitialLists,
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<Delta<Pod>> {
    let (tx, rx) = mpsc::channel(POD_QUEUE_CAPACITY);
    for namespace in namespaces {
        let pods = engine_pod::watch_target(client, namespace.clone());
        tasks.spawn(follow(pods, tx.clone(), awaited.clone(), |change| change));
    }
    rx
}

/// Returns the backends of external models.
fn external_backends(resolved: &Resolved) -> ExternalBackends {
    let external = |served: &ServedModel| match &served.model.hosting {
        ModelHosting::External(backend) => {
            let external = ExternalBackend { engine: Arc::clone(&served.engine), backend: backend.clone() };
            Some((served.spec.name.clone(), Arc::new(external)))
        }
        ModelHosting::Deployment(_) | ModelHosting::DualPods(_) => None,
    };
    resolved.served.values().filter_map(external).collect()
}

/// Returns the host name, for a gateway without a configured name.
fn hostname() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    Ok(name.context("cannot read this machine's host name: set kubernetes.name")?.trim().to_owned())
}
