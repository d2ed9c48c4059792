//! The Pods of one node.

use std::collections::{BTreeMap, BTreeSet};

use rouse::pairing::ids::{ProviderId, RequesterId};

use super::IndexedPod;
use crate::crd::ledger::ObjectName;

/// Names of one node's Pods.
#[derive(Debug, Default)]
pub(super) struct NodePods {
    /// Pods of either role.
    names: BTreeSet<ObjectName>,
    providers: BTreeMap<ProviderId, ObjectName>,
    /// The providers whose records bind an engine to each requester.
    bound: BTreeMap<RequesterId, BTreeSet<(ProviderId, ObjectName)>>,
}

impl NodePods {
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.names.iter()
    }

    pub(super) fn provider(&self, id: &ProviderId) -> Option<&ObjectName> {
        self.providers.get(id)
    }

    pub(super) fn launchers(&self) -> impl Iterator<Item = &ObjectName> {
        self.providers.iter().filter(|(id, _)| id.is_launcher()).map(|(_, name)| name)
    }

    /// Returns the providers whose records bind an engine to this requester.
    pub(super) fn bound_to(&self, requester: &RequesterId) -> impl Iterator<Item = &ObjectName> {
        let all = self.bound.get(requester).into_iter().flatten();
        all.filter(|(id, name)| self.providers.get(id) == Some(name)).map(|(_, name)| name)
    }

    pub(super) fn insert(&mut self, role: &IndexedPod) {
        self.names.insert(role.name().clone());
        let IndexedPod::Provider(provider) = role else { return };
        self.providers.insert(provider.id.clone(), provider.name.clone());
        for requester in provider.records().iter().filter_map(|record| record.requester.as_ref()) {
            let entry = (provider.id.clone(), provider.name.clone());
            self.bound.entry(requester.clone()).or_default().insert(entry);
        }
    }

    pub(super) fn remove(&mut self, role: &IndexedPod) {
        self.names.remove(role.name());
        let IndexedPod::Provider(provider) = role else { return };
        // Another Pod may have taken the id over.
        if self.providers.get(&provider.id) == Some(&provider.name) {
            self.providers.remove(&provider.id);
        }
        let entry = (provider.id.clone(), provider.name.clone());
        for requester in provider.records().iter().filter_map(|record| record.requester.as_ref()) {
            if let Some(providers) = self.bound.get_mut(requester) {
                providers.remove(&entry);
                if providers.is_empty() {
                    self.bound.remove(requester);
                }
            }
        }
    }
}
