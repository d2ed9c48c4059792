//! The chart on a node, as the pages say: installed by the quickstart for a cluster, upgraded from an earlier version,
//! removed, installed again, and upgraded to dual pods by their quickstart. One node and one release serve all of it.
//! What a release takes over needs no node (`manifests`).

mod earlier;
mod leftovers;
mod manifests;
mod quickstarts;
mod release;
mod shell;

use std::io::ErrorKind;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;

use self::{
    quickstarts::{follow_cluster, follow_dual_pods},
    release::{HelmRelease, chat, open_stream},
};
use crate::{client::TestExchange, installation::blocking, pages::blocks, pairs::is_ready, shared_node::run};

/// 20 seconds of tokens: the stream is still open when the second upgrade ends its gateway.
const STREAM_TOKENS: u32 = 1000;
/// `helm uninstall` leaves this. The notes must say so.
const NOTED: [&str; 3] = [
    "the definitions of Rouse's kinds, their objects, and the Deployments of engines with their Pods;",
    "the Secret rouse-stub-key,",
    "the Lease rouse-controller",
];

#[test]
fn the_quickstarts_lead_to_releases_whose_engine_and_streams_outlive_upgrades_and_a_removal() {
    run(async {
        let release = Box::pin(HelmRelease::start()).await;
        let [install] = &blocks("docs/install.md", "sh helm")[..] else {
            panic!("docs/install.md has more commands of helm than this test runs")
        };
        let upgrade = blocks("docs/upgrading.md", "sh helm").remove(0);

        let values = Box::pin(follow_cluster(&release)).await;
        let (gateway, engine) = (release.gateway().await, release.engine().await);
        assert!(!release.keeps_limit().await, "the earlier definition has the field");
        release.shell().pull();

        let mut stream = open_stream(&gateway, STREAM_TOKENS).await;
        Box::pin(is_upgraded(&release, &upgrade, &gateway)).await;
        assert!(is_open(&mut stream), "it ended before the upgrade: {}", stream.text());
        Box::pin(is_replaced(&release, &upgrade, &gateway)).await;
        let whole = blocking(move || stream.rest()).await;
        assert!(whole.is_whole_stream(), "{whole:?}");
        is_same(&release.engine().await, &engine);

        Box::pin(is_removed(&release)).await;
        is_same(&release.engine().await, &engine);
        release.set_values(values);
        release.shell().run(install);
        let again = chat(&release.gateway().await).await;
        assert_eq!(again.status, 200, "{}", again.text());
        is_same(&release.engine().await, &engine);

        release.set_values(json!({}));
        Box::pin(follow_dual_pods(&release)).await;
    });
}

/// The version of the chart and a definition change, and nothing in the template of gateways.
async fn is_upgraded(release: &HelmRelease, upgrade: &str, gateway: &Pod) {
    release.shell().run(upgrade);
    release.until_limit_is_kept().await;
    is_same(&release.gateway().await, gateway);
}

/// A change of what gateways read at their start only replaces them.
async fn is_replaced(release: &HelmRelease, upgrade: &str, before: &Pod) {
    release.set_values(json!({"config": {"kubernetes": {"anyBackend": true}}}));
    release.shell().run(upgrade);
    let next = release.gateway().await;
    assert_ne!(next.uid(), before.uid());
    let answer = chat(&next).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// The release goes, but for what its notes name.
async fn is_removed(release: &HelmRelease) {
    let notes = release.shell().run("helm get notes rouse --namespace rouse");
    for noted in NOTED {
        assert!(notes.contains(noted), "no '{noted}' in the notes: {notes}");
    }
    let present = leftovers::of_release(release.client()).await;
    for expected in ["Deployment rouse-gateway", "ClusterRole rouse-gateway", "Service rouse-gateway"] {
        assert!(present.contains(expected), "no {expected} among {present:?}");
    }
    release.shell().run("helm uninstall rouse --namespace rouse");
    leftovers::until_none(release.client()).await;
}

/// Asserts that this is still the same Pod, and that it is ready and does not end.
fn is_same(now: &Pod, before: &Pod) {
    assert_eq!(now.uid(), before.uid());
    assert!(is_ready(now) && now.metadata.deletion_timestamp.is_none(), "{:?}", now.status);
}

/// Reads what has arrived, and returns whether the answer goes on.
fn is_open(stream: &mut TestExchange) -> bool {
    stream.socket().set_nonblocking(true).unwrap();
    let read = loop {
        match stream.try_more() {
            Ok(true) => {}
            other => break other,
        }
    };
    stream.socket().set_nonblocking(false).unwrap();
    matches!(read, Err(error) if error.kind() == ErrorKind::WouldBlock)
}
