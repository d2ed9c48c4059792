//! The public project's cases of launchers, under its names where it has them: several engines in one provider.

mod limits;
mod populated;
mod trouble;

use std::{collections::BTreeSet, net::SocketAddr};

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::DeleteParams};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::{crd::ledger::ObjectName, stub_key::StubKey};
use rouse_net::http_client::HttpClient;
use serde_json::{Value, json};

use super::{DualPodsFixture, all_modes::TestedProviderKind};
use crate::{
    launched::{define_fma_kinds, engines, generations},
    pairs::{address, annotation, chat_with_requester, is_ready, is_served, label},
};

impl DualPodsFixture {
    /// A client of the launcher's own API, with a gateway's token.
    pub(super) async fn launcher_at(&self, launcher: &Pod) -> HttpClient {
        let key = StubKey::load_or_create(&self.world.site.client().await, self.world.name()).await.unwrap();
        let token = key.launcher_token(&ObjectName::new(self.world.name(), launcher.name_any()));
        HttpClient::new(SocketAddr::new(address(launcher), 8001), Some(token))
    }

    /// A fixture with launchers that have this node's accelerators and the demo engine.
    pub(super) async fn with_launchers(name: &str, gpus: u32) -> Self {
        Self::with_launchers_of(name, gpus, "", "").await
    }

    /// `dual` is the gateway's configuration; `flags` are the launcher's.
    async fn with_launchers_of(name: &str, gpus: u32, dual: &str, flags: &str) -> Self {
        Box::pin(define_fma_kinds()).await;
        Box::pin(Self::new(name, gpus, "8Gi", dual)).await.in_launchers(flags).await
    }

    /// Switches the fixture to launchers with these flags.
    pub(super) async fn in_launchers(mut self, flags: &str) -> Self {
        Box::pin(define_fma_kinds()).await;
        self.provider_kind = TestedProviderKind::Launcher;
        self.launcher_config("launchers", flags, "template", None).await;
        self
    }

    /// Creates a LauncherConfig with this name. Its launchers have these flags, this label, and room for `most`
    /// engines.
    async fn launcher_config(&self, name: &str, flags: &str, of: &str, most: Option<u32>) {
        let dir = self.world.dir.path();
        let command = format!("{} demo-engine --host $(POD_IP)", env!("CARGO_BIN_EXE_rouse-gateway"));
        let mut args = vec!["launcher".to_owned(), "--host=$(POD_IP)".to_owned(), "--grace=1s".to_owned()];
        args.push(format!("--command={command}"));
        args.push(format!("--accelerators-file={}", dir.join("accelerators").display()));
        args.push(format!("--log-dir={}", dir.join("logs").display()));
        args.extend(flags.split_whitespace().map(str::to_owned));
        let container = json!({"image": "rouse/stub", "args": args});
        Box::pin(self.launchers_of(name, container, of, most)).await;
    }

    /// Creates an InferenceServerConfig with this name.
    pub(super) async fn config(&self, name: &str, flags: &str) {
        self.config_in("launchers", name, flags).await;
    }

    /// Creates an InferenceServerConfig for launchers of this LauncherConfig.
    async fn config_in(&self, launchers: &str, name: &str, flags: &str) {
        self.server(launchers, name, &format!("{} {flags}", self.card())).await;
    }

    /// Creates requesters that ask for the InferenceServerConfig of their own name.
    pub(super) async fn request(&self, name: &str, replicas: u32, gpus: u32) {
        let asked = json!({"dual-pods.llm-d.ai/inference-server-config": name});
        self.ask_by(name, replicas, gpus, asked).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_wake_up_fast_path_of_an_engine_that_sleeps_without_its_requester() {
    let duo = DualPodsFixture::with_launchers("dual-launcher", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let led = |pod: &Pod| {
        let all = (pod.labels().get("serves"), pod.annotations().get("example.com/about"));
        (all.0.cloned(), all.1.cloned(), pod.labels().get("of").cloned())
    };
    let serving = (Some("one".to_owned()), Some("one".to_owned()), Some("template".to_owned()));
    // The launcher's labels are written after the requester is ready.
    let until_serving = async || {
        let fits = |requesters: &[Pod], launchers: &[Pod]| {
            is_served(requesters, launchers) && led(&launchers[0]) == serving
        };
        let (mut requesters, mut launchers) =
            duo.until_launchers("one", "a ready requester and the labels of its engine", fits).await;
        (requesters.remove(0), launchers.remove(0))
    };
    let (requester, launcher) = until_serving().await;
    assert_eq!(engines(&launcher).len(), 1, "{launcher:#?}");
    let port = engines(&launcher)[0]["port"].to_string();
    assert_eq!(annotation(&launcher, "server-port"), Some(&*port));
    let bound = format!("{} {}", requester.uid().unwrap(), requester.name_any());
    assert_eq!(annotation(&launcher, "requester"), Some(&*bound));
    let instance = annotation(&launcher, "instance-id");
    assert!(instance.is_some() && label(&requester, "instance") == instance, "{requester:#?}");
    let said = |key: &str| serde_json::from_str::<Value>(annotation(&launcher, key).unwrap()).unwrap();
    let started = said("vllm-config");
    assert!(started["options"].as_str().unwrap().ends_with(&format!(" --port {port}")), "{started}");
    assert_eq!(started["gpu_uuids"], json!([annotation(&requester, "accelerators").unwrap()]));
    let routes = json!({"labels": {"serves": "one"}, "annotations": {"example.com/about": "one"}});
    assert_eq!(said("isc-routing-metadata"), routes);
    assert_eq!(
        annotation(&requester, "inference-server-ip"),
        launcher.status.as_ref().unwrap().pod_ip.as_deref()
    );
    duo.scale("one", 0).await;
    let sleeper = duo.until_unbound("one", 1).await;
    assert_eq!((sleeper.uid(), label(&sleeper, "sleeping")), (launcher.uid(), Some("true")));
    assert_eq!(led(&sleeper), (None, None, Some("template".to_owned())));
    for key in ["requester", "instance-id", "server-port", "vllm-config", "isc-routing-metadata"] {
        assert_eq!(annotation(&sleeper, key), None, "{key}: it is nobody's");
    }
    duo.scale("one", 1).await;
    let (again, woken) = until_serving().await;
    assert_ne!(again.uid(), requester.uid());
    assert_eq!(
        (woken.uid(), generations(&woken)),
        (launcher.uid(), generations(&launcher)),
        "the same engine was woken"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn multiple_instances_share_one_launcher_and_obsolete_ones_go_asleep_or_on_unbind() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-two", 1).await;
    duo.config("one", "").await;
    duo.config("two", "").await;
    duo.request("one", 1, 1).await;
    let (_, launcher) = duo.until_launched("one").await;
    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    duo.request("two", 1, 1).await;
    let (_, shared) = duo.until_launched("two").await;
    let ports: Vec<Value> = engines(&shared).iter().map(|engine| engine["port"].clone()).collect();
    assert_eq!((shared.uid(), ports.len()), (launcher.uid(), 2));
    // The launcher and its engines: no engine outlives the Pod.
    assert_eq!(duo.world.runner.processes(&shared).len(), 3);
    duo.counted("cold", "one", 1).await;
    duo.counted("warm", "two", 1).await;
    assert_ne!(ports[0], ports[1]);
    duo.scale("two", 0).await;
    duo.until_unbound("two", 2).await;
    // The requesters return to the engines of both configurations.
    for name in ["one", "two"] {
        duo.scale(name, 1).await;
        let (_, switched) = duo.until_launched(name).await;
        assert_eq!((switched.uid(), generations(&switched)), (launcher.uid(), generations(&shared)));
        duo.scale(name, 0).await;
        duo.until_unbound(name, 2).await;
    }
    duo.config("one", "--itl 20ms").await;
    duo.until_unbound("one", 1).await;
    duo.objects("InferenceServerConfig").delete("two", &DeleteParams::default()).await.unwrap();
    assert_eq!(duo.until_unbound("two", 0).await.uid(), launcher.uid());
    // An engine that is awake ends when its requester ends.
    duo.scale("one", 1).await;
    duo.until_launched("one").await;
    duo.config("one", "").await;
    duo.scale("one", 0).await;
    assert_eq!(duo.until_unbound("one", 0).await.uid(), launcher.uid());
}

/// Two requesters of one configuration: an engine for each, in launchers of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_node_port_collision_of_two_requesters_of_one_configuration() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-same", 2).await;
    duo.config("one", "").await;
    duo.request("one", 2, 1).await;
    let both = |requesters: &[Pod], launchers: &[Pod]| {
        let duals: BTreeSet<_> = requesters.iter().filter_map(|own| label(own, "dual")).collect();
        duals.len() == 2 && requesters.iter().all(is_ready) && launchers.len() == 2
    };
    let (requesters, _) = duo.until_launchers("one", "two ready requesters", both).await;
    let devices: BTreeSet<_> = requesters.iter().filter_map(|own| annotation(own, "accelerators")).collect();
    assert_eq!(devices.len(), 2);
}

/// An engine on two accelerators, in the launcher of the lower one. Its clients get answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_proxy_leads_to_an_engine_on_several_accelerators() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-proxy", 2).await;
    duo.config("one", "").await;
    duo.request("one", 1, 2).await;
    let (requester, launcher) = duo.until_launched("one").await;
    let devices = annotation(&requester, "accelerators").unwrap();
    assert_eq!(devices.split(',').next(), annotation(&launcher, "accelerators"), "of {devices}");
    let ip = address(&requester);
    let admin = HttpClient::new(SocketAddr::new(ip, 8081), None);
    let target = admin.get("/v1/proxy/config", WAIT_TIMEOUT).await.unwrap();
    let target: Value = serde_json::from_slice(&target.body).unwrap();
    let expected = (address(&launcher).to_string(), engines(&launcher)[0]["port"].clone());
    assert_eq!((target["address"].as_str().unwrap().to_owned(), target["port"].clone()), expected);
    assert!(chat_with_requester(ip, "one").await.is_whole_stream());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controller_restart_recovery_keeps_engines_that_serve_and_that_sleep() {
    let mut duo = DualPodsFixture::with_launchers("dual-launcher-restart", 1).await;
    duo.config("one", "").await;
    duo.config("two", "").await;
    duo.request("one", 1, 1).await;
    duo.until_launched("one").await;
    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    duo.request("two", 1, 1).await;
    let (requester, launcher) = duo.until_launched("two").await;
    duo.restart("gateway-1").await;
    // Only a leading gateway puts the engine to sleep.
    assert_eq!(duo.until_launched("two").await.0.uid(), requester.uid());
    duo.scale("two", 0).await;
    assert_eq!(generations(&duo.until_unbound("two", 2).await), generations(&launcher));
    duo.scale("one", 1).await;
    let (_, woken) = duo.until_launched("one").await;
    assert_eq!((woken.uid(), generations(&woken)), (launcher.uid(), generations(&launcher)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unbound_launcher_deletion_cleanup_and_the_next_requester_has_a_new_one() {
    let duo = DualPodsFixture::with_launchers("dual-launcher-gone", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    duo.until_launched("one").await;
    duo.scale("one", 0).await;
    let launcher = duo.until_unbound("one", 1).await;
    duo.delete(&launcher).await;
    duo.until_launchers("one", "no launcher", |_, launchers| launchers.is_empty()).await;
    duo.scale("one", 1).await;
    assert_ne!(duo.until_launched("one").await.1.uid(), launcher.uid());
}
