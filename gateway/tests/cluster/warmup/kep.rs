//! The example of the proposal (KEP-129 of RoleBasedGroup) with Rouse's group and kind, and its state machine. The
//! example shows both targets, which exclude each other, and both restart policies: it is two Warmups.

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::PostParams};
use rouse_controllers::crd::{Warmup, WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::json;

use super::{
    fixture::WarmupFixture,
    kubelet::ANY_ITEM,
    objects::{ACTION, cause, condition, counts, is_in},
    report::PodReport,
};
use crate::{
    columns::{TABLE, table},
    support::get,
};

const FOR_NODES: &str = r#"
apiVersion: rouse.dev/v1alpha1
kind: Warmup
metadata:
  name: warmup-demo
spec:
  policies:
    parallelism: 10
    backoffLimit: 3
    timeoutSeconds: 300
    ttlSecondsAfterFinished: 86400
  targetNodes:
    nodeSelector:
      disk: <disk>
    nodeNames:
    - "<node1>"
    - "<node2>"
    imagesPreload:
      items:
      - "image1:tag1"
      - "image2:tag2"
      pullSecrets:
      - secret1
      - secret2
    customizedAction:
      podTemplate:
        restartPolicy: Never
        spec:
          containers:
          - name: kernels
            image: "image2:tag2"
            command: ["build-kernels"]
            readinessProbe: {exec: {command: ["are-built"]}}
"#;

const FOR_A_GROUP: &str = r#"
apiVersion: rouse.dev/v1alpha1
kind: Warmup
metadata:
  name: warmup-group
spec:
  policies:
    parallelism: 10
    backoffLimit: 3
    timeoutSeconds: 300
    ttlSecondsAfterFinished: 86400
  targetRoleBasedGroup:
    name: sglang
    namespace: <namespace>
    roles:
      prefill:
        imagesPreload:
          items:
          - "image1:tag1"
          - "image2:tag2"
          pullSecrets:
          - secret1
          - secret2
        customizedAction:
          podTemplate:
            restartPolicy: OnFailure
            spec:
              containers:
              - name: kernels
                image: "image2:tag2"
      decode:
        imagesPreload:
          items:
          - "image1:tag1"
          - "image2:tag2"
          pullSecrets:
          - secret1
          - secret2
"#;

const IMAGES: [&str; 2] = ["image1:tag1", "image2:tag2"];

async fn create(fixture: &WarmupFixture<'_>, text: &str) -> Warmup {
    let warmup: Warmup = serde_saphyr::from_str(text).unwrap();
    fixture.world.warmups().create(&PostParams::default(), &warmup).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_for_nodes_goes_through_its_steps_to_completed() {
    let fixture = WarmupFixture::new("warm-kep", &["a", "b", "c"]).await;
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [a, b, c] = ["a", "b", "c"].map(|name| fixture.node(name));
    // Selector and names together are a union.
    fixture.patch_node("c", json!({"metadata": {"labels": {"disk": world.name()}}})).await;
    for node in [&a, &b, &c] {
        for image in IMAGES {
            kubelet.script(node, image, [PodReport::Pulling]);
        }
    }
    let text = FOR_NODES.replace("<node1>", &a).replace("<node2>", &b).replace("<disk>", world.name());
    let made = create(&fixture, &text).await;

    // Steps 1 and 2: accepted and in progress, with a Pod for each image of each node.
    let pulling = |status: &WarmupStatus| counts(status) == (3, 3, 0, 0) && items_pulling(status) == 6;
    let status = world.until_warmup("warmup-demo", "all pulls", pulling).await;
    assert!(is_in(&status, WarmupStatusPhase::InProgress) && status.start_time.is_some(), "{status:?}");
    assert_eq!(condition(&status, "Accepted").0, "True");
    let pods = fixture.bound_pods(6).await;
    for pod in &pods {
        check_image_pod(pod, &made, &[&a, &b, &c]);
    }
    let path = format!(
        "/apis/rouse.dev/v1alpha1/namespaces/{}/warmups?fieldSelector=metadata.name%3Dwarmup-demo",
        world.name()
    );
    let shown = table(&get(&world.site.admin, &path, TABLE).await);
    assert_eq!(
        json!(shown),
        json!({"Name": "warmup-demo", "Phase": "InProgress", "Target": "nodes", "Desired": 3, "Active": 3,
            "Succeeded": 0, "Failed": 0, "Age": "ago"})
    );

    kubelet.script(&a, ACTION, [PodReport::Running { ready: false }]);
    for image in IMAGES {
        kubelet.report(&a, image, PodReport::Present).await;
    }
    kubelet.until("the action of one node", |pods| pods.existing(&a, ACTION).next().is_some()).await;
    assert_eq!((kubelet.count(&b, ACTION), kubelet.count(&c, ACTION)), (0, 0));
    // It is done when every container is ready.
    kubelet.report(&a, ACTION, PodReport::Running { ready: true }).await;
    let one_done = |status: &WarmupStatus| counts(status) == (3, 2, 1, 0);
    world.until_warmup("warmup-demo", "one node done", one_done).await;

    // Step 3.1: all are done.
    for (node, image) in [&b, &c].into_iter().flat_map(|node| IMAGES.map(|image| (node, image))) {
        kubelet.report(node, image, PodReport::Present).await;
    }
    let status = world.until_completed("warmup-demo").await;
    assert_eq!((counts(&status), status.failed_nodes.len()), ((3, 0, 3, 0), 0));
    assert!(status.completion_time.is_some() && status.nodes.is_empty(), "{status:?}");
    assert_eq!(condition(&status, "Complete").0, "True");
    kubelet.until_gone().await;
    assert!(kubelet.counts().values().all(|pods| *pods == 1), "{:?}", kubelet.counts());
}

fn items_pulling(status: &WarmupStatus) -> u32 {
    status.items.as_ref().map_or(0, |items| items.pulling)
}

/// A Pod that pulls one image: pinned by the node's name, with the pull secrets, and without a right or a request.
fn check_image_pod(pod: &Pod, warmup: &Warmup, nodes: &[&str]) {
    let name = pod.name_any();
    let spec = pod.spec.as_ref().unwrap();
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    let terms = &required.unwrap().node_selector_terms;
    let fields = terms[0].match_fields.as_ref().unwrap();
    let pinned = fields[0].values.as_ref().unwrap();
    assert_eq!((terms.len(), fields.len(), fields[0].key.as_str()), (1, 1, "metadata.name"), "{name}");
    assert!(matches!(&pinned[..], [node] if nodes.contains(&node.as_str())), "{name}: {pinned:?}");
    assert_eq!(spec.node_name.as_ref(), pinned.first(), "{name}: the scheduler has bound it");
    let secrets: Vec<&str> =
        spec.image_pull_secrets.iter().flatten().map(|secret| secret.name.as_str()).collect();
    assert_eq!(secrets, ["secret1", "secret2"], "{name}");
    assert_eq!(spec.automount_service_account_token, Some(false), "{name}");
    assert_eq!(spec.restart_policy.as_deref(), Some("Never"), "{name}");
    for container in &spec.containers {
        let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        assert!(requests.is_none_or(|requests| requests.is_empty()), "{name}: {requests:?}");
        assert_eq!(container.image_pull_policy.as_deref(), Some("IfNotPresent"), "{name}");
    }
    let owner = &pod.owner_references()[0];
    assert_eq!((Some(&owner.uid), owner.controller), (warmup.metadata.uid.as_ref(), Some(true)), "{name}");
    assert!(name.len() <= 63 && name.starts_with("warmup-demo-"), "{name}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_for_a_group_fails_with_the_names_of_the_nodes_that_failed() {
    let fixture = WarmupFixture::new("warm-kep-group", &["a", "b", "c"]).await;
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let [a, b, c] = ["a", "b", "c"].map(|name| fixture.node(name));
    for (pod, role, node) in [("prefill-0", "prefill", "a"), ("decode-0", "decode", "b")] {
        fixture.group_pod(pod, "sglang", role, Some(node)).await;
    }
    kubelet.script(&b, IMAGES[1], [PodReport::Pulling]);
    create(&fixture, &FOR_A_GROUP.replace("<namespace>", world.name())).await;

    let one_done = |status: &WarmupStatus| counts(status) == (2, 1, 1, 0);
    world.until_warmup("warmup-group", "one node done", one_done).await;
    assert_eq!((kubelet.count(&a, ACTION), kubelet.count(&b, ACTION)), (1, 0), "only one role has an action");

    // Step 3.2: one has failed.
    let text = "failed to pull and unpack image \"docker.io/library/image2:tag2\": failed to resolve reference \
                \"docker.io/library/image2:tag2\": docker.io/library/image2:tag2: not found";
    kubelet.report(&b, IMAGES[1], PodReport::PullFailed("ErrImagePull", text.to_owned())).await;
    let status = world.until_failed("warmup-group").await;
    assert_eq!((counts(&status), status.failed_nodes.clone()), ((2, 0, 1, 1), vec![b.clone()]));
    assert_eq!(cause(&status, &b), "NotFound", "{status:?}");
    assert!(status.completion_time.is_some(), "{status:?}");
    let (complete, reason, message) = condition(&status, "Complete");
    assert_eq!((complete.as_str(), reason.as_str()), ("False", "MaxFailedNodesExceeded"), "{message}");
    assert!(!message.is_empty(), "{status:?}");
    assert_eq!(kubelet.count(&c, ANY_ITEM), 0);
    kubelet.until_gone().await;
}
