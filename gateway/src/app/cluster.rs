//! A gateway in a cluster: what it watches, whether it leads, and what runs its engines.

mod dual;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::Client;
use rouse::{fleet::event::Event, lease::Clock, units::Millis};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{AbortHandle, JoinHandle, JoinSet},
    time,
};

use super::home::Next;
use crate::{
    config::{self, Config, Shutdown, Watched as Namespaces},
    controllers::{
        booking::Books,
        compose,
        convert::{Policy, Run},
        crd::ledger::ObjectName,
        election::{Election, Leases},
        index::{Index, Served, Settled, Sight},
        objects::{self, Keeper},
        own_pod::OwnPod,
        pods,
        recorder::Recorder,
        registry::Registry,
        replica::{self, Replica},
        stub_key::StubKey,
        told::Told,
        watch::{Awaited, Change, Watched, watch as follow},
        workload::Sidecar,
        writer::Writer,
    },
    driver::Handle,
    http::admin::Waits,
    metrics::Metrics,
    pairing,
    platform::kubernetes::{External, Externals, Kubernetes, Parts, Place, Places, dcgm::Dcgm},
};

/// The lease that the one who decides holds.
const LEASE: &str = "rouse-controller";
/// Changes of Pods that may wait for the platform; more of them wait at the API server.
const PODS: usize = 1024;
/// As many of the gateways' objects.
const REPLICAS: usize = 64;
/// How often it is said that the API server has not shown everything yet.
const WAITING: Duration = Duration::from_secs(10);
/// Between tries to read what cannot be done without.
const RETRY: Duration = Duration::from_secs(1);

pub(super) struct Cluster {
    pub(super) platform: Arc<Kubernetes>,
    /// While this gateway takes part.
    election: Option<Election>,
    writer: Writer,
    /// The task that gives the lease back.
    released: Option<JoinHandle<()>>,
    /// The task that writes this gateway's own object.
    speaks: Option<AbortHandle>,
    settled: watch::Receiver<Option<Arc<Settled>>>,
    /// What was composed last, and where its models run.
    placed: (Arc<Settled>, Arc<Places>),
    awaited: Awaited,
    tasks: JoinSet<()>,
    client: Client,
    sidecar: Sidecar,
    told: Arc<Told>,
    metrics: Arc<Metrics>,
    /// What others know this gateway by, and its namespace.
    name: String,
    own: String,
    pod: OwnPod,
}

impl Cluster {
    /// Engines are told of on `events`, once [`Self::first`] has returned and what was seen is composed.
    pub(super) async fn start(
        config: &Arc<Config>,
        settings: &config::Kubernetes,
        events: mpsc::Sender<Event>,
        clock: Clock,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let client = Client::try_default().await.context(
            "cannot tell where the Kubernetes API is: run in a Pod with a service account, or set KUBECONFIG",
        )?;
        let reached = client.clone();
        let own = settings.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let namespaces: Vec<Option<String>> = match &settings.watched {
            Namespaces::Own => vec![Some(own.clone())],
            Namespaces::Some(names) => names.iter().cloned().map(Some).collect(),
            Namespaces::All => vec![None],
        };
        let name = settings.name.clone().map_or_else(host, Ok)?;
        let key = stub_key(&client, &own).await?;
        let pod = OwnPod::find(client.clone(), &own, &name, settings.pod_uid.as_deref()).await;
        warn_of_grace(&config.shutdown, &pod);
        let dcgm = settings.prometheus.clone();
        let dcgm = dcgm.map(|asked| Dcgm::new(asked, clock, metrics.readings()).map(Arc::new)).transpose()?;
        let mut tasks = JoinSet::new();
        let (tell, settled) = watch::channel(None);
        let dual = settings.dual_pods;
        let policy = Policy { any_backend: settings.any_backend, dual_pods: dual.map(|dual| dual.mode) };
        let lists = namespaces.iter().collect::<BTreeSet<_>>().len();
        let awaited = Awaited::default();
        let seen = objects::watch_all(&client, &namespaces, true, &awaited, &mut tasks);
        let pods = watch_pods(&client, &namespaces, &awaited, &mut tasks);
        // Two lives of one Pod's container are two that may lead.
        let life = format!("{name}_{}", Timestamp::now().as_nanosecond());
        let election = Election::start(Leases::new(client.clone(), &own, LEASE), life);
        let books = Books::new(client.clone(), election.claim());
        let writer = Writer::new(election.claim(), metrics.writes());
        let told = Arc::new(Told::default());
        let (say, published) = mpsc::unbounded_channel();
        let (herald, recorder) = Recorder::new(client.clone(), writer.clone(), name.clone());
        tasks.spawn(recorder.run());
        let keeper = Keeper {
            index: Index::new(Sight { policy, nodes: true, namespaces: lists }),
            told: seen,
            facts: Arc::clone(&told),
            claim: election.claim(),
            registry: Registry::new(client.clone(), writer.clone(), books.clone(), clock, herald.clone()),
            published: say,
            known: BTreeMap::new(),
            settled: tell,
        };
        tasks.spawn(keeper.run());
        if let Some(dual) = &settings.dual_pods {
            let seen = dual::watch(&client, &namespaces, &own, &awaited, &mut tasks);
            tasks.spawn(pairing::Controller::run(pairing::Parts {
                client: client.clone(),
                writer: writer.clone(),
                claim: election.claim(),
                clock,
                settings: dual::settings(dual, key.clone()),
                seen,
                settled: settled.clone(),
                metrics: metrics.duals(),
                herald,
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
        let parts = Parts {
            books,
            writer,
            told: Arc::clone(&told),
            published,
            claim: election.claim(),
            sidecar: sidecar.clone(),
            watched: namespaces,
            awaited: awaited.clone(),
            pods,
            client,
            dcgm,
            readings: metrics.readings(),
        };
        let platform = Arc::new(Kubernetes::start(Arc::clone(config), events, clock, parts));
        let (metrics, placed) = (Arc::clone(metrics), Default::default());
        Ok(Self {
            platform,
            election: Some(election),
            writer: writes,
            released: None,
            speaks: None,
            settled,
            placed,
            awaited,
            tasks,
            client: reached,
            sidecar,
            told,
            metrics,
            name,
            own,
            pod,
        })
    }

    /// Says what has not been seen yet; nothing once all was.
    pub(super) fn waits(&self) -> Arc<Waits> {
        let (settled, awaited) = (self.settled.clone(), self.awaited.clone());
        Arc::new(move || {
            let waits = settled.borrow().is_none();
            waits.then(|| format!("the API server has not shown everything yet: {awaited}"))
        })
    }

    /// Says what is served without, since this gateway may not see it.
    pub(super) fn lacks(&self) -> Arc<Waits> {
        let awaited = self.awaited.clone();
        Arc::new(move || awaited.lacks())
    }

    /// Returns once everything that is to be served was seen.
    pub(super) async fn first(&mut self) {
        let mut every = time::interval_at(time::Instant::now() + WAITING, WAITING);
        loop {
            tokio::select! {
                // The index outlives this.
                _ = self.settled.wait_for(Option::is_some) => return,
                _ = every.tick() => {
                    let awaited = &self.awaited;
                    tracing::warn!(%awaited, "the API server has not shown all models, pools and nodes yet");
                }
            }
        }
    }

    pub(super) async fn next(&mut self) -> Next {
        let Some(election) = &mut self.election else { return std::future::pending().await };
        tokio::select! {
            changed = self.settled.changed() => match changed {
                Ok(()) => Next::Objects,
                Err(_) => Next::Ended,
            },
            () = election.ended() => Next::Ended,
        }
    }

    /// Tells others of this gateway's demand, and the decisions of theirs.
    pub(super) fn speak(&mut self, handle: &Handle, api: SocketAddr) {
        let replica = Replica {
            client: self.client.clone(),
            namespace: self.own.clone(),
            name: self.name.clone(),
            pod_uid: self.pod.uid().map(str::to_owned),
            address: api.to_string(),
            handle: handle.clone(),
            told: Arc::clone(&self.told),
            awaited: self.awaited.clone(),
        };
        let (tried, written) = oneshot::channel();
        self.speaks = Some(self.tasks.spawn(replica.run(tried)));
        if let Some(election) = &self.election {
            self.tasks.spawn(tell_answers(election.answers(), handle.clone()));
        }
        let (told, seen) = mpsc::channel(REPLICAS);
        let api = objects::namespaced(&self.client, Some(&self.own));
        let namespace = Some(self.own.clone());
        self.tasks.spawn(async move {
            // By the time of its own object it knows how old the others are.
            written.await.unwrap_or_default();
            // When they were written stands where else nobody looks.
            let replicas = Watched { api, namespace, labels: None, fields: None, slim: |_| {} };
            follow(replicas, told, Awaited::default(), |change| change).await;
        });
        self.tasks.spawn(replica::listen(self.name.clone(), handle.clone(), seen));
    }

    /// The file's configuration with what the objects say now; the platform knows where from here on.
    pub(super) fn compose(&mut self, base: &Config) -> Config {
        let settled = self.settled.borrow_and_update().clone().unwrap_or_default();
        let (served, refused, pools) = (settled.served.len(), settled.rejected.len(), settled.pools.len());
        tracing::debug!(served, refused, pools, "the cluster's objects");
        let namespace =
            |(object, served): (&ObjectName, &Served)| (served.spec.name.clone(), object.namespace.clone());
        self.metrics.in_cluster(settled.served.iter().map(namespace).collect());
        let places = Arc::new(self.places(&settled));
        let externals = Arc::new(externals(&settled));
        self.platform.place(Arc::clone(&places), externals, Arc::clone(&settled.nodes));
        let composed = compose::compose(base, &settled);
        self.placed = (settled, places);
        composed
    }

    /// Where each served model runs. External ones run nowhere. A place has the hash of a whole Pod in it: those that are as
    /// before are not made again.
    fn places(&self, now: &Settled) -> Places {
        let (before, places) = &self.placed;
        let place = |(object, served): (&ObjectName, &Served)| {
            let same = before.served.get(object) == Some(served) && before.terms(served) == now.terms(served);
            let known = places.get(&served.spec.name).filter(|_| same);
            known.cloned().or_else(|| Place::of(object, served, now, &self.sidecar).map(Arc::new))
        };
        let places = now.served.iter().filter_map(place);
        places.map(|place| (place.engine.name.clone(), place)).collect()
    }

    /// Another may lead as soon as what is being written has been: this gateway only serves from here on.
    pub(super) fn step_down(&mut self) {
        let Some(election) = self.election.take() else { return };
        let writer = self.writer.clone();
        self.released = Some(tokio::spawn(election.release(async move { writer.quiet().await })));
    }

    /// How long after its signal the kubelet kills this process, as far as anybody says it.
    pub(super) async fn killed_after(&self) -> Option<Millis> {
        self.pod.killed_now().await
    }

    /// The leader starts nothing more for requests that wait at this gateway.
    pub(super) async fn withdraw(&mut self) {
        if let Some(speaks) = self.speaks.take() {
            speaks.abort();
            replica::remove(self.client.clone(), &self.own, &self.name).await;
        }
    }

    pub(super) async fn close(mut self) {
        self.step_down();
        self.withdraw().await;
        let Self { platform, released, mut tasks, .. } = self;
        tasks.shutdown().await;
        if let Ok(platform) = Arc::try_unwrap(platform) {
            platform.close().await;
        }
        if let Some(released) = released {
            drop(released.await);
        }
    }
}

/// Waits for an API server that is away; what somebody must mend first is an error.
async fn stub_key(client: &Client, namespace: &str) -> anyhow::Result<StubKey> {
    loop {
        match StubKey::of(client, namespace).await {
            Err(error) if error.may_pass() => {
                tracing::warn!(%error, "the key of the stubs' tokens was not read; it is tried again");
                time::sleep(RETRY).await;
            }
            outcome => return Ok(outcome?),
        }
    }
}

/// The file promises streams more time than their gateway has.
fn warn_of_grace(shutdown: &Shutdown, pod: &OwnPod) {
    let (Some(said), Some(killed)) = (shutdown.grace, pod.killed_after()) else { return };
    let grace = shutdown.grace(Some(killed));
    if grace < said {
        tracing::warn!(
            %said,
            killed_after = %killed,
            %grace,
            "shutdown.grace is longer than this gateway's Pod lets it be: streams end sooner. Raise terminationGracePeriodSeconds to \
             ten seconds more than it"
        );
    }
}

/// Tells the decisions whenever the API server falls silent or is back.
async fn tell_answers(mut answers: watch::Receiver<bool>, handle: Handle) {
    let mut told = true;
    while answers.wait_for(|answers| *answers != told).await.is_ok() {
        told = !told;
        handle.tell(Event::Cluster { answers: told });
    }
}

fn watch_pods(
    client: &Client,
    namespaces: &[Option<String>],
    awaited: &Awaited,
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<Change<Pod>> {
    let (told, received) = mpsc::channel(PODS);
    for namespace in namespaces {
        let pods = pods::watched(client, namespace.clone());
        tasks.spawn(follow(pods, told.clone(), awaited.clone(), |change| change));
    }
    received
}

/// How those get served that somebody else runs.
fn externals(settled: &Settled) -> Externals {
    let external = |served: &Served| match &served.model.run {
        Run::External(backend) => {
            let external = External { engine: Arc::clone(&served.engine), backend: backend.clone() };
            Some((served.spec.name.clone(), Arc::new(external)))
        }
        Run::Deployment(_) | Run::DualPods(_) => None,
    };
    settled.served.values().filter_map(external).collect()
}

/// What others know this gateway by, where nothing says so.
fn host() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    Ok(name.context("this machine has no name: set kubernetes.name")?.trim().to_owned())
}
