//! Fields of Pods that only a gateway may change, by the chart's policies. The public project's cases have numbers.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use rouse_cluster::wait;
use rouse_controllers::crd::InferenceModel;
use serde_json::{Value, json};

use super::DualPodsFixture;
use crate::{
    events,
    support::{FIELD_MANAGER, repo_path},
};

impl DualPodsFixture {
    /// Applies the policies for this namespace only, because all tests share the cluster.
    async fn guard(&self) {
        self.guard_by(&std::fs::read_to_string(repo_path("charts/rouse/policies/dual-pods.yaml")).unwrap())
            .await;
    }

    async fn guard_by(&self, text: &str) {
        let own = self.world.name();
        let text = text.replace("serviceaccount:rouse:", &format!("serviceaccount:{own}:"));
        for document in text.split("---\n") {
            let mut object: Value = serde_saphyr::from_str(document).unwrap();
            let name = format!("{}-{own}", object["metadata"]["name"].as_str().unwrap());
            object["metadata"]["name"] = json!(name);
            if let Some(policy) = object.pointer_mut("/spec/policyName") {
                *policy = json!(name);
                object["spec"]["matchResources"] =
                    json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": own}}});
            }
            let kind = object["kind"].as_str().unwrap();
            let resource =
                ApiResource::from_gvk(&GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind));
            let api: Api<DynamicObject> = Api::all_with(self.world.site.admin.clone(), &resource);
            api.patch(&name, &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&object)).await.unwrap();
        }
    }

    /// Patches a Pod's metadata. Returns the refusal, if the API server denies the patch.
    async fn edit(&self, pod: &Pod, metadata: Value) -> Result<(), String> {
        let patch = json!({"metadata": metadata});
        let written =
            self.world.pods().patch(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await;
        verdict(written)
    }

    /// Patches as a service account with all rights.
    async fn edit_as(&self, account: &str, pod: &Pod, metadata: Value) -> Result<(), String> {
        let request =
            http::Request::patch(format!("/api/v1/namespaces/{}/pods/{}", self.world.name(), pod.name_any()))
                .header("content-type", "application/merge-patch+json")
                .header("impersonate-user", format!("system:serviceaccount:{account}"))
                .header("impersonate-group", "system:masters")
                .body(json!({"metadata": metadata}).to_string().into_bytes())
                .unwrap();
        verdict(self.world.site.admin.request(request).await)
    }

    /// Waits until the API server enforces the policies: it learns of them by a watch, and denies nothing before.
    async fn is_guarded(&self, pod: &Pod) {
        let denied = async {
            let mut n = 0;
            while self
                .edit(pod, json!({"labels": {"dual-pods.llm-d.ai/launcher-config-name": n.to_string()}}))
                .await
                .is_ok()
            {
                n += 1;
            }
        };
        tokio::time::timeout(wait::WAIT_TIMEOUT, denied).await.unwrap();
    }
}

fn verdict(written: kube::Result<Pod>) -> Result<(), String> {
    match written {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 422 => Err(status.message),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cel_policies_keep_what_gateways_write_and_hinder_no_gateway() {
    let duo = DualPodsFixture::with_launchers("dual-policies", 2).await;
    duo.config("one", "").await;
    let plain: Pod = serde_json::from_value(json!({"metadata": {"name": "plain"}, "spec": {
        "nodeSelector": {"none": "such"}, "containers": [{"name": "c", "image": "rouse/stub"}]}}))
    .unwrap();
    let plain = duo.world.pods().create(&PostParams::default(), &plain).await.unwrap();
    duo.guard().await;
    duo.is_guarded(&plain).await;
    duo.request("one", 1, 1).await;
    let (bound, launcher) = duo.until_launched("one").await;
    // This requester names a configuration that does not exist, so it has no engine.
    duo.request("none", 1, 1).await;
    let (waits, _) = duo.until_launchers("none", "a requester", |all, _| all.len() == 1).await;

    let key = |name: &str| format!("dual-pods.llm-d.ai/{name}");
    let denied = async |pod: &Pod, of: &str, name: &str, value: Value, why: &str| {
        let refused = duo.edit(pod, json!({of: {key(name): value}})).await.expect_err(name);
        assert!(refused.contains(why), "{refused}");
    };
    denied(&launcher, "annotations", "requester", json!("other"), "which engine").await; // T1
    denied(&bound, "labels", "dual", json!("other"), "delete the requester instead").await; // T2
    denied(&bound, "labels", "dual", Value::Null, "delete the requester instead").await; // T3
    denied(&bound, "annotations", "inference-server-config", json!("two"), "while it has an engine").await; // T4
    denied(&bound, "annotations", "inference-server-config", Value::Null, "while it has an engine").await; // T5
    denied(&launcher, "annotations", "isc-routing-metadata", json!("{}"), "which engine").await; // T5b
    denied(&launcher, "labels", "sleeping", json!("true"), "delete the requester instead").await;
    for engine in launcher.annotations().keys().filter(|key| key.starts_with("engines.rouse.dev/")) {
        let refused = duo.edit(&launcher, json!({"annotations": {engine.clone(): null}})).await.unwrap_err();
        assert!(refused.contains("which engines a Pod has"), "{refused}");
    }
    duo.edit(&launcher, json!({"annotations": {"engines.rouse.dev/forged": "{}"}})).await.unwrap_err();
    duo.edit(&bound, json!({"labels": {"other": "allowed"}})).await.unwrap(); // T6
    duo.edit(&waits[0], json!({"annotations": {key("inference-server-config"): "nor-that"}})).await.unwrap(); // T7
    duo.edit(&waits[0], json!({"annotations": {key("inference-server-config"): null}})).await.unwrap(); // T8
    duo.edit(&plain, json!({"annotations": {"other": "allowed"}, "labels": {"other": "allowed"}}))
        .await
        .unwrap(); // T9

    // The policies exempt one account, and no account with a similar name.
    let label = || json!({"labels": {key("launcher-config-name"): "mine"}});
    for account in ["elsewhere:rouse-gateway", "elsewhere:x-fma-controllers"] {
        let refused = duo.edit_as(account, &plain, label()).await.expect_err(account);
        assert!(refused.contains("delete the requester instead"), "{refused}");
    }
    duo.edit_as(&format!("{}:rouse-gateway", duo.world.name()), &plain, label()).await.unwrap();

    duo.scale("none", 0).await;
    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    duo.scale("one", 1).await;
    assert_eq!(duo.until_launched("one").await.1.uid(), launcher.uid(), "the gateway itself is not hindered");
}

/// A policy like the public project's, which exempts its own controllers by their accounts' names.
const PUBLIC: &str = "apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: fma-immutable-fields}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - {apiGroups: [''], apiVersions: [v1], operations: [UPDATE], resources: [pods]}
  matchConditions:
    - {name: others, expression: \"!request.userInfo.username.endsWith('-fma-controllers')\"}
  validations:
    - expression: >-
        ['dual', 'launcher-config-name'].all(key, object.metadata.?labels[?'dual-pods.llm-d.ai/' + key]
        == oldObject.metadata.?labels[?'dual-pods.llm-d.ai/' + key])
    - expression: >-
        ['requester', 'status'].all(key, object.metadata.?annotations[?'dual-pods.llm-d.ai/' + key]
        == oldObject.metadata.?annotations[?'dual-pods.llm-d.ai/' + key])
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: fma-immutable-fields}
spec: {policyName: fma-immutable-fields, validationActions: [Deny]}
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_public_projects_policies_are_it_is_said_what_to_install() {
    let duo = DualPodsFixture::new("dual-public", 1, "8Gi", "").await;
    let plain: Pod = serde_json::from_value(json!({"metadata": {"name": "plain"}, "spec": {
        "nodeSelector": {"none": "such"}, "containers": [{"name": "c", "image": "rouse/stub"}]}}))
    .unwrap();
    let plain = duo.world.pods().create(&PostParams::default(), &plain).await.unwrap();
    duo.guard_by(PUBLIC).await;
    duo.is_guarded(&plain).await;
    super::models::model(&duo, "one", json!({})).await;
    let client = duo.gateway.client();
    // The model keeps waiting, as for anything that an administrator has yet to install, so the test does not await its
    // answer.
    std::thread::spawn(move || client.chat("one", false, 4));
    let what = "an account whose name ends in -fma-controllers";
    let told = |pod: &Pod| pod.annotations().get("rouse.dev/status").is_some_and(|told| told.contains(what));
    let see = async || super::models::pods(&duo, "one").await;
    let (requesters, _) = duo.world.until_pods(see, "its status", |all, _| all.iter().any(told)).await;
    let requester = requesters.iter().find(|pod| told(pod)).unwrap();
    let event = events::until_event(&duo.world, requester, "Failed").await;
    assert!(event.message.as_deref().unwrap().contains(what), "{event:?}");
    let said = |model: &InferenceModel| {
        let conditions = model.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|condition| condition.message.contains(what))
    };
    duo.world.until("one", "its condition", said).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lpp_key_uniqueness_is_the_api_servers_affair() {
    let duo = DualPodsFixture::with_launchers("dual-unique", 1).await;
    let api = duo.objects("LauncherPopulationPolicy");
    let policy = |names: &[&str]| -> DynamicObject {
        let counts: Vec<_> =
            names.iter().map(|name| json!({"launcherConfigName": name, "launcherCount": 1})).collect();
        let selector = json!({"labelSelector": {"matchLabels": {"a": "b"}}});
        serde_json::from_value(json!({
            "apiVersion": "fma.llm-d.ai/v1alpha1",
            "kind": "LauncherPopulationPolicy",
            "metadata": {"name": "some"},
            "spec": {"enhancedNodeSelector": selector, "countForLauncher": counts},
        }))
        .unwrap()
    };
    let refused = api.create(&PostParams::default(), &policy(&["one", "two", "one"])).await.unwrap_err();
    assert!(refused.to_string().contains("Duplicate value"), "{refused}");
    api.create(&PostParams::default(), &policy(&["one", "two"])).await.unwrap();
}
