//! Warmups that are refused before any Pod is created: by the API server, or by the leader in the status.

use kube::{
    ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use rouse_cluster::wait;
use rouse_controllers::crd::warmup::WarmupStatusPhase;
use serde_json::{Value, json};

use super::{
    fixture::WarmupFixture,
    kubelet::ANY_ITEM,
    objects::{condition, counts, is_in},
};

/// Specs that the leader refuses, each with words of the reason. `NODE` is a node's name.
fn refused(node: &str) -> Vec<(&'static str, Value, &'static str)> {
    let nodes = |more: Value| {
        let mut target = json!({"nodeNames": [node]});
        crate::installation::merge(&mut target, more);
        json!({"targetNodes": target})
    };
    let image = |image: &str| nodes(json!({"imagesPreload": {"items": [image]}}));
    let pod = |pod: Value| nodes(json!({"customizedAction": {"podTemplate": pod}}));
    let container = json!({"name": "x", "image": "x:1"});
    let group = |roles: Value| json!({"targetRoleBasedGroup": {"name": "sglang", "roles": roles}});
    vec![
        ("no-node", json!({"targetNodes": {"imagesPreload": {"items": ["x:1"]}}}), "selects no node"),
        ("no-action", nodes(json!({})), "nothing to do"),
        ("no-image", nodes(json!({"imagesPreload": {"items": []}})), "items is empty"),
        ("no-role", group(json!({})), "roles is empty"),
        ("no-action-of-role", group(json!({"decode": {}})), "nothing to do"),
        ("empty-image", image(""), "it is empty"),
        ("upper-image", image("registry.example.com/Team/x:1"), "uppercase"),
        ("space-image", image("x :1"), "x :1"),
        ("tag-image", image("x:-1"), "the tag is invalid"),
        ("digest-image", image("x@sha256:12"), "the digest is invalid"),
        ("no-container", pod(json!({"spec": {"containers": []}})), "containers"),
        (
            "always",
            pod(json!({"restartPolicy": "Always", "spec": {"containers": [container]}})),
            "restartPolicy",
        ),
        ("placed", pod(json!({"spec": {"nodeName": "a", "containers": [container]}})), "nodeName"),
        (
            "bad-node",
            json!({"targetNodes": {"nodeNames": ["A b"], "imagesPreload": {"items": ["x:1"]}}}),
            "A b",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_spec_is_refused_with_its_reason_before_any_pod_and_can_be_mended() {
    let fixture = WarmupFixture::new("warm-refused", &["a"]).await;
    let (world, node) = (&fixture.world, fixture.node("a"));

    // The targets exclude each other: the schema says so.
    let nodes = json!({"nodeNames": [&node], "imagesPreload": {"items": ["x:1"]}});
    let group = json!({"name": "sglang", "roles": {"decode": {"imagesPreload": {"items": ["x:1"]}}}});
    for (name, spec) in [
        ("both", json!({"targetNodes": nodes, "targetRoleBasedGroup": group})),
        ("none", json!({"policies": {"parallelism": 1}})),
    ] {
        let error = world.try_warmup(name, &spec).await.unwrap_err();
        assert!(error.to_string().contains("set exactly one of targetNodes"), "{name}: {error}");
    }

    let refused = refused(&node);
    for (name, spec, _) in &refused {
        world.warmup(name, spec.clone()).await;
    }
    for (name, _, words) in &refused {
        let status = world.until_failed(name).await;
        let (accepted, reason, message) = condition(&status, "Accepted");
        assert_eq!((accepted.as_str(), reason.as_str()), ("False", "InvalidSpec"), "{name}: {message}");
        assert!(message.contains(words), "{name}: {message}");
        assert_eq!(counts(&status), (0, 0, 0, 0), "{name}");
    }
    assert_eq!(fixture.kubelet.count(&node, ANY_ITEM), 0, "{:?}", fixture.kubelet.counts());

    world.edit_warmup("empty-image", json!({"targetNodes": {"imagesPreload": {"items": ["x:1"]}}})).await;
    let status = world.until_completed("empty-image").await;
    assert_eq!(condition(&status, "Accepted").0, "True");
    assert!(!is_in(&status, WarmupStatusPhase::Failed) && fixture.kubelet.count(&node, "x:1") == 1);

    // Rules in the schema would freeze a stored object that breaks them. The API server still takes changes of these.
    let labels = Patch::Merge(json!({"metadata": {"labels": {"team": "a"}}}));
    for name in ["no-role", "upper-image", "always"] {
        let labelled = world.warmups().patch(name, &PatchParams::default(), &labels).await.unwrap();
        assert!(labelled.labels().contains_key("team"), "{name}");
        world.warmups().delete(name, &DeleteParams::background()).await.unwrap();
        wait::until(&world.warmups(), name, "its end", Option::is_none).await.unwrap();
    }
}
