//! Why an InferenceModel is not served.
//!
//! Each rejection has a message with the mistake and its correction, and a one-word reason that programs can check.

use std::fmt;

use rouse::units;

use super::{backend_address, crd::ledger::ObjectName};

/// One thing that is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("{field}: {error}")]
    Quantity { field: String, error: units::Error },
    #[error("{field}: {error}")]
    Duration { field: String, error: units::Error },
    #[error("'{name}' cannot be a model's name: {why}")]
    Name { name: String, why: &'static str },
    #[error("{0}")]
    Spec(String),
    #[error("{0}")]
    Template(String),
    #[error("{0}")]
    Backend(#[from] backend_address::Error),
    #[error(
        "the name '{name}' belongs to {holder}, which is older: choose another, or delete that object. Until then this \
         model is not served"
    )]
    DuplicateName { name: String, holder: ObjectName },
    #[error(
        "the alias '{alias}' is a name of {holder}, which is older: take it out of the aliases. Until then this model \
         is not served"
    )]
    DuplicateAlias { alias: String, holder: ObjectName },
    #[error("it depends on itself: {}. Take one of these dependencies out", .0.join(" needs "))]
    Cycle(Vec<String>),
    #[error(
        "there is no InferenceModel '{0}', which it depends on: create it, or take it out of dependencies"
    )]
    DependencyMissing(ObjectName),
    #[error("it depends on {0}, which is not accepted: see the conditions of that one")]
    DependencyRefused(ObjectName),
    #[error("the object cannot be read: {0}")]
    Unreadable(String),
    #[error("it is being deleted")]
    Terminating,
    #[error(
        "no AcceleratorPool has the nodes of its nodeSelector ({wanted}): a pool takes a model whose nodeSelector has all \
         labels of the pool's. There is {}", if .pools.is_empty() { "no pool" } else { .pools.as_str() }
    )]
    NoPool { wanted: String, pools: String },
    #[error("its nodeSelector is of the pools {0}: take the labels of all but one out")]
    SeveralPools(String),
    #[error(
        "the pool '{pool}' is not for models of the namespace '{namespace}': choose another by nodeSelector, or have \
         the namespace added to the pool's allowedNamespaces"
    )]
    Namespace { pool: String, namespace: String },
    #[error(
        "the pool '{pool}' has no models that stay awake without requests (pinnable): take {field} out, or choose another \
         pool by nodeSelector"
    )]
    Pinned { pool: String, field: &'static str },
    #[error("{0}")]
    Unsupported(&'static str),
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
