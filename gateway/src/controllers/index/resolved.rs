//! What follows from the objects: the pools, the models that are served, and why others are not.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{AcceleratorId, ModelName, ModelSpec},
    units::Bytes,
};

use super::pool::PoolTerms;
use crate::{
    config,
    controllers::{
        convert::{self, EnginePodTemplate, ModelHosting, ModelVariant},
        crd::ledger::ObjectName,
        rejection::Rejections,
    },
};

/// Everything that is decided by objects alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resolved {
    /// By name. Shared with the former `Resolved` while neither nodes nor pools have changed.
    pub pools: Arc<BTreeMap<String, ResolvedPool>>,
    /// Nodes of pools, and those that would be but for what is said.
    pub nodes: Arc<BTreeMap<String, ResolvedNode>>,
    pub served: BTreeMap<ObjectName, ServedModel>,
    /// Of each model that is served, whose decisions and engines go by its name, the object.
    pub objects: BTreeMap<ModelName, ObjectName>,
    pub rejected: BTreeMap<ObjectName, RejectedModel>,
}

impl Resolved {
    /// The model of this name, not an alias.
    #[must_use]
    pub fn find(&self, model: &ModelName) -> Option<&ServedModel> {
        self.served.get(self.objects.get(model)?)
    }

    /// The object's, whether it is served or not.
    #[must_use]
    pub fn uid(&self, object: &ObjectName) -> Option<&String> {
        let served = self.served.get(object).map(|served| &served.uid);
        served.or_else(|| self.rejected.get(object).map(|rejected| &rejected.uid))?.as_ref()
    }

    /// What the pool that it runs in says.
    #[must_use]
    pub fn terms(&self, served: &ServedModel) -> Option<&PoolTerms> {
        self.pools.get(served.pool.as_ref()?)?.terms.as_deref()
    }
}

/// One AcceleratorPool.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedPool {
    pub uid: Option<String>,
    pub generation: Option<i64>,
    /// What its spec means; `None` where that is not known.
    pub terms: Option<Arc<PoolTerms>>,
    /// Its nodes.
    pub nodes: u32,
    /// Healthy accelerators on them.
    pub accelerators: u32,
    /// What may be granted; `None` while nothing may be.
    pub total: Option<Bytes>,
    /// Pieces of its extended resource that Pods may take; `None`: no node says.
    pub units: Option<u32>,
    /// Why nothing can be started in it.
    pub problem: Option<PoolProblem>,
    /// What of its nodes was left out of the sums, and why.
    pub warnings: Vec<String>,
}

/// Where a node belongs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedNode {
    /// The Node's.
    pub uid: Option<String>,
    pub pool: Option<String>,
    /// Its healthy accelerators, as far as they are known.
    pub accelerators: u32,
    /// Of what type they are, by the label that the pool names.
    pub kind: Option<String>,
    /// What may be granted on all of them together; `None`: nothing says.
    pub total: Option<Bytes>,
    pub capacities: AcceleratorCapacities,
    /// What of it does not count, and why.
    pub warning: Option<String>,
}

/// What a node's accelerators hold, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceleratorCapacities {
    /// Each of those that are not listed.
    pub unlisted_each: Option<Bytes>,
    /// By UUID; nothing on one that is not healthy.
    pub by_uuid: BTreeMap<AcceleratorId, Bytes>,
}

/// Why nothing can be started in a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolProblem {
    #[error("{0}")]
    Invalid(Rejections),
    /// The other pools, each with a node that is in both when there is one.
    #[error("{}", overlap(.0))]
    Overlap(BTreeMap<String, Option<String>>),
    #[error("no node has the labels of its nodeSelector: label nodes, or correct the selector")]
    NoNodes,
    #[error(
        "nothing says how much memory its accelerators have: run NVIDIA's feature discovery, which labels its nodes, \
         or give spec.memory"
    )]
    NoCapacity,
    #[error("none of its nodes has a healthy accelerator with memory to grant")]
    NoAccelerators,
}

impl PoolProblem {
    /// The reason of the condition Ready.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(refused) => refused.reason(),
            Self::Overlap(_) => "Overlap",
            Self::NoNodes => "NoNodes",
            Self::NoCapacity => "NoCapacity",
            Self::NoAccelerators => "NoAccelerators",
        }
    }
}

/// As many of a list as a sentence should have.
const MAX_LISTED: usize = 8;

fn overlap(others: &BTreeMap<String, Option<String>>) -> String {
    let named = others.iter().map(|(pool, node)| match node {
        Some(node) => format!("'{pool}' (node {node})"),
        None => format!("'{pool}'"),
    });
    format!(
        "its nodes are also those of {}: change a nodeSelector so that a node is in one pool. Until then nothing is \
         started in either",
        list(named)
    )
}

/// The first few, and how many more there are.
pub(in crate::controllers) fn list(mut items: impl ExactSizeIterator<Item = String>) -> String {
    let more = items.len().saturating_sub(MAX_LISTED);
    let named: Vec<String> = items.by_ref().take(MAX_LISTED).collect();
    let named = named.join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

/// A model that clients can name.
#[derive(Clone, Debug)]
pub struct ServedModel {
    pub uid: Option<String>,
    pub generation: Option<i64>,
    pub model: Arc<convert::ConvertedModel>,
    /// Which of its variants is run: a place in `model.variants`.
    pub variant: usize,
    /// For the decisions: on its pool, with the pool's terms applied.
    pub spec: ModelSpec,
    /// How engines of that variant are spoken to.
    pub engine: Arc<config::EngineConfig>,
    /// `None` for a model that is external.
    pub pool: Option<String>,
    /// What its namespace may have reserved in the pool.
    pub quota: Option<Bytes>,
    /// Why none of its engines can be started now.
    pub blocked_by: Option<String>,
    /// What of the object has no effect in this version.
    pub notes: Vec<String>,
}

/// What is shared is the same: one changes among thousands, as a rule, and all are compared.
impl PartialEq for ServedModel {
    fn eq(&self, other: &Self) -> bool {
        let Self { uid, generation, model, variant, spec, engine, pool, quota, blocked_by: waits, notes } =
            self;
        *generation == other.generation
            && *uid == other.uid
            && (Arc::ptr_eq(model, &other.model) || *model == other.model)
            && (Arc::ptr_eq(engine, &other.engine) || *engine == other.engine)
            && *variant == other.variant
            && *spec == other.spec
            && (pool, quota, waits, notes) == (&other.pool, &other.quota, &other.blocked_by, &other.notes)
    }
}

impl ServedModel {
    /// The one that is run.
    #[must_use]
    pub fn variant(&self) -> Option<&ModelVariant> {
        self.model.variants.get(self.variant)
    }

    /// What its Pods are made of; `None` for a model that is external.
    #[must_use]
    pub fn pods(&self) -> Option<&EnginePodTemplate> {
        match &self.model.hosting {
            ModelHosting::Deployment(pods) | ModelHosting::DualPods(pods) => Some(pods),
            ModelHosting::External(_) => None,
        }
    }
}

/// A model that is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedModel {
    pub uid: Option<String>,
    pub generation: Option<i64>,
    pub rejections: Rejections,
}
