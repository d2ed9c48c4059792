//! Mode launcher, of the installation or of one requester: a server patch makes the engine and its launcher.

use std::{fs, os::unix::fs::PermissionsExt as _};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_cluster::podrunner::PodImage;
use serde_json::{Value, json};

use super::{
    DualPodsFixture,
    models::{asks, model},
};
use crate::{
    installation::reason,
    launched::{engines, generations},
    pairs::{self, address, annotation, chat_with_requester, label},
};

/// An image with the engine and the launcher.
const IMAGE: &str = "rouse/launcher";

impl DualPodsFixture {
    /// A fixture in this mode of the installation. Its launchers find the node's accelerators.
    async fn in_mode(name: &str, gpus: u32, mode: &str) -> Self {
        let duo = Box::pin(Self::new(name, gpus, "8Gi", &format!(", mode: {mode}"))).await;
        duo.launcher_image(IMAGE);
        duo
    }

    /// Makes an image whose `/rouse-stub` reads the accelerators from a file, since no driver reports them here.
    fn launcher_image(&self, name: &str) {
        let dir = self.world.dir.path();
        let folder = dir.join(name.replace('/', "-"));
        fs::create_dir(&folder).unwrap();
        let script = format!(
            "#!/bin/sh\nexec {stub} \"$@\" --grace=1s --accelerators-file={accelerators} --log-dir={logs}\n",
            stub = dir.join("rouse-stub").display(),
            accelerators = dir.join("accelerators").display(),
            logs = dir.join("logs").display(),
        );
        let program = folder.join("rouse-stub");
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        self.world.runner.set_image(name, PodImage::new(program));
    }

    /// The server patch for an engine of this name, in this image.
    fn patch_in(&self, name: &str, image: &str) -> Value {
        let flags = format!("demo-engine {} {}", pairs::flags(name), self.card());
        let mut patch: Value = serde_json::from_str(&pairs::patch(name, image, &flags)).unwrap();
        patch["spec"]["containers"][0]["command"] = json!([env!("CARGO_BIN_EXE_rouse-gateway")]);
        patch
    }

    /// Creates a requester with this patch and this mode of its own.
    async fn ask_in_mode(&self, name: &str, own: Option<&str>, patch: &Value) {
        let mut asked = json!({"dual-pods.llm-d.ai/server-patch": patch.to_string()});
        if let Some(own) = own {
            asked["rouse.dev/provider-mode"] = json!(own);
        }
        self.ask_by(name, 1, 1, asked).await;
    }
}

/// The label by which clients find the engine.
fn routed(launcher: &Pod) -> Option<&str> {
    launcher.labels().get("engine").map(String::as_str)
}

async fn served_in_a_launcher(duo: &DualPodsFixture, own: Option<&str>) {
    let patch = duo.patch_in("one", IMAGE);
    duo.ask_in_mode("one", own, &patch).await;
    let (requester, launcher) = duo.until_launched("one").await;
    assert_eq!((routed(&launcher), engines(&launcher).len()), (Some("one"), 1));
    assert_eq!((label(&launcher, "launcher-config-name"), launcher.owner_references().len()), (None, 0));
    let started: Value = serde_json::from_str(annotation(&launcher, "vllm-config").unwrap()).unwrap();
    let options = started["options"].as_str().unwrap();
    assert!(options.starts_with("demo-engine --host ") && !options.contains("--port 8000"), "{options}");
    assert!(chat_with_requester(address(&requester), "one").await.is_whole_stream());
    duo.scale("one", 0).await;
    let sleeper = duo.until_unbound("one", 1).await;
    assert_eq!((routed(&sleeper), label(&sleeper, "sleeping")), (None, Some("true")));

    let patch = duo.patch_in("two", IMAGE);
    duo.ask_in_mode("two", own, &patch).await;
    let (_, shared) = duo.until_launched("two").await;
    assert_eq!(
        (shared.uid(), engines(&shared).len()),
        (launcher.uid(), 2),
        "both patches make this launcher"
    );
    duo.scale("two", 0).await;
    duo.until_unbound("two", 2).await;
    duo.scale("one", 1).await;
    let (_, woken) = duo.until_launched("one").await;
    assert_eq!((woken.uid(), generations(&woken)), (launcher.uid(), generations(&shared)), "it was woken");
    duo.counted("hot", "", 1).await;
    duo.counted("warm", "", 1).await;
    duo.counted("cold", "", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_mode_launcher_of_the_installation_a_server_patch_is_served_in_a_launcher() {
    let duo = DualPodsFixture::in_mode("dual-mode-all", 1, "launcher").await;
    Box::pin(served_in_a_launcher(&duo, None)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_mode_launcher_of_its_own_a_server_patch_is_served_in_a_launcher() {
    let duo = DualPodsFixture::in_mode("dual-mode-own", 1, "sleep").await;
    Box::pin(served_in_a_launcher(&duo, Some("launcher"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_mode_launcher_of_the_installation_a_models_engine_sleeps_and_wakes_in_a_launcher() {
    let duo = DualPodsFixture::in_mode("dual-mode-model", 1, "launcher").await;
    let flags = format!("demo-engine {} {}", pairs::flags("one"), duo.card());
    let container = json!({
        "name": "engine",
        "image": IMAGE,
        "command": [env!("CARGO_BIN_EXE_rouse-gateway")],
        "args": flags.split_whitespace().collect::<Vec<_>>(),
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    });
    let spec = json!({"cooldownPeriod": "1s", "template": {"spec": {"containers": [container]}}});
    model(&duo, "one", spec).await;
    asks(&duo, "one").await;
    let launchers = async || -> Vec<_> {
        let all = duo.launchers().await;
        all.iter().map(|launcher| (launcher.uid(), generations(launcher))).collect()
    };
    let serving = launchers().await;
    assert!(matches!(&serving[..], [(_, engines)] if engines.len() == 1), "{serving:?}");
    duo.world.until("one", "idle", |model| reason(model, "Ready") == "ScaledToZero").await;
    asks(&duo, "one").await;
    assert_eq!(launchers().await, serving, "it was woken");
}

/// The next leader finds the engines on the launcher's Pod. No InferenceServerConfig can make them obsolete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_controller_knows_the_sleepers_of_server_patches() {
    let mut duo = DualPodsFixture::in_mode("dual-mode-restart", 1, "launcher").await;
    let patch = duo.patch_in("one", IMAGE);
    duo.ask_in_mode("one", None, &patch).await;
    let (_, launcher) = duo.until_launched("one").await;
    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    duo.restart("gateway-1").await;
    duo.scale("one", 1).await;
    let (_, woken) = duo.until_launched("one").await;
    assert_eq!((woken.uid(), generations(&woken)), (launcher.uid(), generations(&launcher)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launcher_of_another_image_makes_way_for_the_patch_that_is_asked_for() {
    let duo = DualPodsFixture::in_mode("dual-mode-image", 1, "launcher").await;
    duo.launcher_image("rouse/launcher-2");
    let patch = duo.patch_in("one", IMAGE);
    duo.ask_in_mode("one", None, &patch).await;
    duo.until_launched("one").await;
    duo.scale("one", 0).await;
    let launcher = duo.until_unbound("one", 1).await;
    let patch = duo.patch_in("two", "rouse/launcher-2");
    duo.ask_in_mode("two", None, &patch).await;
    let (_, other) = duo.until_launched("two").await;
    assert_ne!(other.uid(), launcher.uid());
    assert_eq!(engines(&other).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_patch_that_no_launcher_can_run_says_what_to_do_and_nothing_is_made() {
    let duo = DualPodsFixture::in_mode("dual-mode-wrong", 2, "launcher").await;
    let mut script = duo.patch_in("script", IMAGE);
    script["spec"]["containers"][0]["command"] = json!(["sh", "-c"]);
    let mut selected = duo.patch_in("selected", IMAGE);
    selected["metadata"] = json!({});
    for (name, patch, says) in [
        ("script", script, "the engine's command is a script for sh"),
        ("selected", selected, "counted by the ReplicaSet selected"),
    ] {
        duo.ask_in_mode(name, None, &patch).await;
        let told = |requesters: &[Pod], launchers: &[Pod]| {
            let status = requesters.first().and_then(|own| annotation(own, "status"));
            launchers.is_empty() && status.is_some_and(|status| status.contains(says))
        };
        duo.until_launchers(name, says, told).await;
    }
}
