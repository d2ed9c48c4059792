//! A gateway in a cluster: what it watches, whether it leads, and what runs its engines.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use rouse::{fleet::event::Event, lease::Clock};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time,
};

use super::home::Next;
use crate::{
    config::{self, Config, Watched},
    controllers::{
        booking::Books,
        compose,
        convert::{Policy, Run},
        election::{Election, Leases},
        index::{Index, Served, Settled, Sight},
        objects::{self, Keeper},
        registry::Registry,
        replica::{self, Replica},
        told::Told,
        watch::watch as follow,
        workload::{self, Sidecar},
        writer::Writer,
    },
    driver::Handle,
    metrics::Metrics,
    platform::kubernetes::{External, Externals, Kubernetes, Parts, Place, Places},
};

/// The lease that the one who decides holds.
const LEASE: &str = "rouse-controller";
/// Changes of Pods that may wait for the platform; more of them wait at the API server.
const PODS: usize = 1024;
/// As many of the gateways' objects.
const REPLICAS: usize = 64;
/// How often it is said that the API server has not shown everything yet.
const WAITING: Duration = Duration::from_secs(10);

pub(super) struct Cluster {
    pub(super) platform: Arc<Kubernetes>,
    election: Election,
    settled: watch::Receiver<Option<Arc<Settled>>>,
    tasks: JoinSet<()>,
    client: Client,
    sidecar: Sidecar,
    told: Arc<Told>,
    /// What others know this gateway by, and its namespace.
    name: String,
    own: String,
}

impl Cluster {
    /// Returns once everything that is to be served was seen. Engines are told of on `events`.
    pub(super) async fn start(
        config: &Arc<Config>,
        settings: &config::Kubernetes,
        events: mpsc::Sender<Event>,
        clock: Clock,
        metrics: &Metrics,
    ) -> anyhow::Result<Self> {
        let client = Client::try_default().await.context(
            "cannot tell where the Kubernetes API is: run in a Pod with a service account, or set KUBECONFIG",
        )?;
        let reached = client.clone();
        let own = settings.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        let namespaces: Vec<Option<String>> = match &settings.watched {
            Watched::Own => vec![Some(own.clone())],
            Watched::Some(names) => names.iter().cloned().map(Some).collect(),
            Watched::All => vec![None],
        };
        let name = settings.name.clone().map_or_else(host, Ok)?;
        let mut tasks = JoinSet::new();
        let (tell, settled) = watch::channel(None);
        let policy = Policy { any_backend: settings.any_backend };
        let lists = namespaces.iter().collect::<BTreeSet<_>>().len();
        let seen = objects::watch_all(&client, &namespaces, true, &mut tasks);
        let pods = watch_pods(&client, &namespaces, &mut tasks);
        // Two lives of one Pod's container are two that may lead.
        let life = format!("{name}_{}", Timestamp::now().as_nanosecond());
        let election = Election::start(Leases::new(client.clone(), &own, LEASE), life);
        let books = Books::new(client.clone(), election.claim());
        let writer = Writer::new(election.claim(), metrics.writes());
        let told = Arc::new(Told::default());
        let (say, published) = mpsc::unbounded_channel();
        let keeper = Keeper {
            index: Index::new(Sight { policy, nodes: true, namespaces: lists }),
            told: seen,
            facts: Arc::clone(&told),
            claim: election.claim(),
            registry: Registry::new(client.clone(), writer.clone(), books.clone(), clock),
            published: say,
            known: BTreeMap::new(),
            settled: tell,
        };
        tasks.spawn(keeper.run());
        let sidecar =
            Sidecar { image: settings.stub_image.clone(), pull_policy: settings.stub_pull_policy.clone() };
        let parts = Parts {
            books,
            writer,
            told: Arc::clone(&told),
            published,
            claim: election.claim(),
            sidecar: sidecar.clone(),
            watched: namespaces,
            pods,
            client,
        };
        let platform = Arc::new(Kubernetes::start(Arc::clone(config), events, clock, parts));
        let mut cluster =
            Self { platform, election, settled, tasks, client: reached, sidecar, told, name, own };
        cluster.first().await;
        Ok(cluster)
    }

    async fn first(&mut self) {
        let mut every = time::interval_at(time::Instant::now() + WAITING, WAITING);
        loop {
            tokio::select! {
                // The index outlives this.
                _ = self.settled.wait_for(Option::is_some) => return,
                _ = every.tick() => tracing::warn!("the API server has not shown all models, pools and nodes yet"),
            }
        }
    }

    pub(super) async fn next(&mut self) -> Next {
        tokio::select! {
            changed = self.settled.changed() => match changed {
                Ok(()) => Next::Objects,
                Err(_) => Next::Ended,
            },
            () = self.election.ended() => Next::Ended,
        }
    }

    /// Tells others of this gateway's demand, and the decisions of theirs.
    pub(super) fn speak(&mut self, handle: &Handle, api: SocketAddr) {
        let replica = Replica {
            client: self.client.clone(),
            namespace: self.own.clone(),
            name: self.name.clone(),
            address: api.to_string(),
            handle: handle.clone(),
            told: Arc::clone(&self.told),
        };
        self.tasks.spawn(replica.run());
        let (told, seen) = mpsc::channel(REPLICAS);
        let replicas = objects::namespaced(&self.client, Some(&self.own));
        let namespace = Some(self.own.clone());
        self.tasks.spawn(follow(replicas, namespace, None, told, |change| change));
        self.tasks.spawn(replica::listen(self.name.clone(), handle.clone(), seen));
    }

    /// The file's configuration with what the objects say now; the platform knows where from here on.
    pub(super) fn compose(&mut self, base: &Config) -> Config {
        let settled = self.settled.borrow_and_update().clone().unwrap_or_default();
        let (served, refused, pools) = (settled.served.len(), settled.rejected.len(), settled.pools.len());
        tracing::debug!(served, refused, pools, "the cluster's objects");
        self.platform.place(Arc::new(places(&settled, &self.sidecar)), Arc::new(externals(&settled)));
        compose::compose(base, &settled)
    }

    /// Nothing is written any more; then another may lead at once.
    pub(super) async fn close(self) {
        let Self { platform, election, mut tasks, client, own, name, .. } = self;
        tasks.shutdown().await;
        replica::remove(client, &own, &name).await;
        if let Ok(platform) = Arc::try_unwrap(platform) {
            platform.close().await;
        }
        election.release().await;
    }
}

fn watch_pods(
    client: &Client,
    namespaces: &[Option<String>],
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<crate::controllers::watch::Change<k8s_openapi::api::core::v1::Pod>> {
    let (told, received) = mpsc::channel(PODS);
    for namespace in namespaces {
        let api = objects::namespaced(client, namespace.as_deref());
        let labels = Some(workload::selector());
        tasks.spawn(follow(api, namespace.clone(), labels, told.clone(), |change| change));
    }
    received
}

/// Where each served model runs. External ones run nowhere.
fn places(settled: &Settled, sidecar: &Sidecar) -> Places {
    let places =
        settled.served.iter().filter_map(|(object, served)| Place::of(object, served, settled, sidecar));
    places.map(|place| (place.engine.name.clone(), Arc::new(place))).collect()
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
