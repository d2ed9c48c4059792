//! A launcher's Pod: one for each accelerator of a node, from a LauncherConfig or from an image alone.
//!
//! The kubelet gives it no accelerator. It sees all of the node's, and each of its engines is shown those of its requester: so
//! nothing holds back another Pod that asks for one, and what keeps the two apart is the ledger.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::ids::{LauncherBuild, NodeName},
};
use serde_json::{Map, Value, json};

use super::{PORT, instance::hash64};
use crate::controllers::{
    crd::{
        fma::{CONTAINER, GROUP, LauncherConfig},
        ledger::ObjectName,
    },
    label,
    stub_key::StubKey,
    workload::{MANAGED, ROUSE, merge},
};

/// Label: the LauncherConfig that the Pod is of.
pub const CONFIG_NAME: &str = "dual-pods.llm-d.ai/launcher-config-name";
/// Label: the node that it is for, also before it is there.
pub const NODE_NAME: &str = "dual-pods.llm-d.ai/node-name";
/// Label: what it is, with [`LAUNCHER`] as its value.
pub const COMPONENT: &str = "app.kubernetes.io/component";
pub const LAUNCHER: &str = "launcher";
/// Annotation: the accelerator that it is for.
pub const ACCELERATORS: &str = "dual-pods.llm-d.ai/accelerators";
/// Annotation: [`LauncherSource::hash`].
pub const TEMPLATE_HASH: &str = "dual-pods.llm-d.ai/launcher-populator-template-hash";

/// What an accelerator is called among the resources of a container.
const GPU: &str = "nvidia.com/gpu";
const HOSTNAME: &str = "kubernetes.io/hostname";
const TERMS: &str =
    "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
const EXPRESSIONS: &str = "matchExpressions";
/// Of its container, whatever the template says.
const FORCED: [(&str, &str); 3] = [
    ("NVIDIA_VISIBLE_DEVICES", "all"),
    ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
    ("VLLM_SERVER_DEV_MODE", "1"),
];
/// As our launcher reads the hash of its token.
const TOKEN: &str = "ROUSE_TOKEN_SHA256";
/// Of a DNS label, and of a label's value.
const MAX_LABEL_CHARS: usize = 63;
/// Hexadecimal characters that tell Pods apart whose names are cut alike.
const HASH_CHARS: usize = 12;

/// No launcher can be made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its template has no container named '{CONTAINER}'")]
pub struct NoContainer;

/// What launchers are made from.
#[derive(Clone, Copy, Debug)]
pub enum LauncherSource<'a> {
    Config(&'a LauncherConfig),
    /// An image with the engine, and with `/rouse-stub`.
    Image(&'a str),
}

/// The LauncherConfig that a launcher is made from, and which version of its template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherRevision {
    pub namespace: String,
    /// As the label [`CONFIG_NAME`] has it.
    pub config: String,
    /// [`LauncherSource::hash`].
    pub hash: String,
}

/// The launcher of one accelerator.
#[derive(Clone, Copy, Debug)]
pub struct LauncherPlacement<'a> {
    pub namespace: &'a str,
    pub node: &'a NodeName,
    /// The node's label of that name, which need not be its own.
    pub hostname: &'a str,
    pub accelerator: &'a AcceleratorId,
}

impl LauncherSource<'_> {
    /// Stands for what launchers are made from: another one, and they are to be replaced. It is the same on all nodes and
    /// whatever the order of the keys.
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
            Self::Image(image) => built_in(image),
        }
    }
}

impl LauncherRevision {
    /// Of launchers that are made now.
    #[must_use]
    pub fn of(config: &LauncherConfig) -> Self {
        let name = config.metadata.name.as_deref().unwrap_or_default();
        Self {
            namespace: config.metadata.namespace.clone().unwrap_or_default(),
            config: label_value(name),
            hash: LauncherSource::Config(config).hash(),
        }
    }

    /// Of this launcher, as its Pod says it.
    #[must_use]
    pub fn read(pod: &Pod) -> Option<Self> {
        Some(Self {
            namespace: pod.namespace()?,
            config: pod.labels().get(CONFIG_NAME)?.clone(),
            hash: pod.annotations().get(TEMPLATE_HASH)?.clone(),
        })
    }

    /// The LauncherConfig, whatever its template says.
    #[must_use]
    pub fn config_key(&self) -> (String, String) {
        (self.namespace.clone(), self.config.clone())
    }

    /// What the decisions call it.
    #[must_use]
    pub fn build(&self) -> LauncherBuild {
        // None of the three has a slash in it.
        LauncherBuild(hash64(&[&*self.namespace, &self.config, &self.hash].join("/")))
    }
}

fn built_in(image: &str) -> Value {
    json!({
        "metadata": {"labels": {}, "annotations": {}},
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{
                "name": CONTAINER,
                "image": image,
                "command": ["/rouse-stub", "launcher", format!("--port={PORT}")],
                "ports": [{"name": LAUNCHER, "containerPort": PORT}],
                "resources": {},
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }],
            // Longer than its engines have.
            "terminationGracePeriodSeconds": 60,
            // Those that ask for an accelerator are given this one, and a launcher asks for none.
            "tolerations": [{"key": GPU, "operator": "Exists"}],
            // Engines on several accelerators talk through it.
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    })
}

/// The Pod's name: there is one for each node and accelerator, so that nobody makes a second.
#[must_use]
pub fn name(node: &NodeName, accelerator: &AcceleratorId) -> String {
    let hash: String = label::value(&format!("{node}/{accelerator}")).chars().take(HASH_CHARS).collect();
    let room = MAX_LABEL_CHARS - "launcher--".len() - HASH_CHARS;
    let plain = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let node: String = node.as_str().chars().map(plain).take(room).collect();
    format!("launcher-{}-{hash}", node.trim_matches('-'))
}

/// The node and the accelerator that a Pod is the launcher of; `None`: it is no launcher of ours.
#[must_use]
pub fn placement_of(pod: &Pod) -> Option<(NodeName, AcceleratorId)> {
    let labels = pod.labels();
    if labels.get(COMPONENT).is_none_or(|what| what != LAUNCHER) {
        return None;
    }
    let accelerator = AcceleratorId::from(pod.annotations().get(ACCELERATORS)?.as_str());
    // The label of a long name is a hash; the kubelet's name is whole, and comes later.
    let bound = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    let nodes = bound.into_iter().chain(labels.get(NODE_NAME)).map(|node| NodeName::from(node.as_str()));
    let node = nodes.into_iter().find(|node| name(node, &accelerator) == pod.name_any())?;
    Some((node, accelerator))
}

impl LauncherPlacement<'_> {
    /// The whole Pod.
    ///
    /// # Errors
    /// The template does not say which container the launcher is.
    pub fn pod(&self, origin: LauncherSource<'_>, key: &StubKey) -> Result<Value, NoContainer> {
        let mut pod = origin.template();
        for list in ["/spec/containers", "/spec/initContainers"] {
            let containers = pod.pointer_mut(list).and_then(Value::as_array_mut);
            containers.into_iter().flatten().for_each(without_accelerators);
        }
        let containers = pod.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
        let mut containers = containers.into_iter().flatten();
        let launcher = containers.find(|container| merge::is_named(container, CONTAINER));
        let own = ObjectName::new(self.namespace, name(self.node, self.accelerator));
        let token = key.launcher_hash(&own);
        force(launcher.and_then(Value::as_object_mut).ok_or(NoContainer)?, &token);
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
                // Whoever takes the configuration away takes its launchers away.
                "ownerReferences": [owner],
            });
            merge::into(&mut metadata, &of_config);
        }
        metadata
    }

    /// Lets it run on this node alone, besides whatever it demands of nodes itself. Of its terms one is enough, so each
    /// demands it.
    fn pin(&self, pod: &mut Value) {
        let here = json!({"key": HOSTNAME, "operator": "In", "values": [self.hostname]});
        let mut terms = list(pod.pointer_mut(TERMS));
        if terms.is_empty() {
            terms.push(json!({"matchExpressions": [here]}));
        } else {
            // A term that demands nothing chooses no node, and is left to that.
            for term in terms.iter_mut().filter(|term| demands(term)) {
                let mut expressions = list(term.get_mut(EXPRESSIONS));
                expressions.push(here.clone());
                if let Some(place) = merge::under(term, EXPRESSIONS) {
                    *place = expressions.into();
                }
            }
        }
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        merge::into(pod, &json!({"spec": {"affinity": {"nodeAffinity": required}}}));
    }
}

/// What is in a list, taken out of it; nothing, where none is.
fn list(place: Option<&mut Value>) -> Vec<Value> {
    match place.map(Value::take) {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    }
}

fn demands(term: &Value) -> bool {
    let demanded = |what| term.get(what).and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    demanded(EXPRESSIONS) || demanded("matchFields")
}

/// The container asks for no accelerator.
fn without_accelerators(container: &mut Value) {
    for what in ["/resources/limits", "/resources/requests"] {
        let asked = container.pointer_mut(what).and_then(|all| all.get_mut(GPU));
        asked.into_iter().for_each(|amount| *amount = json!("0"));
    }
}

/// What the launcher's container is, whatever its template says. `token`: the hash of that which it is shown.
fn force(container: &mut Map<String, Value>, token: &str) {
    let forced = FORCED.into_iter().chain([(TOKEN, token)]);
    let mut env = list(container.get_mut("env"));
    env.retain(|one| forced.clone().all(|(name, _)| !merge::is_named(one, name)));
    env.extend(forced.map(|(name, value)| json!({"name": name, "value": value})));
    container.insert("env".to_owned(), env.into());
    let none = json!({"limits": {GPU: "0"}, "requests": {GPU: "0"}});
    merge::into(container.entry("resources").or_insert(Value::Null), &none);
    let liveness = json!({
        "httpGet": {"path": "/health", "port": PORT},
        "initialDelaySeconds": 10,
        "periodSeconds": 20,
        "timeoutSeconds": 1,
        "failureThreshold": 3,
    });
    // Somebody waits for the first answer. A kubelet has no token to show for more.
    let readiness = json!({
        "httpGet": {"path": "/health", "port": PORT},
        "periodSeconds": 1,
        "timeoutSeconds": 2,
        "failureThreshold": 3,
    });
    container.insert("livenessProbe".to_owned(), liveness);
    container.insert("readinessProbe".to_owned(), readiness);
}

/// As it is, or a hash where it is too long for a label.
#[must_use]
pub fn label_value(name: &str) -> String {
    if name.len() <= MAX_LABEL_CHARS { name.to_owned() } else { label::value(name) }
}

#[cfg(test)]
mod tests;
