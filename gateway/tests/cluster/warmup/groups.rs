//! Warmups of a group's nodes, which its Pods name.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::{Value, json};

use super::{
    fixture::WarmupFixture,
    kubelet::ANY_ITEM,
    objects::{ACTION, ITEM_ANNOTATION, condition, counts, is_in},
    report::PodReport,
};

impl WarmupFixture<'_> {
    /// Creates a Pod of a group's role on this node, or unbound.
    pub(super) async fn group_pod(&self, name: &str, group: &str, role: &str, node: Option<&str>) {
        let labels = json!({
            "rbg.workloads.x-k8s.io/group-name": group,
            "rbg.workloads.x-k8s.io/role-name": role,
        });
        self.other_pod(name, labels, node).await;
    }

    /// Creates a Pod of each of two roles of the group on this node, and waits until the gateway knows both.
    ///
    /// Watches of two kinds have no order: a Warmup created now may reach the gateway before the second Pod does.
    async fn two_roles(&self, group_name: &str, node: &str) {
        for role in ["prefill", "decode"] {
            self.group_pod(&format!("{group_name}-{role}"), group_name, role, Some(node)).await;
        }
        let name = format!("{group_name}-known");
        let mut spec = group(group_name, json!({"decode": images(&["known:1"])}), json!({}));
        spec["paused"] = json!(true);
        self.world.warmup(&name, spec).await;
        self.world.until_warmup(&name, "both Pods known", |status| counts(status).0 == 1).await;
    }
}

fn group(name: &str, roles: Value, policies: Value) -> Value {
    json!({"policies": policies, "targetRoleBasedGroup": {"name": name, "roles": roles}})
}

fn images(items: &[&str]) -> Value {
    json!({"imagesPreload": {"items": items}})
}

/// A role whose action mounts a volume of this name from this path.
fn mounts(path: &str) -> Value {
    let container = json!({"name": "copy", "image": "registry.example.com/copy:1"});
    let volume = json!({"name": "models", "hostPath": {"path": path}});
    json!({"customizedAction": {"podTemplate": {"spec": {"containers": [container], "volumes": [volume]}}}})
}

fn waits(status: &WarmupStatus) -> bool {
    condition(status, "TargetsFound").0 == "False" && !is_in(status, WarmupStatusPhase::Completed)
}

/// A group whose Pods have no node yet has no nodes to warm, and is never complete because of that.
async fn unbound(fixture: &WarmupFixture<'_>) {
    let world = &fixture.world;
    fixture.group_pod("late-0", "late", "decode", None).await;
    world.warmup("late", group("late", json!({"decode": images(&["late:1"])}), json!({}))).await;
    let status = world.until_warmup("late", "no node", waits).await;
    assert_eq!(counts(&status), (0, 0, 0, 0));
    assert!(!condition(&status, "TargetsFound").2.is_empty(), "{status:?}");
    fixture.group_pod("late-1", "late", "decode", Some("a")).await;
    fixture.group_pod("late-2", "late", "other", Some("b")).await;
    let status = world.until_completed("late").await;
    assert_eq!(counts(&status), (1, 0, 1, 0), "only the listed role counts");
    assert_eq!(condition(&status, "TargetsFound").0, "True");
    assert_eq!(fixture.kubelet.count(&fixture.node("b"), "late:1"), 0);
}

async fn missing(fixture: &WarmupFixture<'_>) {
    let world = &fixture.world;
    let spec = group("nowhere", json!({"decode": images(&["nowhere:1"])}), json!({"timeoutSeconds": 2}));
    world.warmup("nowhere", spec).await;
    world.until_warmup("nowhere", "waiting", waits).await;
    let status = world.until_failed("nowhere").await;
    let (complete, reason, _) = condition(&status, "Complete");
    assert_eq!((complete.as_str(), reason.as_str()), ("False", "TargetNotFound"), "{status:?}");

    let policies = json!({"timeoutSeconds": 2});
    let target = json!({"nodeSelector": {"nobody-has": "this"}, "imagesPreload": {"items": ["nowhere:1"]}});
    world.warmup("unselected", json!({"policies": policies, "targetNodes": target})).await;
    let status = world.until_failed("unselected").await;
    assert_eq!(condition(&status, "Complete").1, "TargetNotFound", "{status:?}");
}

/// Equal images of two roles are one, in any spelling.
async fn merged(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("c"));
    fixture.two_roles("both", "c").await;
    let roles = json!({
        "prefill": images(&["both:1", "prefill:1"]),
        "decode": images(&["docker.io/library/both:1", "decode:1"]),
    });
    world.warmup("both", group("both", roles, json!({}))).await;
    let status = world.until_completed("both").await;
    assert_eq!(counts(&status), (1, 0, 1, 0));
    assert_eq!(fixture.kubelet.count(&node, ANY_ITEM), 3, "{:?}", fixture.kubelet.counts());
}

/// A group that has Pods, but never a bound one, is waited for until the timeout, and is no success then.
async fn never_bound(fixture: &WarmupFixture<'_>) {
    let world = &fixture.world;
    fixture.group_pod("never-0", "never", "decode", None).await;
    let spec = group("never", json!({"decode": images(&["never:1"])}), json!({"timeoutSeconds": 2}));
    world.warmup("never", spec).await;
    let status = world.until_failed("never").await;
    assert_eq!(
        (counts(&status), condition(&status, "Complete").1),
        ((0, 0, 0, 0), "TargetNotFound".to_owned())
    );
}

/// A group may appear after its Warmup.
async fn appears(fixture: &WarmupFixture<'_>) {
    let world = &fixture.world;
    world.warmup("appears", group("appears", json!({"decode": images(&["appears:1"])}), json!({}))).await;
    world.until_warmup("appears", "no group", waits).await;
    fixture.group_pod("appears-0", "appears", "decode", Some("b")).await;
    let status = world.until_completed("appears").await;
    assert_eq!((counts(&status), condition(&status, "TargetsFound").0), ((1, 0, 1, 0), "True".to_owned()));
}

/// Three Secrets of two roles, of which both name one, and one container that both have under names of their own.
async fn secrets_and_containers(fixture: &WarmupFixture<'_>) {
    let (world, kubelet, node) = (&fixture.world, &fixture.kubelet, fixture.node("e"));
    fixture.two_roles("united", "e").await;
    let role = |secrets: [&str; 2], container: &str| {
        let container = json!({"name": container, "image": "registry.example.com/build:1"});
        json!({
            "imagesPreload": {"items": ["united:1"], "pullSecrets": secrets},
            "customizedAction": {"podTemplate": {"spec": {"containers": [container]}}},
        })
    };
    let roles = json!({"prefill": role(["a", "b"], "build"), "decode": role(["a", "c"], "make")});
    kubelet.script(&node, "united:1", [PodReport::Pulling]);
    kubelet.script(&node, ACTION, [PodReport::Running { ready: false }]);
    world.warmup("united", group("united", roles, json!({}))).await;
    for (item, next) in [("united:1", PodReport::Present), (ACTION, PodReport::Exited(0))] {
        kubelet.until_count(&node, item, 1).await;
        let pods = fixture.pods().await;
        let is_it = |pod: &&Pod| pod.annotations().get(ITEM_ANNOTATION).is_some_and(|found| found == item);
        let spec = pods.iter().find(is_it).unwrap().spec.as_ref().unwrap();
        let secrets: BTreeSet<&str> =
            spec.image_pull_secrets.iter().flatten().map(|secret| secret.name.as_str()).collect();
        assert_eq!(secrets, BTreeSet::from(["a", "b", "c"]), "{item}");
        assert_eq!(spec.containers.len(), 1, "{item}: {:?}", spec.containers);
        kubelet.report(&node, item, next).await;
    }
    let status = world.until_completed("united").await;
    assert_eq!((counts(&status), kubelet.count(&node, ANY_ITEM)), ((1, 0, 1, 0), 2), "{status:?}");
}

/// Two roles on one node that ask for different volumes of one name.
async fn in_conflict(fixture: &WarmupFixture<'_>) {
    let (world, node) = (&fixture.world, fixture.node("d"));
    fixture.two_roles("conflict", "d").await;
    let roles = json!({"prefill": mounts("/mnt/a"), "decode": mounts("/mnt/b")});
    world.warmup("conflict", group("conflict", roles, json!({}))).await;
    let status = world.until_failed("conflict").await;
    let (accepted, _, message) = condition(&status, "Accepted");
    assert_eq!(accepted, "False", "{status:?}");
    for word in ["models", "prefill", "decode"] {
        assert!(message.contains(word), "{message}");
    }
    assert_eq!(fixture.kubelet.count(&node, ANY_ITEM), 0, "{:?}", fixture.kubelet.counts());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_waited_for_and_its_roles_are_merged_or_refused() {
    let fixture = WarmupFixture::new("warm-groups", &["a", "b", "c", "d", "e"]).await;
    tokio::join!(
        Box::pin(unbound(&fixture)),
        Box::pin(missing(&fixture)),
        Box::pin(never_bound(&fixture)),
        Box::pin(appears(&fixture)),
        Box::pin(secrets_and_containers(&fixture)),
        Box::pin(merged(&fixture)),
        Box::pin(in_conflict(&fixture)),
    );
}
