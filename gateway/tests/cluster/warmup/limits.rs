//! The limits of a Warmup: failed nodes, time, pauses, and time after the end.

use rouse_cluster::wait;
use rouse_controllers::crd::{
    WarmupStatus,
    warmup::{WarmupNodeState, WarmupStatusPhase},
};
use serde_json::json;

use super::{
    fixture::WarmupFixture,
    kubelet::PlayedPod,
    objects::{ACTION, cause, condition, counts, is_in},
    report::PodReport,
};

const NOT_FOUND: &str = "docker.io/library/lost:1: not found";

/// With one failed node more than may fail, the Warmup fails: nothing begins, and what runs ends.
async fn too_many_failed(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, names) = (&fixture.world, &fixture.kubelet, ["a", "b", "c", "d", "e"]);
    for node in fixture.nodes(&names) {
        kubelet.script(&node, "lost:1", [PodReport::PullFailed("ErrImagePull", NOT_FOUND.to_owned())]);
    }
    let policies = json!({"maxFailedNodes": 1, "parallelism": 1});
    world.warmup("lost", fixture.spec(&names, &["lost:1"], policies)).await;
    let status = world.until_failed("lost").await;
    assert_eq!((counts(&status), status.failed_nodes.len()), ((5, 0, 0, 2), 2), "{status:?}");
    assert_eq!(condition(&status, "Complete").1, "MaxFailedNodesExceeded", "{status:?}");
    let tried: usize = fixture.nodes(&names).iter().map(|node| kubelet.count(node, "lost:1")).sum();
    assert_eq!(tried, 2, "the others are not begun");
    assert!(status.items.is_some_and(|items| (items.failed, items.skipped) == (2, 3)), "{:?}", status.items);
    for node in &status.failed_nodes {
        assert_eq!(cause(&status, node), "NotFound");
    }
}

/// As many failed nodes as may fail do no harm.
async fn few_failed(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let failed = fixture.node("a");
    kubelet.script(&failed, "few:1", [PodReport::PullFailed("ErrImagePull", NOT_FOUND.to_owned())]);
    world.warmup("few", fixture.spec(&["a", "b", "c"], &["few:1"], json!({"maxFailedNodes": 1}))).await;
    let status = world.until_completed("few").await;
    assert_eq!((counts(&status), status.failed_nodes), ((3, 0, 2, 1), vec![failed]));
}

/// The time is over for one Warmup, and stands still for another that is paused. A third begins paused.
async fn timeouts_and_pauses(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [d, e] = ["d", "e"].map(|name| fixture.node(name));
    for image in ["late:1", "paused:1"] {
        kubelet.script(&d, image, [PodReport::Pulling]);
    }
    let policies = json!({"timeoutSeconds": 60});
    world.warmup("paused", fixture.spec(&["d", "e"], &["paused:1"], policies.clone())).await;
    world.until_warmup("paused", "begun", |status| counts(status) == (2, 1, 1, 0)).await;
    world.edit_warmup("paused", json!({"paused": true})).await;
    let paused =
        |status: &WarmupStatus| is_in(status, WarmupStatusPhase::Paused) && status.paused_since.is_some();
    world.until_warmup("paused", "paused", paused).await;
    let mut from_start = fixture.spec(&["e"], &["from-start:1"], policies);
    from_start["paused"] = json!(true);
    world.warmup("from-start", from_start).await;
    world.until_warmup("from-start", "paused", paused).await;

    world.warmup("late", fixture.spec(&["d"], &["late:1"], json!({"timeoutSeconds": 8}))).await;
    let status = world.until_failed("late").await;
    assert_eq!((status.desired_node_num, status.active_node_num, status.succeeded_node_num), (1, 0, 0));
    let (complete, reason, _) = condition(&status, "Complete");
    assert_eq!((complete.as_str(), reason.as_str()), ("False", "TimeoutExceeded"), "{status:?}");
    let listed = status.nodes.iter().find(|own| own.node == d);
    assert!(listed.is_some_and(|own| own.state != WarmupNodeState::Present), "{status:?}");
    kubelet.until("the end of its Pod", |pods| pods.existing(&d, "late:1").next().is_none()).await;

    let warmup = world.warmups().get("paused").await.unwrap();
    assert!(warmup.status.as_ref().is_some_and(paused), "{:?}", warmup.status);
    assert_eq!(kubelet.count(&d, "paused:1"), 1, "what runs goes on");
    assert_eq!(kubelet.count(&e, "from-start:1"), 0, "nothing begins");
    for name in ["paused", "from-start"] {
        world.edit_warmup(name, json!({"paused": false})).await;
    }
    kubelet.report(&d, "paused:1", PodReport::Present).await;
    let status = world.until_completed("paused").await;
    assert_eq!(counts(&status), (2, 0, 2, 0));
    assert!(status.paused_since.is_none() && status.paused_seconds > 0, "its clock stood still: {status:?}");
    world.until_completed("from-start").await;
    assert_eq!(kubelet.count(&e, "paused:1"), 1, "a pause repeats nothing");
}

/// Without a limit a node is tried again for ever, after pauses that double: a loop of failures creates few Pods.
async fn unlimited_retries(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("e"));
    let failed = || PodReport::Exited(1);
    kubelet.script(&node, ACTION, [failed(), failed(), failed(), PodReport::Exited(0)]);
    world.warmup("unlimited", fixture.action_spec(&["e"], json!({}), json!({}))).await;
    let status = world.until_completed("unlimited").await;
    assert_eq!((counts(&status), kubelet.count(&node, ACTION)), ((1, 0, 1, 0), 4));
    // Pauses of half a second, one and two, each with up to a quarter more.
    let seconds = kubelet.seconds_of_tries(&node, ACTION);
    assert!(seconds >= 3, "four tries within {seconds} s");
}

/// The object goes some time after its end, and its Pods with it.
async fn ends(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    world.warmup("ends", fixture.spec(&["b"], &["ends:1"], json!({"ttlSecondsAfterFinished": 1}))).await;
    wait::until(&world.warmups(), "ends", "its end", Option::is_none).await.unwrap();
    let node = fixture.node("b");
    let is_left = |played: &PlayedPod| played.exists && played.is_of(&node, "ends:1");
    kubelet.until("its Pod's end", |pods| !pods.all.iter().any(is_left)).await;
    assert_eq!(kubelet.count(&node, "ends:1"), 1);

    // A Warmup that is deleted meanwhile takes its Pods along.
    kubelet.script(&fixture.node("c"), "deleted:1", [PodReport::Pulling]);
    world.warmup("deleted", fixture.spec(&["c"], &["deleted:1"], json!({}))).await;
    world.until_warmup("deleted", "begun", |status| status.active_node_num == 1).await;
    world.warmups().delete("deleted", &kube::api::DeleteParams::background()).await.unwrap();
    let node = fixture.node("c");
    kubelet.until("its Pod's end", |pods| pods.existing(&node, "deleted:1").next().is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warmup_ends_by_its_limits_and_a_pause_stops_its_clock() {
    let fixture = WarmupFixture::new("warm-limits", &["a", "b", "c", "d", "e"]).await;
    tokio::join!(
        Box::pin(too_many_failed(&fixture)),
        Box::pin(few_failed(&fixture)),
        Box::pin(timeouts_and_pauses(&fixture)),
        Box::pin(ends(&fixture)),
        Box::pin(unlimited_retries(&fixture)),
    );
    fixture.kubelet.until_gone().await;
}
