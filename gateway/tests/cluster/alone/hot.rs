//! How long a requester waits for a sleeping engine.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
};

use futures_util::StreamExt as _;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_testing::sample::{is_soak, size};
use serde_json::json;
use tokio::time::{Duration, Instant};

use crate::{
    dual::DualPodsFixture,
    pairs::{is_ready, label},
    runner::TestPrograms,
};

const ALL: u32 = 20;
/// Rounds of the soak, which holds optimised programs to the promise (`make hot-start` runs it alone). The gate has one
/// round and shows that no requester waits for all others: beside other load on its two cores a round takes five times
/// as long.
const ROUNDS: usize = 10;
/// The promised median and 99th percentile.
const PROMISED: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(400));
/// The engine's own time to wake.
const WAKE: Duration = Duration::from_millis(50);

/// Whether the kubelet reports the container as running.
fn runs(pod: &Pod) -> bool {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    all.filter_map(|own| own.state.as_ref()).any(|state| state.running.is_some())
}

/// Measures each requester's time from the report that its stub runs until the stub logged its readiness. All stubs run
/// before the node reports the first. Then the node reports them one after the other, as fast as the API server takes
/// the writes, as kubelets do.
async fn waits(duo: &DualPodsFixture, name: &str, many: usize) -> Vec<Duration> {
    let node = format!("{}-a", duo.world.name());
    duo.world.runner.delay_reports(&node);
    duo.scale(name, u32::try_from(many).unwrap()).await;
    listening(duo, name, many).await;
    let own = watcher::Config::default().labels(&format!("app={name}"));
    let mut seen = pin!(watcher(duo.world.pods(), own).applied_objects());
    duo.world.runner.heal(&node);
    let mut since: BTreeMap<String, Timestamp> = BTreeMap::new();
    let mut done: BTreeMap<String, Pod> = BTreeMap::new();
    while done.len() < many {
        let pod = seen.next().await.unwrap().unwrap();
        let uid = pod.uid().unwrap();
        if runs(&pod) {
            since.entry(uid.clone()).or_insert_with(Timestamp::now);
        }
        if is_ready(&pod) {
            done.insert(uid, pod);
        }
    }
    let took = |(uid, pod): (&String, &Pod)| ready(duo, pod).duration_since(since[uid]).unsigned_abs();
    let mut took: Vec<Duration> = done.iter().map(took).collect();
    took.sort();
    took
}

/// Waits until this many stubs take orders. So far only their logs show it.
async fn listening(duo: &DualPodsFixture, name: &str, many: usize) {
    let listens = |pod: &Pod| log(duo, pod).is_some_and(|log| log.contains("listening port=\"probes\""));
    let all = async {
        let mut looks = tokio::time::interval(Duration::from_millis(20));
        loop {
            looks.tick().await;
            let (requesters, _) = duo.pairs(name).await;
            if requesters.iter().filter(|pod| listens(pod)).count() == many {
                return;
            }
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, all).await.expect("stubs that listen");
}

fn log(duo: &DualPodsFixture, pod: &Pod) -> Option<String> {
    duo.world.runner.log(pod, "inference-server", 0).ok()
}

/// When the stub logged that it is ready.
fn ready(duo: &DualPodsFixture, pod: &Pod) -> Timestamp {
    let log = log(duo, pod).unwrap();
    let line = log.lines().find(|line| line.contains("readiness changed ready=true"));
    let line = line.unwrap_or_else(|| panic!("{} was never ready: {log}", pod.name_any()));
    line.split(' ').next().unwrap().parse().unwrap()
}

/// Measures the waits of this many requesters at once, without the engines' wakes.
async fn hot(duo: &DualPodsFixture, at_once: u32) -> Vec<Duration> {
    let many = usize::try_from(at_once).unwrap();
    let took = waits(duo, "hot", many).await;
    let ours: Vec<_> = took.into_iter().map(|took| took.saturating_sub(WAKE)).collect();
    say(&format!("{many} at once"), &ours);
    ours
}

/// Deletes all requesters and waits until every provider is asleep.
async fn sleep_again(duo: &DualPodsFixture) {
    duo.scale("hot", 0).await;
    let asleep = |requesters: &[Pod], providers: &[Pod]| {
        requesters.is_empty() && providers.iter().all(|pod| label(pod, "sleeping") == Some("true"))
    };
    duo.until("hot", "all asleep", asleep).await;
}

/// The wait of a requester without competition: the median of three, because the other bounds depend on it.
async fn alone(duo: &DualPodsFixture) -> Duration {
    let mut took = Vec::new();
    for _ in 0..3 {
        sleep_again(duo).await;
        took.extend(hot(duo, 1).await);
    }
    took.sort();
    took[1]
}

/// Prints and returns the median and the 99th percentile.
fn say(what: &str, sorted: &[Duration]) -> (Duration, Duration) {
    let (median, last) = (sorted[sorted.len() / 2], sorted[sorted.len() * 99 / 100]);
    println!(
        "{what}, from running to ready, without the engine's wake: median {median:.1?}, 99 of 100 within {last:.1?}"
    );
    (median, last)
}

/// The median time in which this machine's API server writes a Pod and reports the change.
async fn writes(duo: &DualPodsFixture, pod: &Pod) -> Duration {
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
    let programs = TestPrograms::optimised();
    let optimised = programs.are_optimised();
    let duo = DualPodsFixture::of(programs, "dual-hot", ALL, "8Gi").await;
    let many = usize::try_from(ALL).unwrap();
    duo.ask("hot", ALL, 1, "--wake-time 50ms").await;
    let served = |requesters: &[Pod], _: &[Pod]| requesters.len() == many && requesters.iter().all(is_ready);
    let (_, before) = duo.until("hot", "all ready", served).await;
    let alone = alone(&duo).await;
    let write = writes(&duo, &before[0]).await;
    assert!(
        alone <= (16 * write).max(Duration::from_millis(150)),
        "{alone:?}, where a write takes {write:?}"
    );
    let mut all = Vec::new();
    for _ in 0..size(ROUNDS, 1) {
        sleep_again(&duo).await;
        all.extend(hot(&duo, ALL).await);
    }
    all.sort();
    let last = *all.last().unwrap();
    assert!(
        2 * last < ALL * (alone + WAKE),
        "one after the other: {last:?}, where one alone takes {alone:?}"
    );
    if is_soak() && optimised {
        let found = say(&format!("{ROUNDS} rounds"), &all);
        assert!(found.0 <= PROMISED.0 && found.1 <= PROMISED.1, "{found:?}, promised are {PROMISED:?}");
    }
    let (_, after) = duo.pairs("hot").await;
    let uids = |all: &[Pod]| all.iter().filter_map(|pod| pod.uid()).collect::<BTreeSet<_>>();
    assert_eq!(uids(&before), uids(&after), "all were woken, and none was made");
}
