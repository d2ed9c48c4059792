//! What a provider's spec has whatever the patch says.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Container, EnvVar, HTTPGetAction, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec,
        Probe, ResourceRequirements,
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};

use super::{ProviderPlacement, ProviderSettings};
use crate::controllers::dual_pods::{
    keys,
    readiness::{self, ReadinessEndpoint},
};

const HOSTNAME: &str = "kubernetes.io/hostname";

/// Gives the port at which the engine listens; `None`: there is no container for it.
pub(super) fn force(
    spec: &mut PodSpec,
    place: &ProviderPlacement<'_>,
    make: &ProviderSettings,
) -> Option<u16> {
    pin(spec, place.node.as_str());
    // An engine that is started anew takes memory that nobody reserved for it.
    spec.restart_policy = Some("Never".to_owned());
    let own = spec.containers.iter_mut().find(|own| own.name == keys::CONTAINER)?;
    let visible = match place.numbers {
        Some(numbers) => numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        None => keys::join_ids(place.accelerators),
    };
    set(own, "CUDA_VISIBLE_DEVICES", visible);
    // Else CUDA numbers by speed, and the numbers are others than everybody else's.
    set(own, "CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned());
    let resources = own.resources.get_or_insert_with(ResourceRequirements::default);
    for amounts in [&mut resources.limits, &mut resources.requests] {
        let amounts = amounts.get_or_insert_default();
        amounts.insert(make.resource.clone(), Quantity("0".to_owned()));
    }
    let readiness = readiness::readiness_endpoint(own);
    if !readiness.probed {
        // Else its Pod is ready before it is.
        own.readiness_probe = Some(probe(&readiness));
    }
    Some(readiness.port)
}

fn probe(readiness: &ReadinessEndpoint) -> Probe {
    let port = IntOrString::Int(readiness.port.into());
    let http_get = HTTPGetAction { path: Some(readiness.path.clone()), port, ..HTTPGetAction::default() };
    Probe { http_get: Some(http_get), period_seconds: Some(1), ..Probe::default() }
}

/// To its node, beside whatever else the user asks of nodes: each of the user's alternatives is one on this node.
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

fn set(own: &mut Container, name: &str, value: String) {
    let all = own.env.get_or_insert_default();
    all.retain(|env| env.name != name);
    all.push(EnvVar { name: name.to_owned(), value: Some(value), ..EnvVar::default() });
}

/// Whether a selector takes Pods with these labels.
pub(super) fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let fits = selector.match_expressions.iter().flatten().all(|one| {
        let (found, values) = (labels.get(&one.key), one.values.as_deref().unwrap_or_default());
        match one.operator.as_str() {
            "In" => found.is_some_and(|found| values.contains(found)),
            "NotIn" => found.is_none_or(|found| !values.contains(found)),
            "Exists" => found.is_some(),
            "DoesNotExist" => found.is_none(),
            // Of an operator to come nothing is known: better refused than counted twice.
            _ => true,
        }
    });
    equal && fits
}
