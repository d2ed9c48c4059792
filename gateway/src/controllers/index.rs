//! What the objects of the cluster mean together, kept up to date as they come and go.
//!
//! No calls and no clock: whoever watches tells what it saw ([`Index::apply`], [`Index::delete`]), and asks what follows
//! ([`Index::settled`]). What follows does not depend on the order in which different objects were told.
//!
//! Three layers, each made anew only when something below it has changed, since a cluster's objects change all the time
//! and mostly in what does not matter here:
//! 1. what an object means by itself (`entry`, `node`, `pool`): once for each version of the object;
//! 2. the *ground* (`ground`): which nodes are in which pool, and what the pools have. Nodes and pools make it;
//! 3. the models on that ground (`place`), and beside each other ([`super::settle`]).

mod entry;
mod ground;
mod node;
mod place;
mod pool;
mod selectors;
mod settled;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use self::{entry::Version, ground::Ground, node::Accelerators, node::NodeFacts, pool::PoolEntry};
use super::{
    convert::Policy,
    crd::{
        AcceleratorNode, AcceleratorPool, AcceleratorPoolStatus, InferenceModel, InferenceModelStatus,
        ledger::ObjectName,
    },
};

pub(super) use self::settled::list;
pub use self::{
    pool::Terms,
    settled::{NodePlace, Pool, Rejected, Room, Served, Settled, Trouble},
};

/// The kinds of objects that are watched for this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Model,
    Pool,
    AcceleratorNode,
    Node,
}

/// Which object is meant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    Model(ObjectName),
    Pool(String),
    AcceleratorNode(String),
    Node(String),
}

/// One object, as a watch has it.
#[derive(Clone, Debug)]
pub enum Object {
    Model(Box<InferenceModel>),
    Pool(Box<AcceleratorPool>),
    AcceleratorNode(Box<AcceleratorNode>),
    Node(Box<Node>),
}

/// What is there to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    pub policy: Policy,
    /// Nodes can be watched. A gateway that may read one namespace alone cannot, and believes what pools say of
    /// themselves.
    pub nodes: bool,
    /// Lists that models come in: one for each watched namespace, or one of all.
    pub namespaces: usize,
}

/// Every object that matters, with what was made of it.
#[derive(Debug)]
pub struct Index {
    sight: Sight,
    models: BTreeMap<ObjectName, entry::ModelEntry>,
    pools: BTreeMap<String, PoolEntry>,
    /// What is said of a node's accelerators, by the node's name; `Err`: why it cannot be used.
    accelerators: BTreeMap<String, Result<Accelerators, String>>,
    nodes: BTreeMap<String, Result<NodeFacts, String>>,
    /// What was listed, by namespace where that was one namespace's.
    listed: BTreeSet<(Kind, Option<String>)>,
    ground: Option<Ground>,
    settled: Option<Arc<Settled>>,
    conversions: u64,
}

impl Index {
    #[must_use]
    pub const fn new(sight: Sight) -> Self {
        Self {
            sight,
            models: BTreeMap::new(),
            pools: BTreeMap::new(),
            accelerators: BTreeMap::new(),
            nodes: BTreeMap::new(),
            listed: BTreeSet::new(),
            ground: None,
            settled: None,
            conversions: 0,
        }
    }

    /// The object is there, as it is now.
    pub fn apply(&mut self, object: impl Into<Object>) {
        match object.into() {
            Object::Model(model) => self.model(&model),
            Object::Pool(pool) => self.pool(*pool),
            Object::AcceleratorNode(node) => {
                let name = node.metadata.name.clone().unwrap_or_default();
                let moved = match Accelerators::of(&node) {
                    Some(found) => put(&mut self.accelerators, name, Ok(found)),
                    None => self.accelerators.remove(&name).is_some(),
                };
                if moved {
                    self.ground_moved();
                }
            }
            Object::Node(node) => {
                let name = node.metadata.name.clone().unwrap_or_default();
                if put(&mut self.nodes, name, Ok(NodeFacts::of(*node))) {
                    self.ground_moved();
                }
            }
        }
    }

    /// The object is there and cannot be read. It keeps the names or the nodes that it had: they must not pass to others
    /// because of a mistake.
    pub fn unreadable(&mut self, kind: Kind, metadata: &ObjectMeta, error: &str) {
        let why = || format!("the object cannot be read: {error}");
        match Key::of(kind, metadata) {
            Key::Model(object) => {
                let entry = entry::ModelEntry::unreadable(metadata, error, self.models.remove(&object));
                self.models.insert(object, entry);
                self.settled = None;
            }
            Key::Pool(name) => {
                let entry = PoolEntry::unreadable(metadata, error, self.pools.remove(&name));
                self.pools.insert(name, entry);
                self.ground_moved();
            }
            Key::AcceleratorNode(name) => {
                if put(&mut self.accelerators, name, Err(why())) {
                    self.ground_moved();
                }
            }
            Key::Node(name) => {
                if put(&mut self.nodes, name, Err(why())) {
                    self.ground_moved();
                }
            }
        }
    }

    /// The object is gone.
    pub fn delete(&mut self, key: &Key) {
        let on_ground = match key {
            Key::Model(object) => {
                if self.models.remove(object).is_some() {
                    self.settled = None;
                }
                false
            }
            Key::Pool(name) => self.pools.remove(name).is_some(),
            Key::AcceleratorNode(name) => self.accelerators.remove(name).is_some(),
            Key::Node(name) => self.nodes.remove(name).is_some(),
        };
        if on_ground {
            self.ground_moved();
        }
    }

    /// All objects of the kind were listed, of this namespace or of all, and these are they: others that were there have
    /// gone while nobody looked.
    pub fn listed(&mut self, kind: Kind, namespace: Option<&str>, there: &BTreeSet<Key>) {
        let looked_at = |key: &&Key| match (namespace, key) {
            (Some(namespace), Key::Model(object)) => object.namespace == namespace,
            _ => true,
        };
        let known: Vec<Key> = match kind {
            Kind::Model => self.models.keys().cloned().map(Key::Model).collect(),
            Kind::Pool => self.pools.keys().cloned().map(Key::Pool).collect(),
            Kind::AcceleratorNode => self.accelerators.keys().cloned().map(Key::AcceleratorNode).collect(),
            Kind::Node => self.nodes.keys().cloned().map(Key::Node).collect(),
        };
        known.iter().filter(looked_at).filter(|key| !there.contains(key)).for_each(|key| self.delete(key));
        self.listed.insert((kind, namespace.map(str::to_owned)));
    }

    /// Every kind was listed once. Before that, what is settled speaks of a part of the cluster: nothing may be put away,
    /// refused or written for it.
    #[must_use]
    pub fn complete(&self) -> bool {
        let nodes = [Kind::AcceleratorNode, Kind::Node].into_iter().filter(|_| self.sight.nodes);
        let wanted = [(Kind::Model, self.sight.namespaces), (Kind::Pool, 1)].into_iter();
        let lists = |kind| self.listed.iter().filter(|(listed, _)| *listed == kind).count();
        wanted.chain(nodes.map(|kind| (kind, 1))).all(|(kind, least)| lists(kind) >= least)
    }

    /// What follows from all of this. The same `Arc` as long as nothing that matters has changed.
    pub fn settled(&mut self) -> Arc<Settled> {
        if let Some(settled) = &self.settled {
            return Arc::clone(settled);
        }
        let ground = self.ground.get_or_insert_with(|| {
            let nodes = self.sight.nodes.then_some(&self.nodes);
            Ground::survey(&self.pools, nodes, &self.accelerators)
        });
        let settled = Arc::new(place::settle(&self.models, &self.pools, ground, self.sight.policy));
        self.settled = Some(Arc::clone(&settled));
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
        let object = super::settle::object_name(model);
        let version = Version::of(&model.metadata);
        if let Some(known) = self.models.get_mut(&object)
            && known.version.is(&version)
        {
            known.status.clone_from(&model.status);
            return;
        }
        self.conversions += 1;
        self.models.insert(object, entry::ModelEntry::of(model, version, self.sight.policy));
        self.settled = None;
    }

    fn pool(&mut self, pool: AcceleratorPool) {
        let name = pool.metadata.name.clone().unwrap_or_default();
        let version = Version::of(&pool.metadata);
        if let Some(known) = self.pools.get_mut(&name)
            && known.version.is(&version)
        {
            known.status = pool.status;
            return;
        }
        self.pools.insert(name, PoolEntry::of(pool, version));
        self.ground_moved();
    }

    fn ground_moved(&mut self) {
        self.ground = None;
        self.settled = None;
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

impl Key {
    /// Of an object with this metadata.
    #[must_use]
    pub fn of(kind: Kind, metadata: &ObjectMeta) -> Self {
        let name = metadata.name.clone().unwrap_or_default();
        match kind {
            Kind::Model => Self::Model(ObjectName::new(metadata.namespace.clone().unwrap_or_default(), name)),
            Kind::Pool => Self::Pool(name),
            Kind::AcceleratorNode => Self::AcceleratorNode(name),
            Kind::Node => Self::Node(name),
        }
    }
}

impl From<InferenceModel> for Object {
    fn from(model: InferenceModel) -> Self {
        Self::Model(Box::new(model))
    }
}

impl From<AcceleratorPool> for Object {
    fn from(pool: AcceleratorPool) -> Self {
        Self::Pool(Box::new(pool))
    }
}

impl From<AcceleratorNode> for Object {
    fn from(node: AcceleratorNode) -> Self {
        Self::AcceleratorNode(Box::new(node))
    }
}

impl From<Node> for Object {
    fn from(node: Node) -> Self {
        Self::Node(Box::new(node))
    }
}
