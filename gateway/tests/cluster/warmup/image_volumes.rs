//! Pods that mount an image as a volume, on nodes whose kubelet and container runtime support it.

use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::{
    fixture::{self, WarmupFixture},
    objects::{ITEM_ANNOTATION, NODE_ANNOTATION, cause, counts},
    report::PodReport,
};
use crate::{installation::Installation, support::cluster};

const IMAGE: &str = "weights:1";
/// The versions that nodes report, and whether such a node mounts images.
const NODES: [(&str, &str, &str, bool); 5] = [
    ("a", "v1.36.0", "containerd://2.1.0", true),
    ("b", "v1.37.1", "cri-o://1.33.0", true),
    ("c", "v1.35.9", "containerd://2.1.0", false),
    ("d", "v1.36.0", "containerd://2.0.5", false),
    ("e", "", "", false),
];

/// Writes the versions of the kubelet and the container runtime into the node's status.
async fn report_versions(world: &Installation<'_>, node: &str, kubelet: &str, runtime: &str) {
    let nodes: Api<Node> = Api::all(world.site.admin.clone());
    let info = json!({"kubeletVersion": kubelet, "containerRuntimeVersion": runtime});
    let patch = Patch::Strategic(json!({"status": {"nodeInfo": info}}));
    let name = world.runner.node(node).name().to_owned();
    nodes.patch_status(&name, &PatchParams::default(), &patch).await.unwrap();
}

/// The spec of the only Pod for this image on this node.
fn spec_of<'a>(pods: &'a [Pod], node: &str, image: &str) -> &'a PodSpec {
    let is_it = |pod: &&Pod| {
        let is = |key: &str, value: &str| pod.annotations().get(key).is_some_and(|found| found == value);
        is(NODE_ANNOTATION, node) && is(ITEM_ANNOTATION, image)
    };
    let found: Vec<&Pod> = pods.iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "Pods for {image} on {node}");
    found[0].spec.as_ref().unwrap()
}

/// The images that the Pod mounts, and those of its containers.
fn images(spec: &PodSpec) -> (Vec<&str>, Vec<&str>) {
    let volumes = spec.volumes.iter().flatten().filter_map(|volume| volume.image.as_ref());
    let mounted = volumes.filter_map(|image| image.reference.as_deref());
    let run = spec.containers.iter().filter_map(|container| container.image.as_deref());
    (mounted.collect(), run.collect())
}

/// The API server has taken the volume as it was written, and its container mounts it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_are_new_enough_mount_the_image_and_the_others_run_a_container_of_it() {
    let names = NODES.map(|(name, ..)| name);
    let world = Box::pin(fixture::world(cluster().await, "warm-volumes", &names)).await;
    // Before the gateway starts: it must know the versions when it creates the Pods.
    for (name, kubelet, runtime, _) in NODES {
        report_versions(&world, name, kubelet, runtime).await;
    }
    let fixture = WarmupFixture::with_settings(world, ", warmup: {imageVolumes: auto, retryDelay: 500ms}");
    let (world, kubelet) = (&fixture.world, &fixture.kubelet);
    let stub = world.stub_image.as_str();
    for node in fixture.nodes(&names) {
        kubelet.script(&node, IMAGE, [PodReport::Pulling]);
        kubelet.script(&node, stub, [PodReport::Pulling]);
    }
    world.warmup("volumes", fixture.spec(&names, &[IMAGE, stub], json!({}))).await;
    for node in fixture.nodes(&names) {
        kubelet.until_count(&node, IMAGE, 1).await;
        kubelet.until_count(&node, stub, 1).await;
    }
    let pods = fixture.bound_pods(2 * NODES.len()).await;
    for (name, kubelet, runtime, mounts) in NODES {
        let node = fixture.node(name);
        let spec = spec_of(&pods, &node, IMAGE);
        let expected = if mounts { (vec![IMAGE], vec![stub]) } else { (vec![], vec![IMAGE]) };
        assert_eq!(images(spec), expected, "kubelet {kubelet:?}, runtime {runtime:?}");
        let mounted = spec.containers[0].volume_mounts.iter().flatten();
        assert_eq!(mounted.filter(|mount| mount.read_only == Some(true)).count(), usize::from(mounts));
        // The container of the stub pulls its image anyway.
        assert_eq!(images(spec_of(&pods, &node, stub)), (vec![], vec![stub]));
    }

    for node in fixture.nodes(&names) {
        kubelet.report(&node, IMAGE, PodReport::Present).await;
        kubelet.report(&node, stub, PodReport::Present).await;
    }
    let status = world.until_completed("volumes").await;
    assert_eq!(counts(&status), (5, 0, 5, 0), "{status:?}");

    // The kubelet reports a failed pull of a mounted image at the container that mounts it.
    let node = fixture.node("a");
    let missing = PodReport::PullFailed("ErrImagePull", "docker.io/library/lost:1: not found".to_owned());
    kubelet.script(&node, "lost:1", [missing]);
    world.warmup("lost", fixture.spec(&["a"], &["lost:1"], json!({}))).await;
    let status = world.until_failed("lost").await;
    assert_eq!((counts(&status), cause(&status, &node)), ((1, 0, 0, 1), "NotFound"), "{status:?}");
    kubelet.until_gone().await;
}
