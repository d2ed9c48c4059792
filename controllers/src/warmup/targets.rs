//! Finds the nodes that a Warmup warms, and what each of them should have.

mod concern;
mod model;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::Toleration;
use rouse::{
    pairing::ids::NodeName,
    units::Bytes,
    warmup::{NodeItems, TaintEffect, TolerationOperator, WarmupTargets, WarmupToleration},
};

pub(super) use self::concern::concerned;
use super::keys;
use crate::{
    convert::warmup::{NodeActions, WarmupTarget, merge_roles},
    index::Resolved,
    label,
};

/// A node of the cluster, as far as it is chosen by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CandidateNode {
    pub(super) labels: BTreeMap<String, String>,
    /// The node takes new Pods.
    pub(super) is_schedulable: bool,
    /// Memory of its accelerators that is reserved for engines.
    pub(super) reserved: Bytes,
}

/// A Pod of a RoleBasedGroup that is bound to a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupPod {
    pub(super) node: NodeName,
    pub(super) role: String,
    pub(super) tolerations: Vec<Toleration>,
}

/// What targets follow from.
#[derive(Clone, Copy)]
pub(super) struct TargetInputs<'a> {
    /// Every node of the cluster.
    pub(super) nodes: &'a BTreeMap<NodeName, CandidateNode>,
    /// Pods of the Warmup's group that are bound and not being deleted.
    pub(super) group_pods: &'a [GroupPod],
    pub(super) resolved: &'a Resolved,
    /// Image of the stub, which runs beside every engine.
    pub(super) stub_image: &'a str,
    /// The nodes that this Warmup had before. A model keeps them as long as its engines may start there.
    pub(super) former: &'a BTreeSet<NodeName>,
}

/// The nodes of a Warmup, and what their Pods are built from.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ResolvedTargets {
    pub(super) targets: WarmupTargets,
    /// What each target node should have. Equal nodes share it.
    pub(super) actions: BTreeMap<NodeName, Arc<NodeActions>>,
    /// What the Pods of the target tolerate, in addition to the Warmup's own.
    pub(super) tolerations: Vec<Toleration>,
}

impl ResolvedTargets {
    fn none(targets: WarmupTargets) -> Self {
        Self { targets, actions: BTreeMap::new(), tolerations: Vec::new() }
    }

    fn pending(reason: impl Into<String>) -> Self {
        Self::none(WarmupTargets::Pending { reason: reason.into() })
    }

    fn refused(reason: impl Into<String>) -> Self {
        Self::none(WarmupTargets::Refused { reason: reason.into() })
    }

    fn nodes(actions: BTreeMap<NodeName, Arc<NodeActions>>, tolerations: Vec<Toleration>) -> Self {
        // Thousands of nodes share few actions.
        let mut shared: BTreeMap<*const NodeActions, Arc<NodeItems>> = BTreeMap::new();
        let nodes = actions.iter().map(|(node, actions)| {
            let items = shared.entry(Arc::as_ptr(actions)).or_insert_with(|| Arc::new(actions.items()));
            (node.clone(), Arc::clone(items))
        });
        let nodes = nodes.collect();
        Self { targets: WarmupTargets::Nodes(nodes), actions, tolerations }
    }
}

/// Returns the targets of one Warmup.
pub(super) fn targets(target: &WarmupTarget, inputs: TargetInputs<'_>) -> ResolvedTargets {
    match target {
        WarmupTarget::Nodes { names, selector, actions } => named(names, selector, actions, inputs),
        WarmupTarget::Group { group, roles } => of_group(&group.to_string(), roles, inputs),
        WarmupTarget::Model { model, nodes } => model::targets(model, *nodes, inputs),
    }
}

/// A name may be that of a node that does not exist, which the Warmup reports.
fn named(
    names: &BTreeSet<NodeName>,
    selector: &BTreeMap<String, String>,
    actions: &NodeActions,
    inputs: TargetInputs<'_>,
) -> ResolvedTargets {
    let selected = inputs.nodes.iter().filter(|(_, node)| is_selected(selector, node));
    let all: BTreeSet<&NodeName> = names.iter().chain(selected.map(|(name, _)| name)).collect();
    if all.is_empty() {
        return ResolvedTargets::pending("no node has the labels of targetNodes.nodeSelector");
    }
    let actions = Arc::new(actions.clone());
    let nodes = all.into_iter().map(|node| (node.clone(), Arc::clone(&actions))).collect();
    ResolvedTargets::nodes(nodes, Vec::new())
}

fn of_group(group: &str, roles: &BTreeMap<String, NodeActions>, inputs: TargetInputs<'_>) -> ResolvedTargets {
    let mut on_node: BTreeMap<&NodeName, BTreeSet<String>> = BTreeMap::new();
    let mut tolerations = Vec::new();
    let is_known = |pod: &&GroupPod| roles.contains_key(&pod.role) && inputs.nodes.contains_key(&pod.node);
    for pod in inputs.group_pods.iter().filter(is_known) {
        on_node.entry(&pod.node).or_default().insert(pod.role.clone());
        pod.tolerations.iter().for_each(|toleration| add_toleration(&mut tolerations, toleration.clone()));
    }
    if on_node.is_empty() {
        return ResolvedTargets::pending(format!(
            "no node runs a Pod of the group {group} with a role that targetRoleBasedGroup.roles lists"
        ));
    }
    // Few combinations of roles occur on many nodes.
    let mut merged: BTreeMap<&BTreeSet<String>, Arc<NodeActions>> = BTreeMap::new();
    let mut nodes = BTreeMap::new();
    for (node, on_it) in &on_node {
        let actions = match merged.get(on_it) {
            Some(known) => Arc::clone(known),
            None => match merge_roles(roles, on_it) {
                Ok(actions) => {
                    let actions = Arc::new(actions);
                    merged.insert(on_it, Arc::clone(&actions));
                    actions
                }
                Err(conflict) => return ResolvedTargets::refused(conflict),
            },
        };
        nodes.insert((*node).clone(), actions);
    }
    ResolvedTargets::nodes(nodes, tolerations)
}

/// Adds a toleration that is not in the list.
///
/// Left out are those that Kubernetes adds to every Pod, by which a Pod stays on a failing node for some minutes.
fn add_toleration(all: &mut Vec<Toleration>, toleration: Toleration) {
    let is_default = toleration.toleration_seconds.is_some()
        && toleration.key.as_ref().is_some_and(|key| key.starts_with(keys::NODE_TAINTS));
    if !is_default && !all.contains(&toleration) {
        all.push(toleration);
    }
}

/// Whether the selector of a target matches the node. An empty selector matches none.
fn is_selected(selector: &BTreeMap<String, String>, node: &CandidateNode) -> bool {
    !selector.is_empty() && label::has_all(&node.labels, selector)
}

/// Returns what the decisions see of these tolerations. One that no API server accepts is left out.
pub(super) fn seen_tolerations(tolerations: &[Toleration]) -> Vec<WarmupToleration> {
    let seen = |toleration: &Toleration| {
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let operator = match toleration.operator.as_deref() {
            None | Some("" | "Equal") => TolerationOperator::Equal,
            Some("Exists") => TolerationOperator::Exists,
            Some(_) => return None,
        };
        let effect = match toleration.effect.as_deref() {
            None | Some("") => None,
            Some("NoSchedule") => Some(TaintEffect::NoSchedule),
            Some("PreferNoSchedule") => Some(TaintEffect::PreferNoSchedule),
            Some("NoExecute") => Some(TaintEffect::NoExecute),
            Some(_) => return None,
        };
        let value = toleration.value.clone().unwrap_or_default();
        Some(WarmupToleration { key: set(&toleration.key), operator, value, effect })
    };
    tolerations.iter().filter_map(seen).collect()
}
