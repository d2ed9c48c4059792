//! Index entry of one InferenceModel.

use std::sync::Arc;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};

use crate::{
    conflicts::ModelClaim,
    convert::{self, ConversionPolicy, convert},
    crd::{InferenceModel, InferenceModelStatus, ledger::ObjectName},
    rejection::{Rejection, Rejections},
};

/// Identifies a version of an object's spec.
///
/// The API server's generation counts these versions; a status write does not change it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SpecVersion {
    pub(super) uid: Option<String>,
    pub(super) generation: Option<i64>,
    /// The object is being deleted and a finalizer delays that.
    pub(super) deleting: bool,
    pub(super) readable: bool,
}

impl SpecVersion {
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

    /// Whether both certainly have the same spec.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.uid.is_some() && self.generation.is_some() && self == other
    }
}

#[derive(Debug)]
pub(super) struct ModelEntry {
    pub(super) version: SpecVersion,
    pub(super) claim: ModelClaim,
    pub(super) converted: Result<Arc<convert::ConvertedModel>, Rejections>,
    pub(super) status: Option<InferenceModelStatus>,
}

impl ModelEntry {
    pub(super) fn of(model: &InferenceModel, version: SpecVersion, policy: ConversionPolicy) -> Self {
        let made = if version.deleting {
            Err(Rejection::Terminating.into())
        } else {
            convert(model, policy).map(Arc::new)
        };
        Self {
            claim: ModelClaim::of(model, made.is_ok()),
            converted: made,
            version,
            status: model.status.clone(),
        }
    }

    /// Builds the entry of an unreadable object. `before` is its entry from when it was readable.
    pub(super) fn unreadable(metadata: &ObjectMeta, error: &str, before: Option<Self>) -> Self {
        let (claim, status) =
            before.map_or_else(|| (unknown_claim(metadata), None), |old| (old.claim, old.status));
        Self {
            version: SpecVersion::unreadable(metadata),
            claim: ModelClaim { sound: false, ..claim },
            converted: Err(Rejection::Unreadable(error.to_owned()).into()),
            status,
        }
    }
}

fn unknown_claim(metadata: &ObjectMeta) -> ModelClaim {
    let namespace = metadata.namespace.clone().unwrap_or_default();
    ModelClaim {
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
