//! Writes to Deployments and to statuses, which carry the version that was read.

use k8s_openapi::api::apps::v1::Deployment;
use kube::{Api, ResourceExt as _};
use rouse_cluster::wait;
use rouse_controllers::{
    crd::{InferenceModel, fma::LauncherPopulationPolicy},
    workload::EPOCH,
};
use serde_json::{Value, json};

use super::{LeaderHandover, pod};

fn deployment(name: &str, replicas: u32, version: Option<&str>) -> Value {
    let mut metadata = json!({"name": name, "annotations": {EPOCH: "1"}});
    if let Some(version) = version {
        metadata["resourceVersion"] = json!(version);
    }
    let labels = json!({"app": name});
    // Its controller makes no Pods of a paused one, and writes its status once.
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {
        "paused": true,
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod("", json!({}))["spec"]},
    }})
}

impl LeaderHandover<'_> {
    /// Creates a Deployment, and waits until its controller has written what it writes.
    async fn deployment(&self, name: &str) -> Deployment {
        let made: Deployment = self.create(deployment(name, 2, None)).await;
        let all = self.api::<Deployment>(self.site.admin.clone());
        let observed = |found: &Option<Deployment>| {
            let status = found.as_ref().and_then(|found| found.status.as_ref());
            status.is_some_and(|status| status.observed_generation == made.metadata.generation)
        };
        wait::until(&all, name, "observed", observed).await.unwrap().unwrap()
    }

    async fn holds_deployment(&self) {
        let made = self.deployment("applied").await;
        let of = |replicas| deployment("applied", replicas, made.resource_version().as_deref());
        let (former, next) = (of(0), of(1));
        self.holds(
            "a Deployment",
            "applied",
            async |writer, all: Api<Deployment>| writer.apply(&all, "applied", &former).await.map(drop),
            async |writer, all: Api<Deployment>| writer.apply(&all, "applied", &next).await.map(drop),
        )
        .await;
    }

    async fn holds_scale(&self) {
        let made = self.deployment("scaled").await;
        let metadata = json!({"resourceVersion": made.resource_version()});
        let of = |replicas: u32| json!({"metadata": metadata, "spec": {"replicas": replicas}});
        let (former, next) = (of(0), of(1));
        self.holds(
            "a number of replicas",
            "scaled",
            async |writer, all: Api<Deployment>| writer.patch_merge(&all, "scaled", &former).await.map(drop),
            async |writer, all: Api<Deployment>| writer.patch_merge(&all, "scaled", &next).await.map(drop),
        )
        .await;
    }

    async fn holds_new_deployment(&self) {
        let (former, next) = (deployment("new", 1, None), deployment("new", 0, None));
        self.holds(
            "a new Deployment",
            "new",
            async |writer, all: Api<Deployment>| writer.create(&all, &former).await.map(drop),
            async |writer, all: Api<Deployment>| writer.create(&all, &next).await.map(drop),
        )
        .await;
    }

    async fn holds_model_status(&self) {
        let spec = json!({"modelName": "qwen", "memory": "40Gi", "engine": {"kind": "vllm"},
            "nodeSelector": {"nobody-has": "this"}, "containerImage": "rouse/engine"});
        let made: InferenceModel = self
            .create(json!({"apiVersion": "rouse.dev/v1alpha1",
            "kind": "InferenceModel", "metadata": {"name": "qwen"}, "spec": spec}))
            .await;
        let of = |replicas: u32| {
            let metadata = json!({"name": "qwen", "resourceVersion": made.resource_version()});
            json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel", "metadata": metadata,
                "status": {"observedGeneration": 1, "ready": false, "replicas": replicas}})
        };
        let (former, next) = (of(1), of(2));
        self.holds(
            "a model's status",
            "qwen",
            async |writer, all: Api<InferenceModel>| {
                writer.apply_status(&all, "qwen", &former).await.map(drop)
            },
            async |writer, all: Api<InferenceModel>| writer.apply_status(&all, "qwen", &next).await.map(drop),
        )
        .await;
    }

    async fn holds_policy_status(&self) {
        let spec = json!({"enhancedNodeSelector": {"labelSelector": {}}, "countForLauncher": []});
        let made: LauncherPopulationPolicy = self
            .create(json!({"apiVersion": "fma.llm-d.ai/v1alpha1",
            "kind": "LauncherPopulationPolicy", "metadata": {"name": "some"}, "spec": spec}))
            .await;
        let of = |error: &str| {
            let metadata = json!({"name": "some", "resourceVersion": made.resource_version()});
            json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "LauncherPopulationPolicy",
                "metadata": metadata, "status": {"observedGeneration": 1, "errors": [error]}})
        };
        let (former, next) = (of("former"), of("next"));
        self.holds(
            "a policy's status",
            "some",
            async |writer, all: Api<LauncherPopulationPolicy>| {
                writer.apply_status(&all, "some", &former).await.map(drop)
            },
            async |writer, all: Api<LauncherPopulationPolicy>| {
                writer.apply_status(&all, "some", &next).await.map(drop)
            },
        )
        .await;
    }
}

#[tokio::test]
async fn no_held_write_to_a_deployment_or_a_status_changes_what_the_next_leader_wrote() {
    let (succession, leader) = Box::pin(LeaderHandover::new("held-objects", 5)).await;
    tokio::join!(
        Box::pin(succession.hand_over(leader)),
        Box::pin(succession.holds_deployment()),
        Box::pin(succession.holds_scale()),
        Box::pin(succession.holds_new_deployment()),
        Box::pin(succession.holds_model_status()),
        Box::pin(succession.holds_policy_status()),
    );
}
