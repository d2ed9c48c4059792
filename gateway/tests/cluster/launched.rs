//! Launchers and their requests: helpers for all tests of launchers, with any runner of Pods.

use k8s_openapi::{
    api::core::v1::Pod, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams},
    core::GroupVersionKind,
    runtime::wait::{await_condition, conditions},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::fma;
use serde_json::{Value, json};
use tokio::{sync::OnceCell, time::timeout};

use crate::{
    installation::Installation,
    pairs::{is_served, is_unbound},
    support::{FIELD_MANAGER, apply_definition, cluster},
};

/// Returns the launcher's records of its engines: one annotation each.
pub(crate) fn engines(launcher: &Pod) -> Vec<Value> {
    let ours = launcher.annotations().iter().filter(|(key, _)| key.starts_with("engines.rouse.dev/"));
    ours.map(|(_, text)| serde_json::from_str(text).unwrap()).collect()
}

/// Returns the generations of the launcher's engines.
pub(crate) fn generations(launcher: &Pod) -> Vec<Value> {
    engines(launcher).iter().map(|own| own["generation"].clone()).collect()
}

/// Defines the public project's kinds in the cluster that all tests share.
pub(crate) async fn define_fma_kinds() {
    static DEFINED: OnceCell<()> = OnceCell::const_new();
    let define = async || {
        let client = cluster().await.client().await.unwrap();
        for definition in fma::all() {
            let name = definition.metadata.name.clone().unwrap();
            let answer = apply_definition(&client, &serde_json::to_value(&definition).unwrap()).await;
            assert!(answer.status().is_success(), "{name}: {:?}", answer.status());
            let kinds: Api<CustomResourceDefinition> = Api::all(client.clone());
            let served = await_condition(kinds, &name, conditions::is_crd_established());
            timeout(WAIT_TIMEOUT, Box::pin(served)).await.unwrap().unwrap();
        }
    };
    let once = async || Box::pin(cluster().await.once("public-kinds", define())).await.unwrap();
    Box::pin(DEFINED.get_or_init(once)).await;
}

impl<R> Installation<'_, R> {
    pub(crate) async fn object(&self, kind: &str, name: &str, spec: Value) {
        let object = json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec});
        let api = self.objects(kind);
        api.patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&object)).await.unwrap();
    }

    pub(crate) fn objects(&self, kind: &str) -> Api<DynamicObject> {
        let gvk = GroupVersionKind::gvk("fma.llm-d.ai", "v1alpha1", kind);
        let namespace = self.site.namespace.name();
        Api::namespaced_with(self.site.admin.clone(), namespace, &ApiResource::from_gvk(&gvk))
    }

    /// Creates a LauncherConfig whose Pods have this container and this label. Each holds `most` engines, or by default
    /// more than a test has.
    pub(crate) async fn launchers_of(&self, name: &str, mut container: Value, of: &str, most: Option<u32>) {
        container["name"] = json!("inference-server");
        container["env"] =
            json!([{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]);
        let metadata = json!({"labels": {"of": of}});
        let pod = json!({"terminationGracePeriodSeconds": 5, "containers": [container]});
        let template = json!({"metadata": metadata, "spec": pod});
        let spec = json!({"podTemplate": template, "maxInstances": most.unwrap_or(50)});
        self.object("LauncherConfig", name, spec).await;
    }

    /// Creates an InferenceServerConfig with this name, for launchers of this LauncherConfig.
    pub(crate) async fn server(&self, launchers: &str, name: &str, flags: &str) {
        let options = format!("--model {name} --enable-sleep-mode --start-time 100ms {flags}");
        let spec = json!({"launcherConfigName": launchers, "modelServerConfig": {
            "port": 8005, "options": options, "labels": {"serves": name}, "annotations": {"example.com/about": name}}});
        self.object("InferenceServerConfig", name, spec).await;
    }

    pub(crate) async fn launchers(&self) -> Vec<Pod> {
        let of = ListParams::default().labels("app.kubernetes.io/component=launcher");
        self.pods().list(&of).await.unwrap().items
    }

    /// Waits until the requesters of this name and all launchers fit, and returns them.
    pub(crate) async fn until_launchers(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&[Pod], &[Pod]) -> bool,
    ) -> (Vec<Pod>, Vec<Pod>) {
        self.until_pods(async || (self.pairs(name).await.0, self.launchers().await), what, fits).await
    }

    /// Waits for one ready requester and one launcher, and returns them.
    pub(crate) async fn until_launched(&self, name: &str) -> (Pod, Pod) {
        let (mut requesters, mut launchers) =
            self.until_launchers(name, "a ready requester", is_served).await;
        (requesters.remove(0), launchers.remove(0))
    }

    /// Waits for no requester of this name and this many engines in the only launcher, which has no requester.
    pub(crate) async fn until_unbound(&self, name: &str, left: usize) -> Pod {
        let fits = |requesters: &[Pod], launchers: &[Pod]| {
            is_unbound(requesters, launchers)
                && engines(&launchers[0]).len() == left
                && engines(&launchers[0]).iter().all(|engine| engine["requester"].is_null())
        };
        self.until_launchers(name, "sleepers alone", fits).await.1.remove(0)
    }
}
