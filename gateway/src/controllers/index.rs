//! What the objects of the cluster mean together, kept up to date as they come and go.
//!
//! No calls and no clock: whoever watches tells what it saw ([`ClusterIndex::apply`], [`ClusterIndex::delete`]), and asks what follows
//! ([`Resolved`]). What follows does not depend on the order in which different objects were told.
//!
//! Three layers, each made anew only when something below it has changed, since a cluster's objects change all the time
//! and mostly in what does not matter here:
//! 1. what an object means by itself (`entry`, `node`, `pool`): once for each version of the object;
//! 2. the *ground* (`ground`): which nodes are in which pool, and what the pools have. Nodes and pools make it;
//! 3. the models on that ground (`placement`), and beside each other (`resolved`).

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
        AcceleratorCapacities, PoolProblem, RejectedModel, Resolved, ResolvedNode, ResolvedPool, ServedModel,
    },
};

/// The kinds of objects that are watched for this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKind {
    Model,
    Pool,
    AcceleratorNode,
    Node,
}

/// Which object is meant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectKey {
    Model(ObjectName),
    Pool(String),
    AcceleratorNode(String),
    Node(String),
}

/// One object, as a watch has it.
#[derive(Clone, Debug)]
pub enum IndexedObject {
    Model(Box<InferenceModel>),
    Pool(Box<AcceleratorPool>),
    AcceleratorNode(Box<AcceleratorNode>),
    Node(Box<Node>),
}

/// What is there to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchScope {
    pub policy: ConversionPolicy,
    /// Nodes can be watched. A gateway that may read one namespace alone cannot, and believes what pools say of
    /// themselves.
    pub nodes: bool,
    /// Lists that models come in: one for each watched namespace, or one of all.
    pub namespaces: usize,
}

/// Every object that matters, with what was made of it.
#[derive(Debug)]
pub struct ClusterIndex {
    scope: WatchScope,
    models: BTreeMap<ObjectName, model_entry::ModelEntry>,
    pools: BTreeMap<String, PoolEntry>,
    /// What is said of a node's accelerators, by the node's name; `Err`: why it cannot be used.
    accelerators: BTreeMap<String, Result<ListedAccelerators, String>>,
    nodes: BTreeMap<String, Result<IndexedNode, String>>,
    /// What was listed, by namespace where that was one namespace's.
    listed_kinds: BTreeSet<(ObjectKind, Option<String>)>,
    pool_membership: Option<PoolMembership>,
    resolved: Option<Arc<Resolved>>,
    conversions: u64,
}

impl ClusterIndex {
    #[must_use]
    pub const fn new(sight: WatchScope) -> Self {
        Self {
            scope: sight,
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

    /// The object is there, as it is now.
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

    /// The object is there and cannot be read. It keeps the names or the nodes that it had: they must not pass to others
    /// because of a mistake.
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

    /// The object is gone.
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

    /// All objects of the kind were listed, of this namespace or of all, and these are they: others that were there have
    /// gone while nobody looked.
    pub fn apply_list(&mut self, kind: ObjectKind, namespace: Option<&str>, there: &BTreeSet<ObjectKey>) {
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
        known.iter().filter(looked_at).filter(|key| !there.contains(key)).for_each(|key| self.delete(key));
        self.listed_kinds.insert((kind, namespace.map(str::to_owned)));
    }

    /// Every kind was listed once. Before that, what is settled speaks of a part of the cluster: nothing may be put away,
    /// refused or written for it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let nodes = [ObjectKind::AcceleratorNode, ObjectKind::Node].into_iter().filter(|_| self.scope.nodes);
        let wanted = [(ObjectKind::Model, self.scope.namespaces), (ObjectKind::Pool, 1)].into_iter();
        let lists = |kind| self.listed_kinds.iter().filter(|(listed, _)| *listed == kind).count();
        wanted.chain(nodes.map(|kind| (kind, 1))).all(|(kind, least)| lists(kind) >= least)
    }

    /// What follows from all of this. The same `Arc` as long as nothing that matters has changed.
    pub fn resolved(&mut self) -> Arc<Resolved> {
        if let Some(settled) = &self.resolved {
            return Arc::clone(settled);
        }
        let ground = self.pool_membership.get_or_insert_with(|| {
            let nodes = self.scope.nodes.then_some(&self.nodes);
            PoolMembership::compute(&self.pools, nodes, &self.accelerators)
        });
        let settled = Arc::new(placement::resolve(&self.models, &self.pools, ground, self.scope.policy));
        self.resolved = Some(Arc::clone(&settled));
        settled
    }

    /// The status that the object has, as it was last seen. Its default was written by nobody, and is none.
    #[must_use]
    pub fn model_status(&self, object: &ObjectName) -> Option<&InferenceModelStatus> {
        self.models.get(object)?.status.as_ref().filter(|status| status.observed_generation.is_some())
    }

    /// The status that the pool has, with its ledger, as it was last seen. Nothing is decided by it: bookings read the
    /// pool again.
    #[must_use]
    pub fn pool_status(&self, pool: &str) -> Option<&AcceleratorPoolStatus> {
        self.pools.get(pool)?.status.as_ref()
    }

    /// How many versions of InferenceModels were read so far.
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

/// Whether that changed anything.
fn put<T: PartialEq>(into: &mut BTreeMap<String, T>, name: String, value: T) -> bool {
    let changed = into.get(&name) != Some(&value);
    if changed {
        into.insert(name, value);
    }
    changed
}

impl ObjectKey {
    /// Of an object with this metadata.
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
