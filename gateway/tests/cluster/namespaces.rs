//! The namespaces whose models a gateway serves: its own, several, or all.

use std::collections::BTreeSet;

use serde_json::json;

use crate::{
    installation::{Installation, blocking, reason},
    runner::plain_node,
    site::{GatewayNamespace, ModelScope},
    support::{cluster, own_cluster},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gateway_serves_the_models_of_several_namespaces_and_of_no_other() {
    let cluster = cluster().await;
    let (far, stranger) = tokio::join!(
        Installation::new("several-far", 1, "64Gi"),
        Installation::new("several-other", 1, "64Gi")
    );
    let namespace = cluster.namespace("several-near").await.unwrap();
    let own = namespace.name().to_owned();
    let site = GatewayNamespace::with(cluster, namespace, ModelScope::Namespaces(&[&own, far.name()])).await;
    let mut near = Installation::with_node(site, "64Gi", |own| plain_node(own, 1)).await;
    near.watched = format!("{own}, {}", far.name());
    serves(&near, &far, &stranger, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gateway_serves_the_models_of_all_namespaces() {
    let cluster = own_cluster().await;
    let (far, stranger) = tokio::join!(
        Installation::new_in(&cluster, "all-far", 1, "64Gi"),
        Installation::new_in(&cluster, "all-other", 1, "64Gi")
    );
    let namespace = cluster.namespace("all-near").await.unwrap();
    let site = GatewayNamespace::with(&cluster, namespace, ModelScope::AllNamespaces).await;
    let mut near = Installation::with_node(site, "64Gi", |own| plain_node(own, 1)).await;
    near.watched = "'*'".to_owned();
    serves(&near, &far, &stranger, true).await;
}

/// Asserts which models a gateway in the first namespace serves. With `too` the third namespace is one of its own as
/// well.
async fn serves(near: &Installation<'_>, far: &Installation<'_>, stranger: &Installation<'_>, too: bool) {
    near.model("near", "40Gi", "", json!({})).await;
    far.model("far", "40Gi", "", json!({})).await;
    stranger.model("stranger", "40Gi", "", json!({})).await;
    let gateway = near.gateway("gateway-0", "");
    for (world, model) in [(near, "near"), (far, "far")] {
        let client = gateway.client();
        assert_eq!(blocking(move || client.chat(model, false, 4)).await.status, 200, "{model}");
        assert_eq!(world.reserved_gib().await, [(model.to_owned(), 40)], "in its own pool");
        assert_eq!(world.running().await.len(), 1, "in its own namespace");
    }
    if too {
        stranger.until("stranger", "seen", |model| reason(model, "Ready") == "ScaledToZero").await;
    } else {
        // The gateway has no right to write there, and the definition's default status informs the owner all the same.
        let unseen = stranger.models().get("stranger").await.unwrap();
        let said = unseen.status.unwrap_or_default().conditions;
        let ready = said.iter().find(|condition| condition.type_ == "Ready").unwrap();
        assert_eq!((ready.reason.as_str(), ready.status.as_str()), ("Pending", "Unknown"));
        assert!(
            ready.message.contains("run one that has this namespace in its kubernetes.namespaces"),
            "{ready:?}"
        );
    }
    let client = gateway.client();
    let listed = blocking(move || client.get("/v1/models")).await.json();
    let listed: BTreeSet<&str> =
        listed["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str()).collect();
    let mut wanted = BTreeSet::from(["near", "far"]);
    wanted.extend(too.then_some("stranger"));
    assert_eq!(listed, wanted);
}
