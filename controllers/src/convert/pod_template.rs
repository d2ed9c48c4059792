//! Builds an engine's Pod template and fingerprint from an InferenceModel.

use std::collections::BTreeMap;

use rouse::units::Bytes;
use rouse_config::FingerprintHasher;
use serde_json::{Map, Value, json};

use super::{EnginePodTemplate, ModelHosting, Rejection, spec_reader::SpecReader};
use crate::{
    backend_address::BackendAddress,
    crd::{
        InferenceModelSpec, PodTemplateJson,
        fma::amount,
        inference_model::{ResourceAmounts, ResourcesSpec},
    },
    strategic_merge,
    workload::merge,
};

/// Container name in a template built from `containerImage`.
const CONTAINER: &str = "engine";
/// Extended resource that a `containerImage` template requests, and the key of the taint that its Pods tolerate.
const GPU: &str = "nvidia.com/gpu";

type NodeLabels = BTreeMap<String, String>;

pub(super) fn engine_pod_template(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
) -> Option<EnginePodTemplate> {
    if spec.resources.is_some() && spec.container_image.is_none() {
        reader.reject_spec(
            "resources is only for containerImage: in a template, set the resources of the container",
        );
    }
    let template = match (&spec.template, &spec.container_image) {
        (Some(template), None) => template.clone(),
        (None, Some(image)) => short_form(image, spec),
        (Some(_), Some(_)) => {
            reader.reject_spec("template and containerImage exclude each other: remove one of them");
            return None;
        }
        (None, None) => {
            reader.reject_spec("the engine's Pod is undefined: set template or containerImage");
            return None;
        }
    };
    let container = container(reader, &template, spec.engine.container.as_deref())?;
    Some(EnginePodTemplate { container, template, port: spec.engine.port })
}

/// Merges a variant's patch into the model's template, as an API server merges a strategic merge patch.
pub(super) fn template(
    reader: &mut SpecReader,
    run: Option<&ModelHosting>,
    patch: Option<&PodTemplateJson>,
) -> Option<PodTemplateJson> {
    let (ModelHosting::Deployment(pods) | ModelHosting::DualPods(pods)) = run? else { return None };
    match strategic_merge::merge(pods.template.value(), patch?.value()) {
        Ok(merged) => Some(merged.into()),
        Err(error) => {
            reader.reject(Rejection::Template(format!("{}template: {error}", reader.prefix)));
            None
        }
    }
}

/// Finds the name of the engine's container.
fn container(reader: &mut SpecReader, template: &PodTemplateJson, wanted: Option<&str>) -> Option<String> {
    let containers = template.containers();
    let names: Vec<_> = containers.iter().filter_map(|container| container.get("name")?.as_str()).collect();
    let found = names.iter().find(|name| wanted.is_none_or(|wanted| **name == wanted));
    if found.is_none() {
        reader.reject(Rejection::Template(match wanted {
            Some(wanted) if !names.is_empty() => {
                format!(
                    "engine.container: the template has no container '{wanted}': use one of {}",
                    names.join(", ")
                )
            }
            _ => "template.spec.containers has no container with a name: add the engine's container and its name".to_owned(),
        }));
    }
    found.map(|name| (*name).to_owned())
}

fn short_form(image: &str, spec: &InferenceModelSpec) -> PodTemplateJson {
    let resources = spec.resources.clone().unwrap_or_default();
    let ResourcesSpec { requests, limits } = &resources;
    let given = |amounts: &Option<ResourceAmounts>| amounts.as_ref().and_then(|amounts| amounts.gpu.clone());
    let gpu = given(limits).or_else(|| given(requests)).unwrap_or_else(|| spec.accelerators.to_string());
    let needed = gpu != "0";
    // An API server requires requests to equal limits for extended resources. Limits alone imply both.
    let mut limits = amounts(limits.as_ref());
    if needed {
        limits.insert(GPU.to_owned(), gpu.into());
    }
    let mut pod = json!({
        "containers": [{
            "name": CONTAINER,
            "image": image,
            "ports": [{"name": "http", "containerPort": spec.engine.port}],
            "resources": {"requests": amounts(requests.as_ref()), "limits": limits},
        }],
    });
    if needed {
        let toleration = json!({"key": GPU, "operator": "Exists", "effect": "NoSchedule"});
        merge::into(&mut pod, &json!({"tolerations": [toleration]}));
    }
    Map::from_iter([("spec".to_owned(), pod)]).into()
}

fn amounts(amounts: Option<&ResourceAmounts>) -> Map<String, Value> {
    let cpu = amounts.and_then(|amounts| amounts.cpu.clone());
    let memory = amounts.and_then(|amounts| amounts.memory.as_ref()).map(ToString::to_string);
    let named = [("cpu", cpu), ("memory", memory)].into_iter();
    named.filter_map(|(name, amount)| Some((name.to_owned(), Value::from(amount?)))).collect()
}

/// Returns command and arguments of the engine's container; empty if the image defines them.
pub(super) fn command(run: &ModelHosting) -> Vec<String> {
    command_of(run, None)
}

/// Returns command and arguments of the engine's container, from the variant's own template or else the model's.
pub(super) fn command_of(run: &ModelHosting, variant_template: Option<&PodTemplateJson>) -> Vec<String> {
    let (ModelHosting::Deployment(pods) | ModelHosting::DualPods(pods)) = run else {
        return Vec::new();
    };
    let named = |name: Option<&Value>| name.and_then(Value::as_str) == Some(pods.container.as_str());
    let containers = variant_template.unwrap_or(&pods.template).containers();
    let container = containers.iter().find(|container| named(container.get("name")));
    let words =
        |key: &str| container.and_then(|container| container.get(key)?.as_array()).into_iter().flatten();
    words("command").chain(words("args")).filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

/// Returns the lower memory limit of the engine's container and its Pod, in mode deployment.
///
/// `variant_template` is the variant's template. In mode dualPods the limit comes from the running Pod.
pub(super) fn memory_limit(
    run: Option<&ModelHosting>,
    variant_template: Option<&PodTemplateJson>,
) -> Option<Bytes> {
    let ModelHosting::Deployment(pods) = run? else { return None };
    let template = variant_template.unwrap_or(&pods.template).value();
    let spec = template.get("spec")?;
    let containers = spec.get("containers").and_then(Value::as_array).into_iter().flatten();
    let engine = containers.filter(|container| merge::is_named(container, &pods.container));
    let limits = engine.chain([spec]).filter_map(|part| part.pointer("/resources/limits/memory"));
    let bytes = limits.filter_map(|limit| match limit {
        Value::String(text) => amount::bytes(text),
        Value::Number(number) => amount::bytes(&number.to_string()),
        _ => None,
    });
    bytes.min()
}

/// Hashes an engine's start settings and the labels of the nodes that it may run on.
pub(super) fn fingerprint(run: &ModelHosting, kind: &str, served_name: &str, nodes: &NodeLabels) -> u64 {
    let mut hash = FingerprintHasher::default();
    hash.feed_text(kind);
    hash.feed_text(served_name);
    feed_labels(&mut hash, nodes);
    if let ModelHosting::Deployment(pods) | ModelHosting::DualPods(pods) = run {
        hash.feed_text(&pods.container);
        hash.feed_text(&pods.port.to_string());
        hash.feed_text(pods.template.text());
    }
    if let ModelHosting::External(BackendAddress { tls, host, port, path }) = run {
        // Another backend is another engine: state learned from the former backend does not apply.
        hash.feed_text(&format!("{tls} {host:?} {port} {path}"));
    }
    hash.value()
}

/// Derives a variant's fingerprint from its model's fingerprint, its patch and its node labels.
pub(super) fn variant_fingerprint(
    fingerprint: u64,
    patch: Option<&PodTemplateJson>,
    nodes: Option<&NodeLabels>,
) -> u64 {
    if patch.is_none() && nodes.is_none() {
        return fingerprint;
    }
    let mut hash = FingerprintHasher::default();
    hash.feed(&fingerprint.to_le_bytes());
    if let Some(patch) = patch {
        hash.feed_text(patch.text());
    }
    if let Some(nodes) = nodes {
        feed_labels(&mut hash, nodes);
    }
    hash.value()
}

fn feed_labels(hash: &mut FingerprintHasher, labels: &NodeLabels) {
    for (name, value) in labels {
        hash.feed_text(name);
        hash.feed_text(value);
    }
}
