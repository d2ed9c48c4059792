//! The public project's cases of launchers, by its names where it has them: several engines in one provider.

mod limits;
mod trouble;

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::{
    api::core::v1::Pod, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
    core::GroupVersionKind,
    runtime::wait::{await_condition, conditions},
};
use rouse::caller::Caller;
use rouse_cluster::wait::PATIENCE;
use rouse_gateway::controllers::crd::fma;
use serde_json::{Value, json};
use tokio::{sync::OnceCell, time::timeout};

use super::{Duo, annotation, is_ready, label};
use crate::{
    client::{Answer, Client, chat_body, request},
    support::{MANAGER, apply_definition, cluster},
    world::aside,
};

/// What a launcher keeps of its engines is one annotation for each.
fn engines(launcher: &Pod) -> Vec<Value> {
    let ours = launcher.annotations().iter().filter(|(key, _)| key.starts_with("engines.rouse.dev/"));
    ours.map(|(_, text)| serde_json::from_str(text).unwrap()).collect()
}

/// Which lives they are in.
fn lives(launcher: &Pod) -> Vec<Value> {
    engines(launcher).iter().map(|own| own["generation"].clone()).collect()
}

/// Tells the cluster that all tests share the public project's kinds.
async fn define() {
    static DEFINED: OnceCell<()> = OnceCell::const_new();
    let define = async || {
        let client = cluster().await.client().await.unwrap();
        for definition in fma::all() {
            let name = definition.metadata.name.clone().unwrap();
            let answer = apply_definition(&client, &serde_json::to_value(&definition).unwrap()).await;
            assert!(answer.status().is_success(), "{name}: {:?}", answer.status());
            let kinds: Api<CustomResourceDefinition> = Api::all(client.clone());
            let served = await_condition(kinds, &name, conditions::is_crd_established());
            timeout(PATIENCE, Box::pin(served)).await.unwrap().unwrap();
        }
    };
    Box::pin(DEFINED.get_or_init(define)).await;
}

/// Where a Pod is.
fn address(pod: &Pod) -> IpAddr {
    pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap().parse().unwrap()
}

/// A stream from the requester that is there.
async fn ask(requester: IpAddr) -> Answer {
    let client = Client::new(SocketAddr::new(requester, 8082));
    aside(move || client.raw(&request("/v1/chat/completions", "", &chat_body("one", true, 5)))).await
}

/// Of the launcher's own interface.
fn launcher_at(launcher: &Pod) -> Caller {
    Caller::new(SocketAddr::new(address(launcher), 8001), None)
}

impl Duo {
    /// With launchers that have this node's accelerators, and the demo engine.
    async fn with_launchers(name: &str, gpus: u32) -> Self {
        Self::with_launchers_of(name, gpus, "", "").await
    }

    /// `dual`: how the gateway is configured; `flags`: how the launcher is started.
    async fn with_launchers_of(name: &str, gpus: u32, dual: &str, flags: &str) -> Self {
        Box::pin(define()).await;
        let duo = Box::pin(Self::new(name, gpus, "8Gi", dual)).await;
        let own = duo.world.name().to_owned();
        let node = duo.world.runner.node(&format!("{own}-a"));
        let all: Vec<String> = node.devices().into_iter().map(|(id, _)| id).collect();
        fs::write(duo.world.dir.path().join("accelerators"), all.join("\n")).unwrap();
        duo.launcher_config("launchers", flags, "template", None).await;
        duo
    }

    /// A LauncherConfig of this name, whose launchers are started with these flags, are labelled as of this, and hold so many engines.
    async fn launcher_config(&self, name: &str, flags: &str, of: &str, most: Option<u32>) {
        let dir = self.world.dir.path();
        let command = format!("{} demo-engine --host $(POD_IP)", env!("CARGO_BIN_EXE_rouse-gateway"));
        let ip = json!([{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]);
        let mut args = vec!["launcher".to_owned(), "--host=$(POD_IP)".to_owned(), "--grace=1s".to_owned()];
        args.push(format!("--command={command}"));
        args.push(format!("--accelerators-file={}", dir.join("accelerators").display()));
        args.push(format!("--log-dir={}", dir.join("logs").display()));
        args.extend(flags.split_whitespace().map(str::to_owned));
        let metadata = json!({"labels": {"of": of}});
        let mut spec = json!({"podTemplate": {"metadata": metadata, "spec": {
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "inference-server",
                "image": "rouse/stub",
                "args": args,
                "env": ip,
            }],
        }}});
        if let Some(most) = most {
            spec["maxInstances"] = json!(most);
        }
        Box::pin(self.object("LauncherConfig", name, spec)).await;
    }

    async fn object(&self, kind: &str, name: &str, spec: Value) {
        let object = json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec});
        let api = self.objects(kind);
        api.patch(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&object)).await.unwrap();
    }

    fn objects(&self, kind: &str) -> Api<DynamicObject> {
        let gvk = GroupVersionKind::gvk("fma.llm-d.ai", "v1alpha1", kind);
        let namespace = self.world.site.namespace.name();
        Api::namespaced_with(self.world.site.admin.clone(), namespace, &ApiResource::from_gvk(&gvk))
    }

    /// An InferenceServerConfig of this name.
    async fn config(&self, name: &str, flags: &str) {
        self.config_in("launchers", name, flags).await;
    }

    /// The same for launchers of this LauncherConfig.
    async fn config_in(&self, launchers: &str, name: &str, flags: &str) {
        let cards = self.world.dir.path().join("cards");
        let card = format!("--accelerator-file {} --memory-awake 40Gi --memory-asleep 1Gi", cards.display());
        let options = format!("--model {name} --enable-sleep-mode --start-time 100ms {card} {flags}");
        let spec = json!({"launcherConfigName": launchers, "modelServerConfig": {
            "port": 8005, "options": options, "labels": {"serves": name}, "annotations": {"example.com/about": name}}});
        self.object("InferenceServerConfig", name, spec).await;
    }

    /// So many requesters of this name, which ask for the InferenceServerConfig of this name.
    async fn request(&self, name: &str, replicas: u32, gpus: u32) {
        let asked = json!({"dual-pods.llm-d.ai/inference-server-config": name});
        self.ask_by(name, replicas, gpus, asked).await;
    }

    async fn launchers(&self) -> Vec<Pod> {
        let of = ListParams::default().labels("app.kubernetes.io/component=launcher");
        self.world.pods().list(&of).await.unwrap().items
    }

    /// Waits until requesters of this name and all launchers are so.
    async fn see(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        self.see_in(async || (self.pairs(name).await.0, self.launchers().await), what, fits).await
    }

    /// One requester that is ready, and one launcher.
    async fn launched(&self, name: &str) -> (Pod, Pod) {
        let fits = |requesters: &[Pod], launchers: &[Pod]| {
            let ([requester], [launcher]) = (requesters, launchers) else { return false };
            is_ready(requester)
                && label(requester, "dual") == Some(&*launcher.name_any())
                && label(launcher, "dual") == Some(&*requester.name_any())
                && label(launcher, "sleeping") == Some("false")
        };
        let (mut requesters, mut launchers) = self.see(name, "a ready requester", fits).await;
        (requesters.remove(0), launchers.remove(0))
    }

    /// No requester of this name, and so many engines in the one launcher, which is nobody's.
    async fn put_away(&self, name: &str, left: usize) -> Pod {
        let fits = |requesters: &[Pod], launchers: &[Pod]| {
            let [launcher] = launchers else { return false };
            requesters.is_empty()
                && label(launcher, "dual").is_none()
                && engines(launcher).len() == left
                && engines(launcher).iter().all(|engine| engine["requester"].is_null())
        };
        self.see(name, "sleepers alone", fits).await.1.remove(0)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launchers_engine_sleeps_without_its_requester_and_is_woken_for_the_next() {
    let duo = Duo::with_launchers("dual-launcher", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.launched("one").await;
    assert_eq!(engines(&launcher).len(), 1, "{launcher:#?}");
    let led = |pod: &Pod| {
        let all = (pod.labels().get("serves"), pod.annotations().get("example.com/about"));
        (all.0.cloned(), all.1.cloned(), pod.labels().get("of").cloned())
    };
    let serving = (Some("one".to_owned()), Some("one".to_owned()), Some("template".to_owned()));
    assert_eq!(led(&launcher), serving);
    assert_eq!(
        annotation(&requester, "inference-server-ip"),
        launcher.status.as_ref().unwrap().pod_ip.as_deref()
    );
    duo.scale("one", 0).await;
    let sleeper = duo.put_away("one", 1).await;
    assert_eq!((sleeper.uid(), label(&sleeper, "sleeping")), (launcher.uid(), Some("true")));
    assert_eq!(led(&sleeper), (None, None, Some("template".to_owned())));
    duo.scale("one", 1).await;
    let (again, woken) = duo.launched("one").await;
    assert_ne!(again.uid(), requester.uid());
    assert_eq!((woken.uid(), lives(&woken)), (launcher.uid(), lives(&launcher)), "the same engine was woken");
    assert_eq!(led(&woken), serving);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_configurations_share_a_launcher_and_an_edited_ones_sleeper_goes() {
    let duo = Duo::with_launchers("dual-launcher-two", 1).await;
    duo.config("one", "").await;
    duo.config("two", "").await;
    duo.request("one", 1, 1).await;
    let (_, launcher) = duo.launched("one").await;
    duo.scale("one", 0).await;
    duo.put_away("one", 1).await;
    duo.request("two", 1, 1).await;
    let (_, shared) = duo.launched("two").await;
    let ports: Vec<Value> = engines(&shared).iter().map(|engine| engine["port"].clone()).collect();
    assert_eq!((shared.uid(), ports.len()), (launcher.uid(), 2));
    assert_ne!(ports[0], ports[1]);
    duo.scale("two", 0).await;
    duo.put_away("two", 2).await;
    duo.config("one", "--itl 20ms").await;
    duo.put_away("one", 1).await;
    duo.objects("InferenceServerConfig").delete("two", &DeleteParams::default()).await.unwrap();
    assert_eq!(duo.put_away("two", 0).await.uid(), launcher.uid());
    // One that is awake is ended when its requester goes.
    duo.scale("one", 1).await;
    duo.launched("one").await;
    duo.config("one", "").await;
    duo.scale("one", 0).await;
    assert_eq!(duo.put_away("one", 0).await.uid(), launcher.uid());
}

/// Two requesters of one configuration: an engine for each, in launchers of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_node_requesters_of_one_configuration_have_different_launchers() {
    let duo = Duo::with_launchers("dual-launcher-same", 2).await;
    duo.config("one", "").await;
    duo.request("one", 2, 1).await;
    let both = |requesters: &[Pod], launchers: &[Pod]| {
        let duals: BTreeSet<_> = requesters.iter().filter_map(|own| label(own, "dual")).collect();
        duals.len() == 2 && requesters.iter().all(is_ready) && launchers.len() == 2
    };
    let (requesters, _) = duo.see("one", "two ready requesters", both).await;
    let devices: BTreeSet<_> = requesters.iter().filter_map(|own| annotation(own, "accelerators")).collect();
    assert_eq!(devices.len(), 2);
}

/// Two accelerators, and one engine in the launcher of the lower one. What its clients ask is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requester_proxy_leads_to_an_engine_on_several_accelerators() {
    let duo = Duo::with_launchers("dual-launcher-proxy", 2).await;
    duo.config("one", "").await;
    duo.request("one", 1, 2).await;
    let (requester, launcher) = duo.launched("one").await;
    let devices = annotation(&requester, "accelerators").unwrap();
    assert_eq!(devices.split(',').next(), annotation(&launcher, "accelerators"), "of {devices}");
    let ip = address(&requester);
    let admin = Caller::new(SocketAddr::new(ip, 8081), None);
    let target = admin.get("/v1/proxy/config", PATIENCE).await.unwrap();
    let target: Value = serde_json::from_slice(&target.body).unwrap();
    let expected = (address(&launcher).to_string(), engines(&launcher)[0]["port"].clone());
    assert_eq!((target["address"].as_str().unwrap().to_owned(), target["port"].clone()), expected);
    assert!(ask(ip).await.is_whole_stream());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controller_restart_recovery_keeps_engines_that_serve_and_that_sleep() {
    let mut duo = Duo::with_launchers("dual-launcher-restart", 1).await;
    duo.config("one", "").await;
    duo.config("two", "").await;
    duo.request("one", 1, 1).await;
    duo.launched("one").await;
    duo.scale("one", 0).await;
    duo.put_away("one", 1).await;
    duo.request("two", 1, 1).await;
    let (requester, launcher) = duo.launched("two").await;
    duo.restart("gateway-1").await;
    // Only who leads again puts it to sleep.
    assert_eq!(duo.launched("two").await.0.uid(), requester.uid());
    duo.scale("two", 0).await;
    assert_eq!(lives(&duo.put_away("two", 2).await), lives(&launcher));
    duo.scale("one", 1).await;
    let (_, woken) = duo.launched("one").await;
    assert_eq!((woken.uid(), lives(&woken)), (launcher.uid(), lives(&launcher)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unbound_launcher_deletion_cleanup_and_the_next_requester_has_a_new_one() {
    let duo = Duo::with_launchers("dual-launcher-gone", 1).await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    duo.launched("one").await;
    duo.scale("one", 0).await;
    let launcher = duo.put_away("one", 1).await;
    duo.delete(&launcher).await;
    duo.see("one", "no launcher", |_, launchers| launchers.is_empty()).await;
    duo.scale("one", 1).await;
    assert_ne!(duo.launched("one").await.1.uid(), launcher.uid());
}
