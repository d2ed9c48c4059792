//! Dual pods with a real kubelet that starts, probes and ends both Pods. Each mode runs from nothing to a stream, to
//! the requester's end, to the next requester, and to the end of the engine's Pod.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_cluster::{TestCluster, node::image};
use serde_json::json;

use crate::{
    client::TestClient,
    installation::blocking,
    launched,
    pairs::{address, annotation, both_replaced, chat_with_requester, flags, patch},
    shared_node::{NodeInstallation, run, shared_node, start},
    support::define_kinds,
};

/// The port of a provider's engine.
const ENGINE: u16 = 8000;

impl NodeInstallation<'_> {
    /// Creates a requester with this accelerator. The scheduler counts accelerators, and no device plugin assigns one.
    async fn asks(&self, name: &str, accelerator: &str, key: &str, asked: &str) {
        let annotations = json!({
            format!("dual-pods.llm-d.ai/{key}"): asked,
            "rouse.dev/gpu-memory": "40Gi",
            "rouse.dev/gpu-memory-asleep": "1Gi",
            "rouse.dev/host-memory": "8Gi",
        });
        let has = [("NVIDIA_VISIBLE_DEVICES", accelerator)];
        let set = self.installation.requester_set(name, 1, 1, annotations, &has);
        self.installation.apply_set(name, &set).await;
    }

    /// Creates a requester for an engine in a Pod of its own.
    async fn asks_directly(&self, name: &str, accelerator: &str) {
        let patch = patch(name, &image("engine-sim"), &flags(name));
        self.asks(name, accelerator, "server-patch", &patch).await;
    }

    fn processes(&self, pod: &Pod) -> Vec<i32> {
        self.installation.runner.processes(pod).unwrap()
    }
}

/// Whether the engine reports that it sleeps.
async fn sleeps(pod: &Pod, port: u16) -> bool {
    let engine = TestClient::new(SocketAddr::new(address(pod), port));
    let answer = blocking(move || engine.get("/is_sleeping")).await;
    answer.json()["is_sleeping"].as_bool().unwrap()
}

/// Asserts that a client gets a stream through the requester.
async fn streams(requester: &Pod, model: &str) {
    let answer = chat_with_requester(address(requester), model).await;
    assert!(answer.is_whole_stream(), "{answer:?}");
}

#[test]
fn an_engine_sleeps_without_its_requester_is_woken_for_the_next_and_both_go_with_its_pod() {
    run(async {
        let ground = shared_node().await;
        let world = &ground.installation;
        ground.asks_directly("slept", "GPU-7").await;
        let (requester, provider) = world.until_served("slept").await;
        assert_eq!(annotation(&provider, "accelerators"), Some("GPU-7"));
        streams(&requester, "slept").await;
        let lives = ground.processes(&provider);
        assert_eq!(lives.len(), 2, "the engine, and what holds the network");

        world.scale("slept", 0).await;
        let sleeper = world.until_asleep("slept").await;
        assert_eq!(sleeper.uid(), provider.uid());
        assert!(sleeps(&sleeper, ENGINE).await);
        ground.until_gone(&requester).await;

        world.scale("slept", 1).await;
        let (next, woken) = world.until_served("slept").await;
        assert_eq!((woken.uid(), ground.processes(&woken)), (provider.uid(), lives), "it is the same engine");
        assert!(!sleeps(&woken, ENGINE).await);
        streams(&next, "slept").await;

        world.delete(&woken).await;
        world.until_pair("slept", "two new Pods", both_replaced(&next, &woken)).await;
        assert_eq!((ground.processes(&next), ground.processes(&woken)), (vec![], vec![]));
        let (last, _) = world.until_served("slept").await;
        streams(&last, "slept").await;
    });
}

/// A gateway has one mode and leads its whole node, so this test has a cluster, a node and a gateway of its own.
#[test]
fn in_mode_plain_an_engine_ends_with_its_requester_and_the_next_has_another() {
    run(async {
        let cluster = TestCluster::start().unwrap();
        define_kinds(&cluster).await;
        let ground = Box::pin(start(&cluster, "mode: plain")).await;
        let world = &ground.installation;
        ground.asks_directly("plain", "GPU-7").await;
        let (requester, provider) = world.until_served("plain").await;
        streams(&requester, "plain").await;

        world.scale("plain", 0).await;
        let nobody = |requesters: &[Pod], providers: &[Pod]| requesters.is_empty() && providers.is_empty();
        world.until_pair("plain", "no Pod", nobody).await;
        assert_eq!((ground.processes(&requester), ground.processes(&provider)), (vec![], vec![]));

        world.scale("plain", 1).await;
        let (next, other) = world.until_served("plain").await;
        assert_ne!(other.uid(), provider.uid());
        streams(&next, "plain").await;

        world.delete(&other).await;
        world.until_pair("plain", "two new Pods", both_replaced(&next, &other)).await;
        let (last, _) = world.until_served("plain").await;
        streams(&last, "plain").await;
    });
}

#[test]
fn a_launchers_engine_sleeps_without_its_requester_is_woken_for_the_next_and_both_go_with_its_pod() {
    run(async {
        let ground = shared_node().await;
        let world = &ground.installation;
        Box::pin(launched::define_fma_kinds()).await;
        let args = ["launcher", "--host=$(POD_IP)", "--mock-gpus", "--command=/engine-sim --host=$(POD_IP)"];
        let container = json!({"image": image("engine-sim"), "command": ["/rouse-stub"], "args": args});
        world.launchers_of("launchers", container, "template", None).await;
        world.server("launchers", "launched", "").await;
        // The first requester of such a launcher.
        ground.asks("launched", "GPU-0", "inference-server-config", "launched").await;
        let (requester, launcher) = world.until_launched("launched").await;
        let port = launched::engines(&launcher)[0]["port"].as_u64().unwrap().try_into().unwrap();
        streams(&requester, "launched").await;
        let lives = ground.processes(&launcher);
        assert_eq!(lives.len(), 3, "the launcher, its engine, and what holds the network");

        world.scale("launched", 0).await;
        let sleeper = world.until_unbound("launched", 1).await;
        assert_eq!(sleeper.uid(), launcher.uid());
        assert!(sleeps(&sleeper, port).await);
        ground.until_gone(&requester).await;

        world.scale("launched", 1).await;
        let (next, woken) = world.until_launched("launched").await;
        assert_eq!((woken.uid(), ground.processes(&woken)), (launcher.uid(), lives), "it is the same engine");
        assert!(!sleeps(&woken, port).await);
        streams(&next, "launched").await;

        world.delete(&woken).await;
        world.until_launchers("launched", "two new Pods", both_replaced(&next, &woken)).await;
        assert_eq!((ground.processes(&next), ground.processes(&woken)), (vec![], vec![]));
        let (last, _) = world.until_launched("launched").await;
        streams(&last, "launched").await;
    });
}
