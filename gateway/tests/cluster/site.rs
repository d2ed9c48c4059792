//! One installation: a namespace with a gateway's account that has the rights that the chart renders.

use std::{ops::Deref, sync::Mutex};

use futures_util::future::join_all;
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
    coordination::v1::Lease,
};
use kube::{
    Api, Client,
    api::{PatchParams, PostParams},
};
use rouse_cluster::{ClusterUser, Link, Namespace, TestCluster, wait::WAIT_TIMEOUT};
use rouse_controllers::election::{Election, KubeLeaseStore, Leadership};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Duration, sleep, timeout},
};

use crate::{
    granted::until_granted,
    rendered::{ChartPart, ReleaseValues},
    support::{FIELD_MANAGER, apply_object},
};

/// The name of the one Lease: the rights are for this name.
pub(crate) const LEASE_NAME: &str = "rouse-controller";
/// The names of the gateway's own namespace and account in a release `rouse`, and in the manifests.
const MANIFEST_NAMESPACE: &str = "rouse";
const ACCOUNT_NAME: &str = "rouse-gateway";
/// The node agents' account there.
const AGENT_ACCOUNT_NAME: &str = "rouse-node";

pub(crate) struct GatewayNamespace<'a> {
    pub(crate) cluster: &'a TestCluster,
    pub(crate) namespace: Namespace,
    pub(crate) account: ClusterUser,
    /// The cluster admin's client.
    pub(crate) admin: Client,
    values: Mutex<ReleaseValues>,
}

/// The namespaces whose models the gateway may run.
pub(crate) enum ModelScope<'a> {
    Namespaces(&'a [&'a str]),
    AllNamespaces,
}

impl<'a> GatewayNamespace<'a> {
    /// A namespace whose gateway runs the models of this namespace.
    pub(crate) async fn new(cluster: &'a TestCluster, name: &str) -> Self {
        Self::with_parts(cluster, name, &[]).await
    }

    /// A namespace whose gateway runs the models of this namespace, with these parts of the chart turned on.
    pub(crate) async fn with_parts(cluster: &'a TestCluster, name: &str, parts: &[ChartPart]) -> Self {
        let namespace = cluster.namespace(name).await.unwrap();
        Self::release(cluster, namespace, ReleaseValues::new(parts)).await
    }

    /// A gateway in this namespace that runs the models of these namespaces, and has rights on those of no other.
    pub(crate) async fn with(cluster: &'a TestCluster, namespace: Namespace, models: ModelScope<'_>) -> Self {
        let namespaces = match models {
            ModelScope::AllNamespaces => vec!["*".to_owned()],
            ModelScope::Namespaces(all) => all.iter().map(|one| (*one).to_owned()).collect(),
        };
        let values = ReleaseValues { namespaces, ..ReleaseValues::default() };
        Self::release(cluster, namespace, values).await
    }

    async fn release(cluster: &'a TestCluster, namespace: Namespace, values: ReleaseValues) -> Self {
        let objects = values.rights(cluster).await;
        let site = Box::pin(Self::with_objects(cluster, namespace, objects)).await;
        Self { values: Mutex::new(values), ..site }
    }

    /// A namespace with these accounts and rights, which are written for the namespace `rouse`.
    pub(crate) async fn with_objects(
        cluster: &'a TestCluster,
        namespace: Namespace,
        objects: Vec<Value>,
    ) -> Self {
        let admin = cluster.client().await.unwrap();
        let account = cluster.service_account(&namespace, ACCOUNT_NAME).await.unwrap();
        let site = Self { cluster, namespace, account, admin, values: Mutex::default() };
        site.install(objects).await;
        site
    }

    /// Turns on a part of the chart.
    pub(crate) async fn turn_on(&self, part: ChartPart) {
        self.upgrade(|values| values.parts.extend([part])).await;
    }

    /// Gives the gateway the rights to run the models of this namespace and of its own.
    pub(crate) async fn serve_too(&self, namespace: &str) {
        let both = [self.namespace.name(), namespace].map(str::to_owned);
        self.upgrade(|values| values.namespaces = both.into()).await;
    }

    /// Installs the same release once more.
    pub(crate) async fn reinstall(&self) {
        self.upgrade(|_| ()).await;
    }

    /// Changes the values of the release, and applies what the chart makes of them.
    async fn upgrade(&self, change: impl FnOnce(&mut ReleaseValues)) {
        let values = {
            let mut values = self.values.lock().unwrap();
            change(&mut values);
            values.clone()
        };
        let objects = values.rights(self.cluster).await;
        Box::pin(self.install(objects)).await;
    }

    /// Applies accounts and rights that are written for the namespace `rouse`, and waits until the gateway has them.
    pub(crate) async fn install(&self, mut objects: Vec<Value>) {
        objects.iter_mut().for_each(|object| self.place(object));
        let parameters = PatchParams::apply(FIELD_MANAGER);
        let applied = objects.iter().map(|object| {
            let namespace = object["metadata"]["namespace"].as_str();
            Box::pin(apply_object(&self.admin, object, namespace, &parameters))
        });
        join_all(applied).await.into_iter().for_each(|outcome| drop(outcome.unwrap()));
        until_granted(&self.client().await, self.account.name(), self.namespace.name(), &objects).await;
    }

    /// Makes an object one of this installation. ClusterRoleBindings get names of their own, because installations
    /// share a cluster.
    fn place(&self, object: &mut Value) {
        for pointer in ["/metadata/namespace", "/subjects/0/namespace"] {
            match object.pointer_mut(pointer) {
                Some(place) if place == MANIFEST_NAMESPACE => *place = json!(self.namespace.name()),
                _ => {}
            }
        }
        if object["kind"] == "ClusterRoleBinding" {
            let name = object["metadata"]["name"].as_str().unwrap();
            object["metadata"]["name"] = json!(format!("{name}-{}", self.namespace.name()));
        }
    }

    /// The account of the node agents, which takes [`ChartPart::Slots`].
    pub(crate) async fn agent_account(&self) -> ClusterUser {
        let account = self.cluster.service_account(&self.namespace, AGENT_ACCOUNT_NAME).await.unwrap();
        let client = self.cluster.client_as(&account).await.unwrap();
        until_allowed(&client, resource_attributes("rouse.dev", "deviceinstances/status", "patch", "")).await;
        account
    }

    /// A client with the gateway's account, for the runtime that calls.
    pub(crate) async fn client(&self) -> Client {
        self.cluster.client_as(&self.account).await.unwrap()
    }

    /// A client with the gateway's account, through a link.
    pub(crate) async fn client_by(&self, link: &Link) -> Client {
        link.client(&self.account).await.unwrap()
    }

    pub(crate) fn leases(&self, client: Client) -> KubeLeaseStore {
        KubeLeaseStore::new(client, &self.namespace, LEASE_NAME)
    }

    /// Creates the lease as released by a holder in the epoch before this one.
    pub(crate) async fn next_epoch(&self, epoch: u64) {
        let leases: Api<Lease> = self.namespace.api();
        let lease = json!({
            "metadata": { "name": LEASE_NAME },
            "spec": { "holderIdentity": "", "leaseTransitions": epoch - 1, "leaseDurationSeconds": 15 },
        });
        leases.create(&PostParams::default(), &serde_json::from_value(lease).unwrap()).await.unwrap();
    }

    /// Starts an election of this installation, and waits until it leads.
    pub(crate) async fn leader(&self, name: &str) -> (Election, Leadership) {
        let election = Election::start(self.leases(self.client().await), name.to_owned());
        let claim = until_leading(&mut election.leadership()).await;
        (election, claim)
    }

    pub(crate) async fn lease(&self) -> Option<Lease> {
        self.namespace.api::<Lease>().get_opt(LEASE_NAME).await.unwrap()
    }

    /// The lease's holder: a gateway's name and which generation of it. Empty without a holder.
    pub(crate) async fn holder(&self) -> String {
        let spec = self.lease().await.and_then(|lease| lease.spec);
        spec.and_then(|spec| spec.holder_identity).unwrap_or_default()
    }
}

impl Deref for GatewayNamespace<'_> {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

/// Waits until this gateway leads, and returns its leadership.
pub(crate) async fn until_leading(claims: &mut watch::Receiver<Option<Leadership>>) -> Leadership {
    let gained =
        timeout(WAIT_TIMEOUT, claims.wait_for(|claim| claim.is_some_and(|claim| claim.is_valid()))).await;
    gained.expect("it never leads").unwrap().unwrap()
}

/// The right to this verb on a resource. `resource` may name a subresource. An empty namespace stands for all.
pub(crate) fn resource_attributes(
    group: &str,
    resource: &str,
    verb: &str,
    namespace: &str,
) -> ResourceAttributes {
    let (resource, below) = resource.split_once('/').map_or((resource, None), |(one, two)| (one, Some(two)));
    ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource: below.map(str::to_owned),
        verb: Some(verb.to_owned()),
        namespace: Some(namespace.to_owned()),
        ..ResourceAttributes::default()
    }
}

/// Waits until the API server grants this right to the client.
pub(crate) async fn until_allowed(client: &Client, right: ResourceAttributes) {
    let seen = async {
        while !is_allowed(client, right.clone()).await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, seen).await.unwrap_or_else(|_| panic!("it was never given {right:?}"));
}

/// Whether the API server grants this right to the client.
pub(crate) async fn is_allowed(client: &Client, right: ResourceAttributes) -> bool {
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(right), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let answered = Api::all(client.clone()).create(&PostParams::default(), &review).await.unwrap();
    answered.status.unwrap().allowed
}
