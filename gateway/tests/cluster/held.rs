//! Writes that a replaced leader sent before, and that arrive after its successor's: none changes anything.
//!
//! Links hold the former leader's writes. Meanwhile it gives the Lease up, and its successor writes the same objects.
//! What is written to Warmups and about slots is held on the way of a whole gateway ([`gateway`]), and what an agent
//! creates on the way of that agent ([`instances`]).

mod gateway;
mod instances;
mod nodes;
mod objects;
mod pods;
mod slots;
mod warmups;

use std::fmt::Debug;

use k8s_openapi::{NamespaceResourceScope, api::core::v1::Pod};
use kube::{Api, Client, Resource, api::PostParams};
use prometheus::{IntCounterVec, Opts};
use rouse_cluster::LinkMode;
use rouse_controllers::{
    election::Election,
    writer::{
        Error, ObjectWriter,
        fence::{Fence, SeenObject},
    },
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::{
    sync::Barrier,
    time::{Duration, sleep},
};

use crate::{
    launched::define_fma_kinds,
    rendered::ChartPart,
    site::{GatewayNamespace, until_leading},
    support::cluster,
};

/// A leader and its successor in one namespace, and the held writes that wait for the change.
struct LeaderHandover<'a> {
    site: GatewayNamespace<'a>,
    former: ObjectWriter,
    next: ObjectWriter,
    successor: Election,
    /// Passed once all writes are held, and again once the successor leads.
    barrier: Barrier,
}

impl LeaderHandover<'static> {
    /// In the cluster that all tests share, with the rights for dual pods. `held`: number of held writes.
    async fn new(name: &str, held: usize) -> (Self, Election) {
        Box::pin(define_fma_kinds()).await;
        let site = GatewayNamespace::with_parts(cluster().await, name, &[ChartPart::DualPods]).await;
        Box::pin(Self::of(site, held)).await
    }
}

impl<'a> LeaderHandover<'a> {
    /// Returns the former leader's election, too. `held`: number of held writes.
    async fn of(site: GatewayNamespace<'a>, held: usize) -> (Self, Election) {
        let (former, _) = site.leader("former").await;
        let successor = Election::start(site.leases(site.client().await), "next".to_owned());
        let succession = Self {
            former: writer(&former),
            next: writer(&successor),
            successor,
            barrier: Barrier::new(held + 1),
            site,
        };
        (succession, former)
    }

    /// Waits until every write is held, and has the former leader replaced.
    async fn hand_over(&self, former: Election) {
        self.barrier.wait().await;
        former.release(async {}).await;
        until_leading(&mut self.successor.leadership()).await;
        self.barrier.wait().await;
    }

    /// Holds the write of an object in this namespace, as [`Self::holds_among`] does.
    async fn holds<K>(
        &self,
        what: &str,
        name: &str,
        former: impl AsyncFnOnce(ObjectWriter, Api<K>) -> Result<(), Error>,
        next: impl AsyncFnOnce(ObjectWriter, Api<K>) -> Result<(), Error>,
    ) where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + serde::Serialize
            + Debug,
    {
        Box::pin(self.holds_among(|client| self.api::<K>(client), what, name, former, next)).await;
    }

    /// Holds the former leader's write until its successor has written the object, and asserts that the object then
    /// stays as it is. `api`: the kind's objects, by a client.
    async fn holds_among<K>(
        &self,
        api: impl Fn(Client) -> Api<K>,
        what: &str,
        name: &str,
        former: impl AsyncFnOnce(ObjectWriter, Api<K>) -> Result<(), Error>,
        next: impl AsyncFnOnce(ObjectWriter, Api<K>) -> Result<(), Error>,
    ) where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + serde::Serialize + Debug,
    {
        let link = self.site.cluster.link().await.unwrap();
        let over_link = api(self.site.client_by(&link).await);
        // A link does not hold the bytes of a connection that it has not opened.
        over_link.get_opt(name).await.unwrap();
        link.set(LinkMode::Hold);
        let all = api(self.site.admin.clone());
        let replaced = async {
            link.until("the write", |traffic| traffic.held > 0).await.unwrap();
            self.barrier.wait().await;
            self.barrier.wait().await;
            let written = Box::pin(next(self.next.clone(), api(self.site.client().await))).await;
            written.unwrap_or_else(|error| panic!("{what}: the successor's write: {error}"));
            let written = state(&all, name).await;
            link.set(LinkMode::Pass);
            written
        };
        let (outcome, written) =
            tokio::join!(Box::pin(former(self.former.clone(), over_link)), Box::pin(replaced));
        assert!(
            matches!(outcome, Err(Error::Conflict | Error::NotLeading | Error::Timeout)),
            "{what}: {outcome:?}"
        );
        link.until("the end of the write", |traffic| traffic.held == 0).await.unwrap();
        if matches!(outcome, Err(Error::Timeout)) {
            // Its answer was not awaited, so the API server may still be at it.
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(state(&all, name).await, written, "{what}: changed by a late write");
    }

    fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self, client: Client) -> Api<K> {
        Api::namespaced(client, self.site.namespace.name())
    }

    /// Creates an object as its user.
    async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + serde::Serialize
            + Debug,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api::<K>(self.site.admin.clone()).create(&PostParams::default(), &object).await.unwrap()
    }

    async fn pod(&self, name: &str, metadata: Value) -> Pod {
        self.create(pod(name, metadata)).await
    }
}

/// A Pod with more metadata. No scheduler takes it.
fn pod(name: &str, mut metadata: Value) -> Value {
    metadata["name"] = json!(name);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {
        "schedulerName": "none",
        "containers": [{"name": "inference-server", "image": "rouse/engine"}],
    }})
}

fn writer(election: &Election) -> ObjectWriter {
    let writes = IntCounterVec::new(Opts::new("writes", "of a test"), &["kind", "outcome"]).unwrap();
    ObjectWriter::new(election.leadership(), writes)
}

/// The fence of a decision that this leader made when the Pod was like this.
fn fence(writer: &ObjectWriter, pod: &Pod) -> Fence {
    Fence::new(SeenObject::of(&pod.metadata), writer.leadership().unwrap().epoch)
}

/// The object's content, without what its own controller writes.
async fn state<K>(api: &Api<K>, name: &str) -> Value
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + serde::Serialize + Debug,
{
    let mut found = api.get(name).await.unwrap();
    found.meta_mut().managed_fields = None;
    found.meta_mut().resource_version = None;
    let mut content = serde_json::to_value(&found).unwrap();
    if K::kind(&()) == "Deployment" {
        content["status"].take();
        content["metadata"]["annotations"]["deployment.kubernetes.io/revision"].take();
    }
    content
}
