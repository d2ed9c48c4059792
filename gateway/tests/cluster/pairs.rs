//! Requesters that a user creates, and their providers: helpers for all tests of dual pods, with any runner of Pods.

use std::net::{IpAddr, SocketAddr};

use futures_util::StreamExt as _;
use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use rouse_cluster::wait;
use serde_json::{Value, json};

use crate::{
    client::{TestClient, TestResponse},
    installation::{Installation, blocking},
    summary,
    support::FIELD_MANAGER,
};

/// Whether the kubelet reports the Pod as ready.
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

/// Whether a requester is ready, with one provider, and each names the other.
pub(crate) fn is_served(requesters: &[Pod], providers: &[Pod]) -> bool {
    let ([requester], [provider]) = (requesters, providers) else { return false };
    is_ready(requester)
        && label(requester, "dual") == Some(&*provider.name_any())
        && label(provider, "dual") == Some(&*requester.name_any())
        && label(provider, "sleeping") == Some("false")
}

/// Whether no requester exists, and one provider without a requester.
pub(crate) fn is_unbound(requesters: &[Pod], providers: &[Pod]) -> bool {
    requesters.is_empty() && matches!(providers, [provider] if label(provider, "dual").is_none())
}

/// Whether one Pod of each kind exists, and neither of these two is left.
pub(crate) fn both_replaced(requester: &Pod, provider: &Pod) -> impl Fn(&[Pod], &[Pod]) -> bool {
    let old = [requester.uid(), provider.uid()];
    let new = move |pods: &[Pod]| matches!(pods, [pod] if !old.contains(&pod.uid()));
    move |requesters, providers| new(requesters) && new(providers)
}

/// The Pod's IP address.
pub(crate) fn address(pod: &Pod) -> IpAddr {
    pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap().parse().unwrap()
}

/// Streams a chat from this requester.
pub(crate) async fn chat_with_requester(requester: IpAddr, model: &str) -> TestResponse {
    let (client, model) = (TestClient::new(SocketAddr::new(requester, 8082)), model.to_owned());
    blocking(move || client.chat(&model, true, 5)).await
}

/// The server patch that makes an engine of a requester. `command` has the arguments of this image.
pub(crate) fn patch(name: &str, image: &str, command: &str) -> String {
    let args: Vec<&str> = command.split_whitespace().collect();
    let patch: Value = json!({
        "metadata": {"labels": {"app": null, "engine": name}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [{
            "name": "inference-server",
            "image": image,
            "args": args,
            "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}},
        }]},
    });
    patch.to_string()
}

/// The arguments of an engine with this name.
pub(crate) fn flags(name: &str) -> String {
    format!("--host $(POD_IP) --port 8000 --model {name} --enable-sleep-mode --start-time 100ms")
}

impl<R> Installation<'_, R> {
    /// Returns a set of requesters with this name in the pool. Each asks for `gpus` accelerators, and for an engine by
    /// its annotations. `env` extends its stub's environment.
    pub(crate) fn requester_set(
        &self,
        name: &str,
        replicas: u32,
        gpus: u32,
        annotations: Value,
        env: &[(&str, &str)],
    ) -> Value {
        let ip = json!({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}});
        let more = env.iter().map(|(name, value)| json!({"name": name, "value": value}));
        let env: Vec<Value> = [ip].into_iter().chain(more).collect();
        json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": name}, "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}, "annotations": annotations},
                "spec": {
                    "nodeSelector": {"inference-pool": self.name()},
                    "terminationGracePeriodSeconds": 120,
                    "containers": [{
                        "name": "inference-server",
                        "image": self.stub_image,
                        "args": ["proxy", "--host=$(POD_IP)", "--epoch-gate"],
                        "env": env,
                        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1},
                        "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
                    }],
                },
            },
        }})
    }

    /// Creates a set of requesters with this name.
    pub(crate) async fn apply_set(&self, name: &str, set: &Value) {
        self.sets()
            .patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(set))
            .await
            .unwrap();
    }

    pub(crate) fn sets(&self) -> Api<ReplicaSet> {
        self.site.namespace.api()
    }

    pub(crate) async fn scale(&self, name: &str, replicas: u32) {
        let patch = json!({"spec": {"replicas": replicas}});
        self.sets().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }

    pub(crate) async fn delete(&self, pod: &Pod) {
        self.pods().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    }

    /// Returns the requesters of this name and their providers, by their labels.
    pub(crate) async fn pairs(&self, name: &str) -> (Vec<Pod>, Vec<Pod>) {
        let list = async |labels: String| {
            self.pods().list(&ListParams::default().labels(&labels)).await.unwrap().items
        };
        (list(format!("app={name}")).await, list(format!("engine={name}")).await)
    }

    /// Waits until the requesters and the providers fit, and returns them.
    pub(crate) async fn until_pair(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        self.until_pods(async || self.pairs(name).await, what, fits).await
    }

    /// Waits until two kinds of Pods fit, and returns them.
    pub(crate) async fn until_pods(
        &self,
        find: impl AsyncFn() -> (Vec<Pod>, Vec<Pod>),
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        let seen = async {
            let mut changed = wait::changes(&self.pods());
            loop {
                let (requesters, providers) = find().await;
                let torn =
                    |own: &&Pod| label(own, "dual").is_some() && label(own, "sleeping") != Some("false");
                assert_eq!(providers.iter().find(torn), None, "somebody's, and it says that it sleeps");
                if fits(&requesters, &providers) {
                    return (requesters, providers);
                }
                changed.next().await;
            }
        };
        match tokio::time::timeout(wait::WAIT_TIMEOUT, seen).await {
            Ok(found) => found,
            Err(_) => {
                let (requesters, providers) = find().await;
                let pods = requesters.iter().chain(&providers).map(summary::of_pod).collect::<String>();
                panic!("never {what}:\n{pods}{}", summary::of_events(self).await)
            }
        }
    }

    /// Waits for one ready requester with an engine, and returns both Pods.
    pub(crate) async fn until_served(&self, name: &str) -> (Pod, Pod) {
        let (mut requesters, mut providers) = self.until_pair(name, "a ready pair", is_served).await;
        (requesters.remove(0), providers.remove(0))
    }

    /// Waits for no requester and one sleeping provider without a requester, and returns the provider.
    pub(crate) async fn until_asleep(&self, name: &str) -> Pod {
        let fits = |requesters: &[Pod], providers: &[Pod]| {
            is_unbound(requesters, providers) && label(&providers[0], "sleeping") == Some("true")
        };
        self.until_pair(name, "a sleeper alone", fits).await.1.remove(0)
    }
}
