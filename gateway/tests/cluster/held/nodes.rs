//! Writes to AcceleratorNodes: the pool, the status and the creation. Writes about Warmups: the label of a warm node,
//! the status, and the Pods.
//!
//! In clusters of their own: in the shared one, each leading gateway writes every AcceleratorNode that it sees.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _, api::PostParams};
use rouse_cluster::ServerRole;
use rouse_controllers::{
    crd::{AcceleratorNode, Warmup},
    workload::EPOCH,
    writer::{Error, ObjectWriter},
};
use serde_json::{Value, json};

use super::{LeaderHandover, fence};
use crate::{
    rendered::ChartPart,
    site::GatewayNamespace,
    support::own_cluster,
    warmup::objects::{ITEM_ANNOTATION, NODE_ANNOTATION, WARM_PREFIX, WARMUP_LABEL},
};

/// An AcceleratorNode of this name with more at the top.
fn node(name: &str, version: Option<&str>, more: (&str, Value)) -> Value {
    let mut metadata = json!({"name": name});
    if let Some(version) = version {
        metadata["resourceVersion"] = json!(version);
    }
    let mut object =
        json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorNode", "metadata": metadata});
    object[more.0] = more.1;
    object
}

impl LeaderHandover<'_> {
    async fn node(&self, name: &str) -> AcceleratorNode {
        let all: Api<AcceleratorNode> = Api::all(self.site.admin.clone());
        let object = serde_json::from_value(node(name, None, ("spec", json!({"pool": "first"})))).unwrap();
        all.create(&PostParams::default(), &object).await.unwrap()
    }

    async fn holds_node(
        &self,
        what: &str,
        name: &str,
        former: impl AsyncFnOnce(ObjectWriter, Api<AcceleratorNode>) -> Result<(), Error>,
        next: impl AsyncFnOnce(ObjectWriter, Api<AcceleratorNode>) -> Result<(), Error>,
    ) {
        Box::pin(self.holds_among(Api::<AcceleratorNode>::all, what, name, former, next)).await;
    }

    async fn holds_node_pool(&self) {
        let made = self.node("moved").await;
        let metadata = json!({"resourceVersion": made.resource_version()});
        let of = |pool: &str| json!({"metadata": metadata, "spec": {"pool": pool}});
        let (former, next) = (of("former"), of("next"));
        self.holds_node(
            "a node's pool",
            "moved",
            async |writer, all| writer.patch_merge(&all, "moved", &former).await.map(drop),
            async |writer, all| writer.patch_merge(&all, "moved", &next).await.map(drop),
        )
        .await;
    }

    async fn holds_node_status(&self) {
        let made = self.node("described").await;
        let of = |count: u32| {
            node("described", made.resource_version().as_deref(), ("status", json!({"count": count})))
        };
        let (former, next) = (of(1), of(2));
        self.holds_node(
            "a node's status",
            "described",
            async |writer, all| writer.apply_status(&all, "described", &former).await.map(drop),
            async |writer, all| writer.apply_status(&all, "described", &next).await.map(drop),
        )
        .await;
    }

    async fn holds_new_node(&self) {
        let of = |pool: &str| node("new", None, ("spec", json!({"pool": pool})));
        let (former, next) = (of("former"), of("next"));
        self.holds_node(
            "a new AcceleratorNode",
            "new",
            async |writer, all| writer.create(&all, &former).await.map(drop),
            async |writer, all| writer.create(&all, &next).await.map(drop),
        )
        .await;
    }

    async fn holds_warm_label(&self) {
        let all: Api<Node> = Api::all(self.site.admin.clone());
        let node = serde_json::from_value(json!({"metadata": {"name": "warm"}})).unwrap();
        let made = all.create(&PostParams::default(), &node).await.unwrap();
        let of = |set: &str| {
            let labels = json!({format!("{WARM_PREFIX}{set}"): self.site.namespace.name()});
            json!({"metadata": {"resourceVersion": made.resource_version(), "labels": labels}})
        };
        let (former, next) = (of("0123456789abcdef"), of("fedcba9876543210"));
        let held = self.holds_among(
            Api::<Node>::all,
            "the label of a warm node",
            "warm",
            async |writer, all| writer.patch_merge(&all, "warm", &former).await.map(drop),
            async |writer, all| writer.patch_merge(&all, "warm", &next).await.map(drop),
        );
        Box::pin(held).await;
    }

    async fn holds_warmup_status(&self) {
        let target = json!({"nodeNames": ["warm"], "imagesPreload": {"items": ["x:1"]}});
        let made: Warmup = self
            .create(
                json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup", "metadata": {"name": "some"},
                "spec": {"targetNodes": target}}),
            )
            .await;
        let of = |succeeded: u32| {
            let metadata = json!({"name": "some", "resourceVersion": made.resource_version()});
            json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup", "metadata": metadata,
                "status": {"observedGeneration": 1, "phase": "InProgress", "succeededNodeNum": succeeded}})
        };
        let (former, next) = (of(1), of(2));
        self.holds(
            "a Warmup's status",
            "some",
            async |writer, all: Api<Warmup>| writer.apply_status(&all, "some", &former).await.map(drop),
            async |writer, all: Api<Warmup>| writer.apply_status(&all, "some", &next).await.map(drop),
        )
        .await;
    }

    /// The name follows from the node, the item and the attempt, so the later creation is refused.
    async fn holds_new_warmup_pod(&self) {
        let (former, next) = (warmup_pod("new-warm", "1"), warmup_pod("new-warm", "2"));
        self.holds(
            "a new Pod of a Warmup",
            "new-warm",
            async |writer, pods: Api<Pod>| writer.create(&pods, &former).await.map(drop),
            async |writer, pods: Api<Pod>| writer.create(&pods, &next).await.map(drop),
        )
        .await;
    }

    /// The next leader has marked the Pod as its own meanwhile.
    async fn holds_warmup_pod_delete(&self) {
        let before: &Pod = &self.create(warmup_pod("old-warm", "1")).await;
        let mark = json!({"metadata": {"annotations": {EPOCH: "2"}}});
        self.holds(
            "the deletion of a Warmup's Pod",
            "old-warm",
            async |writer, pods: Api<Pod>| {
                writer.delete_fenced(&pods, "old-warm", &fence(&writer, before)).await
            },
            async |writer, pods: Api<Pod>| {
                writer.patch_fenced(&pods, "old-warm", &fence(&writer, before), &mark).await
            },
        )
        .await;
    }
}

/// A Pod of a Warmup by the leader of this epoch. No scheduler takes it.
fn warmup_pod(name: &str, epoch: &str) -> Value {
    let annotations = json!({NODE_ANNOTATION: "warm", ITEM_ANNOTATION: "x:1", EPOCH: epoch});
    super::pod(name, json!({"labels": {WARMUP_LABEL: "some"}, "annotations": annotations}))
}

#[tokio::test]
async fn no_held_write_to_an_accelerator_node_changes_what_the_next_leader_wrote() {
    let cluster = own_cluster().await;
    let site = GatewayNamespace::new(&cluster, "held-nodes").await;
    let (succession, leader) = Box::pin(LeaderHandover::of(site, 3)).await;
    tokio::join!(
        Box::pin(succession.hand_over(leader)),
        Box::pin(succession.holds_node_pool()),
        Box::pin(succession.holds_node_status()),
        Box::pin(succession.holds_new_node()),
    );
}

#[tokio::test]
async fn no_held_write_about_a_warmup_changes_what_the_next_leader_wrote() {
    let cluster = own_cluster().await;
    let site = GatewayNamespace::with_parts(&cluster, "held-warmups", &[ChartPart::WarmLabels]).await;
    // Its controllers write nodes, too.
    cluster.stop_server(ServerRole::ControllerManager).await;
    let (succession, leader) = Box::pin(LeaderHandover::of(site, 4)).await;
    tokio::join!(
        Box::pin(succession.hand_over(leader)),
        Box::pin(succession.holds_warm_label()),
        Box::pin(succession.holds_warmup_status()),
        Box::pin(succession.holds_new_warmup_pod()),
        Box::pin(succession.holds_warmup_pod_delete()),
    );
}
