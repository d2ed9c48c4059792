//! The chart on a node, as the pages say: installed, upgraded from an earlier version, removed, and installed again.

mod earlier;
mod leftovers;
mod release;

use std::{io::ErrorKind, path::Path};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;

use self::release::{HelmRelease, chat, open_stream};
use crate::{
    client::TestExchange, installation::blocking, pages::blocks, pairs::is_ready, shared_node::run,
    support::repo_path,
};

/// 20 seconds of tokens: the stream is still open when the second upgrade ends its gateway.
const STREAM_TOKENS: u32 = 400;
/// `helm uninstall` leaves this. The notes must say so.
const NOTED: [&str; 3] = [
    "the definitions of Rouse's kinds, their objects, and the Deployments of engines with their Pods;",
    "the Secret rouse-stub-key,",
    "the Lease rouse-controller",
];

#[test]
fn a_release_is_upgraded_removed_and_installed_again_while_its_engine_stays_and_no_stream_is_cut() {
    run(async {
        let release = Box::pin(HelmRelease::start()).await;
        let pages = repo_path("");
        let [install] = &blocks("docs/install.md", "sh helm")[..] else {
            panic!("docs/install.md has more commands of helm than this test runs")
        };
        let upgrade = blocks("docs/upgrading.md", "sh helm").remove(0);

        release.types(&release.earlier_chart(), install);
        let gateway = release.gateway().await;
        Box::pin(release.serve_model()).await;
        let first = chat(&gateway).await;
        assert_eq!((first.status, first.header("x-rouse-cold-start")), (200, "cold"), "{}", first.text());
        let engine = release.engine().await;
        assert!(!release.keeps_limit().await, "the earlier definition has the field");

        let mut stream = open_stream(&gateway, STREAM_TOKENS).await;
        Box::pin(is_upgraded(&release, &pages, &upgrade, &gateway)).await;
        assert!(is_open(&mut stream), "it ended before the upgrade: {}", stream.text());
        Box::pin(is_replaced(&release, &pages, &upgrade, &gateway)).await;
        let whole = blocking(move || stream.rest()).await;
        assert!(whole.is_whole_stream(), "{whole:?}");
        is_same(&release.engine().await, &engine);

        Box::pin(is_removed(&release, &pages)).await;
        is_same(&release.engine().await, &engine);
        release.types(&pages, install);
        let again = chat(&release.gateway().await).await;
        assert_eq!(again.status, 200, "{}", again.text());
        is_same(&release.engine().await, &engine);
    });
}

/// The version of the chart and a definition change, and nothing in the template of gateways.
async fn is_upgraded(release: &HelmRelease, pages: &Path, upgrade: &str, gateway: &Pod) {
    release.types(pages, upgrade);
    release.until_limit_is_kept().await;
    is_same(&release.gateway().await, gateway);
}

/// A change of what gateways read at their start only replaces them.
async fn is_replaced(release: &HelmRelease, pages: &Path, upgrade: &str, before: &Pod) {
    release.set_config(&json!({"kubernetes": {"anyBackend": true}}));
    release.types(pages, upgrade);
    let next = release.gateway().await;
    assert_ne!(next.uid(), before.uid());
    let answer = chat(&next).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// The release goes, but for what its notes name.
async fn is_removed(release: &HelmRelease, pages: &Path) {
    let notes = release.types(pages, "helm get notes rouse --namespace rouse");
    for noted in NOTED {
        assert!(notes.contains(noted), "no '{noted}' in the notes: {notes}");
    }
    let present = leftovers::of_release(release.client()).await;
    for expected in ["Deployment rouse-gateway", "ClusterRole rouse-gateway", "Service rouse-gateway"] {
        assert!(present.contains(expected), "no {expected} among {present:?}");
    }
    release.types(pages, "helm uninstall rouse --namespace rouse");
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
