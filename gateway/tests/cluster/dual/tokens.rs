//! Which callers may send orders to the stubs of models' requesters.

use kube::ResourceExt as _;
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use serde_json::json;

use super::{
    DualPodsFixture,
    models::{asks, model, pods},
};
use crate::tokens::{assert_refuses_tokens, forget_key, hash_of};

const STUB: &str = "inference-server";

/// A reader of the requester's or the provider's Pod learns only the token's hash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_models_requester_obeys_nobody_without_its_token_and_another_key_replaces_it() {
    let mut duo = DualPodsFixture::new("dual-tokens", 1, "8Gi", ", drain: 1s, sleep: 1s").await;
    model(&duo, "one", json!({"cooldownPeriod": "10m", "memory": "2Gi", "hostMemory": "1Gi"})).await;
    asks(&duo, "one").await;
    let (requesters, _) = pods(&duo, "one").await;
    let hash = hash_of(&requesters[0], STUB);
    assert_refuses_tokens(&requesters[0], &[None, Some(""), Some(&hash)]).await;
    asks(&duo, "one").await;

    duo.gateway.signal(Signal::SIGTERM);
    duo.gateway.wait().await;
    forget_key(&duo.world).await;
    duo.begin("gateway-1");
    // The requester is being deleted, its stub refuses a release under the new key, and it holds on as long as a drain
    // and a sleep may take.
    let old = requesters[0].name_any();
    wait::until(&duo.world.pods(), &old, "its end", Option::is_none).await.unwrap();
    asks(&duo, "one").await;
    let (next, _) = pods(&duo, "one").await;
    let [next] = &next[..] else { panic!("{next:#?}") };
    assert_ne!((next.uid(), hash_of(next, STUB)), (requesters[0].uid(), hash));
}
