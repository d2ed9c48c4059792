//! What is known of nodes and their accelerators, and what of it is news.
//!
//! A pool says which nodes are Rouse's, what of an accelerator sleepers may keep, and how much memory there is. The kubelet knows
//! accelerators by their UUIDs, people and CUDA by their numbers on the node: a ConfigMap `gpu-map` says which is which. Where there
//! is none, UUIDs do as well; where there is one, an accelerator that is not in it waits for it.

mod metered;
mod seen;
mod told;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use rouse::{
    model::AcceleratorId,
    pairing::{
        event::{Answer, Ask, Event, Record, Sizes},
        ids::{Build, Fingerprint, Mode, NodeName, ProviderId},
    },
    units::Bytes,
};

pub use self::seen::READY;
use self::{
    seen::{Seen, numbers},
    told::Told,
};
use super::{
    configs::{self, Configs},
    directory::{Provider, Requester},
    editions::Editions,
    population::Launcher,
};
use crate::{
    config::ADAPTERS_AT_LEVEL_2,
    controllers::{
        crd::fma::LauncherConfig,
        dual::{access::Access, keys, record::Wanted},
        index::{NodePlace, Settled, Terms as PoolTerms},
        watch::{Change, Found},
    },
    platform::kubernetes::launcher::pod::Source,
};

/// By UUID, the accelerators of a node.
type Numbers = BTreeMap<AcceleratorId, u32>;

/// As they were seen last.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Node objects. `listed`: all of them have been seen.
    nodes: BTreeMap<NodeName, Seen>,
    listed: bool,
    settled: Arc<Settled>,
    /// `None`: there is no such ConfigMap.
    map: Option<BTreeMap<NodeName, Numbers>>,
    /// Accelerators that somebody on the node was given.
    met: BTreeMap<NodeName, BTreeSet<AcceleratorId>>,
    /// What is known of launchers' engines by name.
    pub(super) configs: Configs,
    /// Those that Prometheus has a fault of.
    faults: BTreeMap<AcceleratorId, String>,
    /// Of engines with Pods of their own.
    editions: Editions,
    /// Of launchers' engines.
    fingerprints: BTreeSet<Fingerprint>,
    /// What launchers were made from that were seen.
    sources: BTreeMap<Build, Source>,
    launchers: BTreeMap<(NodeName, AcceleratorId), Launcher>,
    /// How many engines and launchers' sources were known when those that are no more were forgotten last.
    kept: usize,
    /// What was told of them, and whether something has come since.
    told: Told,
    news: bool,
}

/// Why nothing can be decided about who is on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Doubt {
    #[error("its node {0} is in no AcceleratorPool: make one whose nodeSelector it has")]
    NoPool(NodeName),
    #[error(
        "nothing says how much memory the accelerators of its node {0} have: label it nvidia.com/gpu.memory"
    )]
    NoCapacity(NodeName),
    #[error(
        "its node {node} lacks the taint {key} of its AcceleratorPool: anybody's Pods may be given the accelerators of its sleepers there. Taint \
         the node, or take the taint out of the pool"
    )]
    Untainted { node: NodeName, key: String },
    #[error("the annotation {} is '2': {ADAPTERS_AT_LEVEL_2}", keys::SLEEP_LEVEL)]
    Adapters,
    #[error("{0}")]
    Config(#[from] configs::Error),
}

impl Facts {
    pub(super) fn new(configs: Configs) -> Self {
        Self { configs, ..Self::default() }
    }

    pub(super) fn nodes(&mut self, change: Change<Node>) {
        self.news = true;
        let saw = |nodes: &mut BTreeMap<NodeName, Seen>, found: Found<Node>| {
            // A node that cannot be read is there all the same.
            let name = NodeName::from(found.name().name);
            nodes.insert(name, found.good().as_ref().map(Seen::of).unwrap_or_default());
        };
        match change {
            Change::All { objects, .. } => {
                self.nodes.clear();
                self.listed = true;
                objects.into_iter().for_each(|found| saw(&mut self.nodes, found));
            }
            Change::Applied(found) => saw(&mut self.nodes, *found),
            Change::Deleted(name) => {
                self.nodes.remove(&NodeName::from(name.name));
            }
        }
    }

    /// Of the one ConfigMap of the name.
    pub(super) fn map(&mut self, change: Change<ConfigMap>) {
        self.news = true;
        self.map = match change {
            Change::All { objects, .. } => objects.into_iter().find_map(Found::good).map(|map| numbers(&map)),
            Change::Applied(found) => found.good().map(|map| numbers(&map)),
            Change::Deleted(_) => None,
        };
    }

    pub(super) fn settled(&mut self, settled: Arc<Settled>) {
        (self.settled, self.news) = (settled, true);
    }

    /// Somebody on a node has accelerators.
    pub(super) fn meet(&mut self, event: &Event) {
        match event {
            Event::SeenRequester { node, seen, .. } => self.met(node, &seen.accelerators),
            Event::SeenProvider { node, provider, seen } => {
                self.met(node, &provider.accelerators);
                let engines = seen.records.iter().map(|record| &record.engine);
                let inside = engines.filter(|engine| engine.mode == Mode::Launcher);
                for fingerprint in inside.map(|engine| engine.fingerprint) {
                    self.news |= self.fingerprints.insert(fingerprint);
                }
            }
            Event::Outcome { node, result: Ok(Answer::Accelerators(found)), .. } => self.met(node, found),
            Event::ProviderGone { node, provider, .. } | Event::ProviderVanished { node, provider, .. }
                if provider.is_launcher() =>
            {
                let places = provider.accelerators.iter().map(|a| (node.clone(), a.clone()));
                let gone = places.filter(|place| self.launchers.remove(place).is_some()).count();
                self.news |= gone > 0;
            }
            _ => {}
        }
    }

    /// What it asks for is what its template asks for by now.
    pub(super) fn meet_requester(&mut self, own: &Requester, ask: &Ask) {
        if let Some(edition) = own.edition.as_ref().filter(|_| ask.mode == Mode::Sleep) {
            let namespace = &own.name.namespace;
            self.news |= self.editions.meet(namespace, edition, ask.fingerprint, Some(own.created));
        }
    }

    pub(super) fn meet_provider(&mut self, own: &Provider, records: &[Record]) {
        let Some(edition) = &own.edition else { return };
        for record in records.iter().filter(|record| record.engine.mode == Mode::Sleep) {
            let namespace = &own.name.namespace;
            self.news |= self.editions.meet(namespace, edition, record.engine.fingerprint, None);
        }
    }

    /// There is a launcher that was made from this.
    pub(super) fn meet_launcher(&mut self, node: &NodeName, id: &ProviderId, source: &Source, used: bool) {
        self.news |= self.sources.insert(source.build(), source.clone()).is_none();
        for accelerator in id.accelerators.iter() {
            let (place, launcher) =
                ((node.clone(), accelerator.clone()), Launcher { of: source.place(), used });
            self.news |= self.launchers.insert(place, launcher.clone()) != Some(launcher);
        }
    }

    /// What a launcher that is to be there whether somebody asks or not is made from.
    pub(super) fn populated(&self, node: &NodeName, launcher: &ProviderId) -> Option<&Arc<LauncherConfig>> {
        let place = (node.clone(), launcher.accelerators.first()?.clone());
        self.configs.named(self.told.populated.get(&place)?)
    }

    fn met(&mut self, node: &NodeName, accelerators: &[AcceleratorId]) {
        let unknown = |a: &&AcceleratorId| self.met.get(node).is_none_or(|known| !known.contains(*a));
        let new: Vec<_> = accelerators.iter().filter(unknown).cloned().collect();
        if !new.is_empty() {
            self.news = true;
            self.met.entry(node.clone()).or_default().extend(new);
        }
    }

    /// The accelerators' numbers on the node, where they are known; `None` where UUIDs must do.
    pub(super) fn numbers(&self, node: &NodeName, accelerators: &[AcceleratorId]) -> Option<Vec<u32>> {
        let map = self.map.as_ref()?.get(node)?;
        accelerators.iter().map(|a| map.get(a).copied()).collect()
    }

    /// Nothing is decided before: a node that was not seen would be taken for one that is gone.
    pub(super) const fn are_complete(&self) -> bool {
        self.listed
    }

    pub(super) fn knows(&self, node: &NodeName) -> bool {
        self.nodes.contains_key(node)
    }

    /// What is wanted, in full: what is not said is what the node's accelerators have. `kv_cache`: what of each is no weights, where
    /// that is known. `resources`: how many accelerators are asked for, among other things.
    pub(super) fn sizes(
        &self,
        node: &NodeName,
        wanted: &Wanted,
        kv_cache: Option<Bytes>,
        resources: &BTreeMap<String, u32>,
    ) -> Result<Sizes, Doubt> {
        let (place, terms) = self.place(node).ok_or_else(|| Doubt::NoPool(node.clone()))?;
        if let Some(key) = self.lacks(node, terms) {
            return Err(Doubt::Untainted { node: node.clone(), key: key.clone() });
        }
        let least = place.room.capacities.values().copied().filter(|c| *c > Bytes::ZERO).min();
        let capacity = least.or(place.room.each).ok_or_else(|| Doubt::NoCapacity(node.clone()))?;
        let kept = terms.sleeping_memory.unwrap_or_default();
        let awake = wanted.awake.unwrap_or_else(|| capacity.saturating_sub(kept));
        let count = resources.get(&terms.resource).copied().unwrap_or(1).max(1);
        let weights = awake.saturating_sub(kv_cache.unwrap_or_default()).0.saturating_mul(u64::from(count));
        let host = wanted.host.unwrap_or(Bytes(weights));
        Ok(Sizes { awake, asleep: wanted.asleep.min(awake), host })
    }

    /// The key of its pool's taint, where the node has none of that key.
    fn lacks<'a>(&self, node: &NodeName, terms: &'a PoolTerms) -> Option<&'a String> {
        let has = |key: &String| self.nodes.get(node).is_some_and(|seen| seen.taints.contains(key));
        terms.taint.as_ref().filter(|key| !has(key))
    }

    /// How a Pod gets at accelerators there.
    pub(super) fn access(&self, node: &NodeName) -> Option<Access> {
        self.place(node).map(|(_, terms)| Access::of(terms))
    }

    fn place(&self, node: &NodeName) -> Option<(&NodePlace, &PoolTerms)> {
        let place = self.settled.nodes.get(node.as_str())?;
        let terms = self.settled.pools.get(place.pool.as_ref()?)?.terms.as_deref()?;
        Some((place, terms))
    }
}

#[cfg(test)]
mod tests;
