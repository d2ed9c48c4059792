//! Why an InferenceModel is not served.
//!
//! Each rejection has a message with the mistake and its correction, and a one-word reason that programs can check.

use std::{fmt, sync::Arc};

use rouse::units;

use super::{backend_address, crd::ledger::ObjectName};

/// One thing that is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("{field}: {error}")]
    Quantity { field: String, error: units::Error },
    #[error("{field}: {error}")]
    Duration { field: String, error: units::Error },
    #[error("'{name}' is not a valid model name: {why}")]
    Name { name: String, why: &'static str },
    #[error("{0}")]
    Spec(String),
    #[error("{0}")]
    Template(String),
    #[error("{0}")]
    Backend(#[from] backend_address::Error),
    #[error(
        "the name '{name}' belongs to {holder}, which is older: choose another name, or delete that object. Until \
         then this model is not served"
    )]
    DuplicateName { name: String, holder: ObjectName },
    #[error(
        "the alias '{alias}' belongs to {holder}, which is older: remove it from the aliases. Until then this model \
         is not served"
    )]
    DuplicateAlias { alias: String, holder: ObjectName },
    #[error("the model depends on itself: {0}. Remove one of these dependencies")]
    Cycle(DependencyCycle),
    #[error(
        "the model depends on the InferenceModel '{0}', which does not exist: create it, or remove it from dependencies"
    )]
    DependencyMissing(ObjectName),
    #[error("the model depends on {0}, which is not accepted: see the conditions of {0}")]
    DependencyRefused(ObjectName),
    #[error("the object cannot be read: {0}")]
    Unreadable(String),
    #[error("the object is being deleted")]
    Terminating,
    #[error(
        "no AcceleratorPool matches the model's nodeSelector ({wanted}): a pool accepts a model whose nodeSelector \
         has all labels of the pool's nodeSelector. Existing pools: {}", if .pools.is_empty() { "none" } else { .pools.as_str() }
    )]
    NoPool { wanted: String, pools: String },
    #[error("the model's nodeSelector matches the pools {0}: remove the labels of all but one")]
    SeveralPools(String),
    #[error(
        "the pool '{pool}' does not allow models of the namespace '{namespace}': choose another pool with \
         nodeSelector, or have the namespace added to the pool's allowedNamespaces"
    )]
    Namespace { pool: String, namespace: String },
    #[error(
        "the pool '{pool}' does not allow models that stay awake without requests (pinnable is false): remove \
         {fields}, or choose another pool with nodeSelector"
    )]
    Pinned { pool: String, fields: String },
    #[error("{0}")]
    Unsupported(&'static str),
}

/// A cycle of dependencies, as the rejection of one of its models names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DependencyCycle {
    /// The rejections of all models of the cycle share the names: each with a path of its own would be quadratic.
    models: Arc<[String]>,
    /// Position of the rejected model.
    first: usize,
}

/// Everything that is wrong with one object; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Rejections(pub(super) Vec<Rejection>);

impl Rejection {
    /// Returns the reason for the condition Accepted.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Quantity { .. } => "InvalidQuantity",
            Self::Duration { .. } => "InvalidDuration",
            Self::Name { .. } => "InvalidName",
            Self::Spec(_) => "InvalidSpec",
            Self::Template(_) => "InvalidTemplate",
            Self::Backend(backend_address::Error::InvalidUrl(_)) => "InvalidBackend",
            Self::Backend(_) => "ForbiddenBackend",
            Self::DuplicateName { .. } | Self::DuplicateAlias { .. } => "DuplicateName",
            Self::Cycle(_) => "DependencyCycle",
            Self::DependencyMissing(_) => "DependencyMissing",
            Self::DependencyRefused(_) => "DependencyRefused",
            Self::Unreadable(_) => "Unreadable",
            Self::Terminating => "Terminating",
            Self::NoPool { .. } => "NoPool",
            Self::SeveralPools(_) => "SeveralPools",
            Self::Namespace { .. } => "NamespaceNotAllowed",
            Self::Pinned { .. } => "PinningNotAllowed",
            Self::Unsupported(_) => "Unsupported",
        }
    }
}

impl DependencyCycle {
    /// Builds the cycle for the model at this position.
    #[must_use]
    pub const fn new(models: Arc<[String]>, first: usize) -> Self {
        Self { models, first }
    }

    /// Returns the models from the rejected one to itself again.
    pub fn path(&self) -> impl Iterator<Item = &str> {
        self.models.iter().map(String::as_str).cycle().skip(self.first).take(self.models.len() + 1)
    }
}

impl fmt::Display for DependencyCycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, model) in self.path().enumerate() {
            if index > 0 {
                f.write_str(" needs ")?;
            }
            f.write_str(model)?;
        }
        Ok(())
    }
}

impl Rejections {
    #[must_use]
    pub fn all(&self) -> &[Rejection] {
        &self.0
    }

    /// Returns the reason of the first rejection.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.0.first().map_or("InvalidSpec", Rejection::reason)
    }
}

impl From<Rejection> for Rejections {
    fn from(refusal: Rejection) -> Self {
        Self(vec![refusal])
    }
}

impl fmt::Display for Rejections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, refusal) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            refusal.fmt(f)?;
        }
        Ok(())
    }
}
