//! How long a requester waits for a sleeper that is there.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::json;
use tokio::time::{Duration, Instant};

use crate::{
    dual::Duo,
    pairs::{is_ready, label},
};

const ALL: u32 = 20;
/// What an engine itself takes to wake.
const WAKE: Duration = Duration::from_millis(50);

/// Its stub runs, as the kubelet says.
fn runs(pod: &Pod) -> bool {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    all.filter_map(|own| own.state.as_ref()).any(|state| state.running.is_some())
}

/// From when each requester's stub was seen to run until it was seen to have its engine.
async fn waits(duo: &Duo, name: &str, many: usize) -> Vec<Duration> {
    let own = watcher::Config::default().labels(&format!("app={name}"));
    let mut seen = pin!(watcher(duo.world.pods(), own).applied_objects());
    let mut since: BTreeMap<String, Instant> = BTreeMap::new();
    let mut took = Vec::new();
    let mut done = BTreeSet::new();
    while done.len() < many {
        let pod = seen.next().await.unwrap().unwrap();
        let uid = pod.uid().unwrap();
        if runs(&pod) {
            let began = *since.entry(uid.clone()).or_insert_with(Instant::now);
            if label(&pod, "dual").is_some() && done.insert(uid) {
                took.push(began.elapsed());
            }
        }
    }
    took.sort();
    took
}

/// The same for so many at once, without what their engines take to wake.
async fn hot(duo: &Duo, at_once: u32) -> Vec<Duration> {
    let many = usize::try_from(at_once).unwrap();
    let (took, ()) = tokio::join!(waits(duo, "hot", many), duo.scale("hot", at_once));
    let ours: Vec<_> = took.into_iter().map(|took| took.saturating_sub(WAKE)).collect();
    let (median, worst) = (ours[many / 2], ours[many - 1]);
    println!(
        "{many} at once, from running to its engine, without its wake: median {median:?}, worst {worst:?}"
    );
    ours
}

/// What this machine's API server takes to write on a Pod, and to say so: the median of some.
async fn writes(duo: &Duo, pod: &Pod) -> Duration {
    let name = pod.name_any();
    let own = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut seen = pin!(watcher(duo.world.pods(), own).applied_objects());
    seen.next().await.unwrap().unwrap();
    let mut took = Vec::new();
    for n in 0..21 {
        let began = Instant::now();
        let patch = json!({"metadata": {"annotations": {"example.com/written": n.to_string()}}});
        let written =
            duo.world.pods().patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        while seen.next().await.unwrap().unwrap().resource_version() != written.resource_version() {}
        took.push(began.elapsed());
    }
    took.sort();
    took[took.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_requesters_on_one_node_have_their_sleepers_at_once() {
    let duo = Duo::new("dual-hot", ALL, "8Gi", "").await;
    let many = usize::try_from(ALL).unwrap();
    duo.ask("hot", ALL, 1, "--wake-time 50ms").await;
    let served = |requesters: &[Pod], _: &[Pod]| requesters.len() == many && requesters.iter().all(is_ready);
    let (_, before) = duo.until("hot", "all ready", served).await;
    duo.scale("hot", 0).await;
    let asleep = |requesters: &[Pod], providers: &[Pod]| {
        requesters.is_empty() && providers.iter().all(|pod| label(pod, "sleeping") == Some("true"))
    };
    duo.until("hot", "all asleep", asleep).await;
    let alone = hot(&duo, 1).await[0];
    let write = writes(&duo, &before[0]).await;
    assert!(
        alone <= (16 * write).max(Duration::from_millis(150)),
        "{alone:?}, where a write takes {write:?}"
    );
    duo.scale("hot", 0).await;
    duo.until("hot", "all asleep again", asleep).await;
    let last = *hot(&duo, ALL).await.last().unwrap();
    assert!(
        2 * last < ALL * (alone + WAKE),
        "one after the other: {last:?}, where one alone takes {alone:?}"
    );
    let (_, after) = duo.pairs("hot").await;
    let uids = |all: &[Pod]| all.iter().filter_map(|pod| pod.uid()).collect::<BTreeSet<_>>();
    assert_eq!(uids(&before), uids(&after), "all were woken, and none was made");
}
