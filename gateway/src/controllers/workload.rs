//! What the engines of a model are in a cluster: a Deployment, with a stub beside each engine.
//!
//! One Deployment for each template that engines run by. A template that changes makes another Deployment, beside the
//! former, whose engines are drained and put away one by one; so no controller but Rouse ever decides that an engine goes,
//! and a rollout cuts no stream. Its name is the object's and eight characters that stand for the template.

pub(crate) mod merge;
mod requester;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::pairing;
use rouse_net::stub_api::Epoch;
use serde_json::{Map, Value, json};

use super::{
    convert::{EnginePodTemplate, ModelVariant},
    crd::ledger::ObjectName,
    dual_pods::keys,
    label,
    stub_key::StubKey,
};
use crate::config::{self, FingerprintHasher, SleepApi, kind_name};

/// Label: which template a Pod runs by.
pub const TEMPLATE: &str = "rouse.dev/template";
/// Label on all that Rouse makes, with [`ROUSE`] as its value.
pub const MANAGED: &str = "app.kubernetes.io/managed-by";
pub const ROUSE: &str = "rouse";
/// Annotation of a Pod: which of the model's engines it is.
pub const REPLICA: &str = "rouse.dev/replica";
/// Annotation of a Pod: which life of that engine.
pub const GENERATION: &str = "rouse.dev/generation";
/// Annotation of a Pod: its engine sleeps at this level, or may. There from before the order until it has been woken.
pub const ASLEEP: &str = "rouse.dev/asleep";
/// Annotation: the fingerprint of what the engine was started with, in decimal.
pub const FINGERPRINT: &str = "rouse.dev/fingerprint";
/// Annotation of a Pod: the name of the InferenceModel that it is a Pod of.
pub const OBJECT: &str = "rouse.dev/object";
/// Annotation of a Pod: the name of its engine's container.
pub const CONTAINER: &str = "rouse.dev/container";
/// Annotation: the leader that wrote it last. A new leader writes its own before anything else, so that what an earlier one
/// has on its way is refused for its version.
pub const EPOCH: &str = "rouse.dev/epoch";
/// Which Pod a ReplicaSet gives up first: the lowest.
pub const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The stub's container.
pub const STUB: &str = "rouse-stub";
/// Its ports. Engines' usual ones are far from them.
pub const PROBES_PORT: u16 = 18080;
pub const SPI_PORT: u16 = 18081;
pub const PROXY_PORT: u16 = 18082;

/// Longer, with what a ReplicaSet and a Pod append, would be cut by Kubernetes.
const MAX_NAME_CHARS: usize = 200;

/// Whose the Deployment is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelRef {
    pub object: ObjectName,
    pub uid: String,
}

impl ModelRef {
    /// The model that this requester is of, if it is of any: its stub demands that one's token. The namespace is the Pod's own: what
    /// somebody writes elsewhere gets them no token of a model here.
    #[must_use]
    pub fn of_requester(pod: &Pod) -> Option<Self> {
        let of = |key: &str| pod.annotations().get(key).cloned();
        let object = ObjectName::new(pod.namespace().unwrap_or_default(), of(OBJECT)?);
        Some(Self { object, uid: of(keys::TOKEN_OF)? })
    }
}

/// What the injected stub is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sidecar {
    pub image: String,
    pub pull_policy: Option<String>,
    /// Of which the tokens are made that stubs demand.
    pub key: StubKey,
    /// How long it may take a requester to hand its engine back.
    pub timing: pairing::settings::PairingSettings,
}

/// One Deployment, as it should be.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    pub owner: &'a ModelRef,
    pub engine: &'a config::EngineConfig,
    pub pod_template: &'a EnginePodTemplate,
    pub variant: &'a ModelVariant,
    /// The key of the pool's taint.
    pub taint: Option<&'a str>,
    pub sidecar: &'a Sidecar,
    /// Its Pods ask for engines, and are none.
    pub dual_pods: bool,
    pub replicas: u32,
    pub epoch: Epoch,
}

/// The Deployment's name. Names that are cut keep apart by a hash of the whole.
#[must_use]
pub fn name(object: &ObjectName, template: &str) -> String {
    if object.name.len() <= MAX_NAME_CHARS {
        return format!("{}-{template}", object.name);
    }
    let head: String = object.name.chars().take(MAX_NAME_CHARS - 33).collect();
    format!("{head}-{}-{template}", label::value(&object.name))
}

/// Which Deployments and Pods are Rouse's.
#[must_use]
pub fn selector() -> String {
    format!("{MANAGED}={ROUSE},{}", label::MODEL)
}

impl Workload<'_> {
    /// Eight hexadecimal characters that stand for everything in its Pods: also what is no engine's affair, such as the stub
    /// beside it. A Deployment whose template changed would end Pods by itself.
    #[must_use]
    pub fn template_hash(&self) -> String {
        let mut hash = FingerprintHasher::new();
        hash.feed_text(&self.pod().to_string());
        let hash = hash.value();
        format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
    }

    /// To be applied by server-side apply, whole.
    #[must_use]
    pub fn deployment(&self) -> Value {
        let template = self.template_hash();
        let labels = BTreeMap::from([
            (MANAGED, ROUSE.to_owned()),
            (label::MODEL, label::value(self.engine.name.as_str())),
            (TEMPLATE, template.clone()),
        ]);
        let mut pod = self.pod();
        merge::into(&mut pod, &json!({"metadata": {"labels": labels}}));
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": name(&self.owner.object, &template),
                "namespace": self.owner.object.namespace,
                "labels": labels,
                "annotations": {
                    label::MODEL_NAME: self.engine.name.as_str(),
                    EPOCH: self.epoch.to_string(),
                },
                "ownerReferences": [{
                    "apiVersion": "rouse.dev/v1alpha1",
                    "kind": "InferenceModel",
                    "name": self.owner.object.name,
                    "uid": self.owner.uid,
                    "controller": true,
                }],
            },
            "spec": {
                "replicas": self.replicas,
                "revisionHistoryLimit": 0,
                // How long an engine may take is decided elsewhere.
                "progressDeadlineSeconds": i32::MAX,
                "selector": {"matchLabels": labels},
                "template": pod,
            },
        })
    }

    /// What a Pod is made of, but for its labels.
    fn pod(&self) -> Value {
        let engine = self.engine_pod();
        if self.dual_pods { self.requester(engine) } else { self.with_stub(engine) }
    }

    /// An engine's Pod as the user has it.
    fn engine_pod(&self) -> Value {
        let template = self.variant.template.as_ref().unwrap_or(&self.pod_template.template);
        let mut pod = Value::Object(template.value());
        // A Pod of a Deployment has the Deployment's namespace and a name that is made for it.
        if let Some(own) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
            own.remove("name");
            own.remove("namespace");
        }
        merge::into(&mut pod, &json!({"spec": {"nodeSelector": self.variant.node_selector}}));
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut)
            && let Some(key) = self.taint
        {
            push(spec, "tolerations", json!({"key": key, "operator": "Exists"}));
        }
        pod
    }

    /// The same with a stub beside the engine.
    fn with_stub(&self, mut pod: Value) -> Value {
        let container = json!({CONTAINER: self.pod_template.container});
        merge::into(&mut pod, &json!({"metadata": {"annotations": self.annotations()}}));
        merge::into(&mut pod, &json!({"metadata": {"annotations": container}}));
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
            let claims = claims(spec, &self.pod_template.container);
            if self.engine.sleep == SleepApi::Vllm
                && let Some(own) = container_of(spec, &self.pod_template.container)
            {
                requester::enable_sleep_endpoints(own);
            }
            let mut stub = self.stub([
                // The engine beside it gets its SIGTERM in the same instant: there is nothing to hold for.
                "--hold=0s".to_owned(),
                format!("--token-sha256={}", self.sidecar.key.hash(self.owner)),
            ]);
            if let Some(claims) = claims {
                merge::into(&mut stub, &json!({"resources": {"claims": claims}}));
            }
            push(spec, "containers", stub);
        }
        pod
    }

    /// Whose Pod it is, and by what it was made.
    fn annotations(&self) -> Value {
        json!({
            label::MODEL_NAME: self.engine.name.as_str(),
            FINGERPRINT: self.variant.spec.fingerprint.to_string(),
            OBJECT: self.owner.object.name,
        })
    }

    /// The stub listens at the Pod's own address: so does the engine, and no other port of the Pod leads past it.
    fn stub(&self, more: impl IntoIterator<Item = String>) -> Value {
        let mut args = vec![
            "proxy".to_owned(),
            "--host=$(POD_IP)".to_owned(),
            format!("--probes-port={PROBES_PORT}"),
            format!("--spi-port={SPI_PORT}"),
            format!("--proxy-port={PROXY_PORT}"),
            "--epoch-gate".to_owned(),
            format!("--engine-kind={}", kind_name(self.engine.kind).replace('-', "")),
            format!("--model={}", self.engine.served_name),
        ];
        args.extend(more);
        let mut stub = json!({
            "name": STUB,
            "image": self.sidecar.image,
            "args": args,
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [
                {"name": "rouse-probes", "containerPort": PROBES_PORT},
                {"name": "rouse-spi", "containerPort": SPI_PORT},
                {"name": "rouse-proxy", "containerPort": PROXY_PORT},
            ],
            "readinessProbe": {
                "httpGet": {"path": "/ready", "port": PROBES_PORT},
                "periodSeconds": 1,
                "failureThreshold": 1,
            },
            "livenessProbe": {
                "httpGet": {"path": "/health", "port": PROBES_PORT},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
            },
            "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "250Mi"}},
            // What a namespace may demand of all its Pods.
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": true,
                "runAsNonRoot": true,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        });
        if let Some(policy) = &self.sidecar.pull_policy {
            merge::into(&mut stub, &json!({"imagePullPolicy": policy}));
        }
        stub
    }
}

/// The resource claims of this container.
fn claims(spec: &Map<String, Value>, container: &str) -> Option<Value> {
    let mut all = spec.get("containers")?.as_array()?.iter();
    all.find(|it| merge::is_named(it, container))?.pointer("/resources/claims").cloned()
}

fn container_of<'a>(spec: &'a mut Map<String, Value>, name: &str) -> Option<&'a mut Map<String, Value>> {
    spec.get_mut("containers")?
        .as_array_mut()?
        .iter_mut()
        .find(|it| merge::is_named(it, name))?
        .as_object_mut()
}

fn push(spec: &mut Map<String, Value>, list: &str, item: Value) {
    let list = spec.entry(list).or_insert_with(|| json!([]));
    if let Some(list) = list.as_array_mut() {
        list.push(item);
    }
}
