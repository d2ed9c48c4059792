//! Tracks which facts the pairing logic has received, and sends those that changed.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    pairing::{
        Pairing,
        event::{AcceleratorFacts, LauncherBuildPolicy, PairingEvent, PairingNodeFacts, TemplateStatus},
        ids::{EngineFingerprint, LauncherBuild, NodeName},
    },
    units::Bytes,
};

use super::{ClusterFacts, ObservedNode};
use crate::{
    crd::ledger::ObjectName,
    dual_pods::population::{self, NodeTraits},
    index::{PoolTerms, ResolvedNode},
    platform::launcher::pod::LauncherRevision,
};

/// Up to this many engines and launcher sources, no entry is forgotten.
pub(super) const MIN_RETAINED: usize = 256;

#[derive(Debug, Default)]
pub(super) struct LastSentFacts {
    pub(super) nodes: BTreeMap<NodeName, PairingNodeFacts>,
    pub(super) silent: BTreeSet<NodeName>,
    /// Nodes that lack their pool's taint.
    pub(super) untainted: BTreeSet<NodeName>,
    pub(super) accelerators: BTreeMap<(NodeName, AcceleratorId), AcceleratorFacts>,
    pub(super) template_statuses: BTreeMap<EngineFingerprint, TemplateStatus>,
    pub(super) build_policies: BTreeMap<LauncherBuild, LauncherBuildPolicy>,
    /// LauncherConfigs of the launchers that population policies place.
    pub(super) launcher_configs: BTreeMap<(NodeName, AcceleratorId), ObjectName>,
}

impl ClusterFacts {
    /// Sends all changed facts. Returns true if the change may also affect what requesters request.
    pub(in crate::dual_pods) fn send_changes(&mut self, tell: &mut impl FnMut(PairingEvent)) -> bool {
        let configured = self.configs.take_changed();
        if !std::mem::take(&mut self.changed) && !configured {
            return false;
        }
        let now = self.current();
        for (node, facts) in &now.nodes {
            if self.last_sent.nodes.get(node) != Some(facts) {
                tell(PairingEvent::Node { node: node.clone(), facts: facts.clone() });
            }
        }
        for node in self.last_sent.nodes.keys().filter(|node| !now.nodes.contains_key(*node)) {
            tell(PairingEvent::NodeGone { node: node.clone() });
        }
        for node in self.last_sent.silent.symmetric_difference(&now.silent) {
            tell(PairingEvent::KubeletReporting { node: node.clone(), reports: !now.silent.contains(node) });
        }
        for ((node, accelerator), facts) in &now.accelerators {
            if self.last_sent.accelerators.get(&(node.clone(), accelerator.clone())) != Some(facts) {
                let (node, accelerator, facts) = (node.clone(), accelerator.clone(), facts.clone());
                tell(PairingEvent::Accelerator { node, accelerator, facts });
            }
        }
        for (fingerprint, status) in &now.template_statuses {
            if self.last_sent.template_statuses.get(fingerprint) != Some(status) {
                tell(PairingEvent::Template { fingerprint: *fingerprint, status: *status });
            }
        }
        // The pairing logic also drops entries that were forgotten here. An entry of uncertain status keeps its last
        // one.
        let is_retained = |known: &&EngineFingerprint| {
            now.template_statuses.contains_key(known) || self.fingerprints.contains(known)
        };
        for fingerprint in self.last_sent.template_statuses.keys().filter(|known| !is_retained(known)) {
            tell(PairingEvent::Template { fingerprint: *fingerprint, status: TemplateStatus::Current });
        }
        let is_retained = |known: &&LauncherBuild| {
            now.build_policies.contains_key(known) || self.sources.contains_key(known)
        };
        for build in self.last_sent.build_policies.keys().filter(|known| !is_retained(known)) {
            tell(PairingEvent::LauncherBuild { build: *build, policy: LauncherBuildPolicy::default() });
        }
        for (build, terms) in &now.build_policies {
            if self.last_sent.build_policies.get(build) != Some(terms) {
                tell(PairingEvent::LauncherBuild { build: *build, policy: *terms });
            }
        }
        let bare = self.last_sent.untainted != now.untainted;
        self.last_sent = now;
        configured || bare
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
        self.retained = self.revisions.len() + self.fingerprints.len() + self.sources.len();
        self.changed |= self.retained < count;
    }

    /// Makes the next [`Self::send_changes`] send everything.
    pub(in crate::dual_pods) fn reset_last_sent(&mut self) {
        (self.last_sent, self.changed) = (LastSentFacts::default(), true);
        // Launchers may have gone while no events were sent. The existing ones are observed again.
        self.launchers.clear();
    }

    fn current(&self) -> LastSentFacts {
        let template_status = |fingerprint: &EngineFingerprint| {
            Some((*fingerprint, self.configs.template_status(*fingerprint)?))
        };
        let template_statuses = self
            .fingerprints
            .iter()
            .filter_map(template_status)
            .chain(self.revisions.template_statuses())
            .collect();
        let sources = self.sources.values().chain(self.configs.sources());
        let terms = |source: &LauncherRevision| Some((source.build(), self.configs.build_policy(source)?));
        let builds = sources.filter_map(terms).collect();
        let mut now = LastSentFacts { template_statuses, build_policies: builds, ..LastSentFacts::default() };
        now.silent =
            self.nodes.iter().filter(|(_, observed)| observed.silent).map(|(node, _)| node.clone()).collect();
        for (node, ObservedNode { traits, cordoned, .. }) in &self.nodes {
            let node_pool = self.node_pool(node);
            let host = node_pool.map(|(_, terms)| terms.host_sleep_memory).unwrap_or_default();
            now.nodes.insert(node.clone(), PairingNodeFacts { cordoned: *cordoned, host_sleep_memory: host });
            let Some((resolved_node, terms)) = node_pool else { continue };
            if self.missing_taint(node, terms).is_some() {
                now.untainted.insert(node.clone());
            }
            let met = self.assigned_accelerators.get(node).into_iter().flatten();
            let numbered = self.gpu_map.iter().filter_map(|map| map.get(node)).flat_map(BTreeMap::keys);
            let all: BTreeSet<&AcceleratorId> = resolved_node
                .capacities
                .by_uuid
                .keys()
                .chain(met)
                .chain(numbered)
                .chain(self.sent_accelerators(node))
                .collect();
            let mut accelerators: BTreeMap<&AcceleratorId, AcceleratorFacts> = all
                .into_iter()
                .enumerate()
                .filter_map(|(position, accelerator)| {
                    Some((accelerator, self.accelerator(node, accelerator, position, resolved_node, terms)?))
                })
                .collect();
            let populated = self.launcher_placement(node, traits, &accelerators);
            for accelerator in populated.keys() {
                accelerators.entry(accelerator).and_modify(|facts| facts.wants_launcher = true);
            }
            let at = |accelerator: &AcceleratorId| (node.clone(), accelerator.clone());
            now.accelerators
                .extend(accelerators.into_iter().map(|(accelerator, facts)| (at(accelerator), facts)));
            now.launcher_configs
                .extend(populated.into_iter().map(|(accelerator, of)| (at(&accelerator), of)));
        }
        now
    }

    /// Returns which of these accelerators get a launcher by policy, and of which LauncherConfig.
    fn launcher_placement(
        &self,
        node: &NodeName,
        traits: &NodeTraits,
        accelerators: &BTreeMap<&AcceleratorId, AcceleratorFacts>,
    ) -> BTreeMap<AcceleratorId, ObjectName> {
        let counts = self.configs.counts(traits);
        let mut healthy: Vec<_> = accelerators.iter().filter(|(_, facts)| facts.healthy).collect();
        healthy.sort_by_key(|(_, facts)| facts.index);
        let healthy: Vec<&AcceleratorId> = healthy.into_iter().map(|(accelerator, _)| *accelerator).collect();
        let launcher_on = |a: &&AcceleratorId| self.launchers.get(&(node.clone(), (*a).clone()));
        let existing = accelerators.keys().filter_map(|a| Some((*a, launcher_on(a)?))).collect();
        population::place_launchers(&counts, &healthy, &existing)
    }

    fn accelerator(
        &self,
        node: &NodeName,
        accelerator: &AcceleratorId,
        position: usize,
        resolved_node: &ResolvedNode,
        terms: &PoolTerms,
    ) -> Option<AcceleratorFacts> {
        let index = match &self.gpu_map {
            Some(map) => *map.get(node)?.get(accelerator)?,
            None => u32::try_from(position).ok()?,
        };
        let capacity = resolved_node
            .capacities
            .by_uuid
            .get(accelerator)
            .copied()
            .or(resolved_node.capacities.unlisted_each);
        // A known accelerator that is missing from the node's list is gone.
        let is_gone = || {
            let place_known = (node.clone(), accelerator.clone());
            !resolved_node.capacities.by_uuid.is_empty()
                && self.last_sent.accelerators.contains_key(&place_known)
        };
        let capacity = capacity.or_else(|| is_gone().then_some(Bytes::ZERO))?;
        Some(AcceleratorFacts {
            index,
            capacity,
            healthy: capacity > Bytes::ZERO && !self.faults.contains_key(accelerator),
            sleeping_memory: terms.sleeping_memory,
            wants_launcher: false,
        })
    }

    pub(super) fn sent_accelerators<'a>(
        &'a self,
        node: &'a NodeName,
    ) -> impl Iterator<Item = &'a AcceleratorId> {
        let from = (node.clone(), AcceleratorId::from(""));
        let all = self.last_sent.accelerators.range(from..).map(|(place, _)| place);
        all.take_while(move |(of, _)| of == node).map(|(_, accelerator)| accelerator)
    }
}
