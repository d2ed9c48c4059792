//! Which nodes are in which pool, and what the pools have.
//!
//! A node in two pools is in neither: its memory would be granted twice. So are nodes that only could be: of two
//! selectors of which one contains the other, whatever node comes is in both.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::units::Bytes;

use super::{
    node::{Accelerators, NodeFacts, Share, share},
    pool::{PoolEntry, Terms},
    selectors::Selectors,
    settled::{NodePlace, Pool, Trouble, list},
};

#[derive(Debug)]
pub(super) struct Ground {
    pub(super) pools: Arc<BTreeMap<String, Pool>>,
    pub(super) nodes: Arc<BTreeMap<String, NodePlace>>,
}

type Nodes = BTreeMap<String, Result<NodeFacts, String>>;
type Stubs = BTreeMap<String, Result<Accelerators, String>>;

impl Ground {
    /// `nodes`: `None` where they cannot be read.
    pub(super) fn survey(pools: &BTreeMap<String, PoolEntry>, nodes: Option<&Nodes>, stubs: &Stubs) -> Self {
        let selectors = Selectors::new(pools.iter().map(|(name, entry)| (name.as_str(), &entry.selector)));
        let mut overlaps = Overlaps::default();
        for entry in pools.values() {
            overlaps.note(&selectors.within(&entry.selector), None);
        }
        let mut places = BTreeMap::new();
        let mut members: BTreeMap<&str, Vec<(&String, &NodeFacts)>> = BTreeMap::new();
        for (node, facts) in nodes.into_iter().flatten() {
            let facts = match facts {
                Ok(facts) => facts,
                Err(why) => {
                    places
                        .insert(node.clone(), NodePlace { doubt: Some(why.clone()), ..NodePlace::default() });
                    continue;
                }
            };
            match selectors.within(&facts.labels).as_slice() {
                [] => {}
                [pool] => {
                    members.entry(pool).or_default().push((node, facts));
                    let (uid, pool) = (facts.uid.clone(), Some((*pool).to_owned()));
                    places.insert(node.clone(), NodePlace { uid, pool, ..NodePlace::default() });
                }
                several => {
                    overlaps.note(several, Some(node));
                    let named = list(several.iter().map(|pool| format!("'{pool}'")));
                    let doubt = Some(format!("it is in the pools {named}, and so in none"));
                    let uid = facts.uid.clone();
                    places.insert(node.clone(), NodePlace { uid, doubt, ..NodePlace::default() });
                }
            }
        }
        let survey = |(name, entry): (&String, &PoolEntry)| {
            let members = members.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
            let overlap = overlaps.of.remove(name.as_str());
            let pool = pool(entry, nodes.is_some().then_some(members), stubs, overlap, &mut places);
            (name.clone(), pool)
        };
        let pools = pools.iter().map(survey).collect();
        Self { pools: Arc::new(pools), nodes: Arc::new(places) }
    }
}

/// Pools with others in which the same nodes are.
#[derive(Default)]
struct Overlaps<'a> {
    of: BTreeMap<&'a str, BTreeMap<String, Option<String>>>,
    /// Thousands of nodes that are in the same pools say the same.
    seen: BTreeSet<Vec<&'a str>>,
}

impl<'a> Overlaps<'a> {
    fn note(&mut self, pools: &[&'a str], node: Option<&String>) {
        if pools.len() < 2 || !self.seen.insert(pools.to_vec()) {
            return;
        }
        for pool in pools {
            let others = self.of.entry(pool).or_default();
            for other in pools.iter().filter(|other| *other != pool) {
                let known = others.entry((*other).to_owned()).or_default();
                if known.is_none() {
                    *known = node.cloned();
                }
            }
        }
    }
}

/// `members`: `None` where nodes cannot be read.
fn pool(
    entry: &PoolEntry,
    members: Option<&[(&String, &NodeFacts)]>,
    stubs: &Stubs,
    overlap: Option<BTreeMap<String, Option<String>>>,
    places: &mut BTreeMap<String, NodePlace>,
) -> Pool {
    let mut pool = Pool {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        terms: entry.terms.as_ref().ok().cloned(),
        nodes: members.map_or(0, |members| u32::try_from(members.len()).unwrap_or(u32::MAX)),
        accelerators: 0,
        total: None,
        units: None,
        trouble: None,
        doubts: Vec::new(),
    };
    let terms = match &entry.terms {
        Ok(terms) => terms,
        Err(trouble) => return Pool { trouble: Some(trouble.clone()), ..pool },
    };
    let mut known: Option<Bytes> = None;
    for (name, facts) in members.into_iter().flatten() {
        let Share { bytes, accelerators, room, units, doubt } =
            share(facts, stubs.get(*name), &terms.resource);
        known = plus(known, bytes, |known, more| known + more);
        pool.units = plus(pool.units, units, u32::saturating_add);
        pool.accelerators = pool.accelerators.saturating_add(accelerators);
        if let Some(doubt) = &doubt {
            pool.doubts.push(format!("node {name}: {doubt}"));
        }
        if let Some(place) = places.get_mut(*name) {
            *place = NodePlace {
                accelerators,
                kind: facts.labels.get(&terms.accelerator_type_label).cloned(),
                total: bytes,
                room,
                doubt,
                uid: place.uid.take(),
                pool: place.pool.take(),
            };
        }
    }
    match overlap.map(Trouble::Overlap).map_or_else(|| total(terms, members.map(<[_]>::len), known), Err) {
        Ok(total) => pool.total = Some(total),
        Err(trouble) => pool.trouble = Some(trouble),
    }
    pool
}

/// What may be granted, of so many nodes that have this much.
fn total(terms: &Terms, nodes: Option<usize>, known: Option<Bytes>) -> Result<Bytes, Trouble> {
    if nodes == Some(0) {
        return Err(Trouble::NoNodes);
    }
    let total = match (known, terms.memory) {
        (Some(known), Some(cap)) => known.min(cap),
        (Some(all), None) | (None, Some(all)) => all,
        (None, None) => return Err(Trouble::NoCapacity),
    };
    if total == Bytes::ZERO { Err(Trouble::NoAccelerators) } else { Ok(total) }
}

fn plus<T>(sum: Option<T>, more: Option<T>, add: impl Fn(T, T) -> T) -> Option<T> {
    match (sum, more) {
        (Some(sum), Some(more)) => Some(add(sum, more)),
        (sum, more) => sum.or(more),
    }
}
