//! The result of the index: pools, served models, and why other models are rejected.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{
    model::{AcceleratorId, ModelName, ModelSpec, VariantName},
    slots::ConfigurationName,
    units::Bytes,
};

use super::pool::PoolTerms;
use crate::{
    convert::{self, EnginePodTemplate, ModelHosting, ModelVariant},
    crd::ledger::ObjectName,
    rejection::Rejections,
};

/// Everything that follows from objects alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resolved {
    /// By name. Shared with the former `Resolved` while neither nodes nor pools change.
    pub pools: Arc<BTreeMap<String, ResolvedPool>>,
    /// Nodes of pools, and nodes that a warning excludes from their pool.
    pub nodes: Arc<BTreeMap<String, ResolvedNode>>,
    pub served: BTreeMap<ObjectName, ServedModel>,
    /// The object of each served model, by the model name that decisions and engines use.
    pub objects: BTreeMap<ModelName, ObjectName>,
    pub rejected: BTreeMap<ObjectName, RejectedModel>,
    /// The object of each model that only rejected objects name. Engines of the time when it was served may still run.
    pub unserved: BTreeMap<ModelName, ObjectName>,
}

impl Resolved {
    /// Finds the model with this name; aliases do not count.
    #[must_use]
    pub fn find(&self, model: &ModelName) -> Option<&ServedModel> {
        self.served.get(self.objects.get(model)?)
    }

    /// Returns the object in whose status the engines of this model are.
    #[must_use]
    pub fn object_of(&self, model: &ModelName) -> Option<&ObjectName> {
        self.objects.get(model).or_else(|| self.unserved.get(model))
    }

    /// Returns the object's uid, whether it is served or not.
    #[must_use]
    pub fn uid(&self, object: &ObjectName) -> Option<&String> {
        let served = self.served.get(object).map(|served| &served.uid);
        served.or_else(|| self.rejected.get(object).map(|rejected| &rejected.uid))?.as_ref()
    }

    /// Returns the terms of the pool that the variant runs in.
    #[must_use]
    pub fn terms(&self, variant: &ServedVariant) -> Option<&PoolTerms> {
        self.pools.get(variant.pool.as_ref()?)?.terms.as_deref()
    }
}

/// One AcceleratorPool.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedPool {
    pub uid: Option<String>,
    pub generation: Option<i64>,
    /// The parsed spec; `None` if it is invalid.
    pub terms: Option<Arc<PoolTerms>>,
    /// Number of the pool's nodes.
    pub nodes: u32,
    /// Number of healthy accelerators on them.
    pub accelerators: u32,
    /// Memory that may be granted; `None` while nothing may be.
    pub total: Option<Bytes>,
    /// Allocatable units of the pool's extended resource; `None` if no node reports any. With slots: those of its healthy
    /// accelerators.
    pub units: Option<u32>,
    /// Present if the decisions pick accelerators of the pool, whose slots engines share. Also while the spec is invalid.
    pub slots: Option<PoolSlots>,
    /// With slots: every accelerator that the node agents list.
    pub slot_accelerators: BTreeMap<AcceleratorId, SlotAccelerator>,
    /// Why nothing can start in the pool.
    pub problem: Option<PoolProblem>,
    /// What the sums leave out of the pool's nodes, and why.
    pub warnings: Vec<String>,
}

/// The slots of a pool's accelerators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSlots {
    /// The DeviceConfiguration that says which devices have the slots.
    pub configuration: ConfigurationName,
    /// Slots on each accelerator, at most.
    pub each: u32,
}

/// An accelerator whose slots engines take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotAccelerator {
    pub node: String,
    /// Its node takes new Pods. The decisions choose the node, so the scheduler could not choose another.
    pub takes_pods: bool,
    /// Memory that may be granted; zero if the accelerator is not healthy.
    pub capacity: Bytes,
    /// Slots that engines may take: those of the pool, or fewer if the node's agent offers fewer.
    pub slots: u32,
}

/// A node and its pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedNode {
    /// Uid of the Node.
    pub uid: Option<String>,
    pub pool: Option<String>,
    /// Number of known healthy accelerators.
    pub accelerators: u32,
    /// Accelerator type, from the label that the pool names.
    pub kind: Option<String>,
    /// Memory that may be granted on all its accelerators together; `None` if unknown.
    pub total: Option<Bytes>,
    pub capacities: AcceleratorCapacities,
    /// Index of each listed accelerator that has one.
    pub indices: BTreeMap<AcceleratorId, u32>,
    /// Slots on each of its accelerators, if its pool has slots.
    pub slots: Option<u32>,
    /// What does not count on this node, and why.
    pub warning: Option<String>,
}

impl ResolvedNode {
    /// Whether one more engine of the variant fits beside the `reserved` memory.
    ///
    /// On a node of unknown size it may.
    #[must_use]
    pub fn has_room_for(&self, variant: &ModelVariant, reserved: Bytes) -> bool {
        let Some(total) = self.total else { return true };
        let count = variant.spec.accelerators.count();
        let needed = Bytes(variant.spec.memory.awake.0.saturating_mul(u64::from(count)));
        self.accelerators >= count && total.saturating_sub(reserved) >= needed
    }
}

/// Known capacities of a node's accelerators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceleratorCapacities {
    /// Capacity of each unlisted accelerator.
    pub unlisted_each: Option<Bytes>,
    /// Capacity by UUID; zero for an unhealthy accelerator.
    pub by_uuid: BTreeMap<AcceleratorId, Bytes>,
}

/// Why nothing can start in a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolProblem {
    #[error("{0}")]
    Invalid(Rejections),
    /// The other pools, each with a shared node if there is one.
    #[error("{}", overlap(.0))]
    Overlap(BTreeMap<String, Option<String>>),
    #[error("no node has the labels of the pool's nodeSelector: label nodes, or correct the selector")]
    NoNodes,
    #[error(
        "the memory of the pool's accelerators is unknown: run NVIDIA's feature discovery, which labels the nodes, \
         or set spec.memory"
    )]
    NoCapacity,
    #[error("no node of the pool has a healthy accelerator with memory to grant")]
    NoAccelerators,
    #[error(
        "no node of the pool lists its accelerators yet, which the pool's slots need: run the node agent on the \
         pool's nodes, and let this gateway read nodes"
    )]
    NotListed,
}

impl PoolProblem {
    /// Returns the reason for the condition Ready.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid(refused) => refused.reason(),
            Self::Overlap(_) => "Overlap",
            Self::NoNodes => "NoNodes",
            Self::NoCapacity => "NoCapacity",
            Self::NoAccelerators | Self::NotListed => "NoAccelerators",
        }
    }
}

/// Maximum number of items that a message lists.
const MAX_LISTED: usize = 8;

fn overlap(others: &BTreeMap<String, Option<String>>) -> String {
    let named = others.iter().map(|(pool, node)| match node {
        Some(node) => format!("'{pool}' (node {node})"),
        None => format!("'{pool}'"),
    });
    format!(
        "the pool shares nodes with {}: change a nodeSelector so that each node is in one pool. Until then no engine \
         starts in any of these pools",
        list(named)
    )
}

/// Lists the first few items and the number of the others.
pub(crate) fn list(mut items: impl ExactSizeIterator<Item = String>) -> String {
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
    /// The variants that run, the cheapest first. There is at least one.
    pub variants: Vec<ServedVariant>,
    /// Spec for the decisions: each variant is placed in its pool, with the pools' terms applied.
    pub spec: ModelSpec,
    /// Parts of the object that have no effect.
    pub notes: Vec<String>,
}

/// A variant of a served model that runs.
#[derive(Clone, Debug)]
pub struct ServedVariant {
    pub name: VariantName,
    /// Configuration for talking to the variant's engines.
    pub engine: Arc<rouse_config::EngineConfig>,
    /// `None` for an external model.
    pub pool: Option<String>,
    /// Limit on the memory that the model's namespace may reserve in the pool.
    pub quota: Option<Bytes>,
    /// Why none of its engines can start now.
    pub blocked_by: Option<String>,
}

/// Compares shared parts by pointer first: usually one model of thousands changes, and all are compared.
impl PartialEq for ServedModel {
    fn eq(&self, other: &Self) -> bool {
        let Self { uid, generation, model, variants, spec, notes } = self;
        *generation == other.generation
            && *uid == other.uid
            && (Arc::ptr_eq(model, &other.model) || *model == other.model)
            && (variants, spec, notes) == (&other.variants, &other.spec, &other.notes)
    }
}

impl PartialEq for ServedVariant {
    fn eq(&self, other: &Self) -> bool {
        let Self { name, engine, pool, quota, blocked_by } = self;
        (Arc::ptr_eq(engine, &other.engine) || *engine == other.engine)
            && (name, pool, quota, blocked_by) == (&other.name, &other.pool, &other.quota, &other.blocked_by)
    }
}

impl ServedModel {
    /// Returns what the object says about this variant.
    #[must_use]
    pub fn converted(&self, variant: &ServedVariant) -> Option<&ModelVariant> {
        self.model.variants.iter().find(|converted| converted.name == variant.name)
    }

    /// Returns the cheapest variant that runs.
    #[must_use]
    pub fn cheapest(&self) -> Option<&ServedVariant> {
        self.variants.first()
    }

    /// Whether the model's backend runs outside of Rouse.
    #[must_use]
    pub fn is_external(&self) -> bool {
        matches!(self.model.hosting, ModelHosting::External(_))
    }

    /// Returns the pools that the variants run in.
    pub fn pools(&self) -> impl Iterator<Item = &String> {
        self.variants.iter().filter_map(|variant| variant.pool.as_ref())
    }

    /// Returns why no engine of any variant can start now; `None` if one can.
    #[must_use]
    pub fn blocked_by(&self) -> Option<String> {
        let reasons = self.variants.iter().map(|variant| variant.blocked_by.as_deref());
        let reasons = reasons.collect::<Option<BTreeSet<&str>>>().filter(|reasons| !reasons.is_empty())?;
        Some(reasons.into_iter().collect::<Vec<_>>().join("; "))
    }

    /// Returns the template of the model's Pods; `None` for an external model.
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
    pub model: ModelName,
    pub rejections: Rejections,
}
