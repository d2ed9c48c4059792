//! A leader is killed before any one of its writes: the next leader finds the state, and nothing is doubled or lost.

use std::path::PathBuf;

use futures_util::future::join_all;
use kube::{ResourceExt as _, api::ListParams};
use rouse_controllers::crd::{InferenceModel, inference_model::EngineState};
use rouse_testing::sample::{cases, is_soak};
use serde_json::json;

use crate::{
    installation::{ClusterGateway, Installation, blocking, reason},
    streams::HeldClientStream,
};

/// How many kills the soak runs at once.
const AT_ONCE: u32 = 10;
/// How many of a story's writes the gate tries.
const SAMPLED: usize = 2;

/// Kills a leader before its first write, its second, and so on, until a leader outlives its story: then no further
/// write exists.
///
/// The gate tries `sampled` of the first `most` writes, chosen by the day. The number of writes varies, because changes
/// that happen together may share a write. The gate therefore follows a leader that outlives its story with one that is
/// killed half as late.
pub(crate) async fn before_each_write(
    most: u32,
    sampled: usize,
    is_killed_before: impl AsyncFn(u32) -> bool,
) {
    if !is_soak() {
        let all: Vec<u32> = (1..=most).collect();
        let halved = async |mut write: u32| {
            while !Box::pin(is_killed_before(write)).await {
                println!("there was no write {write}");
                assert!(write > 1, "the leader has written nothing");
                write /= 2;
            }
        };
        join_all(cases(&all, sampled).into_iter().map(|write| Box::pin(halved(write)))).await;
        return;
    }
    let mut killed = 0;
    for first in (0..).map(|batch| 1 + batch * AT_ONCE) {
        let ended = join_all((first..first + AT_ONCE).map(|write| Box::pin(is_killed_before(write)))).await;
        killed += ended.iter().filter(|killed| **killed).count();
        if ended.contains(&false) {
            break;
        }
    }
    println!("a leader was killed before each of {killed} writes");
    assert!((1..=most as usize).contains(&killed), "{killed} writes, and the gate tries the first {most}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_of_a_start_leaves_nothing_doubled_and_nothing_lost() {
    // A reservation, a Deployment, a Pod and statuses: about seventeen.
    before_each_write(24, SAMPLED, at).await;
}

/// Whether the leader was killed before this write, and so before the request was answered.
async fn at(write: u32) -> bool {
    let world = Installation::new(&format!("crash-{write}"), 2, "64Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let kubeconfig = world.site.cluster.kubeconfig(&world.site.account).unwrap();
    let env = [("ROUSE_TEST_ABORT_BEFORE_WRITE", write.to_string())];
    let first = world.gateway_by("gateway-0", "", &kubeconfig, &env);
    let client = first.client();
    // The request fails when the leader is killed first.
    let served = tokio::task::spawn_blocking(move || client.chat("qwen", false, 4).status).await;
    drop(first);
    let second = world.gateway("gateway-1", "");
    let client = second.client();
    let answer = blocking(move || client.chat("qwen", true, 4)).await;
    assert!(answer.is_whole_stream(), "write {write}: {answer:?}");
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)], "write {write}");
    assert_eq!(world.running().await.len(), 1, "write {write}");
    served.is_err()
}

const FLAGS: &str = "--itl 20ms";
/// Tokens that last until a test ends their stream or the engine that carries it.
const LONG: u32 = 6000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_for_a_further_engine_leaves_nothing_doubled_and_no_stream_cut() {
    // A reservation, a number of replicas, a Pod and statuses: about sixteen.
    before_each_write(24, SAMPLED, further).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_of_a_scale_down_leaves_nothing_behind_and_nothing_lost() {
    // A Pod that drains and ends, a number of replicas, the ledger, statuses: about twenty-two.
    before_each_write(30, SAMPLED, fewer).await;
}

/// A leader that is killed before this write once the test arms it, and a gateway that follows it.
struct KilledLeaderFixture {
    world: Installation<'static>,
    leader: ClusterGateway,
    follower: ClusterGateway,
    from: PathBuf,
}

impl KilledLeaderFixture {
    /// Starts an engine that a stream through the leader keeps in use.
    async fn new(name: &str, write: u32, more: serde_json::Value) -> (Self, HeldClientStream) {
        let world = Installation::new(&format!("{name}-{write}"), 4, "256Gi").await;
        world.model("qwen", "40Gi", FLAGS, more).await;
        let from = world.dir.path().join("writes-count");
        let env = [
            ("ROUSE_TEST_ABORT_BEFORE_WRITE", write.to_string()),
            ("ROUSE_TEST_ABORT_FROM", from.display().to_string()),
        ];
        let kubeconfig = world.site.cluster.kubeconfig(&world.site.account).unwrap();
        let leader = world.gateway_by("gateway-0", "", &kubeconfig, &env);
        let used = HeldClientStream::open(&leader, "qwen", LONG).await;
        world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
        let follower = world.gateway("gateway-1", "");
        assert!(world.site.holder().await.starts_with("gateway-0"));
        (Self { world, leader, follower, from }, used)
    }

    /// Waits until all engines serve, and returns whether the leader was killed. Without such a write the same leader
    /// still leads.
    async fn settles(&mut self, engines: usize) -> bool {
        let killed = self.leader.has_ended();
        let world = &self.world;
        let all_serve = |model: &InferenceModel| {
            let told = model.status.as_ref().map(|status| status.engines.as_slice()).unwrap_or_default();
            told.len() == engines && told.iter().all(|engine| engine.state == EngineState::Awake)
        };
        world.until("qwen", "all its engines to serve", all_serve).await;
        let deployments = world.deployments().list(&ListParams::default()).await.unwrap().items;
        let wanted: Vec<_> =
            deployments.iter().map(|d| d.spec.as_ref().and_then(|spec| spec.replicas)).collect();
        assert_eq!(wanted, [i32::try_from(engines).ok()], "{}", world.name());
        // A leader that was killed between the status and the ledger leaves the ledger to the next.
        let all = vec![("qwen".to_owned(), 40); engines];
        world.until_reserved("one entry for each engine", |booked| booked == all).await;
        let pods = world.running().await;
        let mut replicas: Vec<_> =
            pods.iter().map(|pod| pod.annotations().get("rouse.dev/replica").cloned()).collect();
        replicas.sort();
        let all: Vec<_> = (0..engines).map(|n| Some(n.to_string())).collect();
        assert_eq!(replicas, all, "{}", world.name());
        killed
    }
}

async fn further(write: u32) -> bool {
    let few = |most: u32| json!({"maxReplicas": most, "maxConcurrency": 1});
    let (mut scene, used) = KilledLeaderFixture::new("more", write, few(1)).await;
    used.leave().await;
    // Through the surviving gateway: one stream holds the only place until the next leader leads, and another request
    // waits.
    let engine = scene.world.running().await;
    scene.world.faults(&engine, r#"{"stall-streams": true}"#).await;
    let first = HeldClientStream::open_stalled(&scene.follower, "qwen", 300).await;
    std::fs::write(&scene.from, "").unwrap();
    scene.world.model("qwen", "40Gi", FLAGS, few(2)).await;
    let client = scene.follower.client();
    let second = blocking(move || client.chat("qwen", true, 10)).await;
    assert!(second.is_whole_stream(), "write {write}: {second:?}");
    let killed = scene.settles(2).await;
    scene.world.faults(&engine, r#"{"stall-streams": null}"#).await;
    first.finish_whole().await;
    killed
}

async fn fewer(write: u32) -> bool {
    let (mut scene, used) = KilledLeaderFixture::new("fewer", write, json!({"cooldownPeriod": "4s"})).await;
    std::fs::write(&scene.from, "").unwrap();
    used.leave().await;
    let zero = |model: &_| reason(model, "Ready") == "ScaledToZero";
    scene.world.until("qwen", "scaled to zero", zero).await;
    let killed = scene.settles(0).await;
    let client = scene.follower.client();
    let answer = blocking(move || client.chat("qwen", true, 4)).await;
    assert!(answer.is_whole_stream(), "write {write}: {answer:?}");
    killed
}
