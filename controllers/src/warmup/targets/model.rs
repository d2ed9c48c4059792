//! The nodes on which a model's next engine may start.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Toleration;
use rouse::{pairing::ids::NodeName, warmup::ImageName};
use serde_json::{Map, Value};

use super::{ResolvedTargets, TargetInputs, add_toleration};
use crate::{
    convert::{ModelHosting, ModelVariant, warmup::NodeActions},
    crd::ledger::ObjectName,
    index::ServedVariant,
    label,
    warmup::pod_template::images,
};

/// What one variant's engines need, and where they may start.
struct WarmVariant<'a> {
    served: &'a ServedVariant,
    converted: &'a ModelVariant,
    actions: NodeActions,
}

/// A node's order among those where an engine may start: the first are warmed.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    is_unschedulable: bool,
    /// Nodes that are warm stay it, although the engines that start there take their room.
    is_new: bool,
    is_full: bool,
    name: NodeName,
}

pub(super) fn targets(object: &ObjectName, limit: Option<u32>, inputs: TargetInputs<'_>) -> ResolvedTargets {
    let Some(served) = inputs.resolved.served.get(object) else {
        let why = inputs.resolved.rejected.get(object).map_or_else(
            || format!("there is no InferenceModel {object}"),
            |rejected| format!("the InferenceModel {object} is not served: {}", rejected.rejections),
        );
        return ResolvedTargets::pending(why);
    };
    let (ModelHosting::Deployment(template) | ModelHosting::DualPods(template)) = &served.model.hosting
    else {
        return ResolvedTargets::refused(format!(
            "the InferenceModel {object} runs outside of Rouse: warm the nodes of its backend by targetNodes"
        ));
    };
    let mut tolerations = Vec::new();
    let mut variants = Vec::new();
    for variant in &served.variants {
        let mut converted = served.model.variants.iter();
        let Some(converted) = converted.find(|it| it.name == variant.name) else { continue };
        let pod = converted.template.as_ref().unwrap_or(&template.template).value();
        for toleration in pod_tolerations(&pod) {
            add_toleration(&mut tolerations, toleration);
        }
        let taint = inputs.resolved.terms(variant).and_then(|terms| terms.taint.clone());
        if let Some(key) = taint {
            let operator = Some("Exists".to_owned());
            add_toleration(
                &mut tolerations,
                Toleration { key: Some(key), operator, ..Toleration::default() },
            );
        }
        variants.push(WarmVariant { served: variant, converted, actions: actions(&pod, inputs.stub_image) });
    }
    let nodes = choose(&variants, limit, inputs);
    if nodes.is_empty() {
        return ResolvedTargets::pending(format!(
            "no node of the model's pools has the labels of the InferenceModel {object}"
        ));
    }
    ResolvedTargets::nodes(nodes, tolerations)
}

fn choose(
    variants: &[WarmVariant<'_>],
    limit: Option<u32>,
    inputs: TargetInputs<'_>,
) -> BTreeMap<NodeName, Arc<NodeActions>> {
    let mut candidates: BTreeMap<Preference, Vec<usize>> = BTreeMap::new();
    for (name, node) in inputs.nodes {
        let Some(resolved) = inputs.resolved.nodes.get(name.as_str()) else { continue };
        let fits = |variant: &WarmVariant<'_>| {
            resolved.pool.is_some()
                && resolved.pool == variant.served.pool
                && label::has_all(&node.labels, &variant.converted.node_selector)
        };
        let fitting = variants.iter().enumerate().filter(|(_, variant)| fits(variant));
        let fitting: Vec<usize> = fitting.map(|(index, _)| index).collect();
        if fitting.is_empty() {
            continue;
        }
        let mut fitting_variants = fitting.iter().filter_map(|index| variants.get(*index));
        let preference = Preference {
            is_unschedulable: !node.is_schedulable,
            is_new: !inputs.former.contains(name),
            is_full: !fitting_variants.any(|variant| resolved.has_room_for(variant.converted, node.reserved)),
            name: name.clone(),
        };
        candidates.insert(preference, fitting);
    }
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let mut merged: BTreeMap<Vec<usize>, Arc<NodeActions>> = BTreeMap::new();
    let chosen = candidates.into_iter().take(limit).map(|(preference, fitting)| {
        let of_node = fitting.iter().filter_map(|index| variants.get(*index));
        let union = || Arc::new(union(of_node.map(|variant| &variant.actions)));
        (preference.name, Arc::clone(merged.entry(fitting.clone()).or_insert_with(union)))
    });
    chosen.collect()
}

fn union<'a>(all: impl Iterator<Item = &'a NodeActions>) -> NodeActions {
    let mut union = NodeActions::default();
    for actions in all {
        union.pull_secrets.extend(actions.pull_secrets.iter().cloned());
        actions.images.iter().for_each(|image| union.add_image(image.clone()));
    }
    union
}

/// Reads what the Pods of an engine need from their template.
fn actions(pod: &Map<String, Value>, stub_image: &str) -> NodeActions {
    let mut actions = NodeActions::default();
    let all = images(pod).into_iter().chain([ImageName::from(stub_image)]);
    all.for_each(|image| actions.add_image(image));
    let secrets = list(pod, "imagePullSecrets").iter();
    let names = secrets.filter_map(|secret| secret.get("name")?.as_str());
    actions.pull_secrets.extend(names.map(str::to_owned));
    actions
}

/// Returns the tolerations of a Pod template. A malformed one is left out, as no Pod with it is created.
fn pod_tolerations(pod: &Map<String, Value>) -> Vec<Toleration> {
    let all = list(pod, "tolerations").iter();
    all.filter_map(|toleration| serde_json::from_value(toleration.clone()).ok()).collect()
}

fn list<'a>(pod: &'a Map<String, Value>, field: &str) -> &'a [Value] {
    let list = pod.get("spec").and_then(|spec| spec.get(field)).and_then(Value::as_array);
    list.map(Vec::as_slice).unwrap_or_default()
}
