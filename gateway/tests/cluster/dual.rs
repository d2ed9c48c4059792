//! Dual pods: requesters that a user makes, and the engines that they get.

mod away;
mod crashes;
mod direct;
mod faults;
mod launchers;
mod models;
mod policies;

use std::{collections::BTreeMap, fs};

use futures_util::StreamExt as _;
use k8s_openapi::api::{
    apps::v1::ReplicaSet,
    core::v1::{ConfigMap, Node, Pod},
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::{podrunner::NodeSpec, wait};
use serde_json::{Value, json};

use crate::{
    memory::until_told,
    site::Site,
    support::{MANAGER, cluster},
    world::{Gateway, World},
};

/// Nodes with accelerators of 64 GiB, of which sleepers may keep some.
pub(crate) struct Duo {
    pub(crate) world: World<'static>,
    pub(crate) gateway: Gateway,
    second: Option<Gateway>,
    /// How gateways are configured.
    more: String,
}

/// A requester as the kubelet's side of it was last seen, and whose it is.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}

pub(crate) fn label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.labels().get(&format!("dual-pods.llm-d.ai/{key}")).map(String::as_str)
}

pub(crate) fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.annotations().get(&format!("dual-pods.llm-d.ai/{key}")).map(String::as_str)
}

impl Duo {
    pub(crate) async fn new(name: &str, gpus: u32, sleeping: &str, dual: &str) -> Self {
        Self::with(name, gpus, sleeping, dual, &[]).await
    }

    /// Whose gateway dies before its write or order of this number; another is there to take over.
    pub(crate) async fn dying(name: &str, point: u32) -> Self {
        let env = [("ROUSE_TEST_ABORT_BEFORE_WRITE", point.to_string())];
        let mut duo = Self::with(name, 1, "8Gi", "", &env).await;
        duo.second = Some(duo.world.gateway_with("gateway-1", &duo.more));
        duo
    }

    async fn with(name: &str, gpus: u32, sleeping: &str, dual: &str, env: &[(&str, String)]) -> Self {
        let site = Site::new(cluster().await, name).await;
        let own = site.namespace.name().to_owned();
        site.install("dual-pods.yaml", Some(&own)).await;
        let world = World::at(site, "1Ti", |own| node(own, "a", gpus)).await;
        let pool = json!({"nodeSelector": {"inference-pool": own}, "sleepingMemory": sleeping, "hostSleepMemory": "256Gi",
            "settle": "1s"});
        world.pool(&own, pool).await;
        let more = format!(", dualPods: {{settle: 1s{dual}}}");
        let gateway = world.gateway_in("gateway-0", &more, env);
        let duo = Self { world, gateway, second: None, more };
        duo.cards(&["a"]);
        duo
    }

    /// The accelerators of these nodes, as engines find them.
    fn cards(&self, nodes: &[&str]) {
        let all = nodes.iter().map(|name| self.world.runner.node(&format!("{}-{name}", self.world.name())));
        let cards: BTreeMap<_, _> = all
            .flat_map(|node| node.devices())
            .map(|(id, _)| (id, json!({"capacity": 64_u64 << 30})))
            .collect();
        let file = self.world.dir.path().join("cards");
        fs::write(file, json!({"accelerators": cards}).to_string()).unwrap();
    }

    /// Kills the gateway; another comes.
    pub(crate) async fn restart(&mut self, name: &str) {
        self.kill().await;
        self.begin(name);
    }

    async fn kill(&mut self) {
        self.gateway.signal(Signal::SIGKILL);
        self.gateway.ends().await;
    }

    fn begin(&mut self, name: &str) {
        self.gateway = self.world.gateway_with(name, &self.more);
    }

    /// So many requesters of this name; each asks for `gpus`, of each of which its engine takes 40 GiB and keeps one. `flags` are
    /// the engine's, which dies where there is not that much.
    pub(crate) async fn ask(&self, name: &str, replicas: u32, gpus: u32, flags: &str) {
        let cards = self.world.dir.path().join("cards");
        let card = format!("--accelerator-file {} --memory-awake 40Gi --memory-asleep 1Gi", cards.display());
        self.ask_with(name, replicas, gpus, &patch(name, &format!("{card} {flags}"))).await;
    }

    pub(crate) async fn ask_with(&self, name: &str, replicas: u32, gpus: u32, patch: &str) {
        self.ask_by(name, replicas, gpus, json!({"dual-pods.llm-d.ai/server-patch": patch})).await;
    }

    /// The same by annotations that say what the engine is.
    pub(crate) async fn ask_by(&self, name: &str, replicas: u32, gpus: u32, mut annotations: Value) {
        annotations["rouse.dev/gpu-memory"] = json!("40Gi");
        annotations["rouse.dev/gpu-memory-asleep"] = json!("1Gi");
        annotations["rouse.dev/host-memory"] = json!("8Gi");
        let own = self.world.name();
        let set = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": name}, "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}, "annotations": annotations},
                "spec": {
                    "nodeSelector": {"inference-pool": own},
                    "terminationGracePeriodSeconds": 60,
                    "containers": [{
                        "name": "inference-server",
                        "image": "rouse/stub",
                        "args": ["proxy", "--host=$(POD_IP)", "--epoch-gate"],
                        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1},
                        "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
                    }],
                },
            },
        }});
        self.sets().patch(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&set)).await.unwrap();
    }

    pub(crate) async fn scale(&self, name: &str, replicas: u32) {
        let patch = json!({"spec": {"replicas": replicas}});
        self.sets().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    pub(crate) fn sets(&self) -> Api<ReplicaSet> {
        self.world.site.namespace.api()
    }

    /// Which accelerators have which number, as the public project's map says it.
    pub(crate) async fn map(&self, numbers: &BTreeMap<String, String>) {
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpu-map"}, "data": numbers});
        let maps: Api<ConfigMap> = self.world.site.namespace.api();
        maps.patch("gpu-map", &PatchParams::apply(MANAGER).force(), &Patch::Apply(&map)).await.unwrap();
    }

    /// Requesters of this name, and their providers, by what their labels say.
    pub(crate) async fn pairs(&self, name: &str) -> (Vec<Pod>, Vec<Pod>) {
        let list = async |labels: String| {
            self.world.pods().list(&ListParams::default().labels(&labels)).await.unwrap().items
        };
        (list(format!("app={name}")).await, list(format!("engine={name}")).await)
    }

    /// Waits until these Pods are so: the requesters, and the providers.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        self.see_in(async || self.pairs(name).await, what, fits).await
    }

    /// Waits until these two kinds of Pods are so.
    async fn see_in(
        &self,
        find: impl AsyncFn() -> (Vec<Pod>, Vec<Pod>),
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        let seen = async {
            let mut changed = wait::changes(&self.world.pods());
            loop {
                let (requesters, providers) = find().await;
                if fits(&requesters, &providers) {
                    return (requesters, providers);
                }
                changed.next().await;
            }
        };
        match tokio::time::timeout(wait::PATIENCE, seen).await {
            Ok(found) => found,
            Err(_) => panic!("never {what}: {:#?}", find().await),
        }
    }

    /// One requester that is ready, with an engine.
    pub(crate) async fn served(&self, name: &str) -> (Pod, Pod) {
        let fits = |requesters: &[Pod], providers: &[Pod]| {
            let ([requester], [provider]) = (requesters, providers) else { return false };
            is_ready(requester)
                && label(requester, "dual") == Some(&*provider.name_any())
                && label(provider, "dual") == Some(&*requester.name_any())
                && label(provider, "sleeping") == Some("false")
        };
        let (mut requesters, mut providers) = self.until(name, "a ready pair", fits).await;
        (requesters.remove(0), providers.remove(0))
    }

    /// No requester, and one provider that is nobody's.
    pub(crate) async fn asleep(&self, name: &str) -> Pod {
        let fits = |requesters: &[Pod], providers: &[Pod]| {
            let [provider] = providers else { return false };
            requesters.is_empty()
                && label(provider, "dual").is_none()
                && label(provider, "sleeping") == Some("true")
        };
        self.until(name, "a sleeper alone", fits).await.1.remove(0)
    }

    /// Waits until the gateway's metrics say that so many requesters came to their engines in this way.
    async fn counted(&self, path: &str, config: &str, many: u32) {
        let labels =
            format!("exported_namespace=\"{}\",isc_name=\"{config}\",path=\"{path}\"", self.world.name());
        until_told(&self.gateway, &format!("fma_actuation_seconds_count{{{labels}}} {many}")).await;
    }

    pub(crate) async fn cordon(&self, node: &str) {
        let nodes: Api<Node> = Api::all(self.world.site.admin.clone());
        let patch = json!({"spec": {"unschedulable": true}});
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    pub(crate) async fn delete(&self, pod: &Pod) {
        self.world.pods().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    }
}

fn node(own: &str, name: &str, gpus: u32) -> NodeSpec {
    NodeSpec::new(&format!("{own}-{name}"))
        .gpus(gpus)
        .label("inference-pool", own)
        .label("nvidia.com/gpu.memory", "65536")
}

/// What makes an engine of a requester.
fn patch(name: &str, flags: &str) -> String {
    let words = format!(
        "demo-engine --host $(POD_IP) --port 8000 --model {name} --enable-sleep-mode --start-time 100ms {flags}"
    );
    let args: Vec<&str> = words.split_whitespace().collect();
    let patch: Value = json!({
        "metadata": {"labels": {"app": null, "engine": name}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [{
            "name": "inference-server",
            "image": "rouse/engine",
            "args": args,
            "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}},
        }]},
    });
    patch.to_string()
}
