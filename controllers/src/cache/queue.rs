//! The changes that one reader has not seen yet, compressed per object.
//!
//! A reader needs an object's present, and the last state before a deletion: that state shows whether a Pod's containers
//! had ended. So at most three things are kept per object: its last state, its deletion (if the reader knows the object),
//! and the last state of another object that has taken its name.

use std::collections::{BTreeMap, VecDeque};

use kube::Resource;

use crate::{
    crd::ledger::ObjectName,
    watch::{Delta, WatchedObject},
};

/// Maximum number of changes of one name: applied and deleted, then applied and deleted again under the same name.
const MAX_CHANGES: usize = 4;

#[derive(Debug)]
pub(super) struct ChangeQueue<K> {
    /// The newest list of each namespace. Lists come first: older changes of their namespaces are dropped.
    lists: BTreeMap<Option<String>, Vec<WatchedObject<K>>>,
    /// Names with changes, in the order of their oldest one.
    order: VecDeque<ObjectName>,
    changes: BTreeMap<ObjectName, VecDeque<ObjectChange<K>>>,
}

#[derive(Debug)]
enum ObjectChange<K> {
    Applied(WatchedObject<K>),
    Deleted,
}

impl<K> Default for ChangeQueue<K> {
    fn default() -> Self {
        Self { lists: BTreeMap::new(), order: VecDeque::new(), changes: BTreeMap::new() }
    }
}

impl<K: Resource<DynamicType = ()>> ChangeQueue<K> {
    pub(super) fn push_list(&mut self, namespace: Option<String>, objects: Vec<WatchedObject<K>>) {
        let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|listed| *listed == name.namespace);
        self.changes.retain(|name, _| !in_scope(name));
        self.order.retain(|name| !in_scope(name));
        self.lists.insert(namespace, objects);
    }

    pub(super) fn push_applied(&mut self, found: WatchedObject<K>) {
        let pending = self.pending(found.name());
        let same_object = match pending.back() {
            Some(ObjectChange::Applied(before)) => before.metadata().uid == found.metadata().uid,
            Some(ObjectChange::Deleted) | None => false,
        };
        if same_object {
            pending.pop_back();
        }
        pending.push_back(ObjectChange::Applied(found));
        Self::compress(pending);
    }

    pub(super) fn push_deleted(&mut self, name: ObjectName) {
        let pending = self.pending(name);
        if !matches!(pending.back(), Some(ObjectChange::Deleted)) {
            pending.push_back(ObjectChange::Deleted);
            Self::compress(pending);
        }
    }

    /// Returns the oldest change.
    pub(super) fn pop(&mut self) -> Option<Delta<K>> {
        if let Some((namespace, objects)) = self.lists.pop_first() {
            return Some(Delta::All { namespace, objects });
        }
        let name = self.order.pop_front()?;
        let pending = self.changes.get_mut(&name)?;
        let change = pending.pop_front();
        if pending.is_empty() {
            self.changes.remove(&name);
        } else {
            self.order.push_front(name.clone());
        }
        Some(match change? {
            ObjectChange::Applied(found) => Delta::Applied(found),
            ObjectChange::Deleted => Delta::Deleted(name),
        })
    }

    fn pending(&mut self, name: ObjectName) -> &mut VecDeque<ObjectChange<K>> {
        if !self.changes.contains_key(&name) {
            self.order.push_back(name.clone());
        }
        self.changes.entry(name).or_default()
    }

    /// Drops objects in the middle, of which the reader has seen nothing and which are gone.
    fn compress(pending: &mut VecDeque<ObjectChange<K>>) {
        if pending.len() > MAX_CHANGES {
            // The first two changes end what the reader knows, and the last one is the present.
            pending.drain(2..MAX_CHANGES);
        }
    }
}

#[cfg(test)]
mod tests;
