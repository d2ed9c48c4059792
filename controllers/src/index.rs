//! Index of the cluster's objects, from which the served models and pools follow.
//!
//! The index makes no calls and has no clock. Watches feed it ([`ClusterIndex::apply`], [`ClusterIndex::delete`]) and
//! read the result ([`Resolved`]). The result does not depend on the order in which different objects arrive.
//!
//! It has three layers. Each is recomputed only after a change below it, since a cluster's objects change all the time
//! and mostly in irrelevant fields:
//! 1. each object by itself (`model_entry`, `node`, `pool`): once per version of the object;
//! 2. pool membership (`pool_membership`): the nodes of each pool and its capacity, from nodes and pools;
//! 3. the models in these pools (`placement`), checked against each other (`resolved`).

mod model_entry;
mod node;
mod placement;
mod pool;
mod pool_membership;
mod resolved;
mod selectors;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use self::{
    model_entry::SpecVersion, node::IndexedNode, node::ListedAccelerators, pool::PoolEntry,
    pool_membership::PoolMembership,
};
use super::{
    convert::ConversionPolicy,
    crd::{
        AcceleratorNode, AcceleratorPool, AcceleratorPoolStatus, InferenceModel, InferenceModelStatus,
        ledger::ObjectName,
    },
};

pub(super) use self::resolved::list;
pub use self::{
    pool::PoolTerms,
    resolved::{
        AcceleratorCapacities, PoolProblem, PoolSlots, RejectedModel, Resolved, ResolvedNode, ResolvedPool,
        ServedModel, ServedVariant, SlotAccelerator,
    },
};

/// The kinds of objects that the index watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    Model,
    Pool,
    AcceleratorNode,
    Node,
}

/// Identifies one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKey {
    Model(ObjectName),
    Pool(String),
    AcceleratorNode(String),
    Node(String),
}

/// One object from a watch.
#[derive(Clone, Debug)]
pub enum IndexedObject {
    Model(Box<InferenceModel>),
    Pool(Box<AcceleratorPool>),
    AcceleratorNode(Box<AcceleratorNode>),
    Node(Box<Node>),
}

/// What this gateway can watch and what objects may request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchScope {
    pub policy: ConversionPolicy,
    /// Whether nodes can be watched. A gateway that may read one namespace only cannot, and uses the pools' own
    /// declarations.
    pub nodes: bool,
    /// Number of lists that models come in: one per watched namespace, or one for all.
    pub namespaces: usize,
}

/// All relevant objects and what follows from them.
#[derive(Debug)]
pub struct ClusterIndex {
    scope: WatchScope,
    models: BTreeMap<ObjectName, model_entry::ModelEntry>,
    pools: BTreeMap<String, PoolEntry>,
    /// Accelerators of each node, by node name; `Err` has the reason if they cannot be used.
    accelerators: BTreeMap<String, Result<ListedAccelerators, String>>,
    nodes: BTreeMap<String, Result<IndexedNode, String>>,
    /// Kinds that were listed, with the namespace if the list was of one namespace.
    listed_kinds: BTreeSet<(ObjectKind, Option<String>)>,
    pool_membership: Option<PoolMembership>,
    resolved: Option<Arc<Resolved>>,
    conversions: u64,
}

impl ClusterIndex {
    #[must_use]
    pub const fn new(scope: WatchScope) -> Self {
        Self {
            scope,
            models: BTreeMap::new(),
            pools: BTreeMap::new(),
            accelerators: BTreeMap::new(),
            nodes: BTreeMap::new(),
            listed_kinds: BTreeSet::new(),
            pool_membership: None,
            resolved: None,
            conversions: 0,
        }
    }

    /// Inserts or updates an object.
    pub fn apply(&mut self, object: impl Into<IndexedObject>) {
        match object.into() {
            IndexedObject::Model(model) => self.model(&model),
            IndexedObject::Pool(pool) => self.pool(*pool),
            IndexedObject::AcceleratorNode(node) => {
                let name = node.metadata.name.clone().unwrap_or_default();
                let moved = match ListedAccelerators::of(&node) {
                    Some(found) => put(&mut self.accelerators, name, Ok(found)),
                    None => self.accelerators.remove(&name).is_some(),
                };
                if moved {
                    self.invalidate_pools();
                }
            }
            IndexedObject::Node(node) => {
                let name = node.metadata.name.clone().unwrap_or_default();
                if put(&mut self.nodes, name, Ok(IndexedNode::of(*node))) {
                    self.invalidate_pools();
                }
            }
        }
    }

    /// Marks an object as unreadable.
    ///
    /// The object keeps the names or nodes it had: a mistake must not pass them on to other objects.
    pub fn unreadable(&mut self, kind: ObjectKind, metadata: &ObjectMeta, error: &str) {
        let why = || format!("the object cannot be read: {error}");
        match ObjectKey::of(kind, metadata) {
            ObjectKey::Model(object) => {
                let entry = model_entry::ModelEntry::unreadable(metadata, error, self.models.remove(&object));
                self.models.insert(object, entry);
                self.resolved = None;
            }
            ObjectKey::Pool(name) => {
                let entry = PoolEntry::unreadable(metadata, error, self.pools.remove(&name));
                self.pools.insert(name, entry);
                self.invalidate_pools();
            }
            ObjectKey::AcceleratorNode(name) => {
                if put(&mut self.accelerators, name, Err(why())) {
                    self.invalidate_pools();
                }
            }
            ObjectKey::Node(name) => {
                if put(&mut self.nodes, name, Err(why())) {
                    self.invalidate_pools();
                }
            }
        }
    }

    /// Removes an object.
    pub fn delete(&mut self, key: &ObjectKey) {
        let on_ground = match key {
            ObjectKey::Model(object) => {
                if self.models.remove(object).is_some() {
                    self.resolved = None;
                }
                false
            }
            ObjectKey::Pool(name) => self.pools.remove(name).is_some(),
            ObjectKey::AcceleratorNode(name) => self.accelerators.remove(name).is_some(),
            ObjectKey::Node(name) => self.nodes.remove(name).is_some(),
        };
        if on_ground {
            self.invalidate_pools();
        }
    }

    /// Removes the objects that are missing from a full list.
    ///
    /// The list covers a kind in one namespace, or in all without `namespace`. Missing objects were deleted while no
    /// watch was running.
    pub fn apply_list(&mut self, kind: ObjectKind, namespace: Option<&str>, listed: &BTreeSet<ObjectKey>) {
        let looked_at = |key: &&ObjectKey| match (namespace, key) {
            (Some(namespace), ObjectKey::Model(object)) => object.namespace == namespace,
            _ => true,
        };
        let known: Vec<ObjectKey> = match kind {
            ObjectKind::Model => self.models.keys().cloned().map(ObjectKey::Model).collect(),
            ObjectKind::Pool => self.pools.keys().cloned().map(ObjectKey::Pool).collect(),
            ObjectKind::AcceleratorNode => {
                self.accelerators.keys().cloned().map(ObjectKey::AcceleratorNode).collect()
            }
            ObjectKind::Node => self.nodes.keys().cloned().map(ObjectKey::Node).collect(),
        };
        known.iter().filter(looked_at).filter(|key| !listed.contains(key)).for_each(|key| self.delete(key));
        self.listed_kinds.insert((kind, namespace.map(str::to_owned)));
    }

    /// Whether every kind was listed once.
    ///
    /// Before that, the result covers only a part of the cluster, and nothing may be stopped, refused or written
    /// because of it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let nodes = [ObjectKind::AcceleratorNode, ObjectKind::Node].into_iter().filter(|_| self.scope.nodes);
        let wanted = [(ObjectKind::Model, self.scope.namespaces), (ObjectKind::Pool, 1)].into_iter();
        let lists = |kind| self.listed_kinds.iter().filter(|(listed, _)| *listed == kind).count();
        wanted.chain(nodes.map(|kind| (kind, 1))).all(|(kind, least)| lists(kind) >= least)
    }

    /// Returns what follows from all objects; the same `Arc` until a relevant change.
    pub fn resolved(&mut self) -> Arc<Resolved> {
        if let Some(resolved) = &self.resolved {
            return Arc::clone(resolved);
        }
        let membership = self.pool_membership.get_or_insert_with(|| {
            let nodes = self.scope.nodes.then_some(&self.nodes);
            PoolMembership::compute(&self.pools, nodes, &self.accelerators)
        });
        let resolved = Arc::new(placement::resolve(&self.models, &self.pools, membership, self.scope.policy));
        self.resolved = Some(Arc::clone(&resolved));
        resolved
    }

    /// Returns the object's last known status. A default status, which no gateway wrote, counts as none.
    #[must_use]
    pub fn model_status(&self, object: &ObjectName) -> Option<&InferenceModelStatus> {
        self.models.get(object)?.status.as_ref().filter(|status| status.observed_generation.is_some())
    }

    /// Returns the pool's last known status with its ledger.
    ///
    /// No decision uses this copy: reservations read the pool again.
    #[must_use]
    pub fn pool_status(&self, pool: &str) -> Option<&AcceleratorPoolStatus> {
        self.pools.get(pool)?.status.as_ref()
    }

    /// Returns how many versions of InferenceModels were converted so far.
    #[must_use]
    pub const fn conversions(&self) -> u64 {
        self.conversions
    }

    fn model(&mut self, model: &InferenceModel) {
        let object = super::conflicts::object_name(model);
        let version = SpecVersion::of(&model.metadata);
        if let Some(known) = self.models.get_mut(&object)
            && known.version.is_same(&version)
        {
            known.status.clone_from(&model.status);
            return;
        }
        self.conversions += 1;
        self.models.insert(object, model_entry::ModelEntry::of(model, version, self.scope.policy));
        self.resolved = None;
    }

    fn pool(&mut self, pool: AcceleratorPool) {
        let name = pool.metadata.name.clone().unwrap_or_default();
        let version = SpecVersion::of(&pool.metadata);
        if let Some(known) = self.pools.get_mut(&name)
            && known.version.is_same(&version)
        {
            known.status = pool.status;
            return;
        }
        self.pools.insert(name, PoolEntry::of(pool, version));
        self.invalidate_pools();
    }

    fn invalidate_pools(&mut self) {
        self.pool_membership = None;
        self.resolved = None;
    }
}

/// Inserts a value and returns whether it differs from the former.
fn put<T: PartialEq>(into: &mut BTreeMap<String, T>, name: String, value: T) -> bool {
    let changed = into.get(&name) != Some(&value);
    if changed {
        into.insert(name, value);
    }
    changed
}

impl ObjectKey {
    /// Returns the key of the object with this metadata.
    #[must_use]
    pub fn of(kind: ObjectKind, metadata: &ObjectMeta) -> Self {
        let name = metadata.name.clone().unwrap_or_default();
        match kind {
            ObjectKind::Model => {
                Self::Model(ObjectName::new(metadata.namespace.clone().unwrap_or_default(), name))
            }
            ObjectKind::Pool => Self::Pool(name),
            ObjectKind::AcceleratorNode => Self::AcceleratorNode(name),
            ObjectKind::Node => Self::Node(name),
        }
    }
}

impl From<InferenceModel> for IndexedObject {
    fn from(model: InferenceModel) -> Self {
        Self::Model(Box::new(model))
    }
}

impl From<AcceleratorPool> for IndexedObject {
    fn from(pool: AcceleratorPool) -> Self {
        Self::Pool(Box::new(pool))
    }
}

impl From<AcceleratorNode> for IndexedObject {
    fn from(node: AcceleratorNode) -> Self {
        Self::AcceleratorNode(Box::new(node))
    }
}

impl From<Node> for IndexedObject {
    fn from(node: Node) -> Self {
        Self::Node(Box::new(node))
    }
}
