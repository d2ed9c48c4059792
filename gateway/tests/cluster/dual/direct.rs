//! The public project's cases of mode sleep, which it calls direct, by its names.

use std::collections::BTreeMap;

use kube::ResourceExt as _;

use super::{Duo, annotation, is_ready, label};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pod_creation_with_a_late_gpu_map() {
    let duo = Duo::new("dual-create", 2, "8Gi", "").await;
    duo.map(&BTreeMap::new()).await;
    duo.ask("one", 1, 1, "40Gi", "").await;
    // The stub has said what it has, and nothing follows from that yet.
    let (requesters, _) = duo
        .until("one", "accelerators", |all, _| {
            all.first().is_some_and(|pod| annotation(pod, "accelerators").is_some())
        })
        .await;
    let (_, providers) = duo.pairs("one").await;
    assert!(providers.is_empty() && !is_ready(&requesters[0]), "{providers:#?}");
    let uuid = annotation(&requesters[0], "accelerators").unwrap().to_owned();
    let node = requesters[0].spec.as_ref().unwrap().node_name.clone().unwrap();
    duo.map(&BTreeMap::from([(node.clone(), format!("{{\"{uuid}\": 3}}"))])).await;
    let (_, provider) = duo.served("one").await;
    assert!(provider.name_any().contains("-8-"), "third bit of the mask: {}", provider.name_any());
    let env = provider.spec.as_ref().unwrap().containers[0].env.clone().unwrap();
    let visible = env.iter().find(|env| env.name == "CUDA_VISIBLE_DEVICES").unwrap();
    assert_eq!(visible.value.as_deref(), Some("3"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_deletion_leaves_its_provider_asleep_and_reuse_wakes_it() {
    let duo = Duo::new("dual-reuse", 2, "8Gi", "").await;
    duo.ask("one", 1, 2, "40Gi", "").await;
    let (requester, provider) = duo.served("one").await;
    duo.scale("one", 0).await;
    let sleeper = duo.asleep("one").await;
    assert_eq!(sleeper.uid(), provider.uid());
    duo.scale("one", 1).await;
    let (again, woken) = duo.served("one").await;
    assert_eq!(woken.uid(), provider.uid(), "the engine was woken");
    assert_ne!(again.uid(), requester.uid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_deletion_deletes_the_requester_and_a_wholly_new_pair_comes() {
    let duo = Duo::new("dual-deleted", 2, "8Gi", "").await;
    duo.ask("one", 1, 1, "40Gi", "").await;
    let (requester, provider) = duo.served("one").await;
    duo.delete(&provider).await;
    let new = |requesters: &[_], providers: &[_]| {
        let of =
            |pods: &[k8s_openapi::api::core::v1::Pod]| pods.iter().map(|pod| pod.uid()).collect::<Vec<_>>();
        let old = |pods: &[_]| of(pods).iter().any(|uid| *uid == requester.uid() || *uid == provider.uid());
        requesters.len() == 1 && providers.len() == 1 && !old(requesters) && !old(providers)
    };
    duo.until("one", "two new Pods", new).await;
    let (_, provider) = duo.served("one").await;
    assert_eq!(label(&provider, "sleeping"), Some("false"));
}
