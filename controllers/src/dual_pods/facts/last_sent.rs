//! Tracks which facts the pairing logic has received, and sends those that changed.
//!
//! A change marks what it may concern: a node, a template, the launcher builds, or everything. Only what is marked is
//! computed again, and only what then differs from what was sent last is sent.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    pairing::{
        Pairing,
        event::{LauncherBuildPolicy, PairingEvent, TemplateStatus},
        ids::{EngineFingerprint, LauncherBuild, NodeName},
    },
};

use super::{ClusterFacts, node_facts::NodeFacts};

/// Up to this many engines and launcher sources, no entry is forgotten.
pub(super) const MIN_RETAINED: usize = 256;

#[derive(Debug, Default)]
pub(super) struct LastSentFacts {
    pub(super) nodes: BTreeMap<NodeName, NodeFacts>,
    pub(super) template_statuses: BTreeMap<EngineFingerprint, TemplateStatus>,
    pub(super) build_policies: BTreeMap<LauncherBuild, LauncherBuildPolicy>,
}

/// Facts that may differ from those that were sent last. Those of templates keep track of their changes themselves.
#[derive(Debug, Default)]
pub(super) struct DirtyFacts {
    pub(super) everything: bool,
    pub(super) nodes: BTreeSet<NodeName>,
    pub(super) builds: bool,
}

/// The Pods that changed facts may affect.
#[derive(Debug, Default)]
pub(in crate::dual_pods) struct FactChanges {
    /// The Pods of all nodes are affected.
    pub(in crate::dual_pods) everywhere: bool,
    /// Nodes whose facts changed.
    pub(in crate::dual_pods) nodes: BTreeSet<NodeName>,
    /// The configurations of launchers and their engines changed.
    pub(in crate::dual_pods) configured: bool,
}

impl ClusterFacts {
    /// Sends all changed facts, and returns which Pods they may affect.
    pub(in crate::dual_pods) fn send_changes(&mut self, tell: &mut impl FnMut(PairingEvent)) -> FactChanges {
        let configured = self.configs.take_changed();
        if !std::mem::take(&mut self.changed) && !configured {
            return FactChanges::default();
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        let mut templates = self.revisions.take_changed();
        templates.extend(self.fingerprints.take_changed());
        let everywhere = dirty.everything || configured;
        if everywhere {
            dirty.nodes = self.nodes.keys().chain(self.last_sent.nodes.keys()).cloned().collect();
            let sent = self.last_sent.template_statuses.keys();
            templates =
                self.fingerprints.iter().chain(self.revisions.engines()).chain(sent).copied().collect();
        }
        let nodes = self.send_nodes(dirty.nodes, tell);
        self.send_templates(templates, tell);
        if everywhere || dirty.builds {
            self.send_build_policies(tell);
        }
        FactChanges { everywhere, nodes, configured }
    }

    /// Returns the nodes whose facts changed.
    fn send_nodes(
        &mut self,
        dirty: BTreeSet<NodeName>,
        tell: &mut impl FnMut(PairingEvent),
    ) -> BTreeSet<NodeName> {
        let mut changed = BTreeSet::new();
        for node in dirty {
            let (now, before) = (self.node_facts(&node), self.last_sent.nodes.get(&node));
            if now.as_ref() == before {
                continue;
            }
            NodeFacts::send(&node, before, now.as_ref(), tell);
            match now {
                Some(now) => drop(self.last_sent.nodes.insert(node.clone(), now)),
                None => drop(self.last_sent.nodes.remove(&node)),
            }
            changed.insert(node);
        }
        changed
    }

    fn send_templates(&mut self, dirty: BTreeSet<EngineFingerprint>, tell: &mut impl FnMut(PairingEvent)) {
        for fingerprint in dirty {
            let in_launchers = self.fingerprints.contains(&fingerprint);
            let status = self
                .revisions
                .template_status(fingerprint)
                .or_else(|| if in_launchers { self.configs.template_status(fingerprint) } else { None });
            let sent = &mut self.last_sent.template_statuses;
            match status {
                Some(status) => {
                    if sent.insert(fingerprint, status) != Some(status) {
                        tell(PairingEvent::Template { fingerprint, status });
                    }
                }
                // An engine of uncertain status keeps its last one.
                None if in_launchers => {}
                // The pairing logic also drops entries that were forgotten here.
                None => {
                    if sent.remove(&fingerprint).is_some() {
                        tell(PairingEvent::Template { fingerprint, status: TemplateStatus::Current });
                    }
                }
            }
        }
    }

    fn send_build_policies(&mut self, tell: &mut impl FnMut(PairingEvent)) {
        let sources = self.sources.values().chain(self.configs.sources());
        let policies: BTreeMap<LauncherBuild, LauncherBuildPolicy> =
            sources.filter_map(|source| Some((source.build(), self.configs.build_policy(source)?))).collect();
        let sent = &mut self.last_sent.build_policies;
        sent.retain(|build, _| {
            let stays = policies.contains_key(build) || self.sources.contains_key(build);
            if !stays {
                tell(PairingEvent::LauncherBuild { build: *build, policy: LauncherBuildPolicy::default() });
            }
            stays
        });
        for (build, policy) in policies {
            if sent.insert(build, policy) != Some(policy) {
                tell(PairingEvent::LauncherBuild { build, policy });
            }
        }
    }

    /// Forgets unused entries once their number has doubled since the last cleanup.
    pub(in crate::dual_pods) fn forget_unused(&mut self, core: &Pairing) {
        let count = self.revisions.len() + self.fingerprints.len() + self.sources.len();
        if count < MIN_RETAINED.max(2 * self.retained) {
            return;
        }
        let (mut engines, mut builds) = (BTreeSet::new(), BTreeSet::new());
        for node in core.nodes() {
            engines.extend(node.engines.keys().map(|id| id.fingerprint));
            engines
                .extend(node.requesters.values().map(|requester| requester.observed.requested.fingerprint));
            builds.extend(node.providers.values().filter_map(|known| known.build));
            builds.extend(node.accelerators.values().filter_map(|known| known.crashed_build));
        }
        self.revisions.retain(|fingerprint| engines.contains(fingerprint));
        self.fingerprints.retain(|fingerprint| engines.contains(fingerprint));
        self.sources.retain(|build, _| builds.contains(build));
        self.dirty.builds = true;
        self.retained = self.revisions.len() + self.fingerprints.len() + self.sources.len();
        self.changed |= self.retained < count;
    }

    /// Makes the next [`Self::send_changes`] send everything.
    pub(in crate::dual_pods) fn reset_last_sent(&mut self) {
        self.last_sent = LastSentFacts::default();
        (self.dirty.everything, self.changed) = (true, true);
        // Launchers may have gone while no events were sent. The existing ones are observed again.
        self.launchers.clear();
    }

    /// Makes the next [`Self::send_changes`] compute this node's facts again.
    pub(super) fn mark_node(&mut self, node: &NodeName) {
        self.dirty.nodes.insert(node.clone());
        self.changed = true;
    }

    pub(super) fn sent_accelerators(&self, node: &NodeName) -> impl Iterator<Item = &AcceleratorId> {
        self.last_sent.nodes.get(node).into_iter().flat_map(|sent| sent.accelerators.keys())
    }
}
