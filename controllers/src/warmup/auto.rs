//! The Warmups that Rouse itself creates: one for each model with `warmup: auto`.
//!
//! Such a Warmup is an object like any other, so its progress, its Events and its limits are where users look for them.
//! The model owns it, and Kubernetes deletes it together with the model.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Api, Client};
use rouse::units::{Millis, Tick};
use serde_json::{Value, json};

use crate::{
    crd::{GROUP, Warmup, ledger::ObjectName},
    index::{Resolved, ServedModel},
    label,
    workload::{EPOCH, MANAGED, ROUSE, merge},
    writer::{
        Error, ObjectWriter,
        fence::{Fence, SeenObject},
    },
};

const KIND: &str = "InferenceModel";
const SUFFIX: &str = "-warmup";
/// Maximum length of an object's name.
const MAX_NAME_CHARS: usize = 253;
/// Number of nodes that may fail. No cluster has so many: one bad node must not end the warming of the others.
const MAX_FAILED_NODES: u32 = 100_000;
/// Interval between two writes of the same Warmup. Once it has a permit, a write takes at most half of this time.
const RETRY_INTERVAL: Millis = Millis::secs(10);

/// A change to a Warmup of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum OwnedWarmupChange {
    Create {
        name: ObjectName,
        object: Value,
    },
    /// Sets fields that differ from what the model asks for.
    Update {
        name: ObjectName,
        uid: String,
        object: Value,
    },
    Delete {
        name: ObjectName,
        metadata: Box<ObjectMeta>,
    },
}

/// Decides which Warmups of models are to be changed, and when the next attempt is due.
#[derive(Debug)]
pub(crate) struct OwnedWarmups {
    /// Number of nodes that each of them warms at a time.
    parallelism: u32,
    /// When a Warmup with an open change may be written again.
    next_tries: BTreeMap<ObjectName, Tick>,
}

impl OwnedWarmups {
    pub(crate) const fn new(parallelism: u32) -> Self {
        Self { parallelism, next_tries: BTreeMap::new() }
    }

    /// Returns the changes that are due. The caller starts all of them.
    pub(crate) fn due<'a>(
        &mut self,
        resolved: &Resolved,
        existing: impl IntoIterator<Item = &'a Warmup>,
        now: Tick,
    ) -> Vec<OwnedWarmupChange> {
        let open = changes(resolved, existing, self.parallelism);
        let names: BTreeSet<&ObjectName> = open.iter().map(OwnedWarmupChange::name).collect();
        self.next_tries.retain(|name, _| names.contains(name));
        let is_due =
            |change: &OwnedWarmupChange| self.next_tries.get(change.name()).is_none_or(|at| *at <= now);
        let due: Vec<OwnedWarmupChange> = open.into_iter().filter(is_due).collect();
        self.next_tries.extend(due.iter().map(|change| (change.name().clone(), now + RETRY_INTERVAL)));
        due
    }

    /// Returns when to ask again although nothing has changed.
    pub(crate) fn next_deadline(&self) -> Option<Tick> {
        self.next_tries.values().min().copied()
    }

    /// Forgets the attempts of a term of leadership.
    pub(crate) fn clear(&mut self) {
        self.next_tries.clear();
    }
}

impl OwnedWarmupChange {
    pub(super) const fn name(&self) -> &ObjectName {
        match self {
            Self::Create { name, .. } | Self::Update { name, .. } | Self::Delete { name, .. } => name,
        }
    }

    /// Writes the change on behalf of the leader of this epoch.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the object is no longer as the decision saw it. See [`Error`].
    pub(crate) async fn execute(self, client: Client, writer: ObjectWriter, epoch: u64) -> Result<(), Error> {
        let stamp = json!({"metadata": {"annotations": {EPOCH: epoch.to_string()}}});
        let api: Api<Warmup> = Api::namespaced(client, &self.name().namespace);
        match self {
            Self::Create { mut object, .. } => {
                merge::into(&mut object, &stamp);
                writer.leadership_in(epoch)?;
                writer.create(&api, &object).await.map(drop)
            }
            Self::Update { name, uid, mut object } => {
                let found = writer.get_for_write(&api, &name.name, epoch).await?.ok_or(Error::Gone)?;
                if found.metadata.uid.as_ref() != Some(&uid) {
                    return Err(Error::Conflict);
                }
                merge::into(&mut object, &stamp);
                let version = json!({"metadata": {"resourceVersion": found.metadata.resource_version}});
                merge::into(&mut object, &version);
                writer.leadership_in(epoch)?;
                writer.apply(&api, &name.name, &object).await.map(drop)
            }
            Self::Delete { name, metadata } => {
                let fence = Fence::new(SeenObject::of(&metadata), epoch);
                writer.delete_fenced(&api, &name.name, &fence).await
            }
        }
    }
}

/// Returns the Warmup of each model that is to be kept warm.
fn wanted_warmups(resolved: &Resolved, parallelism: u32) -> BTreeMap<ObjectName, Value> {
    let wanted = |(object, served): (&ObjectName, &ServedModel)| {
        let uid = served.uid.as_ref().filter(|_| served.model.keeps_warm)?;
        Some((warmup_name(object), warmup(object, served, uid, parallelism)))
    };
    resolved.served.iter().filter_map(wanted).collect()
}

/// Returns what differs from what the models ask for.
///
/// A Warmup of that name that a user wrote stays as it is. So does the Warmup of a model that is not served now: a
/// model with an error in it keeps what it had.
fn changes<'a>(
    resolved: &Resolved,
    existing: impl IntoIterator<Item = &'a Warmup>,
    parallelism: u32,
) -> Vec<OwnedWarmupChange> {
    let mut wanted = wanted_warmups(resolved, parallelism);
    let mut changes = Vec::new();
    for found in existing {
        let metadata = &found.metadata;
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let name = ObjectName::new(text(&metadata.namespace), text(&metadata.name));
        let wanted = wanted.remove(&name);
        if !is_owned(resolved, &name.namespace, metadata) || metadata.deletion_timestamp.is_some() {
            continue;
        }
        match wanted {
            Some(object) => {
                let spec = serde_json::to_value(&found.spec).unwrap_or_default();
                if object.get("spec").is_none_or(|wanted| !has_all(&spec, wanted)) {
                    changes.push(OwnedWarmupChange::Update { name, uid: text(&metadata.uid), object });
                }
            }
            None => changes.push(OwnedWarmupChange::Delete { name, metadata: Box::new(metadata.clone()) }),
        }
    }
    changes.extend(wanted.into_iter().map(|(name, object)| OwnedWarmupChange::Create { name, object }));
    changes
}

/// Whether a served model owns an object with these metadata.
fn is_owned(resolved: &Resolved, namespace: &str, metadata: &ObjectMeta) -> bool {
    let is_model = |owner: &&OwnerReference| {
        let group = owner.api_version.split_once('/').map(|(group, _)| group);
        owner.controller == Some(true) && owner.kind == KIND && group == Some(GROUP)
    };
    let Some(owner) = metadata.owner_references.iter().flatten().find(is_model) else { return false };
    let model = resolved.served.get(&ObjectName::new(namespace, owner.name.as_str()));
    // A model that was created anew owns nothing of its predecessor, which Kubernetes deletes.
    model.is_some_and(|model| model.uid.as_ref() == Some(&owner.uid))
}

/// Whether a value has everything that is wanted. What users add, such as `paused`, stays.
fn has_all(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| found.get(key).is_some_and(|found| has_all(found, wanted)))
        }
        (found, wanted) => found == wanted,
    }
}

/// Returns the name of a model's Warmup. A hash of the whole name keeps truncated names apart.
fn warmup_name(model: &ObjectName) -> ObjectName {
    let name = &model.name;
    if name.len() + SUFFIX.len() <= MAX_NAME_CHARS {
        return ObjectName::new(model.namespace.as_str(), format!("{name}{SUFFIX}"));
    }
    let hash = label::value(name);
    let head: String = name.chars().take(MAX_NAME_CHARS - SUFFIX.len() - hash.len() - 1).collect();
    // A part of a name must not end with these.
    let head = head.trim_end_matches(['.', '-']);
    ObjectName::new(model.namespace.as_str(), format!("{head}-{hash}{SUFFIX}"))
}

/// Renders the Warmup of a model. Rouse retries its failures for ever, because no user starts
/// it again.
fn warmup(object: &ObjectName, served: &ServedModel, uid: &str, parallelism: u32) -> Value {
    let name = warmup_name(object);
    let model = served.spec.name.as_str();
    json!({
        "apiVersion": format!("{GROUP}/v1alpha1"),
        "kind": "Warmup",
        "metadata": {
            "name": name.name,
            "namespace": name.namespace,
            "labels": {MANAGED: ROUSE, label::MODEL: label::value(model)},
            "annotations": {label::MODEL_NAME: model},
            "ownerReferences": [{
                "apiVersion": format!("{GROUP}/v1alpha1"),
                "kind": KIND,
                "name": object.name,
                "uid": uid,
                "controller": true,
            }],
        },
        "spec": {
            "policies": {"parallelism": parallelism, "maxFailedNodes": MAX_FAILED_NODES},
            "targetModel": {"name": object.name, "keepWarm": true},
        },
    })
}
