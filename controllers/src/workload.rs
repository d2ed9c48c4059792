//! Builds the Deployments that run a model's engines, each with a stub beside it.
//!
//! There is one Deployment per variant and template. A changed template makes another Deployment beside the former
//! one, whose engines Rouse drains and stops one by one. So no controller but Rouse decides that an engine ends, and a
//! rollout cuts no stream. A Deployment's name is the object's name, the variant's name unless that is the default, and
//! eight characters that identify the template.

mod accelerators;
mod affinity;
pub(crate) mod merge;
mod requester;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{model::VariantName, pairing};
use rouse_config::{FingerprintHasher, SleepApi, kind_name};
use rouse_net::stub_api::Epoch;
use serde_json::{Map, Value, json};

use super::{
    convert::{EnginePodTemplate, ModelVariant, device_configuration::ACCELERATORS_VARIABLE},
    crd::ledger::ObjectName,
    dual_pods::keys,
    label,
    stub_key::StubKey,
};

pub use self::accelerators::{SlotTerms, is_slot_resource};

/// Label: the template of a Pod.
pub const TEMPLATE: &str = "rouse.dev/template";
/// Label on everything that Rouse creates, with the value [`ROUSE`].
pub const MANAGED: &str = "app.kubernetes.io/managed-by";
pub const ROUSE: &str = "rouse";
/// Annotation of a Pod: its engine's replica number.
pub const REPLICA: &str = "rouse.dev/replica";
/// Annotation of a Pod: its engine's generation.
pub const GENERATION: &str = "rouse.dev/generation";
/// Annotation of a Pod: the level at which its engine sleeps or may sleep. It is set before the sleep order and removed
/// after the wake.
pub const ASLEEP: &str = "rouse.dev/asleep";
/// Annotation: fingerprint of the engine's start settings, in decimal.
pub const FINGERPRINT: &str = "rouse.dev/fingerprint";
/// Annotation of a Pod: name of its InferenceModel.
pub const OBJECT: &str = "rouse.dev/object";
/// Annotation of a Pod: name of its engine's container.
pub const CONTAINER: &str = "rouse.dev/container";
/// Annotation: epoch of the leader that wrote the object last.
///
/// A new leader writes its own epoch before anything else, so that late writes of an earlier leader fail on the
/// version.
pub const EPOCH: &str = "rouse.dev/epoch";
/// Annotation that decides which Pod a ReplicaSet deletes first: the one with the lowest cost.
pub const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Name of the stub's container.
pub const STUB: &str = "rouse-stub";
/// The stub's ports, far from the usual ports of engines.
pub const PROBES_PORT: u16 = 18080;
pub const SPI_PORT: u16 = 18081;
pub const PROXY_PORT: u16 = 18082;

/// Maximum length of a Deployment's name without its template. Kubernetes would cut a longer name with the suffixes of
/// ReplicaSet and Pod.
const MAX_NAME_CHARS: usize = 200;

/// The InferenceModel that owns a Deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelRef {
    pub object: ObjectName,
    pub uid: String,
}

impl ModelRef {
    /// Returns the model that this requester belongs to, whose token its stub requires; `None` if there is none.
    ///
    /// The namespace is the Pod's own, so annotations in another namespace give access to no token of a model here.
    #[must_use]
    pub fn of_requester(pod: &Pod) -> Option<Self> {
        let of = |key: &str| pod.annotations().get(key).cloned();
        let object = ObjectName::new(pod.namespace().unwrap_or_default(), of(OBJECT)?);
        Some(Self { object, uid: of(keys::TOKEN_OF)? })
    }
}

/// Settings of the injected stub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sidecar {
    pub image: String,
    pub pull_policy: Option<String>,
    /// Key from which the stubs' tokens derive.
    pub key: StubKey,
    /// How long a requester may take to hand its engine back.
    pub timing: pairing::settings::PairingSettings,
}

/// The wanted state of one Deployment.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    pub owner: &'a ModelRef,
    pub engine: &'a rouse_config::EngineConfig,
    pub pod_template: &'a EnginePodTemplate,
    pub variant: &'a ModelVariant,
    /// Key of the pool's taint.
    pub taint: Option<&'a str>,
    /// Extended resource that Pods request in the pool.
    pub resource: &'a str,
    /// How an engine gets its accelerators in a pool of slots.
    pub slots: Option<&'a SlotTerms>,
    pub sidecar: &'a Sidecar,
    /// Whether its Pods are requesters rather than engines.
    pub dual_pods: bool,
    pub replicas: u32,
    pub epoch: Epoch,
}

/// Returns the Deployment's name. A hash of the whole name keeps truncated names apart.
#[must_use]
pub fn name(object: &ObjectName, variant: &VariantName, template: &str) -> String {
    let whole = match named(variant) {
        Some(variant) => format!("{}-{variant}", object.name),
        None => object.name.clone(),
    };
    if whole.len() <= MAX_NAME_CHARS {
        return format!("{whole}-{template}");
    }
    let head: String = whole.chars().take(MAX_NAME_CHARS - 33).collect();
    format!("{head}-{}-{template}", label::value(&whole))
}

/// Returns the variant's name; `None` for the default variant, whose objects do not show it.
fn named(variant: &VariantName) -> Option<&str> {
    (!variant.is_default()).then(|| variant.as_str())
}

/// Returns the label selector of Rouse's Deployments and Pods.
#[must_use]
pub fn selector() -> String {
    format!("{MANAGED}={ROUSE},{}", label::MODEL)
}

impl Workload<'_> {
    /// Returns eight hexadecimal characters that identify the Pod template; sixteen for one on chosen accelerators.
    ///
    /// A model can have thousands of the latter, and two of them must not agree. The hash covers all of the Pods, with
    /// parts that do not concern the engine, such as the stub. If a Deployment's template changed, the Deployment would
    /// end Pods on its own.
    #[must_use]
    pub fn template_hash(&self) -> String {
        let mut hash = FingerprintHasher::default();
        hash.feed_text(&self.pod().to_string());
        let hash = hash.value();
        if self.slots.is_some_and(|slots| slots.location.is_some()) {
            return format!("{hash:016x}");
        }
        format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
    }

    /// Renders the Deployment for server-side apply of the whole object.
    #[must_use]
    pub fn deployment(&self) -> Value {
        let template = self.template_hash();
        let mut labels = BTreeMap::from([
            (MANAGED, ROUSE.to_owned()),
            (label::MODEL, label::value(self.engine.name.as_str())),
            (TEMPLATE, template.clone()),
        ]);
        labels.extend(named(&self.variant.name).map(|variant| (label::VARIANT, variant.to_owned())));
        let mut pod = self.pod();
        merge::into(&mut pod, &json!({"metadata": {"labels": labels}}));
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": name(&self.owner.object, &self.variant.name, &template),
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
                // Rouse itself limits how long an engine may take to start.
                "progressDeadlineSeconds": i32::MAX,
                "selector": {"matchLabels": labels},
                "template": pod,
            },
        })
    }

    /// Renders the Pod template without its labels.
    fn pod(&self) -> Value {
        let engine = self.engine_pod();
        let mut pod = if self.dual_pods { self.requester(engine) } else { self.with_stub(engine) };
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
            affinity::prefer_warm_nodes(spec, &self.owner.object);
        }
        pod
    }

    /// Renders an engine's Pod as the user configured it.
    fn engine_pod(&self) -> Value {
        let template = self.variant.template.as_ref().unwrap_or(&self.pod_template.template);
        let mut pod = Value::Object(template.value());
        // A Deployment's Pods get its namespace and a generated name.
        if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("name");
            metadata.remove("namespace");
        }
        merge::into(&mut pod, &json!({"spec": {"nodeSelector": self.variant.node_selector}}));
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut)
            && let Some(key) = self.taint
        {
            push(spec, "tolerations", json!({"key": key, "operator": "Exists"}));
        }
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut)
            && let Some(container) = container_of(spec, &self.pod_template.container)
        {
            // In mode dualPods the requester requests the accelerators.
            self.adapt_requests(container, !self.dual_pods);
        }
        pod
    }

    /// Adds a stub beside the engine.
    fn with_stub(&self, mut pod: Value) -> Value {
        let container = json!({CONTAINER: self.pod_template.container});
        merge::into(&mut pod, &json!({"metadata": {"annotations": self.annotations()}}));
        merge::into(&mut pod, &json!({"metadata": {"annotations": container}}));
        if let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut) {
            let claims = claims(spec, &self.pod_template.container);
            if self.engine.sleep == SleepApi::Vllm
                && let Some(container) = container_of(spec, &self.pod_template.container)
            {
                requester::enable_sleep_endpoints(container);
            }
            let mut stub = self.stub([
                // The engine in the same Pod gets SIGTERM at the same time, so holding the Pod is pointless.
                "--hold=0s".to_owned(),
                format!("--token-sha256={}", self.sidecar.key.hash(self.owner)),
            ]);
            if let Some(claims) = claims {
                merge::into(&mut stub, &json!({"resources": {"claims": claims}}));
            }
            // The kubelet sets this variable in the engine's container only, and the stub names the accelerators.
            if let Some(location) = self.slots.and_then(|slots| slots.location.as_ref())
                && let Some(stub) = stub.as_object_mut()
            {
                let ids = keys::join_ids(&location.accelerators);
                push(stub, "env", json!({"name": ACCELERATORS_VARIABLE, "value": ids}));
            }
            push(spec, "containers", stub);
        }
        pod
    }

    /// Returns annotations for the Pod's model and fingerprint.
    fn annotations(&self) -> Value {
        json!({
            label::MODEL_NAME: self.engine.name.as_str(),
            FINGERPRINT: self.variant.spec.fingerprint.to_string(),
            OBJECT: self.owner.object.name,
        })
    }

    /// Renders the stub's container. The stub listens on the Pod's own address, as the engine does, and no other port
    /// of the Pod bypasses it.
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
            // Settings that a namespace may require of all its Pods.
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

/// Returns the resource claims of this container.
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
