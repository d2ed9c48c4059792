//! Writes to AcceleratorNodes: the pool, the status and the creation.
//!
//! In a cluster of their own: in the shared one, each leading gateway writes every AcceleratorNode that it sees.

use kube::{Api, ResourceExt as _, api::PostParams};
use rouse_controllers::{
    crd::AcceleratorNode,
    writer::{Error, ObjectWriter},
};
use serde_json::{Value, json};

use super::LeaderHandover;
use crate::{site::GatewayNamespace, support::own_cluster};

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
