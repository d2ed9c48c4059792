//! How deep and how long engines sleep, as their requesters and models declare, also after a change while they serve.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    DualPodsFixture,
    all_modes::{TestedProviderKind, for_all_kinds, is_empty},
    models, patch,
};
use crate::events::until_event;

impl DualPodsFixture {
    /// Asserts that the engine sleeps at level 2 and is ended soon after.
    async fn sleeps_deep_and_is_ended(&self, provider: &Pod) {
        let slept = until_event(&self.world, provider, "Slept").await.message.unwrap();
        assert!(slept.ends_with("sleeps at level 2"), "{slept}");
        let ended = until_event(&self.world, provider, "Ended").await.message.unwrap();
        assert!(ended.ends_with("the engine has slept for as long as stopAfter allows"), "{ended}");
    }

    async fn annotate(&self, pod: &Pod, annotations: Value) {
        let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        self.world.pods().patch(&pod.name_any(), &PatchParams::default(), &patch).await.unwrap();
    }
}

/// Without a declaration the engine sleeps at level 1 and stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_requester_says_of_its_engines_sleep_while_it_serves_is_followed_in_each_mode() {
    for_all_kinds("dual-rest", 1, "", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        let said = json!({"rouse.dev/sleep-level": "2", "rouse.dev/stop-after": "1s"});
        duo.annotate(&requester, said).await;
        duo.scale("one", 0).await;
        if duo.provider_kind == TestedProviderKind::Plain {
            let ended = until_event(&duo.world, &provider, "Ended").await.message.unwrap();
            assert!(ended.ends_with("the requester is gone"), "it never sleeps: {ended}");
        } else {
            duo.sleeps_deep_and_is_ended(&provider).await;
        }
        duo.watch_for("one", "no engine", is_empty).await;
    })
    .await;
}

/// The node's budget has room for the weights, and the Pod has not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_weights_exceed_the_memory_limit_of_its_pod_sleeps_at_level_2() {
    let duo = DualPodsFixture::new("dual-rest-limit", 1, "8Gi", "").await;
    let mut limited: Value = serde_json::from_str(&patch("one", &duo.card())).unwrap();
    limited["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "4Gi"}});
    duo.ask_with("one", 1, 1, &limited.to_string()).await;
    duo.until_served("one").await;
    duo.scale("one", 0).await;
    let sleeper = duo.until_asleep("one").await;
    let slept = until_event(&duo.world, &sleeper, "Slept").await.message.unwrap();
    assert!(slept.contains("sleeps at level 2"), "{slept}");
    let limit = "it would take 8Gi of host RAM, and the memory limit of the engine's Pod is 4Gi, of which 4Gi is left";
    assert!(slept.contains(limit), "{slept}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_model_says_of_its_engines_sleep_is_followed_and_so_is_a_change_while_it_serves() {
    let duo = DualPodsFixture::new("dual-model-rest", 1, "8Gi", "").await;
    let deep = json!({"engine": {"level": "2"}, "stopAfter": "2s", "cooldownPeriod": "1s"});
    models::model(&duo, "deep", deep.clone()).await;
    models::asks(&duo, "deep").await;
    let (_, engines) = models::pods(&duo, "deep").await;
    duo.sleeps_deep_and_is_ended(&engines[0]).await;

    let first = json!({"engine": {"level": "1"}, "stopAfter": "2h", "cooldownPeriod": "1h"});
    models::model(&duo, "changed", first).await;
    models::asks(&duo, "changed").await;
    let (_, engines) = models::pods(&duo, "changed").await;
    duo.world.edit("changed", deep).await;
    duo.sleeps_deep_and_is_ended(&engines[0]).await;
}
