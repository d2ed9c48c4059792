//! Helpers for several tests: the definitions in a cluster, pools, and every revision of a pool.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use futures_util::StreamExt as _;
use http::{Request, Response};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
    client::Body,
    core::{self, GroupVersionKind},
    runtime::{
        WatchStreamExt as _,
        wait::{await_condition, conditions},
        watcher,
    },
};
use rouse::{model::VariantName, units::Bytes};
use rouse_cluster::{TestCluster, wait::WAIT_TIMEOUT};
use rouse_controllers::{
    crd::{
        self, AcceleratorPool, AcceleratorPoolStatus, Quantity,
        ledger::{ObjectName, ReservationOwner},
    },
    ledger::ReservationRequest,
};
use serde_json::{Value, json};
use tokio::{
    sync::{OnceCell, watch},
    task::JoinSet,
    time::timeout,
};

pub(crate) const FIELD_MANAGER: &str = "tests";

/// The file of the repository at this path.
pub(crate) fn repo_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// The cluster that all tests share, which serves our kinds.
pub(crate) async fn cluster() -> &'static TestCluster {
    static DEFINED: OnceCell<()> = OnceCell::const_new();
    let cluster = TestCluster::shared();
    DEFINED.get_or_init(async || Box::pin(cluster.once("kinds", define_kinds(cluster))).await.unwrap()).await;
    cluster
}

/// A cluster that serves our kinds, with the gateways of one test only. In the shared cluster each leading gateway
/// writes the AcceleratorNodes that it sees.
pub(crate) async fn own_cluster() -> TestCluster {
    let cluster = TestCluster::start().unwrap();
    define_kinds(&cluster).await;
    cluster
}

/// Defines our kinds in a cluster, and waits until it serves them.
pub(crate) async fn define_kinds(cluster: &TestCluster) {
    let client = cluster.client().await.unwrap();
    for definition in Vec::from(crd::all()) {
        let name = definition.metadata.name.clone().unwrap();
        let answer = apply_definition(&client, &serde_json::to_value(&definition).unwrap()).await;
        assert!(answer.status().is_success(), "{name}: {:?}", answer.status());
        let kinds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let served = await_condition(kinds, &name, conditions::is_crd_established());
        timeout(WAIT_TIMEOUT, Box::pin(served))
            .await
            .unwrap_or_else(|_| panic!("{name} is not served"))
            .unwrap();
        until_watchable(&client, &definition).await;
    }
}

/// Waits until the API server serves watches of a kind, which tests count. It refuses them (429) while its cache of an
/// established kind fills.
async fn until_watchable(client: &Client, definition: &CustomResourceDefinition) {
    let spec = &definition.spec;
    let kind = GroupVersionKind::gvk(&spec.group, &spec.versions[0].name, &spec.names.kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, &spec.names.plural);
    let objects: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let listed = async {
        let config = watcher::Config::default().streaming_lists();
        let mut events = watcher(objects, config).default_backoff().boxed();
        while !matches!(events.next().await, Some(Ok(watcher::Event::InitDone))) {}
    };
    timeout(WAIT_TIMEOUT, listed).await.unwrap_or_else(|_| panic!("{} cannot be watched", spec.names.plural));
}

/// Applies a definition, and returns the complete response, because its head has the warnings.
pub(crate) async fn apply_definition(client: &Client, definition: &Value) -> Response<Body> {
    let name = definition["metadata"]["name"].as_str().unwrap();
    let path = <CustomResourceDefinition as kube::Resource>::url_path(&(), None);
    let patch = Patch::Apply(definition);
    let request = core::Request::new(path).patch(name, &PatchParams::apply(FIELD_MANAGER), &patch).unwrap();
    client.send(request.map(Body::from)).await.unwrap()
}

/// Applies an object of any kind: in this namespace, or to the cluster.
pub(crate) async fn apply_object(
    client: &Client,
    object: &Value,
    namespace: Option<&str>,
    parameters: &PatchParams,
) -> kube::Result<DynamicObject> {
    let [kind, version] = ["kind", "apiVersion"].map(|field| object[field].as_str().unwrap());
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let name = object["metadata"]["name"].as_str().unwrap();
    api.patch(name, parameters, &Patch::Apply(object)).await
}

/// Sends a request that the client library has no call for.
pub(crate) async fn get(client: &Client, path: &str, accept: &str) -> Value {
    let request = Request::get(path).header("accept", accept).body(Vec::new()).unwrap();
    client.request(request).await.unwrap()
}

/// Creates a pool with this name and this total.
pub(crate) async fn pool(client: &Client, name: &str, total: Bytes) -> AcceleratorPool {
    let pools: Api<AcceleratorPool> = Api::all(client.clone());
    let spec = json!({ "nodeSelector": { "inference-pool": name } });
    let object = AcceleratorPool::new(name, serde_json::from_value(spec).unwrap());
    let mut made = pools.create(&PostParams::default(), &object).await.unwrap();
    let total = Some(Quantity::from(total));
    made.status = Some(AcceleratorPoolStatus { total, ..AcceleratorPoolStatus::default() });
    pools.replace_status(name, &PostParams::default(), &made).await.unwrap()
}

pub(crate) fn names(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|name| (*name).to_owned()).collect()
}

/// The request of this model's first engine, on one accelerator.
pub(crate) fn reservation_request(model: &str, bytes: Bytes) -> ReservationRequest {
    let (model, variant) = (ObjectName::new("default", model), VariantName::default());
    let engine = ReservationOwner { model, variant, replica: 0 };
    ReservationRequest { engine, count: 1, bytes, host_bytes: Bytes::ZERO, quota: None, location: None }
}

/// Every revision of one pool since a given one, in order.
pub(crate) struct PoolRevisions {
    revisions: watch::Receiver<Vec<AcceleratorPool>>,
    pools: Api<AcceleratorPool>,
    name: String,
    /// Ends with these revisions: the API server may end before the test does.
    _follower: JoinSet<()>,
}

impl PoolRevisions {
    /// Follows this pool from its given revision on.
    pub(crate) fn of(client: &Client, from: &AcceleratorPool) -> Self {
        let pools: Api<AcceleratorPool> = Api::all(client.clone());
        let (told, rx) = watch::channel(vec![from.clone()]);
        let mut follower = JoinSet::new();
        follower.spawn(follow_pool(pools.clone(), told));
        Self { revisions: rx, pools, name: from.name_any(), _follower: follower }
    }

    /// All revisions up to now.
    pub(crate) async fn all(&mut self) -> Vec<AcceleratorPool> {
        let now = self.pools.get(&self.name).await.unwrap().resource_version();
        let there = self.revisions.wait_for(|all| all.last().unwrap().resource_version() == now);
        timeout(WAIT_TIMEOUT, there).await.expect("the watch is behind").unwrap().clone()
    }
}

async fn follow_pool(pools: Api<AcceleratorPool>, tx: watch::Sender<Vec<AcceleratorPool>>) {
    let last = || tx.borrow().last().map(|pool| (pool.name_any(), pool.resource_version().unwrap()));
    // An API server ends each watch after some time; the next watch continues at the last version.
    while let Some((name, version)) = last() {
        let only = WatchParams::default().fields(&format!("metadata.name={name}"));
        let events = pools.watch(&only, &version).await.unwrap();
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event.unwrap() {
                WatchEvent::Modified(pool) => tx.send_modify(|all| all.push(pool)),
                WatchEvent::Bookmark(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Checks the invariants of every revision of every pool.
pub(crate) fn check_ledger(revisions: &[AcceleratorPool]) {
    let mut epoch = 0;
    for pool in revisions {
        let status = pool.status.as_ref().unwrap();
        let bytes = |text: &Option<Quantity>| text.as_ref().map(|text| text.bytes().unwrap());
        let (total, allocated) = (bytes(&status.total).unwrap(), status.ledger.allocated());
        assert!(allocated <= total, "{allocated} of {total} granted in {status:?}");
        if let Some(told) = bytes(&status.allocated) {
            assert_eq!(told, allocated, "{status:?}");
            assert_eq!(bytes(&status.available), Some(total.saturating_sub(allocated)));
            assert_eq!(status.count as usize, status.ledger.reservations.len());
        }
        assert!(status.epoch >= epoch, "under {} after {epoch}", status.epoch);
        epoch = status.epoch;
    }
}
