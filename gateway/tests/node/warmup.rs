//! Warmups with a real kubelet and containerd, and images from a registry on loopback.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, ResourceExt as _, api::PostParams};
use rouse_cluster::{LinkMode, node::NodeRegistry, node::image, wait};
use rouse_controllers::crd::{WarmupStatus, warmup::WarmupStatusPhase};
use serde_json::{Value, json};
use tokio::{
    sync::OnceCell,
    time::{Duration, Instant},
};

use crate::{
    images::{ImageLayer, push, shell},
    installation::blocking,
    shared_node::{NodeInstallation, run, shared_node},
    warmup_objects::{cause, counts, is_in},
};

/// The only user of the private registry: `rouse` with the password `let-me-pull`.
const USERS: &str = "rouse:$2b$05$abcdefghijklmnopqrstuucCZeJdrAgCPNDV0D5WMVlxjAoEEY.vu\n";
/// The same as HTTP's Basic authentication.
const CREDENTIALS: &str = "Basic cm91c2U6bGV0LW1lLXB1bGw=";
/// The user's name and password, in base64.
const USER: &str = "cm91c2U6bGV0LW1lLXB1bGw=";

/// The registry from which everybody may pull.
async fn registry() -> &'static NodeRegistry {
    static REGISTRY: OnceCell<NodeRegistry> = OnceCell::const_new();
    let start =
        async || shared_node().await.installation.runner.start_registry("registry", "").await.unwrap();
    REGISTRY.get_or_init(start).await
}

/// Pushes an image without a shell, and returns the reference by which Pods name it.
async fn data_image(name: &'static str, bytes: u64) -> String {
    pushed(name, BTreeMap::from([("name".to_owned(), name.as_bytes().to_vec())]), bytes).await
}

async fn pushed(name: &'static str, files: BTreeMap<String, Vec<u8>>, bytes: u64) -> String {
    let registry = registry().await;
    blocking(move || push(registry, name, &ImageLayer::new(&files, bytes), "")).await;
    registry.reference(name)
}

impl NodeInstallation<'_> {
    fn warmed_node(&self) -> &str {
        self.installation.runner.name()
    }

    /// Creates a Warmup of these images on the node. `more` is merged into its spec.
    async fn warm(&self, name: &str, images: &[&str], more: Value) {
        let mut spec = json!({"targetNodes": {
            "nodeNames": [self.warmed_node()],
            "imagesPreload": {"items": images},
        }});
        crate::installation::merge(&mut spec, more);
        self.installation.warmup(name, spec).await;
    }

    /// Waits until the Warmup is complete, and returns its status.
    async fn warmed(&self, name: &str) -> WarmupStatus {
        let status = self.installation.until_completed(name).await;
        assert_eq!(counts(&status), (1, 0, 1, 0), "{name}: {status:?}");
        status
    }

    /// Removes an image from the node, under all its names.
    async fn remove_image(&self, reference: &str) {
        let script = format!(
            "digest=$(ctr --namespace k8s.io images ls | awk '$1 == \"{reference}\" {{print $3}}')\n\
             ctr --namespace k8s.io images ls | awk -v digest=\"$digest\" '$3 == digest {{print $1}}' |\n\
             xargs ctr --namespace k8s.io images rm --sync\n"
        );
        self.installation.runner.run(&script).await.unwrap();
    }
}

#[test]
fn an_image_that_the_node_has_is_done_at_once_and_one_without_a_shell_is_pulled() {
    run(async {
        let ground = shared_node().await;
        let reference = data_image("no-shell:1", 1 << 20).await;
        let begun = Instant::now();
        ground.warm("present", &[&image("engine-sim")], json!({})).await;
        ground.warmed("present").await;
        println!("an image that the node has: {:.1?}", begun.elapsed());
        let begun = Instant::now();
        // One failure would be final.
        ground.warm("no-shell", &[&reference], json!({"policies": {"backoffLimit": 0}})).await;
        ground.warmed("no-shell").await;
        println!("an image of 1 MiB without a shell: {:.1?}", begun.elapsed());
        let listed = format!("ctr --namespace k8s.io images ls --quiet | grep --fixed-strings {reference}");
        ground.installation.runner.run(&listed).await.unwrap();
    });
}

#[test]
fn a_missing_image_fails_for_good_within_seconds_and_names_the_cause() {
    run(async {
        let ground = shared_node().await;
        let reference = registry().await.reference("missing:1");
        let begun = Instant::now();
        ground.warm("missing", &[&reference], json!({})).await;
        let status = ground.installation.until_failed("missing").await;
        let took = begun.elapsed();
        println!("a missing image: {took:.1?}");
        assert_eq!(cause(&status, ground.warmed_node()), "NotFound", "{status:?}");
        assert_eq!(status.failed_nodes, [ground.warmed_node()]);
        assert!(took < Duration::from_secs(10), "{took:?}");
    });
}

#[test]
fn a_refused_pull_fails_for_good_and_a_pull_secret_lets_it_in() {
    run(async {
        let ground = shared_node().await;
        let runner = &ground.installation.runner;
        let private = runner.start_registry("private-registry", USERS).await.unwrap();
        let reference = private.reference("private:1");
        let host = private.link().address().to_string();
        let private = blocking(move || {
            let files = BTreeMap::from([("name".to_owned(), b"private".to_vec())]);
            push(&private, "private:1", &ImageLayer::new(&files, 0), CREDENTIALS);
            private
        })
        .await;
        ground.warm("refused", &[&reference], json!({})).await;
        let status = ground.installation.until_failed("refused").await;
        assert_eq!(cause(&status, ground.warmed_node()), "Auth", "{status:?}");

        let settings = json!({"auths": {host: {"auth": USER}}}).to_string();
        let secret = json!({
            "metadata": {"name": "let-me-pull"},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": settings},
        });
        let secrets: Api<Secret> = ground.installation.site.namespace.api();
        secrets.create(&PostParams::default(), &serde_json::from_value(secret).unwrap()).await.unwrap();
        let secrets = json!({"targetNodes": {"imagesPreload": {"pullSecrets": ["let-me-pull"]}}});
        ground.warm("let-in", &[&reference], secrets).await;
        ground.warmed("let-in").await;
        drop(private);
    });
}

/// Nothing passes the link to a second registry until both pulls have asked for something.
#[test]
fn two_images_of_one_node_are_pulled_side_by_side() {
    run(async {
        let ground = shared_node().await;
        let slow = ground.installation.runner.start_registry("slow-registry", "").await.unwrap();
        let names = ["one:1", "two:1"];
        let references = names.map(|name| slow.reference(name));
        let slow = blocking(move || {
            for name in names {
                let files = BTreeMap::from([("name".to_owned(), name.as_bytes().to_vec())]);
                push(&slow, name, &ImageLayer::new(&files, 1 << 20), "");
            }
            slow
        })
        .await;
        slow.link().set(LinkMode::Hold);
        ground.warm("parallel", &[&references[0], &references[1]], json!({})).await;
        slow.link().until("both pulls", |traffic| traffic.accepted >= 2).await.unwrap();
        slow.link().set(LinkMode::Pass);
        ground.warmed("parallel").await;
    });
}

#[test]
fn an_action_that_fails_twice_and_then_succeeds_is_done() {
    run(async {
        let ground = shared_node().await;
        let reference = pushed("shell:1", shell(), 0).await;
        let state = tempfile::tempdir().unwrap();
        let script = "tries=0; [ ! -e /state/tries ] || read -r tries < /state/tries; tries=$((tries + 1)); \
                      echo $tries > /state/tries; [ $tries -gt 2 ]";
        let container = json!({
            "name": "action", "image": reference, "command": ["/bin/sh", "-c", script],
            "volumeMounts": [{"name": "state", "mountPath": "/state"}],
        });
        let volume = json!({"name": "state", "hostPath": {"path": state.path(), "type": "Directory"}});
        let template = json!({"spec": {"containers": [container], "volumes": [volume]}});
        let more = json!({
            "policies": {"backoffLimit": 2},
            "targetNodes": {"customizedAction": {"podTemplate": template}},
        });
        ground.warm("at-last", &[&reference], more).await;
        let named = |status: &WarmupStatus| cause(status, ground.warmed_node()) == "ActionFailed";
        ground.installation.until_warmup("at-last", "a failed attempt", named).await;
        ground.warmed("at-last").await;
        assert_eq!(std::fs::read_to_string(state.path().join("tries")).unwrap(), "3\n");
    });
}

/// Size of the image whose pull is cut, and how many pieces of 16 KiB or less pass before that.
const CUT_IMAGE: u64 = 64 << 20;
const CUT_AFTER: usize = 200;

#[test]
fn a_registry_that_dies_in_the_middle_of_a_pull_and_comes_back_only_costs_time() {
    run(async {
        let ground = shared_node().await;
        let dying = ground.installation.runner.start_registry("dying-registry", "").await.unwrap();
        let reference = dying.reference("cut:1");
        let dying = blocking(move || {
            let files = BTreeMap::from([("name".to_owned(), b"cut".to_vec())]);
            push(&dying, "cut:1", &ImageLayer::new(&files, CUT_IMAGE), "");
            dying
        })
        .await;
        dying.link().set(LinkMode::Slow(Duration::from_millis(2)));
        ground.warm("cut", &[&reference], json!({})).await;
        dying.link().until("a part", |traffic| traffic.to_client >= CUT_AFTER).await.unwrap();
        dying.link().set(LinkMode::Cut);
        let named = |status: &WarmupStatus| {
            cause(status, ground.warmed_node()) == "Network" && is_in(status, WarmupStatusPhase::InProgress)
        };
        ground.installation.until_warmup("cut", "the cause", named).await;
        dying.link().set(LinkMode::Pass);
        ground.warmed("cut").await;
    });
}

/// What a cold start saves: a Pod whose image the node lacks, and one whose image of the same size a Warmup has pulled.
/// They are two images, because a node may list one for half a minute after it was removed.
#[test]
fn a_pod_whose_image_of_500_mb_was_warmed_starts_sooner() {
    run(async {
        let ground = shared_node().await;
        let missing = pushed("large-missing:1", named("missing"), LARGE).await;
        let cold = ground.start_of("large-missing", &missing).await;
        ground.remove_image(&missing).await;

        let present = pushed("large-present:1", named("present"), LARGE).await;
        let begun = Instant::now();
        ground.warm("large", &[&present], json!({})).await;
        ground.warmed("large").await;
        let warmup = begun.elapsed();
        let warm = ground.start_of("large-present", &present).await;
        println!(
            "an image of 500 MB: a Pod starts after {cold:.1?} where it is missing, and after {warm:.1?} where it is \
             present; the Warmup took {warmup:.1?}"
        );
        assert!(warm < cold, "{warm:?} where it is present, {cold:?} where it is missing");
        ground.remove_image(&present).await;
    });
}

const LARGE: u64 = 500_000_000;

/// A shell and a file with this text, so that the layer is the image's own.
fn named(text: &str) -> BTreeMap<String, Vec<u8>> {
    let mut files = shell();
    files.insert("name".to_owned(), text.as_bytes().to_vec());
    files
}

impl NodeInstallation<'_> {
    /// Runs a Pod of this image, and returns the time until its container has ended.
    async fn start_of(&self, name: &str, reference: &str) -> Duration {
        let container = json!({"name": "main", "image": reference, "command": ["/bin/sh", "-c", "exit 0"]});
        let pod = json!({"metadata": {"name": name}, "spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": self.warmed_node()},
            "containers": [container],
        }});
        let pods = self.installation.pods();
        let begun = Instant::now();
        let made = pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let succeeded = |pod: &Option<Pod>| {
            let status = pod.as_ref().and_then(|pod| pod.status.as_ref());
            status.is_some_and(|status| status.phase.as_deref() == Some("Succeeded"))
        };
        wait::until(&pods, &made.name_any(), "its end", succeeded).await.unwrap();
        let took = begun.elapsed();
        pods.delete(name, &Default::default()).await.unwrap();
        wait::until(&pods, name, "to be gone", Option::is_none).await.unwrap();
        took
    }
}
