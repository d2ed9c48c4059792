//! Whose models a gateway serves: those of its own namespace, of several, of all.

use std::collections::BTreeSet;

use serde_json::json;

use crate::{
    runner::plain_node,
    site::{Models, Site},
    support::{cluster, own_cluster},
    world::{World, aside, reason},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gateway_serves_the_models_of_several_namespaces_and_of_no_other() {
    let cluster = cluster().await;
    let (far, stranger) =
        tokio::join!(World::new("several-far", 1, "64Gi"), World::new("several-other", 1, "64Gi"));
    let namespace = cluster.namespace("several-near").await.unwrap();
    let own = namespace.name().to_owned();
    let site = Site::with(cluster, namespace, Models::In(&[&own, far.name()])).await;
    let mut near = World::at(site, "64Gi", |own| plain_node(own, 1)).await;
    near.watched = format!("{own}, {}", far.name());
    serves(&near, &far, &stranger, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gateway_serves_the_models_of_all_namespaces() {
    let cluster = own_cluster().await;
    let (far, stranger) =
        tokio::join!(World::on(&cluster, "all-far", 1, "64Gi"), World::on(&cluster, "all-other", 1, "64Gi"));
    let namespace = cluster.namespace("all-near").await.unwrap();
    let site = Site::with(&cluster, namespace, Models::Everywhere).await;
    let mut near = World::at(site, "64Gi", |own| plain_node(own, 1)).await;
    near.watched = "'*'".to_owned();
    serves(&near, &far, &stranger, true).await;
}

/// A gateway in the first; `too`: the third is one of its namespaces as well.
async fn serves(near: &World<'_>, far: &World<'_>, stranger: &World<'_>, too: bool) {
    near.model("near", "40Gi", "", json!({})).await;
    far.model("far", "40Gi", "", json!({})).await;
    stranger.model("stranger", "40Gi", "", json!({})).await;
    let gateway = near.gateway("gateway-0", "");
    for (world, model) in [(near, "near"), (far, "far")] {
        let client = gateway.client();
        assert_eq!(aside(move || client.chat(model, false, 4)).await.status, 200, "{model}");
        assert_eq!(world.booked().await, [(model.to_owned(), 40)], "in its own pool");
        assert_eq!(world.running().await.len(), 1, "in its own namespace");
    }
    if too {
        stranger.until("stranger", "seen", |model| reason(model, "Ready") == "ScaledToZero").await;
    } else {
        // Nobody may write there, and its owner is told all the same.
        let unseen = stranger.models().get("stranger").await.unwrap();
        let said = unseen.status.unwrap_or_default().conditions;
        let ready = said.iter().find(|condition| condition.type_ == "Ready").unwrap();
        assert_eq!((ready.reason.as_str(), ready.status.as_str()), ("Pending", "Unknown"));
        assert!(ready.message.contains("with this namespace in its kubernetes.namespaces"), "{ready:?}");
    }
    let client = gateway.client();
    let listed = aside(move || client.get("/v1/models")).await.json();
    let listed: BTreeSet<&str> =
        listed["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str()).collect();
    let mut wanted = BTreeSet::from(["near", "far"]);
    wanted.extend(too.then_some("stranger"));
    assert_eq!(listed, wanted);
}
