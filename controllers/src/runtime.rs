//! Runs a gateway in a cluster: its watches, its election, and the platform of its engines.

mod placements;
mod startup;
mod threads;
mod watches;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use futures_util::{FutureExt as _, future::LocalBoxFuture};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use rouse::{fleet::event::Event, slots::SlotsSettings, units::Millis};
use rouse_config::{
    Config, ImageVolumes, KubernetesConfig, SaturationConfig, WatchedNamespaces as Namespaces,
};
use rouse_net::lease::TickClock;
use rouse_platform::{DriverClient as _, ReadinessCheck, SharedDriver};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{AbortHandle, JoinHandle, JoinSet},
    time,
};

use self::threads::Threads;
use crate::{
    convert::ConversionPolicy,
    dual_pods::{self, engine_orders::EngineOrders},
    election::{Election, KubeLeaseStore},
    gateway_replica::{self, DemandReporter},
    index::{ClusterIndex, Resolved, WatchScope},
    kit::{self, Terms},
    ledger::PoolLedger,
    metrics::{ControllerMetrics, SaturationMetrics},
    model_controller::ModelController,
    own_pod::OwnPod,
    platform::{KubernetesDependencies, KubernetesPlatform, ModelPlacements, dcgm::DcgmClient},
    prometheus_api::PrometheusClient,
    published::PublishedMailbox,
    recorder::EventRecorder,
    saturation::{SaturationController, SaturationParts, SaturationWatches},
    slots::{DeviceSlotsController, DeviceSlotsParts},
    status_inputs::StatusInputs,
    status_writer::StatusWriter,
    warmup::{IndexSettings, WarmupController, WarmupParts},
    warmup_list::WarmupLister,
    watch::InitialLists,
    workload::Sidecar,
    writer::ObjectWriter,
};

pub use startup::hostname;

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
/// Maximum number of writes in flight of each part that may have thousands of them to do and none that is urgent.
const MAX_MINOR_WRITES: usize = 16;
/// How often the log repeats which lists the API server has not returned yet.
const SYNC_WARN_INTERVAL: Duration = Duration::from_secs(10);

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
    /// Whether this gateway may list Pods. Only a leader watches them, but any gateway may have to lead.
    pods_listable: watch::Receiver<bool>,
    /// The objects that [`Self::compose`] used last, and where their models run.
    last_composed: (Arc<Resolved>, Arc<ModelPlacements>),
    initial_lists: InitialLists,
    /// Lists of Warmups, which no gateway waits for.
    warmup_lists: InitialLists,
    /// Lists of the kinds of shared devices, which no gateway waits for.
    slots_lists: InitialLists,
    /// Controllers, each until the election ends.
    controllers: JoinSet<()>,
    /// The controller of saturation, if it is enabled, until there is a driver for it to ask.
    saturation: Option<SaturationStart>,
    /// Watches and other tasks, until the gateway ends.
    tasks: JoinSet<()>,
    warmups: WarmupLister,
    /// Client of the control side, and that of the models' thread.
    client: Client,
    of_models: Client,
    sidecar: Sidecar,
    status_inputs: Arc<StatusInputs>,
    /// The name by which other gateways know this one, and its namespace.
    name: String,
    namespace: String,
    pod: OwnPod,
    /// Dropped last: the tasks run on them.
    threads: Threads,
}

/// What the controller of saturation starts with.
struct SaturationStart {
    config: SaturationConfig,
    prometheus: Option<PrometheusClient>,
    metrics: SaturationMetrics,
    watches: SaturationWatches,
    terms: Terms,
    /// Number of initial lists of InferenceModels.
    expected_lists: usize,
}

impl ClusterRuntime {
    /// Starts all watches and controllers.
    ///
    /// Engine events arrive on `events` once [`Self::wait_until_synced`] has returned and [`Self::compose`] has run.
    /// The future is boxed for the program's size (ADR 18).
    pub fn start<'a>(
        config: &'a Arc<Config>,
        settings: &'a KubernetesConfig,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        metrics: &'a ControllerMetrics,
    ) -> LocalBoxFuture<'a, anyhow::Result<Self>> {
        Box::pin(Self::start_all(config, settings, events, clock, metrics))
    }

    async fn start_all(
        config: &Arc<Config>,
        settings: &KubernetesConfig,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        metrics: &ControllerMetrics,
    ) -> anyhow::Result<Self> {
        let api = kube::Config::infer().await.context(
            "cannot find the Kubernetes API: run in a Pod with a service account, or set KUBECONFIG",
        )?;
        let client =
            Client::try_from(api.clone()).context("cannot use the configuration of the Kubernetes API")?;
        let own_namespace =
            settings.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let namespaces: BTreeSet<Option<String>> = match &settings.watched_namespaces {
            Namespaces::Own => BTreeSet::from([Some(own_namespace.clone())]),
            Namespaces::Named(names) => names.iter().cloned().map(Some).collect(),
            Namespaces::All => BTreeSet::from([None]),
        };
        let name = settings.name.clone().map_or_else(startup::hostname, Ok)?;
        let key = startup::stub_key(&client, &own_namespace).await?;
        let pod = OwnPod::find(client.clone(), &own_namespace, &name, settings.pod_uid.as_deref()).await;
        startup::warn_if_grace_exceeds_pod(&config.shutdown, &pod);
        let dcgm = settings.prometheus.clone();
        let dcgm = dcgm
            .map(|asked| DcgmClient::new(asked, clock, metrics.meter_reads.clone()).map(Arc::new))
            .transpose()?;
        let dual = settings.dual_pods;
        let threads = Threads::start(settings)?;
        let (of_lease, of_models) = (threads.lease.client(&api)?, threads.models.client(&api)?);
        let of_engines = threads.engines.client(&api)?;

        // A restarted container is a new candidate and needs a new identity.
        let identity = format!("{name}_{}", Timestamp::now().as_nanosecond());
        let store = KubeLeaseStore::new(of_lease, &own_namespace, LEASE_NAME);
        let election = {
            let _on_its_thread = threads.lease.handle().enter();
            Election::start(store, identity)
        };
        let terms = Terms::new(election.leadership());
        let writer = ObjectWriter::new(election.leadership(), metrics.writes.clone());
        let status_inputs = Arc::new(StatusInputs::default());
        let published = Arc::new(PublishedMailbox::default());
        let (resolved_tx, resolved) = watch::channel(None);
        let awaited = InitialLists::default();
        let (mut controllers, mut tasks) = (JoinSet::new(), JoinSet::new());
        let (event_sender, recorder) =
            EventRecorder::new(of_models.clone(), writer.with_own_limit(MAX_MINOR_WRITES), name.clone());
        tasks.spawn_on(recorder.run(), threads.models.handle());

        let mut watches =
            watches::ClusterWatches::new(of_models.clone(), namespaces.clone(), own_namespace.clone());
        let pods = watches.engine_pods();
        let (engine_orders, orders_rx) = EngineOrders::new();
        let engine_orders = dual.map(|_| engine_orders);
        let pairing_watches = dual.map(|_| watches.pairing(resolved.clone(), orders_rx));
        let policy =
            ConversionPolicy { any_backend: settings.any_backend, dual_pods: dual.map(|dual| dual.mode) };
        let model_controller = ModelController {
            index: ClusterIndex::new(WatchScope { policy, nodes: true, namespaces: namespaces.len() }),
            status_inputs: Arc::clone(&status_inputs),
            status_writer: StatusWriter::new(
                of_models.clone(),
                writer.clone(),
                PoolLedger::new(of_models.clone(), election.leadership()),
                clock,
                event_sender.clone(),
            ),
            published: Arc::clone(&published),
            last_published: BTreeMap::new(),
            resolved: resolved_tx,
            term: None,
            decides: None,
        };
        let inputs = watches.models().inputs(Arc::clone(&status_inputs));
        controllers
            .spawn_on(kit::run(model_controller, inputs, terms.clone(), clock), threads.models.handle());
        if let (Some(dual), Some(thread), Some(pairing_watches), Some(orders)) =
            (dual, &threads.dual_pods, pairing_watches, engine_orders.clone())
        {
            let mut controller = dual_pods::PairingController::new(dual_pods::PairingControllerParts {
                client: thread.client(&api)?,
                writer: writer.clone(),
                clock,
                settings: dual_pods::PairingControllerSettings {
                    core: dual.timing,
                    mode: dual.mode,
                    key: key.clone(),
                },
                metrics: metrics.dual_pods.clone(),
                events: event_sender.clone(),
                meter: dcgm.clone(),
                namespaces: namespaces.clone(),
                orders,
            });
            let inputs = controller.inputs(pairing_watches);
            controllers.spawn_on(kit::run(controller, inputs, terms.clone(), clock), thread.handle());
        }
        let warmup_lists = InitialLists::default();
        if let Some(thread) = &threads.warmup {
            let controller = WarmupController::new(WarmupParts {
                client: thread.client(&api)?,
                writer: writer.with_own_limit(MAX_MINOR_WRITES),
                clock,
                events: event_sender.clone(),
                metrics: metrics.warmup.clone(),
                settings: IndexSettings {
                    expected_lists: namespaces.len(),
                    installation: own_namespace.clone(),
                    retry_delay: settings.warmup.retry_delay,
                    stub_image: settings.stub_image.clone(),
                },
                image_volumes: settings.warmup.image_volumes == ImageVolumes::Auto,
                auto_parallelism: settings.warmup.auto_parallelism,
            });
            let inputs = watches.warmup(resolved.clone(), warmup_lists.clone()).inputs();
            controllers.spawn_on(kit::run(controller, inputs, terms.clone(), clock), thread.handle());
        }
        let slots_lists = InitialLists::default();
        if let (Some(slots), Some(thread)) = (settings.slots, &threads.slots) {
            let controller = DeviceSlotsController::new(DeviceSlotsParts {
                client: thread.client(&api)?,
                writer: writer.with_own_limit(MAX_MINOR_WRITES),
                clock,
                events: event_sender,
                metrics: metrics.slots.clone(),
                settings: SlotsSettings { node_timeout: slots.node_timeout },
                expected_lists: namespaces.len(),
            });
            let inputs = watches.slots(slots_lists.clone()).inputs();
            controllers.spawn_on(kit::run(controller, inputs, terms.clone(), clock), thread.handle());
        }
        let saturation = match settings.saturation {
            Some(config) => Some(SaturationStart {
                config,
                prometheus: startup::prometheus_of_engines(settings, config.source)?,
                metrics: metrics.saturation.clone(),
                watches: watches.saturation(resolved.clone()),
                terms: terms.clone(),
                expected_lists: namespaces.len(),
            }),
            None => None,
        };
        let pods_listable = watches.start(&awaited, &terms, &mut tasks, threads.models.handle());
        let sidecar = Sidecar {
            image: settings.stub_image.clone(),
            pull_policy: settings.stub_pull_policy.clone(),
            key,
            timing: dual.map(|dual| dual.timing).unwrap_or_default(),
        };
        let warmups = WarmupLister::new(client.clone(), namespaces.clone());
        let dependencies = KubernetesDependencies {
            pool_ledger: PoolLedger::new(of_engines.clone(), election.leadership()),
            writer: writer.clone(),
            status_inputs: Arc::clone(&status_inputs),
            published,
            terms,
            sidecar: sidecar.clone(),
            namespaces: namespaces.into_iter().collect(),
            initial_lists: awaited.clone(),
            pods,
            client: of_engines,
            dcgm,
            readings: metrics.meter_reads.clone(),
            takeovers: metrics.takeover.clone(),
            engine_orders,
        };
        let platform = {
            let _on_its_thread = threads.engines.handle().enter();
            Arc::new(KubernetesPlatform::start(Arc::clone(config), events, clock, dependencies))
        };
        Ok(Self {
            platform,
            election: Some(election),
            writer,
            release_task: None,
            demand_report_task: None,
            resolved,
            pods_listable,
            last_composed: Default::default(),
            initial_lists: awaited,
            warmup_lists,
            slots_lists,
            controllers,
            saturation,
            tasks,
            warmups,
            client,
            of_models,
            sidecar,
            status_inputs,
            name,
            namespace: own_namespace,
            pod,
            threads,
        })
    }

    /// Reports which lists are still missing; `None` once all have arrived, and Pods may be listed.
    pub fn not_ready_reason(&self) -> Arc<ReadinessCheck> {
        let (resolved, awaited) = (self.resolved.clone(), self.initial_lists.clone());
        let pods_listable = self.pods_listable.clone();
        Arc::new(move || {
            let waits = resolved.borrow().is_none() || !*pods_listable.borrow();
            waits.then(|| format!("waiting for lists from the API server: {awaited}"))
        })
    }

    /// Reports what the gateway runs without, because it may not read it.
    pub fn degraded_reason(&self) -> Arc<ReadinessCheck> {
        let (awaited, warmups) = (self.initial_lists.clone(), self.warmup_lists.clone());
        let slots = self.slots_lists.clone();
        Arc::new(move || {
            let skipped = awaited.skipped_message().map(|lists| format!("this gateway may not read {lists}"));
            let warmups =
                warmups.failed_message().map(|lists| format!("no Warmups are carried out: {lists}"));
            let slots = slots.failed_message();
            let slots = slots.map(|lists| format!("no slots of lost nodes are freed: {lists}"));
            let reasons: Vec<String> = skipped.into_iter().chain(warmups).chain(slots).collect();
            (!reasons.is_empty()).then(|| reasons.join("; "))
        })
    }

    /// Returns what lists the Warmups.
    #[must_use]
    pub fn warmups(&self) -> WarmupLister {
        self.warmups.clone()
    }

    /// Returns once all objects to serve have arrived, and Pods may be listed.
    pub async fn wait_until_synced(&mut self) {
        let Self { resolved, pods_listable, initial_lists: awaited, .. } = self;
        let mut every = time::interval_at(time::Instant::now() + SYNC_WARN_INTERVAL, SYNC_WARN_INTERVAL);
        let synced = async {
            // Neither fails: a sender ends only after it has sent the awaited value, or with this runtime.
            drop(resolved.wait_for(Option::is_some).await);
            drop(pods_listable.wait_for(|listable| *listable).await);
        };
        tokio::pin!(synced);
        loop {
            tokio::select! {
                () = &mut synced => return,
                _ = every.tick() => {
                    tracing::warn!(
                        %awaited,
                        "still waiting for lists of models, pools, nodes and Pods from the API server"
                    );
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
            Some(ended) = self.controllers.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "controller panicked");
                }
                ClusterChange::TaskEnded
            }
            () = self.platform.failed() => ClusterChange::TaskEnded,
        }
    }

    /// Starts the controller of saturation, which asks the driver and sends it targets.
    fn start_saturation(&mut self, handle: &SharedDriver) {
        let (Some(start), Some(thread)) = (self.saturation.take(), &self.threads.saturation) else { return };
        let SaturationStart { config, prometheus, metrics, watches, terms, expected_lists } = start;
        let controller = SaturationController::new(SaturationParts {
            driver: handle.clone(),
            config,
            prometheus,
            status_inputs: Arc::clone(&self.status_inputs),
            metrics,
            expected_lists,
        });
        let run = kit::run(controller, watches.inputs(), terms, handle.clock());
        self.controllers.spawn_on(run, thread.handle());
    }

    /// Reports this gateway's demand to other gateways, and their demand to the driver. Scales models by their load.
    pub fn start_reporting(&mut self, handle: &SharedDriver, api: SocketAddr) {
        self.start_saturation(handle);
        let replica = DemandReporter {
            client: self.of_models.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            pod_uid: self.pod.uid().map(str::to_owned),
            address: api.to_string(),
            handle: handle.clone(),
            status_inputs: Arc::clone(&self.status_inputs),
            resolved: self.resolved.clone(),
            initial_lists: self.initial_lists.clone(),
        };
        let (first_report_tx, written) = oneshot::channel();
        let models = self.threads.models.handle();
        self.demand_report_task = Some(self.tasks.spawn_on(replica.run(first_report_tx), models));
        if let Some(election) = &self.election {
            let report = report_api_server_availability(election.api_reachable(), handle.clone());
            self.tasks.spawn_on(report, models);
        }
        let (replicas, watch_task) = watches::gateway_replicas(&self.of_models, &self.namespace);
        // Compared with the write time of its own object, the write times of other objects show their age.
        let watch_task = written.map(drop).then(move |()| watch_task);
        self.tasks.spawn_on(watch_task, self.threads.models.handle());
        self.tasks
            .spawn_on(gateway_replica::watch_peers(self.name.clone(), handle.clone(), replicas), models);
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
        let Self { platform, release_task: released, mut controllers, mut tasks, threads, .. } = self;
        controllers.shutdown().await;
        tasks.shutdown().await;
        if let Ok(platform) = Arc::try_unwrap(platform) {
            platform.close().await;
        }
        if let Some(released) = released {
            drop(released.await);
        }
        drop(threads);
    }
}

/// Reports to the driver when the API server stops or resumes answering.
async fn report_api_server_availability(mut answers: watch::Receiver<bool>, handle: SharedDriver) {
    let mut reachable = true;
    while answers.wait_for(|answers| *answers != reachable).await.is_ok() {
        reachable = !reachable;
        handle.send_event(Event::ApiServerChanged { answers: reachable });
    }
}
