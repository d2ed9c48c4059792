//! A leader that is killed before a write, whichever: the next one finds what there is, and nothing is doubled or lost.

use futures_util::future::join_all;
use serde_json::json;

use crate::world::{World, aside, reason};

/// Writes of a cold start, one after the other, and some of what follows it.
const WRITES: u32 = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_of_a_start_leaves_nothing_doubled_and_nothing_lost() {
    let killed = join_all((1..=WRITES).map(at)).await;
    let killed = killed.into_iter().filter(|killed| *killed).count();
    assert!(
        killed >= 5,
        "a start has a reservation, a Deployment, a Pod and statuses: {killed} of {WRITES} were met"
    );
}

/// Whether there was such a write before the request was answered.
async fn at(write: u32) -> bool {
    let world = World::new(&format!("crash-{write}"), 2, "64Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let kubeconfig = world.site.cluster.kubeconfig(&world.site.account).unwrap();
    let env = [("ROUSE_TEST_ABORT_BEFORE_WRITE", write.to_string())];
    let first = world.gateway_by("gateway-0", "", &kubeconfig, &env);
    let client = first.client();
    // Nobody answers when it is killed first.
    let served = tokio::task::spawn_blocking(move || client.chat("qwen", false, 4).status).await;
    drop(first);
    let second = world.gateway("gateway-1", "");
    let client = second.client();
    let answer = aside(move || client.chat("qwen", true, 4)).await;
    assert!(answer.is_whole_stream(), "write {write}: {answer:?}");
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    assert_eq!(world.booked().await, [("qwen".to_owned(), 40)], "write {write}");
    assert_eq!(world.running().await.len(), 1, "write {write}");
    served.is_err()
}
