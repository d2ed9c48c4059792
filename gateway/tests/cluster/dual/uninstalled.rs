//! The gateways are uninstalled, in the documented order and in the opposite one.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::Value;

use super::all_modes::{for_all_kinds, for_sleeping_kinds};
use crate::support::repo_path;

/// The documented patch with which an administrator releases a Pod that no gateway releases.
fn by_hand() -> Value {
    let text = std::fs::read_to_string(repo_path("docs/dual-pods.md")).unwrap();
    let (_, command) = text.split_once("`kubectl patch pod NAME --type=merge -p '").unwrap();
    serde_json::from_str(command.split_once("'`").unwrap().0).unwrap()
}

fn nobody(requesters: &[Pod], providers: &[Pod]) -> bool {
    requesters.is_empty() && providers.is_empty()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requesters_first_then_providers_then_gateways_leaves_nothing() {
    for_sleeping_kinds("dual-uninstall", 1, "", async |mut duo| {
        duo.demand("one", "").await;
        duo.pair("one").await;
        duo.sets().delete("one", &DeleteParams::default()).await.unwrap();
        duo.alone("one").await;
        for selector in ["dual-pods.llm-d.ai/sleeping", "app.kubernetes.io/component=launcher"] {
            let all = ListParams::default().labels(selector);
            duo.world.pods().delete_collection(&DeleteParams::default(), &all).await.unwrap();
        }
        duo.watch_for("one", "no Pod", nobody).await;
        duo.kill().await;
        assert!(duo.world.running().await.is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_first_then_finalizers_are_taken_off_by_the_documented_command() {
    for_all_kinds("dual-orphans", 1, "", async |mut duo| {
        // Nothing releases the stubs, which hold for a minute by default.
        duo.stub_flags = &["--hold=5s"];
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        duo.kill().await;
        duo.sets().delete("one", &DeleteParams::default()).await.unwrap();
        duo.delete(&provider).await;
        let held = |requesters: &[Pod], providers: &[Pod]| {
            let held = |own: &Pod| own.metadata.deletion_timestamp.is_some() && !own.finalizers().is_empty();
            matches!((requesters, providers), ([left], [right]) if held(left) && held(right))
        };
        duo.watch_for("one", "both held", held).await;
        for pod in [&requester, &provider] {
            let patch = Patch::Merge(by_hand());
            duo.world.pods().patch(&pod.name_any(), &PatchParams::default(), &patch).await.unwrap();
        }
        duo.watch_for("one", "no Pod", nobody).await;
    })
    .await;
}
