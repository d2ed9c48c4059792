//! What a provider's spec has whatever the patch says.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{
        Container, EnvVar, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec,
        ResourceRequirements,
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};

use super::{Error, Make, Place};
use crate::controllers::dual::keys;

const HOSTNAME: &str = "kubernetes.io/hostname";
/// Where a server listens that does not say it.
const PORT: u16 = 8000;

/// Gives the port at which the engine listens.
pub(super) fn force(spec: &mut PodSpec, place: &Place<'_>, make: &Make) -> Result<u16, Error> {
    pin(spec, place.node.as_str());
    // An engine that is started anew takes memory that nobody reserved for it.
    spec.restart_policy = Some("Never".to_owned());
    let own = spec.containers.iter_mut().find(|own| own.name == keys::CONTAINER).ok_or(Error::NoContainer)?;
    let visible = match place.numbers {
        Some(numbers) => numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        None => keys::listed(place.accelerators),
    };
    set(own, "CUDA_VISIBLE_DEVICES", visible);
    // Else CUDA numbers by speed, and the numbers are others than everybody else's.
    set(own, "CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned());
    let resources = own.resources.get_or_insert_with(ResourceRequirements::default);
    for amounts in [&mut resources.limits, &mut resources.requests] {
        let amounts = amounts.get_or_insert_default();
        amounts.insert(make.resource.clone(), Quantity("0".to_owned()));
    }
    port(own)
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

/// That of the readiness probe: where it is asked whether it serves, it serves.
fn port(own: &Container) -> Result<u16, Error> {
    let probe = own.readiness_probe.as_ref().and_then(|probe| probe.http_get.as_ref());
    let number = |port: &i32| u16::try_from(*port).map_err(|_| Error::Port { port: port.to_string() });
    match probe.map(|probe| &probe.port) {
        None => Ok(PORT),
        Some(IntOrString::Int(port)) => number(port),
        Some(IntOrString::String(name)) => {
            let named = own.ports.iter().flatten().find(|port| port.name.as_ref() == Some(name));
            named.map_or_else(|| Err(Error::Port { port: name.clone() }), |port| number(&port.container_port))
        }
    }
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
