//! Builds a launcher's Pod: one per accelerator of a node, from a LauncherConfig or from a requester's server patch.
//!
//! The kubelet assigns no accelerator to the Pod. The Pod sees all of the node's, and each of its engines sees those of
//! its requester. So nothing keeps another Pod that requests an accelerator away; the ledger keeps the two apart.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::ids::{LauncherBuild, NodeName},
};
use serde_json::{Map, Value, json};

use super::{PORT, instance::hash64};
use crate::{
    crd::{
        PodTemplateJson,
        fma::{CONTAINER, GROUP, LauncherConfig},
        ledger::ObjectName,
        pool::NVIDIA_GPU,
    },
    label,
    stub_key::StubKey,
    workload::{MANAGED, ROUSE, is_slot_resource, merge},
};

/// Label: the LauncherConfig that the Pod is made from.
pub const CONFIG_NAME: &str = "dual-pods.llm-d.ai/launcher-config-name";
/// Label: the Pod's node, set before the Pod is scheduled.
pub const NODE_NAME: &str = "dual-pods.llm-d.ai/node-name";
/// Label: the Pod's role, with [`LAUNCHER`] as its value.
pub const COMPONENT: &str = "app.kubernetes.io/component";
pub const LAUNCHER: &str = "launcher";
/// Annotation: the accelerator that the launcher is for.
pub const ACCELERATORS: &str = "dual-pods.llm-d.ai/accelerators";
/// Annotation: [`LauncherSource::hash`].
pub const TEMPLATE_HASH: &str = "dual-pods.llm-d.ai/launcher-populator-template-hash";

const HOSTNAME: &str = "kubernetes.io/hostname";
const TERMS: &str =
    "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
const EXPRESSIONS: &str = "matchExpressions";
/// Environment of the launcher's container, which overrides the template.
const FORCED: [(&str, &str); 3] = [
    ("NVIDIA_VISIBLE_DEVICES", "all"),
    ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
    ("VLLM_SERVER_DEV_MODE", "1"),
];
/// Folder with the modules of the public launcher's image. The public project's controllers set it, too.
const MODULES: (&str, &str) = ("PYTHONPATH", "/app");
/// Variable from which our launcher reads the hash of its token.
const TOKEN: &str = "ROUSE_TOKEN_SHA256";
/// Maximum length of a DNS label, and of a label's value.
const MAX_LABEL_CHARS: usize = 63;
/// Hexadecimal characters that distinguish Pods whose names are truncated alike.
const HASH_CHARS: usize = 12;

/// The template has no launcher container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its template has no container named '{CONTAINER}'")]
pub struct NoContainer;

/// What a launcher is made from.
#[derive(Clone, Copy, Debug)]
pub enum LauncherSource<'a> {
    Config(&'a LauncherConfig),
    /// The launcher's part of a patched Pod, see [`crate::dual_pods::patched_launcher`].
    Patch(&'a PodTemplateJson),
}

/// What a launcher is made from: a LauncherConfig in one version of its template, or a server patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherRevision {
    pub namespace: String,
    /// As in the label [`CONFIG_NAME`]; empty for a server patch.
    pub config: String,
    /// [`LauncherSource::hash`].
    pub hash: String,
}

/// Where one launcher runs: its namespace, its node and its accelerator.
#[derive(Clone, Copy, Debug)]
pub struct LauncherPlacement<'a> {
    pub namespace: &'a str,
    pub node: &'a NodeName,
    /// The node's hostname label, which can differ from its name.
    pub hostname: &'a str,
    pub accelerator: &'a AcceleratorId,
    /// Extended resource by which other Pods get accelerators on the node.
    pub resource: &'a str,
}

impl LauncherSource<'_> {
    /// Returns a hash of the template. A launcher with another hash needs replacement.
    ///
    /// The hash is the same on all nodes and for any order of keys.
    #[must_use]
    pub fn hash(&self) -> String {
        label::value(&self.template().to_string())
    }

    fn template(&self) -> Value {
        match self {
            Self::Config(config) => {
                let template = &config.spec.pod_template;
                let (labels, annotations) = (&template.metadata.labels, &template.metadata.annotations);
                json!({
                    "metadata": {"labels": labels, "annotations": annotations},
                    "spec": template.spec.value(),
                })
            }
            Self::Patch(template) => Value::Object(template.value()),
        }
    }
}

impl LauncherRevision {
    /// Returns the revision of launchers that are made now.
    #[must_use]
    pub fn of(config: &LauncherConfig) -> Self {
        let name = config.metadata.name.as_deref().unwrap_or_default();
        Self {
            namespace: config.metadata.namespace.clone().unwrap_or_default(),
            config: label_value(name),
            hash: LauncherSource::Config(config).hash(),
        }
    }

    /// Reads a launcher's revision from its Pod.
    #[must_use]
    pub fn read(pod: &Pod) -> Option<Self> {
        Some(Self {
            namespace: pod.namespace()?,
            config: pod.labels().get(CONFIG_NAME).cloned().unwrap_or_default(),
            hash: pod.annotations().get(TEMPLATE_HASH)?.clone(),
        })
    }

    /// Returns the revision of launchers that this template of a server patch makes.
    #[must_use]
    pub fn of_patch(namespace: &str, template: &PodTemplateJson) -> Self {
        Self {
            namespace: namespace.to_owned(),
            config: String::new(),
            hash: LauncherSource::Patch(template).hash(),
        }
    }

    /// Whether the launcher was made from a server patch, without a LauncherConfig.
    #[must_use]
    pub const fn is_of_patch(&self) -> bool {
        self.config.is_empty()
    }

    /// Returns namespace and label of the LauncherConfig, without its template's hash.
    #[must_use]
    pub fn config_key(&self) -> (String, String) {
        (self.namespace.clone(), self.config.clone())
    }

    /// Returns the build id that the pairing logic uses.
    #[must_use]
    pub fn build(&self) -> LauncherBuild {
        // None of the three contains a slash.
        LauncherBuild(hash64(&[&*self.namespace, &self.config, &self.hash].join("/")))
    }
}

/// Returns the Pod's name. Each node and accelerator has one, so there is never a second launcher.
#[must_use]
pub fn name(node: &NodeName, accelerator: &AcceleratorId) -> String {
    let hash: String = label::value(&format!("{node}/{accelerator}")).chars().take(HASH_CHARS).collect();
    let max_node_chars = MAX_LABEL_CHARS - "launcher--".len() - HASH_CHARS;
    let plain = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let node: String = node.as_str().chars().map(plain).take(max_node_chars).collect();
    format!("launcher-{}-{hash}", node.trim_matches('-'))
}

/// Returns the node and accelerator of a launcher; `None` if the Pod is not one of ours.
#[must_use]
pub fn placement_of(pod: &Pod) -> Option<(NodeName, AcceleratorId)> {
    let labels = pod.labels();
    if labels.get(COMPONENT).is_none_or(|what| what != LAUNCHER) {
        return None;
    }
    let accelerator = AcceleratorId::from(pod.annotations().get(ACCELERATORS)?.as_str());
    // The label of a long node name is a hash. The Pod's spec has the whole name, but only once it is scheduled.
    let bound = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    let nodes = bound.into_iter().chain(labels.get(NODE_NAME)).map(|node| NodeName::from(node.as_str()));
    let node = nodes.into_iter().find(|node| name(node, &accelerator) == pod.name_any())?;
    Some((node, accelerator))
}

impl LauncherPlacement<'_> {
    /// Builds the whole Pod.
    ///
    /// # Errors
    /// The template does not name the launcher's container.
    pub fn pod(&self, origin: LauncherSource<'_>, key: &StubKey) -> Result<Value, NoContainer> {
        let mut pod = origin.template();
        for list in ["/spec/containers", "/spec/initContainers"] {
            let containers = pod.pointer_mut(list).and_then(Value::as_array_mut);
            let containers = containers.into_iter().flatten();
            containers.for_each(|container| without_accelerators(container, self.resource));
        }
        let containers = pod.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
        let mut containers = containers.into_iter().flatten();
        let launcher = containers.find(|container| merge::is_named(container, CONTAINER));
        let own_name = ObjectName::new(self.namespace, name(self.node, self.accelerator));
        let token = key.launcher_hash(&own_name);
        let launcher = launcher.and_then(Value::as_object_mut).ok_or(NoContainer)?;
        force(launcher, &token, self.resource, origin);
        self.pin(&mut pod);
        merge::into(&mut pod, &json!({"apiVersion": "v1", "kind": "Pod", "metadata": self.metadata(origin)}));
        Ok(pod)
    }

    fn metadata(&self, origin: LauncherSource<'_>) -> Value {
        let mut metadata = json!({
            "name": name(self.node, self.accelerator),
            "namespace": self.namespace,
            "labels": {
                NODE_NAME: label_value(self.node.as_str()),
                COMPONENT: LAUNCHER,
                MANAGED: ROUSE,
            },
            "annotations": {ACCELERATORS: self.accelerator, TEMPLATE_HASH: origin.hash()},
        });
        if let LauncherSource::Config(config) = origin {
            let name = config.metadata.name.clone().unwrap_or_default();
            let owner = json!({
                "apiVersion": format!("{GROUP}/v1alpha1"),
                "kind": "LauncherConfig",
                "name": name,
                "uid": config.metadata.uid,
            });
            let of_config = json!({
                "labels": {CONFIG_NAME: label_value(&name)},
                // Kubernetes deletes the launchers when a user deletes the LauncherConfig.
                "ownerReferences": [owner],
            });
            merge::into(&mut metadata, &of_config);
        }
        metadata
    }

    /// Restricts the Pod to this node, in addition to its template's own node affinity.
    ///
    /// One matching term is enough for the scheduler, so each term gets the restriction.
    fn pin(&self, pod: &mut Value) {
        let hostname_term = json!({"key": HOSTNAME, "operator": "In", "values": [self.hostname]});
        let mut terms = list(pod.pointer_mut(TERMS));
        if terms.is_empty() {
            terms.push(json!({"matchExpressions": [hostname_term]}));
        } else {
            // A term without requirements matches no node and stays as it is.
            for term in terms.iter_mut().filter(|term| demands(term)) {
                let mut expressions = list(term.get_mut(EXPRESSIONS));
                expressions.push(hostname_term.clone());
                if let Some(term_expressions) = merge::under(term, EXPRESSIONS) {
                    *term_expressions = expressions.into();
                }
            }
        }
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        merge::into(pod, &json!({"spec": {"affinity": {"nodeAffinity": required}}}));
    }
}

/// Takes the elements out of a list; empty if there is none.
fn list(value: Option<&mut Value>) -> Vec<Value> {
    match value.map(Value::take) {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    }
}

fn demands(term: &Value) -> bool {
    let demanded = |what| term.get(what).and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    demanded(EXPRESSIONS) || demanded("matchFields")
}

/// Makes the container request zero accelerators, and removes its requests for slots: a kubelet rejects a Pod that
/// requests zero slots while none is free.
fn without_accelerators(container: &mut Value, resource: &str) {
    for what in ["/resources/limits", "/resources/requests"] {
        let amounts = container.pointer_mut(what).and_then(Value::as_object_mut);
        let Some(amounts) = amounts else { continue };
        amounts.retain(|name, _| !is_slot_resource(name));
        for name in [NVIDIA_GPU, resource] {
            if let Some(amount) = amounts.get_mut(name) {
                *amount = json!("0");
            }
        }
    }
}

/// Sets what the launcher's container needs, whatever its template says.
///
/// `token`: the hash of the launcher's token. `resource`: see [`LauncherPlacement`].
fn force(container: &mut Map<String, Value>, token: &str, resource: &str, origin: LauncherSource<'_>) {
    let forced = FORCED.into_iter().chain([(TOKEN, token)]);
    let mut env = list(container.get_mut("env"));
    env.retain(|one| forced.clone().all(|(name, _)| !merge::is_named(one, name)));
    let (modules, folder) = MODULES;
    if matches!(origin, LauncherSource::Config(_)) && !env.iter().any(|one| merge::is_named(one, modules)) {
        env.push(json!({"name": modules, "value": folder}));
    }
    env.extend(forced.map(|(name, value)| json!({"name": name, "value": value})));
    container.insert("env".to_owned(), env.into());
    if !is_slot_resource(resource) {
        let none = json!({"limits": {resource: "0"}, "requests": {resource: "0"}});
        merge::into(container.entry("resources").or_insert(Value::Null), &none);
    }
    let liveness = json!({
        "httpGet": {"path": "/health", "port": PORT},
        "initialDelaySeconds": 10,
        "periodSeconds": 20,
        "timeoutSeconds": 1,
        "failureThreshold": 3,
    });
    // Frequent, because a requester waits for the first answer. `/health`, because a kubelet sends no token.
    let readiness = json!({
        "httpGet": {"path": "/health", "port": PORT},
        "periodSeconds": 1,
        "timeoutSeconds": 2,
        "failureThreshold": 3,
    });
    container.insert("livenessProbe".to_owned(), liveness);
    container.insert("readinessProbe".to_owned(), readiness);
}

/// Returns the name, or its hash if it is too long for a label.
#[must_use]
pub fn label_value(name: &str) -> String {
    if name.len() <= MAX_LABEL_CHARS { name.to_owned() } else { label::value(name) }
}

#[cfg(test)]
mod tests;
