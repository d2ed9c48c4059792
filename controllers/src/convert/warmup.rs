//! Converts a Warmup into what the decisions and the Pods need.
//!
//! The schema is loose ([`crate::crd::warmup`]), so the conversion refuses bad values. It collects everything that is
//! wrong, so that a user corrects it at once. No Pod is created for a Warmup that is refused.

mod action;
mod merge;
mod problems;
#[cfg(test)]
mod tests;
mod toleration;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use kube::ResourceExt as _;
use rouse::{
    pairing::ids::NodeName,
    units::Millis,
    warmup::{ImageName, NodeItems, WarmSet, WarmupId, WarmupLimits, WarmupRequest, WarmupSpecHash},
};

use self::problems::Problems;
use super::names;
use crate::{
    condition,
    crd::{
        Warmup, WarmupSpec,
        ledger::ObjectName,
        warmup::{
            CustomizedAction, ImagesPreload, TargetGroup, TargetModel, TargetNodes, TolerationSpec,
            WarmupActions, WarmupPolicies,
        },
    },
    image_reference::ImageReference,
    label,
};

pub use self::{action::ActionTemplate, merge::merge_roles};

/// Length of a [`WarmSet`].
const SET_CHARS: usize = 16;

/// One converted Warmup.
#[derive(Clone, Debug, PartialEq)]
pub struct AcceptedWarmup {
    pub id: WarmupId,
    pub request: WarmupRequest,
    pub target: WarmupTarget,
    /// The tolerations as the object has them, for the Pods.
    pub tolerations: Vec<TolerationSpec>,
}

/// Which nodes are warmed, and with what.
#[derive(Clone, Debug, PartialEq)]
pub enum WarmupTarget {
    /// The union of the named nodes and those that the selector matches. An empty selector matches none.
    Nodes { names: BTreeSet<NodeName>, selector: BTreeMap<String, String>, actions: NodeActions },
    /// The nodes of a RoleBasedGroup's Pods, by role.
    Group { group: ObjectName, roles: BTreeMap<String, NodeActions> },
    /// The nodes on which the model's next engine may start: at most `nodes` of them.
    Model { model: ObjectName, nodes: Option<u32> },
}

/// What one node should have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeActions {
    /// References as the object has them. No two of them are the same image.
    pub images: BTreeSet<ImageName>,
    /// Names of Secrets in the Warmup's namespace.
    pub pull_secrets: BTreeSet<String>,
    pub action: Option<ActionTemplate>,
}

impl NodeActions {
    /// Returns what the decisions see of it.
    #[must_use]
    pub fn items(&self) -> NodeItems {
        let action = self.action.as_ref().map(|action| action.hash.clone());
        NodeItems { images: self.images.clone(), action }
    }

    /// Adds an image, unless another spelling of it is there.
    pub(crate) fn add_image(&mut self, image: ImageName) {
        let canonical =
            |image: &ImageName| ImageReference::parse(image.as_str()).ok().map(|parsed| parsed.canonical());
        let name = canonical(&image);
        if name.is_none() || !self.images.iter().any(|known| canonical(known) == name) {
            self.images.insert(image);
        }
    }
}

/// Names the target as the status does, in a few words.
impl fmt::Display for WarmupTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nodes { .. } => f.write_str("nodes"),
            Self::Group { group, .. } => write!(f, "group {}", group.name),
            Self::Model { model, .. } => write!(f, "model {}", model.name),
        }
    }
}

/// Converts one Warmup. `retry_delay` is the gateway's pause after the first failure of a node.
///
/// # Errors
/// Returns everything that is wrong with the object, as sentences for its status.
pub fn convert(warmup: &Warmup, retry_delay: Millis) -> Result<AcceptedWarmup, String> {
    let (spec, metadata) = (&warmup.spec, &warmup.metadata);
    let object = ObjectName::new(warmup.namespace().unwrap_or_default(), warmup.name_any());
    let mut problems = Problems::default();
    let target = target(&mut problems, spec, &object.namespace);
    let limits = limits(&mut problems, spec.policies.as_ref(), retry_delay);
    let tolerations = toleration::tolerations(&mut problems, &spec.tolerations);
    let target = problems.finish(target)?;
    let generation = metadata.generation.unwrap_or_default();
    let request = WarmupRequest {
        generation: u64::try_from(generation).unwrap_or_default(),
        spec_hash: spec_hash(spec),
        created: metadata.creation_timestamp.as_ref().map(condition::tick).unwrap_or_default(),
        paused: spec.paused,
        limits,
        keep_warm: spec.target_model.as_ref().is_some_and(|model| model.keep_warm),
        set: warmup_set(warmup),
        tolerations,
    };
    let id = WarmupId::from(object.to_string());
    Ok(AcceptedWarmup { id, request, target, tolerations: spec.tolerations.clone() })
}

/// Returns the hash of the spec without `paused`. A changed hash starts the Warmup anew.
#[must_use]
pub fn spec_hash(spec: &WarmupSpec) -> WarmupSpecHash {
    let unpaused = WarmupSpec { paused: false, ..spec.clone() };
    // A spec always serializes.
    let text = serde_json::to_string(&unpaused).unwrap_or_default();
    WarmupSpecHash::from(label::value(&text))
}

/// Returns the set of nodes that are warm for a model, whichever Warmup warmed them.
#[must_use]
pub fn model_set(model: &ObjectName) -> WarmSet {
    set(&format!("model/{model}"))
}

/// Returns the set of the nodes that a Warmup warms, whether it is accepted or not.
#[must_use]
pub fn warmup_set(warmup: &Warmup) -> WarmSet {
    let namespace = warmup.namespace().unwrap_or_default();
    match &warmup.spec.target_model {
        Some(model) => model_set(&ObjectName::new(namespace, model.name.as_str())),
        None => set(&format!("warmup/{}", ObjectName::new(namespace, warmup.name_any()))),
    }
}

fn set(identity: &str) -> WarmSet {
    let hash: String = label::value(identity).chars().take(SET_CHARS).collect();
    WarmSet::from(hash)
}

fn target(problems: &mut Problems, spec: &WarmupSpec, namespace: &str) -> Option<WarmupTarget> {
    match (&spec.target_nodes, &spec.target_role_based_group, &spec.target_model) {
        (Some(nodes), None, None) => Some(target_nodes(problems, nodes)),
        (None, Some(group), None) => Some(target_group(problems, group, namespace)),
        (None, None, Some(model)) => Some(target_model(problems, model, namespace)),
        (None, None, None) => {
            problems.add("there is no target: set targetNodes, targetRoleBasedGroup or targetModel");
            None
        }
        _ => {
            problems.add(
                "targetNodes, targetRoleBasedGroup and targetModel exclude each other: keep one of them, and create \
                 another Warmup for each of the others",
            );
            None
        }
    }
}

fn target_nodes(problems: &mut Problems, target: &TargetNodes) -> WarmupTarget {
    let at = "targetNodes";
    if target.node_names.is_empty() && target.node_selector.is_empty() {
        problems.add(format!("{at} selects no node: set nodeNames or nodeSelector"));
    }
    for name in target.node_names.iter().filter(|name| !names::is_dns_subdomain(name)) {
        problems.add(format!("{at}.nodeNames: '{}' is not the name of a node", name.escape_debug()));
    }
    for (key, value) in &target.node_selector {
        problems.check_label(&format!("{at}.nodeSelector"), key, value);
    }
    let actions = actions(problems, at, target.images_preload.as_ref(), target.customized_action.as_ref());
    let names = target.node_names.iter().map(|name| NodeName::from(name.as_str())).collect();
    WarmupTarget::Nodes { names, selector: target.node_selector.clone(), actions }
}

fn target_group(problems: &mut Problems, target: &TargetGroup, namespace: &str) -> WarmupTarget {
    let at = "targetRoleBasedGroup";
    problems.check_object_name(&format!("{at}.name"), &target.name);
    if let Some(namespace) = &target.namespace {
        problems.check_object_name(&format!("{at}.namespace"), namespace);
    }
    if target.roles.is_empty() {
        problems.add(format!("{at}.roles is empty: list the roles whose nodes should be warmed"));
    }
    let read = |(role, written): (&String, &WarmupActions)| {
        if role.is_empty() || !names::is_label_value(role) {
            problems.add(format!("{at}.roles: '{}' is not the name of a role", role.escape_debug()));
        }
        let at = format!("{at}.roles.{}", role.escape_debug());
        let actions =
            actions(problems, &at, written.images_preload.as_ref(), written.customized_action.as_ref());
        (role.clone(), actions)
    };
    let roles = target.roles.iter().map(read).collect();
    let namespace = target.namespace.as_deref().unwrap_or(namespace);
    WarmupTarget::Group { group: ObjectName::new(namespace, target.name.as_str()), roles }
}

fn target_model(problems: &mut Problems, target: &TargetModel, namespace: &str) -> WarmupTarget {
    problems.check_object_name("targetModel.name", &target.name);
    let nodes = problems.limit("targetModel.nodes", target.nodes, 1);
    WarmupTarget::Model { model: ObjectName::new(namespace, target.name.as_str()), nodes }
}

/// Reads what a node should have. `at` is the path of the field that has it.
fn actions(
    problems: &mut Problems,
    at: &str,
    images: Option<&ImagesPreload>,
    action: Option<&CustomizedAction>,
) -> NodeActions {
    let mut actions = NodeActions::default();
    if images.is_none() && action.is_none() {
        problems.add(format!("{at} has nothing to do: set imagesPreload, customizedAction or both"));
    }
    if let Some(images) = images {
        if images.items.is_empty() {
            problems.add(format!("{at}.imagesPreload.items is empty: list images, or remove imagesPreload"));
        }
        for image in &images.items {
            problems.check_image(&format!("{at}.imagesPreload.items"), image);
            actions.add_image(ImageName::from(image.as_str()));
        }
        for secret in &images.pull_secrets {
            problems.check_object_name(&format!("{at}.imagesPreload.pullSecrets"), secret);
        }
        actions.pull_secrets.extend(images.pull_secrets.iter().cloned());
    }
    let at = format!("{at}.customizedAction.podTemplate");
    actions.action = action.and_then(|action| action::template(problems, &at, &action.pod_template));
    actions
}

fn limits(problems: &mut Problems, written: Option<&WarmupPolicies>, retry_delay: Millis) -> WarmupLimits {
    let unlimited = WarmupPolicies::default();
    let written = written.unwrap_or(&unlimited);
    let seconds = |seconds: u32| Millis::secs(u64::from(seconds));
    WarmupLimits {
        parallelism: problems.limit("policies.parallelism", written.parallelism, 1),
        backoff_limit: problems.limit("policies.backoffLimit", written.backoff_limit, 0),
        timeout: problems.limit("policies.timeoutSeconds", written.timeout_seconds, 1).map(seconds),
        ttl: problems
            .limit("policies.ttlSecondsAfterFinished", written.ttl_seconds_after_finished, 0)
            .map(seconds),
        max_failed_nodes: problems
            .limit("policies.maxFailedNodes", written.max_failed_nodes, 0)
            .unwrap_or_default(),
        retry_delay,
    }
}
