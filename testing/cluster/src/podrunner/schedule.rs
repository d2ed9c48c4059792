//! Chooses a node for a Pod.
//!
//! This implements the part of the scheduler whose effects Rouse can observe: node selectors and required node
//! affinity, taints, whole units of extended resources, preferred node affinity, and preferred affinity by labels to
//! Pods of the same namespace on the same node. A Pod holds its units until it is in a terminal phase or its object is
//! gone, whatever its processes do. CPU and memory are not counted, since Pods here share one machine anyway. Of the
//! nodes that fit, the preferred node wins, then the node with the most free units, then the emptiest, then the first
//! by name: the same Pods are always placed alike.

use std::{cmp::Reverse, collections::BTreeMap};

use k8s_openapi::{
    api::core::v1::{
        Affinity, Container, Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodAffinityTerm, PodSpec,
        PreferredSchedulingTerm, Taint, Toleration, WeightedPodAffinityTerm,
    },
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt as _;

/// Units of extended resources by name.
pub(super) type ResourceUnits = BTreeMap<String, u64>;

const HOSTNAME_LABEL: &str = "kubernetes.io/hostname";

/// Whether the Pod has ended for good and holds no units any more.
pub(super) fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The Pod's request: the sum of its containers and sidecars, or its largest init container if that is more.
pub(super) fn demand(spec: &PodSpec) -> ResourceUnits {
    let mut units = ResourceUnits::new();
    let init = spec.init_containers.iter().flatten();
    let (sidecars, once): (Vec<_>, Vec<_>) = init.partition(|container| is_sidecar(container));
    for container in spec.containers.iter().chain(sidecars) {
        for (name, count) in container_demand(container) {
            *units.entry(name).or_default() += count;
        }
    }
    for (name, count) in once.into_iter().flat_map(container_demand) {
        let most = units.entry(name).or_default();
        *most = count.max(*most);
    }
    units.retain(|_, count| *count > 0);
    units
}

/// The request of one container.
pub(super) fn container_demand(container: &Container) -> ResourceUnits {
    let Some(resources) = &container.resources else { return ResourceUnits::new() };
    let named = resources.requests.iter().chain(&resources.limits).flatten();
    named
        .filter(|(name, _)| is_extended(name))
        .map(|(name, count)| (name.clone(), parse_count(count)))
        .collect()
}

pub(super) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn is_extended(name: &str) -> bool {
    name.contains('/')
}

/// Parses a count. The API server accepts only whole numbers; it writes a number with a suffix only beyond any node
/// here.
fn parse_count(count: &Quantity) -> u64 {
    count.0.parse().unwrap_or(u64::MAX)
}

/// Chooses the node for this Pod, given all Pods that have a node. Otherwise returns the reason in the scheduler's
/// words.
pub(super) fn choose_node<'a>(
    pod: &Pod,
    nodes: impl Iterator<Item = &'a Node>,
    placed: &[&Pod],
) -> Result<String, String> {
    let Some(spec) = &pod.spec else { return Err("the Pod has no spec".to_owned()) };
    let demand = demand(spec);
    let mut reasons = BTreeMap::<String, usize>::new();
    let mut fitting = Vec::new();
    let mut all = 0;
    for node in nodes {
        all += 1;
        let free = free_units(node, placed);
        match unfit_reason(spec, &demand, node, &free) {
            Some(reason) => *reasons.entry(reason).or_default() += 1,
            None => {
                let room = free.values().sum::<u64>();
                let pods = pods_on(node, placed).count();
                fitting.push((
                    Reverse(affinity_weight(pod, node, placed)),
                    Reverse(room),
                    pods,
                    node.name_any(),
                ));
            }
        }
    }
    fitting.into_iter().min().map(|(.., name)| name).ok_or_else(|| {
        let reasons: Vec<_> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        format!("0/{all} nodes are available: {}.", reasons.join(", "))
    })
}

/// The Pods on this node that hold units.
fn pods_on<'a>(node: &Node, placed: &'a [&Pod]) -> impl Iterator<Item = &'a Pod> {
    let name = node.name_any();
    let at =
        |pod: &&Pod, name: &str| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(name);
    placed.iter().copied().filter(|pod| !is_terminal(pod)).filter(move |pod| at(pod, &name))
}

/// The sum of the affinity weights that favor this node.
fn affinity_weight(pod: &Pod, node: &Node, placed: &[&Pod]) -> i32 {
    let affinity = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref());
    node_weight(affinity, node) + pod_weight(pod, affinity, node, placed)
}

/// The sum of the weights for the node's own labels.
fn node_weight(affinity: Option<&Affinity>, node: &Node) -> i32 {
    let terms = affinity.and_then(|affinity| affinity.node_affinity.as_ref()).and_then(|node_affinity| {
        node_affinity.preferred_during_scheduling_ignored_during_execution.as_ref()
    });
    let draws = |term: &&PreferredSchedulingTerm| matches_term(&term.preference, node);
    terms.into_iter().flatten().filter(draws).map(|term| term.weight).sum()
}

/// The sum of the weights for other Pods on the node.
fn pod_weight(pod: &Pod, affinity: Option<&Affinity>, node: &Node, placed: &[&Pod]) -> i32 {
    let terms = affinity
        .and_then(|affinity| affinity.pod_affinity.as_ref())
        .and_then(|pod_affinity| pod_affinity.preferred_during_scheduling_ignored_during_execution.as_ref());
    let draws = |term: &&WeightedPodAffinityTerm| {
        let PodAffinityTerm { topology_key, label_selector, .. } = &term.pod_affinity_term;
        let labels = label_selector.as_ref().and_then(|selector| selector.match_labels.as_ref());
        let Some(labels) = labels.filter(|_| topology_key == HOSTNAME_LABEL) else { return false };
        let fits = |other: &Pod| labels.iter().all(|(key, value)| other.labels().get(key) == Some(value));
        pods_on(node, placed).any(|other| other.namespace() == pod.namespace() && fits(other))
    };
    terms.into_iter().flatten().filter(draws).map(|term| term.weight).sum()
}

fn free_units(node: &Node, placed: &[&Pod]) -> ResourceUnits {
    let allocatable = node.status.iter().filter_map(|status| status.allocatable.as_ref()).flatten();
    let mut units: ResourceUnits = allocatable
        .filter(|(name, _)| is_extended(name))
        .map(|(name, count)| (name.clone(), parse_count(count)))
        .collect();
    for (name, count) in pods_on(node, placed).filter_map(|pod| pod.spec.as_ref()).flat_map(demand) {
        if let Some(free) = units.get_mut(&name) {
            *free = free.saturating_sub(count);
        }
    }
    units
}

fn unfit_reason(spec: &PodSpec, demand: &ResourceUnits, node: &Node, free: &ResourceUnits) -> Option<String> {
    let node_spec = node.spec.clone().unwrap_or_default();
    if node_spec.unschedulable == Some(true) {
        return Some("node(s) were unschedulable".to_owned());
    }
    if !matches_selector(spec, node) {
        return Some("node(s) didn't match Pod's node affinity/selector".to_owned());
    }
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let repels = |taint: &&Taint| {
        taint.effect != "PreferNoSchedule"
            && !tolerations.iter().any(|toleration| tolerates(toleration, taint))
    };
    if let Some(taint) = node_spec.taints.iter().flatten().find(repels) {
        let value = taint.value.as_deref().unwrap_or_default();
        return Some(format!("node(s) had untolerated taint {{{}: {value}}}", taint.key));
    }
    let lacking = demand.iter().find(|&(name, count)| free.get(name).unwrap_or(&0) < count);
    lacking.map(|(name, _)| format!("Insufficient {name}"))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect =
        toleration.effect.as_deref().is_none_or(|effect| effect.is_empty() || effect == taint.effect);
    let key = toleration.key.as_deref().unwrap_or_default();
    let exists = toleration.operator.as_deref() == Some("Exists");
    let value = exists
        || toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    effect && value && (key == taint.key || (key.is_empty() && exists))
}

fn matches_selector(spec: &PodSpec, node: &Node) -> bool {
    let labels = node.labels();
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    selected
        && required
            .is_none_or(|selector| selector.node_selector_terms.iter().any(|term| matches_term(term, node)))
}

fn matches_term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let name = node.name_any();
    let by_label = term.match_expressions.iter().flatten().all(|requirement| {
        let value = node.labels().get(&requirement.key);
        matches_requirement(requirement, value.map(String::as_str))
    });
    // The only field: DaemonSet Pods name their nodes with it.
    let by_field = term.match_fields.iter().flatten().all(|requirement| {
        matches_requirement(requirement, (requirement.key == "metadata.name").then_some(name.as_str()))
    });
    by_label && by_field
}

fn matches_requirement(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let among = value.is_some_and(|value| requirement.values.iter().flatten().any(|one| one == value));
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
    let bound = number(requirement.values.iter().flatten().next().map(String::as_str));
    match requirement.operator.as_str() {
        "In" => among,
        "NotIn" => !among,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => number(value).zip(bound).is_some_and(|(value, bound)| value > bound),
        "Lt" => number(value).zip(bound).is_some_and(|(value, bound)| value < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
