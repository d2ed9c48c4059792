//! Chooses the sleepers to delete where accelerators hold too many.
//!
//! An engine may use several accelerators, so the choice cannot be made for each accelerator by itself: two sleepers
//! that each are the oldest of one accelerator may cost more than a single sleeper on both. The choice is a *set* of
//! sleepers that covers every shortage. The best set, in this order of criteria,
//!
//! 1. spares sleepers that a requester waits for,
//! 2. spares accelerators that are within their budget,
//! 3. deletes only outdated sleepers,
//! 4. frees least beyond the need, in whole GiB: a smaller surplus does not justify deleting a recently used sleeper,
//! 5. deletes outdated sleepers, then those used longest ago: sets are compared by the last use of their most recent
//!    sleeper, then of the next, and so on, so that a further sleeper never makes a set better,
//! 6. restarts soonest, should its engines be requested again.
//!
//! With few sleepers, every set is tried in which each member is needed. With many, the sets of the most preferred
//! sleepers are tried first. If these sleepers are not enough, further ones are added one by one, and superfluous
//! members are dropped.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};

/// Limit for trying every combination of sleepers: 4,096 sets.
const MAX_EXHAUSTIVE_SLEEPERS: usize = 12;

/// A sleeping engine that may be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleeper {
    pub accelerators: Vec<AcceleratorId>,
    /// The memory that it keeps of each accelerator.
    pub residue: Bytes,
    /// A requester exists that would wake it.
    pub wanted: bool,
    pub outdated: bool,
    pub last_used: Tick,
    /// Estimated time to restart it.
    pub restart_time: Millis,
}

/// The memory that must become free on each accelerator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceleratorShortage {
    pub accelerators: BTreeMap<AcceleratorId, Bytes>,
}

impl AcceleratorShortage {
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.accelerators.values().all(|short| *short == Bytes::ZERO)
    }

    fn is_covered_by<'a>(&self, set: impl Iterator<Item = &'a Sleeper> + Clone) -> bool {
        let of = |a: &AcceleratorId| {
            set.clone().filter(|s| s.accelerators.contains(a)).map(|s| s.residue).sum::<Bytes>()
        };
        self.accelerators.iter().all(|(a, short)| of(a) >= *short)
    }

    /// Memory that a set frees beyond the need, in whole GiB, over all accelerators.
    fn surplus_gib<'a>(&self, set: impl Iterator<Item = &'a Sleeper>) -> u64 {
        let mut freed: BTreeMap<&AcceleratorId, Bytes> = BTreeMap::new();
        for sleeper in set {
            sleeper.accelerators.iter().for_each(|a| *freed.entry(a).or_default() += sleeper.residue);
        }
        let need = |a| self.accelerators.get(a).copied().unwrap_or_default();
        freed.iter().map(|(a, freed)| freed.saturating_sub(need(*a))).sum::<Bytes>().0 >> 30
    }

    /// Whether deleting this sleeper reduces a shortage.
    fn is_reduced_by(&self, sleeper: &Sleeper) -> bool {
        let short = |a| self.accelerators.get(a).is_some_and(|short| *short > Bytes::ZERO);
        sleeper.residue > Bytes::ZERO && sleeper.accelerators.iter().any(short)
    }
}

/// Chooses the best set of sleepers to delete, as indices into `sleepers`. `None` if all of them together are not
/// enough.
#[must_use]
pub fn choose_eviction_set(sleepers: &[Sleeper], short: &AcceleratorShortage) -> Option<Vec<usize>> {
    if short.is_none() {
        return Some(Vec::new());
    }
    let mut options: Vec<usize> =
        (0..sleepers.len()).filter(|i| sleepers.get(*i).is_some_and(|s| short.is_reduced_by(s))).collect();
    options.sort_by_key(|i| (score(sleepers, &[*i], short), *i));
    if !short.is_covered_by(pick(sleepers, &options)) {
        return None;
    }
    let few = options.get(..MAX_EXHAUSTIVE_SLEEPERS).unwrap_or(&options);
    let mut set = minimal_sets(sleepers, few, short)
        .into_iter()
        .min_by_key(|set| score(sleepers, set, short))
        .unwrap_or_else(|| greedy(sleepers, &options, short));
    set.sort_unstable();
    Some(set)
}

/// Every set of `few` that covers the shortage and of which no member can be spared.
fn minimal_sets(sleepers: &[Sleeper], few: &[usize], short: &AcceleratorShortage) -> Vec<Vec<usize>> {
    // Precomputes the bytes that each sleeper frees per shortage, so that names are not compared for every set.
    let shortages: Vec<Bytes> = short.accelerators.values().copied().collect();
    let frees = |s: &Sleeper| -> Vec<Bytes> {
        let on = |a| if s.accelerators.contains(a) { s.residue } else { Bytes::ZERO };
        short.accelerators.keys().map(on).collect()
    };
    let table: Vec<Vec<Bytes>> = pick(sleepers, few).map(frees).collect();
    let members = |mask: usize| (0..few.len()).filter(move |bit| mask & (1 << bit) != 0);
    let is_enough = |mask: usize| {
        let rows = || members(mask).filter_map(|bit| table.get(bit));
        shortages
            .iter()
            .enumerate()
            .all(|(at, need)| rows().filter_map(|row| row.get(at)).copied().sum::<Bytes>() >= *need)
    };
    let covers: Vec<bool> = (0..1 << few.len()).map(is_enough).collect();
    let enough = |mask: usize| covers.get(mask).copied().unwrap_or_default();
    let tight = |mask: &usize| enough(*mask) && members(*mask).all(|bit| !enough(mask & !(1 << bit)));
    let sets = (1..1 << few.len()).filter(tight);
    sets.map(|mask| members(mask).filter_map(|bit| few.get(bit)).copied().collect()).collect()
}

fn pick<'a>(sleepers: &'a [Sleeper], set: &'a [usize]) -> impl Iterator<Item = &'a Sleeper> + Clone {
    set.iter().filter_map(|i| sleepers.get(*i))
}

/// Takes sleepers in the order of preference until the shortage is covered. Then drops members that later ones made
/// superfluous.
fn greedy(sleepers: &[Sleeper], options: &[usize], short: &AcceleratorShortage) -> Vec<usize> {
    let mut set: Vec<usize> = Vec::new();
    for option in options {
        if short.is_covered_by(pick(sleepers, &set)) {
            break;
        }
        set.push(*option);
    }
    for at in (0..set.len()).rev() {
        let without: Vec<usize> = set.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, s)| *s).collect();
        if short.is_covered_by(pick(sleepers, &without)) {
            set = without;
        }
    }
    set
}

type EvictionScore = (usize, usize, bool, u64, Vec<(bool, Tick)>, Millis);

/// Smaller is better.
fn score(sleepers: &[Sleeper], set: &[usize], short: &AcceleratorShortage) -> EvictionScore {
    let wanted_count = pick(sleepers, set).filter(|s| s.wanted).count();
    let disturbed: BTreeSet<&AcceleratorId> = pick(sleepers, set)
        .flat_map(|s| &s.accelerators)
        .filter(|a| short.accelerators.get(*a).is_none_or(|short| *short == Bytes::ZERO))
        .collect();
    let current = pick(sleepers, set).any(|s| !s.outdated);
    let mut used: Vec<_> = pick(sleepers, set).map(|s| (!s.outdated, s.last_used)).collect();
    used.sort_unstable_by(|a, b| b.cmp(a));
    let restart_time = pick(sleepers, set).fold(Millis::ZERO, |sum, s| sum + s.restart_time);
    (wanted_count, disturbed.len(), current, short.surplus_gib(pick(sleepers, set)), used, restart_time)
}

#[cfg(test)]
mod tests;
