//! What is known of nodes and their accelerators, and what of it is news.
//!
//! A pool says which nodes are Rouse's, what of an accelerator sleepers may keep, and how much memory there is. The kubelet knows
//! accelerators by their UUIDs, people and CUDA by their numbers on the node: a ConfigMap `gpu-map` says which is which. Where there
//! is none, UUIDs do as well; where there is one, an accelerator that is not in it waits for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node, NodeCondition};
use kube::ResourceExt as _;
use rouse::{
    model::AcceleratorId,
    pairing::{
        Pairing,
        event::{AcceleratorFacts, Answer, Ask, Event, NodeFacts, Record, Sizes, Standing, Terms},
        ids::{Build, Fingerprint, Mode, NodeName, ProviderId},
    },
    units::Bytes,
};

use super::{
    configs::{self, Configs},
    directory::{Provider, Requester},
    editions::Editions,
    population::{self, Launcher, Traits},
};
use crate::{
    controllers::{
        crd::{fma::LauncherConfig, ledger::ObjectName},
        dual::{access::Access, record::Wanted},
        index::{NodePlace, Settled, Terms as PoolTerms},
        watch::{Change, Found},
    },
    platform::kubernetes::{dcgm::Samples, launcher::pod::Source},
};

/// The condition of a Node from which its kubelet's silence is known.
pub const READY: &str = "Ready";

/// Of so many engines and launchers' sources nothing is forgotten.
const FEW: usize = 256;

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

/// What a Node object says.
#[derive(Clone, Debug, Default)]
struct Seen {
    traits: Traits,
    /// The keys of its taints.
    taints: BTreeSet<String>,
    /// It takes nothing new.
    cordoned: bool,
    /// Its kubelet has stopped to report.
    silent: bool,
}

#[derive(Debug, Default)]
struct Told {
    nodes: BTreeMap<NodeName, NodeFacts>,
    silent: BTreeSet<NodeName>,
    /// Those that lack their pool's taint.
    bare: BTreeSet<NodeName>,
    accelerators: BTreeMap<(NodeName, AcceleratorId), AcceleratorFacts>,
    standings: BTreeMap<Fingerprint, Standing>,
    builds: BTreeMap<Build, Terms>,
    /// The LauncherConfigs of the launchers that are to be there whether somebody asks or not.
    populated: BTreeMap<(NodeName, AcceleratorId), ObjectName>,
}

/// Why nothing can be decided about who is on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Doubt {
    #[error("its node {0} is in no AcceleratorPool: make one whose nodeSelector it has")]
    NoPool(NodeName),
    #[error(
        "nothing says how much memory the accelerators of its node {0} have: label it nvidia.com/gpu.memory, or run rouse-stub there"
    )]
    NoCapacity(NodeName),
    #[error(
        "its node {node} lacks the taint {key} of its AcceleratorPool: anybody's Pods may be given the accelerators of its sleepers there. Taint \
         the node, or take the taint out of the pool"
    )]
    Untainted { node: NodeName, key: String },
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

    /// What Prometheus has of accelerators: it names nodes' accelerators, too, and says which have a fault.
    pub(super) fn sampled(&mut self, samples: &Samples) {
        for (accelerator, sample) in &samples.used {
            let node = sample.node.as_deref().map(NodeName::from).filter(|node| self.knows(node));
            if let Some(node) = node {
                self.met(&node, std::slice::from_ref(accelerator));
            }
        }
        // A series has the last Xid alone, and a program that erred after that repairs nothing.
        let lasting = self.faults.iter().filter(|(a, _)| samples.erred.contains(*a));
        let mut faults: BTreeMap<_, _> = lasting.map(|(a, fault)| (a.clone(), fault.clone())).collect();
        faults.extend(samples.faults.clone());
        if self.faults == faults {
            return;
        }
        for (accelerator, fault) in faults.iter().filter(|(a, _)| !self.faults.contains_key(*a)) {
            tracing::warn!(%accelerator, fault, "an accelerator has a fault: it is not used any more");
        }
        for accelerator in self.faults.keys().filter(|a| !faults.contains_key(*a)) {
            tracing::info!(%accelerator, "an accelerator has no fault any more");
        }
        (self.faults, self.news) = (faults, true);
    }

    fn told_of<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = &'a AcceleratorId> {
        let from = (node.clone(), AcceleratorId::from(""));
        let all = self.told.accelerators.range(from..).map(|(place, _)| place);
        all.take_while(move |(of, _)| of == node).map(|(_, accelerator)| accelerator)
    }

    /// The readings of accelerators that anything is known to hold memory of, but for those that are known already.
    pub(super) fn readings(&self, samples: &Samples, core: &Pairing) -> Vec<Event> {
        let all = self.told.accelerators.keys().filter_map(|(node, accelerator)| {
            let sample = samples.used.get(accelerator)?;
            let known = core.node(node)?;
            let before = known.accelerators.get(accelerator)?.observed;
            let matters = known.engines_on(accelerator).next().is_some() || !known.remains.is_empty();
            let new = before.is_none_or(|(_, at)| at < sample.at);
            let event = Event::Observed {
                node: node.clone(),
                accelerator: accelerator.clone(),
                used: sample.used,
                at: sample.at,
            };
            (matters && new).then_some(event)
        });
        all.collect()
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

    /// What is wanted, in full: what is not said is what the node's accelerators have.
    pub(super) fn sizes(&self, node: &NodeName, wanted: &Wanted) -> Result<Sizes, Doubt> {
        let (place, terms) = self.place(node).ok_or_else(|| Doubt::NoPool(node.clone()))?;
        if let Some(key) = self.lacks(node, terms) {
            return Err(Doubt::Untainted { node: node.clone(), key: key.clone() });
        }
        let least = place.room.capacities.values().copied().filter(|c| *c > Bytes::ZERO).min();
        let capacity = least.or(place.room.each).ok_or_else(|| Doubt::NoCapacity(node.clone()))?;
        let kept = terms.sleeping_memory.unwrap_or_default();
        let awake = wanted.awake.unwrap_or_else(|| capacity.saturating_sub(kept));
        Ok(Sizes { awake, asleep: wanted.asleep.min(awake), host: wanted.host.unwrap_or(awake) })
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

    /// Tells what is otherwise than was told. True: somebody may ask for something else now, too.
    pub(super) fn tell(&mut self, tell: &mut impl FnMut(Event)) -> bool {
        let configured = self.configs.news();
        if !std::mem::take(&mut self.news) && !configured {
            return false;
        }
        let now = self.now();
        for (node, facts) in &now.nodes {
            if self.told.nodes.get(node) != Some(facts) {
                tell(Event::Node { node: node.clone(), facts: facts.clone() });
            }
        }
        for node in self.told.nodes.keys().filter(|node| !now.nodes.contains_key(*node)) {
            tell(Event::NodeGone { node: node.clone() });
        }
        for node in self.told.silent.symmetric_difference(&now.silent) {
            tell(Event::Heard { node: node.clone(), reports: !now.silent.contains(node) });
        }
        for ((node, accelerator), facts) in &now.accelerators {
            if self.told.accelerators.get(&(node.clone(), accelerator.clone())) != Some(facts) {
                let (node, accelerator, facts) = (node.clone(), accelerator.clone(), facts.clone());
                tell(Event::Accelerator { node, accelerator, facts });
            }
        }
        for (fingerprint, standing) in &now.standings {
            if self.told.standings.get(fingerprint) != Some(standing) {
                tell(Event::Template { fingerprint: *fingerprint, standing: *standing });
            }
        }
        // Of what was forgotten here nothing is kept there. What is not certain now stays as it was told.
        let kept =
            |known: &&Fingerprint| now.standings.contains_key(known) || self.fingerprints.contains(known);
        for fingerprint in self.told.standings.keys().filter(|known| !kept(known)) {
            tell(Event::Template { fingerprint: *fingerprint, standing: Standing::Current });
        }
        let kept = |known: &&Build| now.builds.contains_key(known) || self.sources.contains_key(known);
        for build in self.told.builds.keys().filter(|known| !kept(known)) {
            tell(Event::Build { build: *build, terms: Terms::default() });
        }
        for (build, terms) in &now.builds {
            if self.told.builds.get(build) != Some(terms) {
                tell(Event::Build { build: *build, terms: *terms });
            }
        }
        let bare = self.told.bare != now.bare;
        self.told = now;
        configured || bare
    }

    /// Forgets what nobody has any more, once as much has come as was there.
    pub(super) fn forget_unused(&mut self, core: &Pairing) {
        let known = self.editions.len() + self.fingerprints.len() + self.sources.len();
        if known < FEW.max(2 * self.kept) {
            return;
        }
        let (mut engines, mut builds) = (BTreeSet::new(), BTreeSet::new());
        for node in core.nodes() {
            engines.extend(node.engines.keys().map(|id| id.fingerprint));
            engines.extend(node.requesters.values().map(|own| own.seen.ask.fingerprint));
            builds.extend(node.providers.values().filter_map(|known| known.build));
            builds.extend(node.accelerators.values().filter_map(|known| known.crashed));
        }
        self.editions.retain(|fingerprint| engines.contains(fingerprint));
        self.fingerprints.retain(|fingerprint| engines.contains(fingerprint));
        self.sources.retain(|build, _| builds.contains(build));
        self.kept = self.editions.len() + self.fingerprints.len() + self.sources.len();
        self.news |= self.kept < known;
    }

    /// To be told again from the first.
    pub(super) fn forget_told(&mut self) {
        (self.told, self.news) = (Told::default(), true);
        // Some may have gone while nobody was told. Those that are there are met again.
        self.launchers.clear();
    }

    fn now(&self) -> Told {
        let standing = |fingerprint: &Fingerprint| Some((*fingerprint, self.configs.standing(*fingerprint)?));
        let standings =
            self.fingerprints.iter().filter_map(standing).chain(self.editions.standings()).collect();
        let sources = self.sources.values().chain(self.configs.sources());
        let terms = |source: &Source| Some((source.build(), self.configs.terms(source)?));
        let builds = sources.filter_map(terms).collect();
        let mut now = Told { standings, builds, ..Told::default() };
        now.silent =
            self.nodes.iter().filter(|(_, seen)| seen.silent).map(|(node, _)| node.clone()).collect();
        for (node, Seen { traits, cordoned, .. }) in &self.nodes {
            let place = self.place(node);
            let host = place.map(|(_, terms)| terms.host_sleep_memory).unwrap_or_default();
            now.nodes.insert(node.clone(), NodeFacts { cordoned: *cordoned, host });
            let Some((place, terms)) = place else { continue };
            if self.lacks(node, terms).is_some() {
                now.bare.insert(node.clone());
            }
            let met = self.met.get(node).into_iter().flatten();
            let numbered = self.map.iter().filter_map(|map| map.get(node)).flat_map(BTreeMap::keys);
            let all: BTreeSet<&AcceleratorId> =
                place.room.capacities.keys().chain(met).chain(numbered).chain(self.told_of(node)).collect();
            let mut told: BTreeMap<&AcceleratorId, AcceleratorFacts> = all
                .into_iter()
                .enumerate()
                .filter_map(|(position, accelerator)| {
                    Some((accelerator, self.accelerator(node, accelerator, position, place, terms)?))
                })
                .collect();
            let populated = self.populate(node, traits, &told);
            for accelerator in populated.keys() {
                told.entry(accelerator).and_modify(|facts| facts.launcher = true);
            }
            let at = |accelerator: &AcceleratorId| (node.clone(), accelerator.clone());
            now.accelerators.extend(told.into_iter().map(|(accelerator, facts)| (at(accelerator), facts)));
            now.populated.extend(populated.into_iter().map(|(accelerator, of)| (at(&accelerator), of)));
        }
        now
    }

    /// Which of these have a launcher whether somebody asks or not, and of which LauncherConfig.
    fn populate(
        &self,
        node: &NodeName,
        traits: &Traits,
        told: &BTreeMap<&AcceleratorId, AcceleratorFacts>,
    ) -> BTreeMap<AcceleratorId, ObjectName> {
        let counts = self.configs.counts(traits);
        let mut well: Vec<_> = told.iter().filter(|(_, facts)| facts.healthy).collect();
        well.sort_by_key(|(_, facts)| facts.index);
        let well: Vec<&AcceleratorId> = well.into_iter().map(|(accelerator, _)| *accelerator).collect();
        let there = |a: &&AcceleratorId| self.launchers.get(&(node.clone(), (*a).clone()));
        let there = told.keys().filter_map(|a| Some((*a, there(a)?))).collect();
        population::places(&counts, &well, &there)
    }

    fn accelerator(
        &self,
        node: &NodeName,
        accelerator: &AcceleratorId,
        position: usize,
        place: &NodePlace,
        terms: &PoolTerms,
    ) -> Option<AcceleratorFacts> {
        let index = match &self.map {
            Some(map) => *map.get(node)?.get(accelerator)?,
            None => u32::try_from(position).ok()?,
        };
        let capacity = place.room.capacities.get(accelerator).copied().or(place.room.each);
        // One that was there and is not among those that are listed is gone.
        let gone = || {
            let place_known = (node.clone(), accelerator.clone());
            !place.room.capacities.is_empty() && self.told.accelerators.contains_key(&place_known)
        };
        let capacity = capacity.or_else(|| gone().then_some(Bytes::ZERO))?;
        Some(AcceleratorFacts {
            index,
            capacity,
            healthy: capacity > Bytes::ZERO && !self.faults.contains_key(accelerator),
            sleeping: terms.sleeping_memory,
            launcher: false,
        })
    }
}

impl Seen {
    fn of(node: &Node) -> Self {
        let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true);
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.clone());
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        Self {
            traits: Traits { labels: node.labels().clone(), allocatable: allocatable.unwrap_or_default() },
            taints: taints.map(|taint| taint.key.clone()).collect(),
            cordoned: unschedulable || node.metadata.deletion_timestamp.is_some(),
            silent: readiness(node).is_some_and(|ready| ready.status == "Unknown"),
        }
    }
}

/// What the cluster makes of the node's kubelet: `Unknown`, when it has not heard of it for too long.
fn readiness(node: &Node) -> Option<&NodeCondition> {
    node.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == READY)
}

/// By node: `{"GPU-…": 0}`. What cannot be read is passed over, and said.
fn numbers(map: &ConfigMap) -> BTreeMap<NodeName, Numbers> {
    let entry = |(node, text): (&String, &String)| match serde_json::from_str::<Numbers>(text) {
        Ok(numbers) => Some((NodeName::from(node.as_str()), numbers)),
        Err(error) => {
            tracing::warn!(map = map.name_any(), node, %error, "an entry is no object of UUIDs and numbers");
            None
        }
    };
    map.data.iter().flatten().filter_map(entry).collect()
}

#[cfg(test)]
mod tests;
