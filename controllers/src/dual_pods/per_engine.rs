//! Values of engines, grouped by node.

use std::collections::BTreeMap;

use rouse::pairing::ids::{NodeName, PairingEngineId};

/// A value for each engine. A plan cleans up its nodes, and visits the engines of no other node.
#[derive(Debug)]
pub(super) struct PerEngine<T>(BTreeMap<NodeName, BTreeMap<PairingEngineId, T>>);

impl<T> Default for PerEngine<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> PerEngine<T> {
    pub(super) fn get(&self, node: &NodeName, engine: &PairingEngineId) -> Option<&T> {
        self.0.get(node)?.get(engine)
    }

    /// Returns the values of a node's engines.
    pub(super) fn values_on(&self, node: &NodeName) -> impl Iterator<Item = &T> {
        self.0.get(node).into_iter().flat_map(BTreeMap::values)
    }

    pub(super) fn insert(&mut self, node: &NodeName, engine: PairingEngineId, value: T) {
        self.0.entry(node.clone()).or_default().insert(engine, value);
    }

    pub(super) fn remove(&mut self, node: &NodeName, engine: &PairingEngineId) -> Option<T> {
        self.0.get_mut(node)?.remove(engine)
    }

    /// Keeps the node's engines that still exist.
    pub(super) fn retain_on(&mut self, node: &NodeName, exists: impl Fn(&PairingEngineId) -> bool) {
        let Some(engines) = self.0.get_mut(node) else { return };
        engines.retain(|engine, _| exists(engine));
        if engines.is_empty() {
            self.0.remove(node);
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
