//! Nodes that go, and Pods that go while nobody decides.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _, api::DeleteParams};
use nix::sys::signal::Signal;

use super::{Duo, node};
use crate::pairs::{address, ask};

fn place(pod: &Pod) -> &str {
    pod.spec.as_ref().unwrap().node_name.as_deref().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_deletion_ends_the_pair_and_another_comes_on_another_node() {
    let duo = Duo::new("dual-node", 1, "8Gi", "").await;
    duo.ask("one", 1, 1, "").await;
    let (requester, provider) = duo.served("one").await;
    let spec = node(duo.world.name(), "b", 1);
    let other = duo.world.runner.add_node(spec).await.unwrap();
    duo.cards(&["a", "b"]);
    let nodes: Api<Node> = Api::all(duo.world.site.admin.clone());
    nodes.delete(place(&requester), &DeleteParams::default()).await.unwrap();
    let gone = |requesters: &[Pod], providers: &[Pod]| {
        let old = |pod: &Pod| pod.uid() == requester.uid() || pod.uid() == provider.uid();
        !requesters.iter().chain(providers).any(old)
    };
    duo.until("one", "the end of both", gone).await;
    let (again, new) = duo.served("one").await;
    assert_eq!((place(&again), place(&new)), (other.name(), other.name()));
}

/// In both orders: a requester whose engine then has to be put to sleep, and a provider whose requester has to go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletions_while_the_controller_is_not_running_are_made_up_for() {
    let mut duo = Duo::new("dual-away", 2, "8Gi", "").await;
    for name in ["left", "lost"] {
        duo.ask(name, 1, 1, "").await;
    }
    let (_, stays) = duo.served("left").await;
    let (requester, provider) = duo.served("lost").await;
    duo.kill().await;
    duo.scale("left", 0).await;
    duo.delete(&provider).await;
    let ending = |all: &[Pod], _: &[Pod]| all.iter().all(|pod| pod.metadata.deletion_timestamp.is_some());
    let (held, _) = duo.until("left", "that its requester is to go", ending).await;
    assert_eq!(held.len(), 1, "its engine is awake, so it is held");
    duo.begin("gateway-1");
    assert_eq!(duo.asleep("left").await.uid(), stays.uid());
    let old = |pods: &[Pod], old: &Pod| pods.iter().any(|pod| pod.uid() == old.uid());
    let new =
        |requesters: &[Pod], providers: &[Pod]| !old(requesters, &requester) && !old(providers, &provider);
    duo.until("lost", "the end of both", new).await;
    duo.served("lost").await;
}

/// By turns each of two leaders is stopped in the midst of its orders, and goes on once the other one has carried them out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ex_leader_that_wakes_from_a_pause_does_nothing() {
    let mut duo = Duo::dying("dual-paused", u32::MAX).await;
    duo.ask("one", 1, 1, "").await;
    let (_, provider) = duo.served("one").await;
    let mut other = duo.second.take().unwrap();
    duo.scale("one", 0).await;
    duo.gateway.signal(Signal::SIGSTOP);
    assert_eq!(duo.asleep("one").await.uid(), provider.uid());
    duo.gateway.signal(Signal::SIGCONT);
    duo.scale("one", 1).await;
    other.signal(Signal::SIGSTOP);
    let (requester, woken) = duo.served("one").await;
    assert_eq!(woken.uid(), provider.uid());
    other.signal(Signal::SIGCONT);
    assert!(ask(address(&requester), "one").await.is_whole_stream());
    let (requesters, providers) = duo.pairs("one").await;
    assert_eq!((requesters.len(), providers.len()), (1, 1));
    assert!(!duo.gateway.has_ended() && !other.has_ended());
}
