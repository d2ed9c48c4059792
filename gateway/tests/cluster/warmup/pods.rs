//! Pods that are deleted, collected, refused or in another Warmup's way.

use k8s_openapi::api::core::v1::{Namespace, Pod, ResourceQuota};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use rouse_cluster::wait;
use rouse_controllers::crd::{
    WarmupStatus,
    warmup::{WarmupNodeStatus, WarmupStatusPhase},
};
use serde_json::json;

use super::{
    fixture::WarmupFixture,
    objects::{ACTION, ITEM_ANNOTATION, NODE_ANNOTATION, cause, counts, is_in, items_of},
    report::PodReport,
};

impl WarmupFixture<'_> {
    /// Deletes the Pods for this item on this node that have not ended, as a user would.
    pub(super) async fn delete_pods_of(&self, node: &str, item: &str) {
        for pod in self.pods().await {
            let is = |key: &str, value: &str| pod.annotations().get(key).is_some_and(|found| found == value);
            if is(NODE_ANNOTATION, node) && is(ITEM_ANNOTATION, item) {
                match self.world.pods().delete(&pod.name_any(), &DeleteParams::default()).await {
                    // The leader has deleted it before.
                    Err(kube::Error::Api(gone)) if gone.code == 404 => {}
                    deleted => drop(deleted.unwrap()),
                }
            }
        }
    }
}

/// A node that is done stays done; a Pod that had not ended is replaced.
async fn deleted_by_hand(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [a, b] = ["a", "b"].map(|name| fixture.node(name));
    kubelet.script(&b, "by-hand:1", [PodReport::Pulling]);
    world.warmup("by-hand", fixture.spec(&["a", "b"], &["by-hand:1"], json!({}))).await;
    let one_done = |status: &WarmupStatus| counts(status) == (2, 1, 1, 0);
    world.until_warmup("by-hand", "one node done", one_done).await;
    for node in [&a, &b] {
        fixture.delete_pods_of(node, "by-hand:1").await;
    }
    fixture.kubelet.until_count(&b, "by-hand:1", 2).await;
    kubelet.report(&b, "by-hand:1", PodReport::Present).await;
    world.until_completed("by-hand").await;
    assert_eq!((kubelet.count(&a, "by-hand:1"), kubelet.count(&b, "by-hand:1")), (1, 2));
}

/// Failures count although their Pods are gone.
async fn collected(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("c"));
    kubelet.script(&node, ACTION, [PodReport::Exited(1), PodReport::Running { ready: false }]);
    world.warmup("collected", fixture.action_spec(&["c"], json!({}), json!({"backoffLimit": 1}))).await;
    let once = |status: &WarmupStatus| items_of(status, &node).iter().any(|own| own.attempts == 1);
    world.until_warmup("collected", "one failure", once).await;
    fixture.kubelet.until_count(&node, ACTION, 2).await;
    // The garbage collection of Pods takes failed ones.
    fixture.delete_pods_of(&node, ACTION).await;
    fixture.kubelet.until_count(&node, ACTION, 3).await;
    kubelet.report(&node, ACTION, PodReport::Exited(1)).await;
    let status = world.until_failed("collected").await;
    assert_eq!((cause(&status, &node), counts(&status).3), ("ActionFailed", 1), "{status:?}");
}

/// Another item is warmed on every node, and what a node has is not warmed again unless its items changed.
async fn edited(fixture: &WarmupFixture<'_>) {
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [d, e] = ["d", "e"].map(|name| fixture.node(name));
    kubelet.script(&e, "edited:1", [PodReport::Pulling]);
    world.warmup("edited", fixture.spec(&["d", "e"], &["edited:1"], json!({}))).await;
    let one_done = |status: &WarmupStatus| counts(status) == (2, 1, 1, 0);
    world.until_warmup("edited", "one node done", one_done).await;
    // A change of the policies changes no item.
    world.edit_warmup("edited", json!({"policies": {"parallelism": 5}})).await;
    world.until_warmup("edited", "the same", one_done).await;
    assert_eq!((kubelet.count(&d, "edited:1"), kubelet.count(&e, "edited:1")), (1, 1));

    let items = json!({"targetNodes": {"imagesPreload": {"items": ["edited:1", "edited:2"]}}});
    kubelet.script(&e, "edited:1", [PodReport::Present]);
    world.edit_warmup("edited", items).await;
    // The Pod of before the edit may go on, or another may take its place.
    kubelet.report_now(&e, "edited:1", PodReport::Present).await;
    let status = world.until_completed("edited").await;
    assert_eq!(counts(&status), (2, 0, 2, 0));
    assert_eq!((kubelet.count(&d, "edited:2"), kubelet.count(&e, "edited:2")), (1, 1));
    // An edit of a Warmup that has finished begins it again.
    world.edit_warmup("edited", json!({"targetNodes": {"imagesPreload": {"items": ["edited:3"]}}})).await;
    world.until_completed("edited").await;
    assert_eq!((kubelet.count(&d, "edited:3"), kubelet.count(&e, "edited:3")), (1, 1));
}

/// The later of two pulls of one image waits for the earlier.
async fn shared(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("f"));
    kubelet.script(&node, "shared:1", [PodReport::Pulling, PodReport::Present]);
    world.warmup("first", fixture.spec(&["f"], &["shared:1"], json!({}))).await;
    fixture.kubelet.until_count(&node, "shared:1", 1).await;
    world.warmup("second", fixture.spec(&["f"], &["shared:1", "second:1"], json!({}))).await;
    fixture.kubelet.until_count(&node, "second:1", 1).await;
    let status = world.warmups().get("second").await.unwrap().status.unwrap_or_default();
    assert!(!is_in(&status, WarmupStatusPhase::Completed), "{status:?}");
    assert_eq!(kubelet.count(&node, "shared:1"), 1, "equal pulls do not run side by side");
    kubelet.report(&node, "shared:1", PodReport::Present).await;
    world.until_completed("first").await;
    world.until_completed("second").await;
    assert_eq!(kubelet.count(&node, "second:1"), 1);
    assert!(kubelet.count(&node, "shared:1") <= 2, "{:?}", kubelet.counts());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outcomes_outlive_their_pods_and_only_what_changed_is_done_again() {
    let fixture = WarmupFixture::new("warm-pods", &["a", "b", "c", "d", "e", "f"]).await;
    tokio::join!(
        Box::pin(deleted_by_hand(&fixture)),
        Box::pin(collected(&fixture)),
        Box::pin(edited(&fixture)),
        Box::pin(shared(&fixture)),
    );
}

/// A Pod that is being deleted still runs: no second one beside it, and no other node in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_is_being_deleted_counts_as_active() {
    let fixture = WarmupFixture::new("warm-deleted", &["a", "b"]).await;
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    for node in fixture.nodes(&["a", "b"]) {
        kubelet.script(&node, "x:1", [PodReport::Pulling]);
    }
    world.warmup("deleted", fixture.spec(&["a", "b"], &["x:1"], json!({"parallelism": 1}))).await;
    kubelet.until("the first Pod", |pods| pods.all.len() == 1).await;
    kubelet.hold_deleted(true).await;
    fixture.delete_pods().await;
    let pod = fixture.pods().await.remove(0);
    let deleted =
        |pod: &Option<Pod>| pod.as_ref().is_some_and(|pod| pod.metadata.deletion_timestamp.is_some());
    wait::until(&world.pods(), &pod.name_any(), "deleted", deleted).await.unwrap();
    // The leader has seen the deletion long before it has refused a Warmup that is created after it.
    world.warmup("later", json!({"targetNodes": {"nodeNames": [fixture.node("b")]}})).await;
    world.until_failed("later").await;
    let status = world.until_warmup("deleted", "one active", |status| status.active_node_num == 1).await;
    assert_eq!((counts(&status), fixture.pods().await.len()), ((2, 1, 0, 0), 1));

    for node in fixture.nodes(&["a", "b"]) {
        kubelet.script(&node, "x:1", [PodReport::Present]);
    }
    kubelet.hold_deleted(false).await;
    world.until_completed("deleted").await;
    assert_eq!(kubelet.max_active_nodes(), 1);
}

/// The API server refuses every Pod. The Warmup says so, tries again after pauses, and goes on once it may.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_without_pods_is_named_and_tried_again() {
    let fixture = WarmupFixture::new("warm-quota", &["a"]).await;
    let (world, node) = (&fixture.world, fixture.node("a"));
    let quotas: Api<ResourceQuota> = world.site.namespace.api();
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    let holds = |quota: &Option<ResourceQuota>| {
        let status = quota.as_ref().and_then(|quota| quota.status.as_ref());
        status.is_some_and(|status| status.hard.is_some() && status.used.is_some())
    };
    wait::until(&quotas, "none", "in force", holds).await.unwrap();

    world.warmup("quota", fixture.spec(&["a"], &["x:1"], json!({}))).await;
    let refused = |status: &WarmupStatus| {
        let says = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains("exceeded quota"));
        is_in(status, WarmupStatusPhase::InProgress)
            && items_of(status, &node).iter().any(|own| {
                own.cause.as_deref() == Some("Refused") && says(&own.message) && own.next_try.is_some()
            })
    };
    world.until_warmup("quota", "the quota named", refused).await;
    quotas.delete("none", &DeleteParams::default()).await.unwrap();
    world.until_completed("quota").await;
    let calls = world.site.cluster.calls(&world.site.account).unwrap();
    let tries = calls.iter().filter(|call| (&*call.verb, &*call.resource) == ("create", "pods")).count();
    assert!((2..=12).contains(&tries), "{tries} tries");
}

/// Label of a namespace: the rights that the API server lets its Pods have.
const POD_SECURITY: &str = "pod-security.kubernetes.io/enforce";
/// Requests within which an API server has read a namespace's new label.
const MAX_TRIES: usize = 2000;

impl WarmupFixture<'_> {
    /// Lets Pods of the namespace have few rights, or any.
    async fn restrict_rights(&self, is_restricted: bool) {
        let namespaces: Api<Namespace> = Api::all(self.world.site.admin.clone());
        let level = if is_restricted { "restricted" } else { "privileged" };
        let patch = Patch::Merge(json!({"metadata": {"labels": {POD_SECURITY: level}}}));
        namespaces.patch(self.world.site.namespace.name(), &PatchParams::default(), &patch).await.unwrap();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "tried"},
            "spec": {"containers": [
                {"name": "main", "image": "x:1", "securityContext": {"privileged": true}},
            ]},
        }))
        .unwrap();
        // The API server reads the label from its cache, and no event tells when that has it.
        let try_it = PostParams { dry_run: true, ..PostParams::default() };
        for _ in 0..MAX_TRIES {
            if self.world.pods().create(&try_it, &pod).await.is_err() == is_restricted {
                return;
            }
        }
        panic!("the API server does not read the label {POD_SECURITY}");
    }
}

/// An image whose entrypoint would need rights is pulled where no Pod may have them, because nothing of it runs. An
/// action that needs such rights does run: it is refused, which the Warmup says, and tried again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_whose_entrypoint_needs_rights_is_pulled_where_no_pod_has_them() {
    let fixture = WarmupFixture::new("warm-rights", &["a", "b"]).await;
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [a, b] = ["a", "b"].map(|name| fixture.node(name));
    fixture.restrict_rights(true).await;
    let denied = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc \
                  create failed: unable to start container process: exec: \"/rouse-warmup\": permission denied";
    kubelet.script(&a, "rights:1", [PodReport::StartError(denied)]);
    world.warmup("image", fixture.spec(&["a"], &["rights:1"], json!({"backoffLimit": 0}))).await;
    let status = world.until_completed("image").await;
    assert_eq!((counts(&status), kubelet.count(&a, "rights:1")), ((1, 0, 1, 0), 1), "{status:?}");

    let privileged = json!({"securityContext": {"privileged": true}});
    world.warmup("action", fixture.action_spec(&["b"], privileged, json!({}))).await;
    let refused = |status: &WarmupStatus| {
        let says =
            |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains("violates PodSecurity"));
        let is_it = |own: &&WarmupNodeStatus| {
            own.cause.as_deref() == Some("Refused") && says(&own.message) && own.next_try.is_some()
        };
        is_in(status, WarmupStatusPhase::InProgress) && items_of(status, &b).iter().any(is_it)
    };
    world.until_warmup("action", "the refusal named", refused).await;
    assert_eq!(kubelet.count(&b, ACTION), 0);
    fixture.restrict_rights(false).await;
    world.until_completed("action").await;
    assert_eq!(kubelet.count(&b, ACTION), 1);
}
