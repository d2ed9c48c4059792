//! The public project's cases of mode sleep, which that project calls direct, under its names.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;

use super::{DualPodsFixture, patch};
use crate::pairs::{annotation, both_replaced, is_ready, label};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_creation_with_a_late_gpu_map() {
    let duo = DualPodsFixture::new("dual-create", 2, "8Gi", "").await;
    duo.map(&BTreeMap::new()).await;
    duo.ask("one", 1, 1, "").await;
    // The stub has reported its accelerators, and the gateway creates no provider yet.
    let (requesters, _) = duo
        .until("one", "accelerators", |all, _| {
            all.first().is_some_and(|pod| annotation(pod, "accelerators").is_some())
        })
        .await;
    let (_, providers) = duo.pairs("one").await;
    assert!(providers.is_empty() && !is_ready(&requesters[0]), "{providers:#?}");
    let uuid = annotation(&requesters[0], "accelerators").unwrap().to_owned();
    let node = requesters[0].spec.as_ref().unwrap().node_name.clone().unwrap();
    let numbers = if uuid.ends_with('0') { "0" } else { "1" };
    duo.map(&BTreeMap::from([(node.clone(), format!("{{\"{uuid}\": {numbers}}}"))])).await;
    let (_, provider) = duo.until_served("one").await;
    let mask = if numbers == "0" { "-1-" } else { "-2-" };
    assert!(provider.name_any().contains(mask), "a bit for the number: {}", provider.name_any());
    let env = provider.spec.as_ref().unwrap().containers[0].env.clone().unwrap();
    let visible = env.iter().find(|env| env.name == "CUDA_VISIBLE_DEVICES").unwrap();
    assert_eq!(visible.value.as_deref(), Some(numbers));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_deletion_leaves_its_provider_asleep_and_reuse_wakes_it() {
    let duo = DualPodsFixture::new("dual-reuse", 2, "8Gi", "").await;
    duo.ask("one", 1, 2, "").await;
    let (requester, provider) = duo.until_served("one").await;
    duo.scale("one", 0).await;
    let sleeper = duo.until_asleep("one").await;
    assert_eq!(sleeper.uid(), provider.uid());
    duo.scale("one", 1).await;
    let (again, woken) = duo.until_served("one").await;
    assert_eq!(woken.uid(), provider.uid(), "the engine was woken");
    duo.counted("cold", "", 1).await;
    duo.counted("hot", "", 1).await;
    assert_ne!(again.uid(), requester.uid());
    for words in ["command=put ", "command=wake ", "engine serves the requester requester="] {
        duo.gateway.until_logged("INFO", words).await;
    }
}

/// The mode comes from the installation or from the requester.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_mode_plain_a_provider_never_says_that_its_engine_sleeps() {
    for (name, dual, own) in [("dual-plain", ", mode: plain", None), ("dual-plain-own", "", Some("plain"))] {
        let duo = DualPodsFixture::new(name, 1, "8Gi", dual).await;
        let mut asked = json!({"dual-pods.llm-d.ai/server-patch": patch("one", "")});
        if let Some(own) = own {
            asked["rouse.dev/provider-mode"] = json!(own);
        }
        duo.ask_by("one", 1, 1, asked).await;
        duo.until_served("one").await;
        duo.scale("one", 0).await;
        let gone = |_: &[Pod], providers: &[Pod]| {
            assert_ne!(providers.iter().find_map(|own| label(own, "sleeping")), Some("true"));
            providers.is_empty()
        };
        duo.until("one", "no provider", gone).await;
    }
}

/// The only accelerator of the node needs no pin.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_pair_after_the_now_irrelevant_provider_was_deleted() {
    let duo = DualPodsFixture::new("dual-new-pair", 1, "8Gi", "").await;
    duo.ask("one", 1, 1, "").await;
    duo.until_served("one").await;
    duo.scale("one", 0).await;
    let sleeper = duo.until_asleep("one").await;
    duo.delete(&sleeper).await;
    duo.until("one", "no provider", |_, providers| providers.is_empty()).await;
    duo.scale("one", 1).await;
    assert_ne!(duo.until_served("one").await.1.uid(), sleeper.uid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_deletion_deletes_the_requester_and_a_wholly_new_pair_comes() {
    let duo = DualPodsFixture::new("dual-deleted", 2, "8Gi", "").await;
    duo.ask("one", 1, 1, "").await;
    let (requester, provider) = duo.until_served("one").await;
    duo.delete(&provider).await;
    duo.until("one", "two new Pods", both_replaced(&requester, &provider)).await;
    duo.until_served("one").await;
}

/// The limit for sleepers allows two, and the least recently used sleeper is not of the former template.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sleeper_of_a_former_edition_of_its_template_goes_first() {
    let duo = DualPodsFixture::new("dual-edition", 1, "2Gi", "").await;
    let mut sleepers = Vec::new();
    for name in ["oldest", "edited"] {
        duo.ask(name, 1, 1, "").await;
        duo.until_served(name).await;
        duo.scale(name, 0).await;
        sleepers.push(duo.until_asleep(name).await);
    }
    duo.ask("edited", 1, 1, "--itl 20ms").await;
    let both = |providers: &[Pod]| providers.len() == 2;
    let awake = |requesters: &[Pod], providers: &[Pod]| both(providers) && requesters.iter().any(is_ready);
    duo.until("edited", "the new edition beside the sleeper of the former", awake).await;
    duo.scale("edited", 0).await;
    let asleep = |pod: &Pod| label(pod, "sleeping") == Some("true");
    duo.until("edited", "two sleepers", |_, all| both(all) && all.iter().all(asleep)).await;
    duo.ask("next", 1, 1, "").await;
    duo.until_served("next").await;
    let left = duo.until_asleep("edited").await;
    assert_ne!(left.uid(), sleepers[1].uid(), "the former edition's is gone");
    assert_eq!(duo.until_asleep("oldest").await.uid(), sleepers[0].uid());
}

/// The limit for sleepers allows two. The gateway applies it only before it creates an engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleeper_limit_is_met_when_the_next_is_created_by_who_was_used_longest_ago() {
    let duo = DualPodsFixture::new("dual-limit", 1, "2Gi", "").await;
    let mut sleepers = Vec::new();
    for name in ["two", "three", "four"] {
        duo.ask(name, 1, 1, "").await;
        duo.until_served(name).await;
        duo.scale(name, 0).await;
        sleepers.push(duo.until_asleep(name).await);
    }
    for (name, sleeper) in ["two", "three", "four"].into_iter().zip(&sleepers) {
        assert_eq!(
            duo.until_asleep(name).await.uid(),
            sleeper.uid(),
            "nothing is awake that they are in the way of"
        );
    }
    // A further use of the oldest engine makes another one the least recently used.
    duo.scale("two", 1).await;
    assert_eq!(duo.until_served("two").await.1.uid(), sleepers[0].uid());
    duo.scale("two", 0).await;
    duo.until_asleep("two").await;
    duo.ask("five", 1, 1, "").await;
    duo.until_served("five").await;
    duo.until("three", "no provider", |_, providers| providers.is_empty()).await;
    duo.scale("five", 0).await;
    duo.until_asleep("five").await;
    for (name, n) in [("two", 0), ("four", 2)] {
        assert_eq!(duo.until_asleep(name).await.uid(), sleepers[n].uid());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_controller_knows_the_sleepers_and_which_was_used_last() {
    let mut duo = DualPodsFixture::new("dual-restart", 1, "1Gi", "").await;
    let mut sleepers = Vec::new();
    for name in ["old", "young"] {
        duo.ask(name, 1, 1, "").await;
        duo.until_served(name).await;
        duo.scale(name, 0).await;
        sleepers.push(duo.until_asleep(name).await);
    }
    duo.restart("gateway-1").await;
    duo.ask("new", 1, 1, "").await;
    duo.until_served("new").await;
    duo.until("old", "no provider", |_, providers| providers.is_empty()).await;
    duo.scale("new", 0).await;
    duo.until_asleep("new").await;
    duo.scale("young", 1).await;
    assert_eq!(duo.until_served("young").await.1.uid(), sleepers[1].uid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_users_errors_are_in_the_status_until_they_are_mended_and_nothing_is_made() {
    let duo = DualPodsFixture::new("dual-errors", 2, "8Gi", "").await;
    let selected = "spec: {containers: [{name: inference-server, image: rouse/engine}]}";
    for (name, patch, says) in [
        ("template", "{{ .Nowhere }}", "use only {{ .NodeName }}"),
        ("selected", selected, "counted by the ReplicaSet selected"),
    ] {
        duo.ask_with(name, 1, 1, patch).await;
        let told = |all: &[k8s_openapi::api::core::v1::Pod], _: &[_]| {
            all.len() == 1 && annotation(&all[0], "status").is_some_and(|text| text.contains(says))
        };
        let (requesters, _) = duo.until(name, says, told).await;
        assert!(annotation(&requesters[0], "status").unwrap().starts_with(r#"{"Errors":["#));
        assert!(!is_ready(&requesters[0]));
        // The next requester gets the set's present template.
        duo.ask(name, 1, 1, "").await;
        duo.delete(&requesters[0]).await;
        duo.until_served(name).await;
    }
}
