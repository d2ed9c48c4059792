//! Links fail on command, and other links are unaffected.

use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{ListParams, WatchParams},
};
use rouse_cluster::{LinkMode, TestCluster, wait::WAIT_TIMEOUT};
use tokio::time::timeout;

/// Long enough for any response that is not held.
const A_WHILE: Duration = Duration::from_millis(700);

#[tokio::test]
async fn a_link_is_held_let_go_and_cut_and_others_are_not() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("links").await.unwrap();
    let (link, other) = (cluster.link().await.unwrap(), cluster.link().await.unwrap());
    let through = link.client(cluster.admin()).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(through, &namespace);
    let others: Api<ConfigMap> = Api::namespaced(other.client(cluster.admin()).await.unwrap(), &namespace);
    let list = ListParams::default();
    maps.list(&list).await.unwrap();
    others.list(&list).await.unwrap();
    assert_eq!((link.traffic().accepted, other.traffic().accepted), (1, 1));

    link.set(LinkMode::Hold);
    let mut pending_list = std::pin::pin!(maps.list(&list));
    assert!(timeout(A_WHILE, &mut pending_list).await.is_err(), "an answer came over a link that is held");
    let traffic = link.until("a piece that is held", |traffic| traffic.held > 0).await.unwrap();
    assert_eq!(link.traffic(), traffic, "what is held goes nowhere");
    others.list(&list).await.unwrap();
    link.set(LinkMode::Pass);
    timeout(WAIT_TIMEOUT, pending_list).await.expect("it is still held").unwrap();
    let after = link.until("the answer", |now| now.to_client > traffic.to_client).await.unwrap();
    assert!(after.held == 0 && after.to_server > traffic.to_server, "{after:?}");
    assert_eq!(link.traffic().accepted, 1, "the connection that was held is the one that went on");

    link.set(LinkMode::Slow(A_WHILE));
    let begun = tokio::time::Instant::now();
    maps.list(&list).await.unwrap();
    assert!(begun.elapsed() >= A_WHILE * 2, "{:?}, there and back", begun.elapsed());
    link.set(LinkMode::Pass);

    let watched = maps.watch(&WatchParams::default(), "0").await.unwrap();
    let mut watched = std::pin::pin!(watched);
    link.set(LinkMode::Cut);
    let end = async { while let Some(Ok(_)) = watched.next().await {} };
    timeout(WAIT_TIMEOUT, end).await.expect("the watch goes on over a link that is cut");
    assert!(timeout(WAIT_TIMEOUT, maps.list(&list)).await.expect("no outcome").is_err());
    others.list(&list).await.unwrap();
    link.set(LinkMode::Pass);
    maps.list(&list).await.unwrap();
}
