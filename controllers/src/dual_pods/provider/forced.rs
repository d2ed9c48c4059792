//! Forces the fields of a provider's spec that a server patch cannot override.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Container, EnvVar, HTTPGetAction, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec,
        Probe, ResourceRequirements,
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};

use super::ProviderPlacement;
use crate::{
    crd::pool::NVIDIA_GPU,
    dual_pods::{
        keys,
        readiness::{self, ReadinessEndpoint},
    },
    workload::is_slot_resource,
};

const HOSTNAME: &str = "kubernetes.io/hostname";

/// Forces the spec's fields and returns the engine's port; `None` if the engine's container is missing.
pub(super) fn force(spec: &mut PodSpec, placement: &ProviderPlacement<'_>, resource: &str) -> Option<u16> {
    pin(spec, placement.node.as_str());
    // A restarted engine would take memory without a reservation.
    spec.restart_policy = Some("Never".to_owned());
    let container = spec.containers.iter_mut().find(|container| container.name == keys::CONTAINER)?;
    let visible = match placement.numbers {
        Some(numbers) => numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        None => keys::join_ids(placement.accelerators),
    };
    set(container, "CUDA_VISIBLE_DEVICES", visible);
    // By default CUDA orders devices by speed, which differs from the order that everything else uses.
    set(container, "CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned());
    request_no_accelerators(container, resource);
    let readiness = readiness::readiness_endpoint(container);
    if !readiness.probed {
        // Without a probe the Pod is ready before its engine is.
        container.readiness_probe = Some(probe(&readiness));
    }
    Some(readiness.port)
}

/// Makes the container request zero of the pool's resource and of NVIDIA's, and removes its requests for slots: a
/// kubelet rejects a Pod that requests zero slots while none is free.
fn request_no_accelerators(container: &mut Container, resource: &str) {
    let none = || Quantity("0".to_owned());
    let resources = container.resources.get_or_insert_with(ResourceRequirements::default);
    for amounts in [&mut resources.limits, &mut resources.requests] {
        let amounts = amounts.get_or_insert_default();
        amounts.insert(resource.to_owned(), none());
        amounts.retain(|name, _| !is_slot_resource(name));
        if let Some(amount) = amounts.get_mut(NVIDIA_GPU) {
            *amount = none();
        }
    }
}

fn probe(readiness: &ReadinessEndpoint) -> Probe {
    let port = IntOrString::Int(readiness.port.into());
    let http_get = HTTPGetAction { path: Some(readiness.path.clone()), port, ..HTTPGetAction::default() };
    Probe { http_get: Some(http_get), period_seconds: Some(1), ..Probe::default() }
}

/// Pins the Pod to its node: adds the node to each of the user's alternative terms.
fn pin(spec: &mut PodSpec, node: &str) {
    let affinity = spec.affinity.get_or_insert_default().node_affinity.get_or_insert_default();
    let required = &mut affinity.required_during_scheduling_ignored_during_execution;
    let terms = &mut required.get_or_insert_with(NodeSelector::default).node_selector_terms;
    if terms.is_empty() {
        terms.push(NodeSelectorTerm::default());
    }
    for term in terms {
        term.match_expressions.get_or_insert_default().push(NodeSelectorRequirement {
            key: HOSTNAME.to_owned(),
            operator: "In".to_owned(),
            values: Some(vec![node.to_owned()]),
        });
    }
}

fn set(container: &mut Container, name: &str, value: String) {
    let all = container.env.get_or_insert_default();
    all.retain(|env| env.name != name);
    all.push(EnvVar { name: name.to_owned(), value: Some(value), ..EnvVar::default() });
}

/// Whether a selector matches these labels.
pub(super) fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let fits = selector.match_expressions.iter().flatten().all(|one| {
        let (found, values) = (labels.get(&one.key), one.values.as_deref().unwrap_or_default());
        match one.operator.as_str() {
            "In" => found.is_some_and(|found| values.contains(found)),
            "NotIn" => found.is_none_or(|found| !values.contains(found)),
            "Exists" => found.is_some(),
            "DoesNotExist" => found.is_none(),
            // An unknown operator counts as a match: a refusal is better than a Pod that is counted twice.
            _ => true,
        }
    });
    equal && fits
}
