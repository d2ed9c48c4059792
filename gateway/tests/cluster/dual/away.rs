//! Nodes that vanish, and Pods that are deleted while no gateway leads.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _, api::DeleteParams};

use super::{
    all_modes::{engines_of, for_sleeping_kinds},
    node,
};
use crate::pairs::both_replaced;

fn place(pod: &Pod) -> &str {
    pod.spec.as_ref().unwrap().node_name.as_deref().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_deletion_ends_the_pair_and_another_comes_on_another_node() {
    for_sleeping_kinds("dual-node", 1, "", async |duo| {
        duo.demand("one", "").await;
        let (requester, provider) = duo.pair("one").await;
        let spec = node(duo.world.name(), "b", 1);
        let other = duo.world.runner.add_node(spec).await.unwrap();
        duo.write_accelerator_files(&["a", "b"]);
        let nodes: Api<Node> = Api::all(duo.world.site.admin.clone());
        nodes.delete(place(&requester), &DeleteParams::default()).await.unwrap();
        let gone = |requesters: &[Pod], providers: &[Pod]| {
            let old = |pod: &Pod| pod.uid() == requester.uid() || pod.uid() == provider.uid();
            !requesters.iter().chain(providers).any(old)
        };
        duo.watch_for("one", "the end of both", gone).await;
        let (again, new) = duo.pair("one").await;
        assert_eq!((place(&again), place(&new)), (other.name(), other.name()));
    })
    .await;
}

/// Both orders: a requester whose engine then must go to sleep, and a provider whose requester must end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletions_while_the_controller_is_not_running_are_made_up_for() {
    for_sleeping_kinds("dual-away", 1, "", async |mut duo| {
        duo.demand("one", "").await;
        let (_, stays) = duo.pair("one").await;
        duo.kill().await;
        duo.scale("one", 0).await;
        let going = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
        let held = |all: &[Pod], _: &[Pod]| matches!(all, [own] if going(own));
        duo.watch_for("one", "a requester that is to go, and held", held).await;
        duo.begin("gateway-1");
        assert_eq!(engines_of(&duo.alone("one").await), engines_of(&stays));
        duo.scale("one", 1).await;
        let (requester, provider) = duo.pair("one").await;
        duo.kill().await;
        duo.delete(&provider).await;
        let held = |_: &[Pod], all: &[Pod]| matches!(all, [own] if going(own));
        duo.watch_for("one", "a provider that is to go, and held", held).await;
        duo.begin("gateway-2");
        duo.watch_for("one", "two new Pods", both_replaced(&requester, &provider)).await;
        duo.pair("one").await;
    })
    .await;
}
