//! One InferenceModel by itself.

use std::sync::Arc;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};

use crate::controllers::{
    convert::{self, Policy, convert},
    crd::{InferenceModel, InferenceModelStatus, ledger::ObjectName},
    refusal::{Refusal, Refused},
    settle::Claim,
};

/// Which version of an object's spec. An API server counts its generations; a status has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) uid: Option<String>,
    pub(super) generation: Option<i64>,
    /// It is being deleted, and something holds that up.
    pub(super) deleting: bool,
    pub(super) readable: bool,
}

impl Version {
    pub(super) fn of(metadata: &ObjectMeta) -> Self {
        Self {
            uid: metadata.uid.clone(),
            generation: metadata.generation,
            deleting: metadata.deletion_timestamp.is_some(),
            readable: true,
        }
    }

    pub(super) fn unreadable(metadata: &ObjectMeta) -> Self {
        Self { readable: false, ..Self::of(metadata) }
    }

    /// Certainly the same spec.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.uid.is_some() && self.generation.is_some() && self == other
    }
}

#[derive(Debug)]
pub(super) struct ModelEntry {
    pub(super) version: Version,
    pub(super) claim: Claim,
    pub(super) made: Result<Arc<convert::Model>, Refused>,
    pub(super) status: Option<InferenceModelStatus>,
}

impl ModelEntry {
    pub(super) fn of(model: &InferenceModel, version: Version, policy: Policy) -> Self {
        let made = if version.deleting {
            Err(Refusal::Terminating.into())
        } else {
            convert(model, policy).map(Arc::new)
        };
        Self { claim: Claim::of(model, made.is_ok()), made, version, status: model.status.clone() }
    }

    /// `before`: what was known of the object when it could be read.
    pub(super) fn unreadable(metadata: &ObjectMeta, error: &str, before: Option<Self>) -> Self {
        let (claim, status) = before.map_or_else(|| (nothing(metadata), None), |old| (old.claim, old.status));
        Self {
            version: Version::unreadable(metadata),
            claim: Claim { sound: false, ..claim },
            made: Err(Refusal::Unreadable(error.to_owned()).into()),
            status,
        }
    }
}

fn nothing(metadata: &ObjectMeta) -> Claim {
    let namespace = metadata.namespace.clone().unwrap_or_default();
    Claim {
        object: ObjectName::new(namespace, metadata.name.clone().unwrap_or_default()),
        created: created(metadata),
        name: String::new(),
        aliases: Vec::new(),
        dependencies: Vec::new(),
        sound: false,
    }
}

pub(super) fn created(metadata: &ObjectMeta) -> Option<Timestamp> {
    metadata.creation_timestamp.as_ref().map(|time| time.0)
}
