//! Builds an engine's Pod from the Pod that requests it.

mod forced;
mod name;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use aws_lc_rs::digest;
use k8s_openapi::{ByteString, api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::LabelSelector};
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::EngineRecord,
        ids::{EngineFingerprint, NodeName},
    },
    units::Bytes,
};
use rouse_config::{has_lora_by_command, kv_cache_by_command};
use serde_json::{Value, json};

use super::{
    base::base,
    keys, record,
    template::{self, TemplateFields},
};
use crate::strategic_merge;

pub use name::name;

/// Node and accelerators that a provider runs on.
#[derive(Clone, Copy, Debug)]
pub struct ProviderPlacement<'a> {
    pub node: &'a NodeName,
    pub accelerators: &'a [AcceleratorId],
    /// The accelerators' indices on the node, if known.
    pub numbers: Option<&'a [u32]>,
}

/// A provider to create.
#[derive(Clone, Debug)]
pub struct BuiltProvider {
    pub pod: Pod,
    pub name: String,
}

/// An error that the user must correct. The user sees this text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "the annotation {} is missing: set it to the patch that turns this Pod into the server's Pod",
        keys::SERVER_PATCH
    )]
    NoPatch,
    #[error("the server patch is not a valid template: {0}")]
    Template(#[from] template::Error),
    #[error("the server patch is not a YAML or JSON object: {0}")]
    Text(String),
    #[error("the server patch cannot be applied to this Pod: {0}")]
    Merge(#[from] strategic_merge::Error),
    #[error("the patched Pod is not a valid Pod: {0}")]
    NoPod(String),
    #[error("the server patch has a field that Pods do not have: {0}")]
    Unknown(String),
    #[error(
        "the patched Pod has no container named {}: give this name to the container that runs the server",
        keys::CONTAINER
    )]
    NoContainer,
    #[error(
        "the server's Pod would be counted by {owner}, which created this Pod: change a label of its selector in the \
         server patch, as in metadata: {{labels: {{app: null}}}}"
    )]
    Selected { owner: String },
}

/// The owner of the requester, with the selector that it counts Pods by.
#[derive(Clone, Debug)]
pub struct RequesterOwner {
    pub name: String,
    pub selector: LabelSelector,
}

impl RequesterOwner {
    /// Whether the owner would count a Pod with these labels as one of its own.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        forced::selects(&self.selector, labels)
    }
}

/// The engine that a requester asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchedEngine {
    /// Identifies interchangeable engines: a hash of the patched Pod without its routing metadata.
    pub fingerprint: EngineFingerprint,
    /// The labels that route requests to the engine.
    pub labels: BTreeMap<String, String>,
    /// Bytes on each accelerator, if the command sets them.
    pub kv_cache: Option<Bytes>,
    /// Whether the command loads LoRA adapters, which level 2 loses.
    pub adapters: bool,
}

/// Reads the engine that a requester on this node asks for.
///
/// # Errors
/// See [`Error`].
pub fn patched_engine(requester: &Pod, node: &NodeName) -> Result<PatchedEngine, Error> {
    let mut pod = patched_pod(requester, node)?;
    let labels = pod.metadata.labels.take().unwrap_or_default();
    pod.metadata.annotations = None;
    let mut containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let engine = containers.find(|container| container.name == keys::CONTAINER).ok_or(Error::NoContainer)?;
    let command: Vec<String> =
        [&engine.command, &engine.args].into_iter().flatten().flatten().cloned().collect();
    let (kv_cache, adapters) = (kv_cache_by_command(&command), has_lora_by_command(&command));
    let hash = digest::digest(&digest::SHA256, &text(&pod)?);
    let first = hash.as_ref().iter().take(8);
    let fingerprint = EngineFingerprint(first.fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
    Ok(PatchedEngine { fingerprint, labels, kv_cache, adapters })
}

/// Serializes a Pod for hashing. serde_json sorts objects, so equal Pods have equal text.
fn text(pod: &Pod) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(pod).map_err(|error| Error::NoPod(error.to_string()))
}

/// Hashes the patched engine and its placement, in base64 as the public project does.
fn nominal(patched: &Pod, placement: &ProviderPlacement<'_>) -> Result<String, Error> {
    let mut pod = patched.clone();
    (pod.metadata.labels, pod.metadata.annotations) = (None, None);
    let numbers = |all: &[u32]| all.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let accelerators = placement.numbers.map_or_else(|| keys::join_ids(placement.accelerators), numbers);
    let mut text = text(&pod)?;
    text.extend(format!(";gpus={accelerators};node={}", placement.node).into_bytes());
    let hash = digest::digest(&digest::SHA256, &text);
    let base64 = serde_json::to_value(ByteString(hash.as_ref().to_vec()));
    let base64 = base64.map_err(|error| Error::NoPod(error.to_string()))?;
    Ok(base64.as_str().unwrap_or_default().trim_end_matches('=').to_owned())
}

/// Builds the provider of this engine.
///
/// `resource`: the extended resource by which other Pods get accelerators on the node. A provider requests none of it.
///
/// # Errors
/// See [`Error`].
pub fn build(
    requester: &Pod,
    placement: &ProviderPlacement<'_>,
    record: &EngineRecord,
    owner: Option<&RequesterOwner>,
    resource: &str,
) -> Result<BuiltProvider, Error> {
    let mut pod = patched_pod(requester, placement.node)?;
    let nominal = nominal(&pod, placement)?;
    let requester_name = requester.metadata.name.clone().unwrap_or_default();
    let name = name(placement, &record.engine);
    let labels = pod.metadata.labels.get_or_insert_default();
    // Label of the requester's ReplicaSet.
    labels.remove("pod-template-hash");
    if let Some(owner) = owner.filter(|owner| owner.selects(labels)) {
        return Err(Error::Selected { owner: owner.name.clone() });
    }
    labels.insert(keys::DUAL.to_owned(), requester_name.clone());
    labels.insert(keys::SLEEPING.to_owned(), "false".to_owned());
    pod.metadata.name = Some(name.clone());
    pod.metadata.finalizers = Some(vec![keys::PROVIDER_FINALIZER.to_owned()]);
    let spec = pod.spec.as_mut().ok_or(Error::NoContainer)?;
    let port = forced::force(spec, placement, resource).ok_or(Error::NoContainer)?;
    record::write(&mut pod, placement.node, &requester_name, record, port);
    pod.metadata.annotations.get_or_insert_default().insert(keys::NOMINAL.to_owned(), nominal);
    Ok(BuiltProvider { pod, name })
}

/// Returns the Pod that the server patch makes of a requester on this node.
pub(super) fn patched_pod(requester: &Pod, node: &NodeName) -> Result<Pod, Error> {
    decoded(patched(requester, node)?)
}

/// Applies the server patch to the requester as its user wrote it.
///
/// Fields that the API server, the scheduler and the kubelet added are left out first.
fn patched(requester: &Pod, node: &NodeName) -> Result<Value, Error> {
    let text = keys::read(requester, keys::SERVER_PATCH).ok_or(Error::NoPatch)?;
    let text = template::render(text, &TemplateFields { node: node.as_str() })?;
    let patch: Value = serde_saphyr::from_str(&text).map_err(|error| Error::Text(error.to_string()))?;
    let Value::Object(patch) = patch else {
        return Err(Error::Text("the top level is not a mapping".to_owned()));
    };
    let mut merged = strategic_merge::merge(base(requester), patch)?;
    // The patch may change labels and annotations only; the other metadata and the status are not its own.
    merged.remove("status");
    let metadata = merged.remove("metadata").unwrap_or_default();
    let fields =
        ["labels", "annotations"].map(|key| (key.to_owned(), metadata.get(key).cloned().unwrap_or_default()));
    let mut fields: serde_json::Map<_, _> =
        fields.into_iter().filter(|(_, value)| !value.is_null()).collect();
    fields.insert("namespace".to_owned(), json!(requester.metadata.namespace));
    merged.insert("metadata".to_owned(), Value::Object(fields));
    Ok(Value::Object(merged))
}

/// Decodes a Pod and refuses fields that Pods do not have.
fn decoded(merged: Value) -> Result<Pod, Error> {
    let pod: Pod = serde_json::from_value(merged.clone()).map_err(|error| Error::NoPod(error.to_string()))?;
    let again = serde_json::to_value(&pod).map_err(|error| Error::NoPod(error.to_string()))?;
    match first_lost_field(&merged, &again) {
        Some(path) => Err(Error::Unknown(path)),
        None => Ok(pod),
    }
}

/// Finds the first field that the round trip dropped.
fn first_lost_field(before: &Value, after: &Value) -> Option<String> {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => before.iter().find_map(|(field, value)| {
            let Some(value_after) = after.get(field) else {
                return (!value.is_null()).then(|| field.clone());
            };
            first_lost_field(value, value_after).map(|rest| format!("{field}.{rest}"))
        }),
        (Value::Array(before), Value::Array(after)) => {
            let mut pairs = before.iter().zip(after).enumerate();
            pairs.find_map(|(n, (before, after))| {
                first_lost_field(before, after).map(|rest| format!("[{n}].{rest}"))
            })
        }
        _ => None,
    }
}
