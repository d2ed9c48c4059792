//! One installation: a namespace with a gateway's account that has the rights of the chart's manifests.

use std::ops::Deref;

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

use crate::support::{FIELD_MANAGER, apply_object, repo_path};

/// The name of the one Lease: the rights are for this name.
pub(crate) const LEASE_NAME: &str = "rouse-controller";
/// The names of the gateway's own namespace and account in the manifests.
const MANIFEST_NAMESPACE: &str = "rouse";
const ACCOUNT_NAME: &str = "rouse-gateway";
/// The node agents' account in the manifests.
const AGENT_ACCOUNT_NAME: &str = "rouse-node";

pub(crate) struct GatewayNamespace<'a> {
    pub(crate) cluster: &'a TestCluster,
    pub(crate) namespace: Namespace,
    pub(crate) account: ClusterUser,
    /// The cluster admin's client.
    pub(crate) admin: Client,
}

/// The namespaces whose models the gateway may run.
pub(crate) enum ModelScope<'a> {
    Namespaces(&'a [&'a str]),
    AllNamespaces,
}

impl<'a> GatewayNamespace<'a> {
    /// A namespace whose gateway runs the models of this namespace.
    pub(crate) async fn new(cluster: &'a TestCluster, name: &str) -> Self {
        let namespace = cluster.namespace(name).await.unwrap();
        let own = namespace.name().to_owned();
        Self::with(cluster, namespace, ModelScope::Namespaces(&[&own])).await
    }

    pub(crate) async fn with(cluster: &'a TestCluster, namespace: Namespace, models: ModelScope<'_>) -> Self {
        let admin = cluster.client().await.unwrap();
        let account = cluster.service_account(&namespace, ACCOUNT_NAME).await.unwrap();
        let site = Self { cluster, namespace, account, admin };
        site.install("gateway.yaml", None).await;
        match models {
            ModelScope::AllNamespaces => site.install("all-namespaces.yaml", None).await,
            ModelScope::Namespaces(namespaces) => {
                for namespace in namespaces {
                    site.install("namespace.yaml", Some(namespace)).await;
                }
            }
        }
        site.wait_for_rights(&models).await;
        site
    }

    /// Applies the manifest of a gateway's own rights once more.
    pub(crate) async fn reinstall(&self) {
        self.install("gateway.yaml", None).await;
    }

    /// Applies one of the manifests for this installation. ClusterRoleBindings get names of their own, because
    /// installations share a cluster.
    pub(crate) async fn install(&self, file: &str, into: Option<&str>) {
        let text = std::fs::read_to_string(repo_path("charts/rouse/rbac").join(file)).unwrap();
        for document in text.split("---\n") {
            let mut object: Value = serde_saphyr::from_str(document).unwrap();
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
            self.apply(&object, into).await;
        }
    }

    /// Creates the account of the node agents, with the rights of the manifest.
    pub(crate) async fn agent_account(&self) -> ClusterUser {
        let account = self.cluster.service_account(&self.namespace, AGENT_ACCOUNT_NAME).await.unwrap();
        self.install("node-agent.yaml", None).await;
        let client = self.cluster.client_as(&account).await.unwrap();
        until_allowed(&client, resource_attributes("rouse.dev", "deviceinstances/status", "patch", "")).await;
        account
    }

    async fn apply(&self, object: &Value, into: Option<&str>) {
        let cluster_wide = object["kind"].as_str().unwrap().starts_with("Cluster");
        let namespace = object["metadata"]["namespace"].as_str().or_else(|| into.filter(|_| !cluster_wide));
        apply_object(&self.admin, object, namespace, &PatchParams::apply(FIELD_MANAGER)).await.unwrap();
    }

    /// Waits until the rights hold. The authoriser watches roles and bindings separately, so this checks one right of
    /// each.
    async fn wait_for_rights(&self, models: &ModelScope<'_>) {
        let client = self.client().await;
        let mut reviews = vec![
            resource_attributes("coordination.k8s.io", "leases", "create", self.namespace.name()),
            resource_attributes("rouse.dev", "acceleratorpools/status", "update", ""),
        ];
        match models {
            ModelScope::AllNamespaces => {
                reviews.push(resource_attributes("apps", "deployments", "delete", ""))
            }
            ModelScope::Namespaces(all) => reviews
                .extend(all.iter().map(|one| resource_attributes("apps", "deployments", "delete", one))),
        }
        for right in reviews {
            until_allowed(&client, right).await;
        }
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
