//! What was told to the decisions, and what of that is otherwise by now.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    pairing::{
        Pairing,
        event::{AcceleratorFacts, Event, NodeFacts, Standing, Terms},
        ids::{Build, Fingerprint, NodeName},
    },
    units::Bytes,
};

use super::{Facts, Seen};
use crate::{
    controllers::{
        crd::ledger::ObjectName,
        index::{NodePlace, Terms as PoolTerms},
    },
    pairing::population::{self, Traits},
    platform::kubernetes::launcher::pod::Source,
};

/// Of so many engines and launchers' sources nothing is forgotten.
pub(super) const FEW: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) nodes: BTreeMap<NodeName, NodeFacts>,
    pub(super) silent: BTreeSet<NodeName>,
    /// Those that lack their pool's taint.
    pub(super) bare: BTreeSet<NodeName>,
    pub(super) accelerators: BTreeMap<(NodeName, AcceleratorId), AcceleratorFacts>,
    pub(super) standings: BTreeMap<Fingerprint, Standing>,
    pub(super) builds: BTreeMap<Build, Terms>,
    /// The LauncherConfigs of the launchers that are to be there whether somebody asks or not.
    pub(super) populated: BTreeMap<(NodeName, AcceleratorId), ObjectName>,
}

impl Facts {
    /// Tells what is otherwise than was told. True: somebody may ask for something else now, too.
    pub(in crate::pairing) fn tell(&mut self, tell: &mut impl FnMut(Event)) -> bool {
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
    pub(in crate::pairing) fn forget_unused(&mut self, core: &Pairing) {
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
    pub(in crate::pairing) fn forget_told(&mut self) {
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

    pub(super) fn told_of<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = &'a AcceleratorId> {
        let from = (node.clone(), AcceleratorId::from(""));
        let all = self.told.accelerators.range(from..).map(|(place, _)| place);
        all.take_while(move |(of, _)| of == node).map(|(_, accelerator)| accelerator)
    }
}
