//! Which sleepers are deleted, where accelerators hold too many of them.
//!
//! An engine may use several accelerators, so the choice cannot be made for each accelerator by itself: two sleepers that each
//! are the oldest of one accelerator may cost more than a single one that is on both. What is chosen is a *set* that covers
//! everything that is short. Of all such sets the best is that which
//!
//! 1. leaves alone what somebody waits for,
//! 2. leaves alone accelerators that are within their budget,
//! 3. deletes nothing but what is outdated,
//! 4. frees least beyond what is needed, in whole GiB: less than that is no reason to delete what was used a moment ago,
//! 5. deletes what is outdated, then what was used longest ago: sets are compared by the last used of each, then by the one used before that, and so on,
//!    so that a sleeper more is never better than one less,
//! 6. is back soonest, should it be asked for again.
//!
//! With few sleepers every set is tried of which each member is needed. With many it is tried with those that would be chosen first, and then, if these are
//! not enough, as many are taken one by one as it needs, less those that turn out to be superfluous.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};

/// Sets of so many sleepers are tried in every combination: 4,096 of them.
const MAX_EXHAUSTIVE_SLEEPERS: usize = 12;

/// A sleeping engine that may be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleeper {
    pub accelerators: Vec<AcceleratorId>,
    /// What it keeps of each accelerator.
    pub residue: Bytes,
    /// A requester is there that it would be woken for.
    pub wanted: bool,
    pub outdated: bool,
    pub last_used: Tick,
    /// How long it takes to have it again, as learned.
    pub restart_time: Millis,
}

/// What must become free.
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

    /// What a set frees that nobody needs, in whole GiB, over all accelerators.
    fn surplus_gib<'a>(&self, set: impl Iterator<Item = &'a Sleeper>) -> u64 {
        let mut freed: BTreeMap<&AcceleratorId, Bytes> = BTreeMap::new();
        for sleeper in set {
            sleeper.accelerators.iter().for_each(|a| *freed.entry(a).or_default() += sleeper.residue);
        }
        let need = |a| self.accelerators.get(a).copied().unwrap_or_default();
        freed.iter().map(|(a, freed)| freed.saturating_sub(need(*a))).sum::<Bytes>().0 >> 30
    }

    /// Deleting it helps.
    fn is_reduced_by(&self, sleeper: &Sleeper) -> bool {
        let short = |a| self.accelerators.get(a).is_some_and(|short| *short > Bytes::ZERO);
        sleeper.residue > Bytes::ZERO && sleeper.accelerators.iter().any(short)
    }
}

/// The best set of sleepers to delete, by their places in the list; `None` when all of them together are not enough.
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

/// Every set of these that covers what is short, and of which none can be spared.
fn minimal_sets(sleepers: &[Sleeper], few: &[usize], short: &AcceleratorShortage) -> Vec<Vec<usize>> {
    // What each frees of each thing that is short: names are compared once, not for every set.
    let needs: Vec<Bytes> = short.accelerators.values().copied().collect();
    let frees = |s: &Sleeper| -> Vec<Bytes> {
        let on = |a| if s.accelerators.contains(a) { s.residue } else { Bytes::ZERO };
        short.accelerators.keys().map(on).collect()
    };
    let table: Vec<Vec<Bytes>> = pick(sleepers, few).map(frees).collect();
    let members = |mask: usize| (0..few.len()).filter(move |bit| mask & (1 << bit) != 0);
    let is_enough = |mask: usize| {
        let rows = || members(mask).filter_map(|bit| table.get(bit));
        needs
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

/// As many as it needs in the order of preference, each only if it eases what is short still; then without those that later
/// ones made superfluous.
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
    let wanted = pick(sleepers, set).filter(|s| s.wanted).count();
    let within: BTreeSet<&AcceleratorId> = pick(sleepers, set)
        .flat_map(|s| &s.accelerators)
        .filter(|a| short.accelerators.get(*a).is_none_or(|short| *short == Bytes::ZERO))
        .collect();
    let current = pick(sleepers, set).any(|s| !s.outdated);
    let mut used: Vec<_> = pick(sleepers, set).map(|s| (!s.outdated, s.last_used)).collect();
    used.sort_unstable_by(|a, b| b.cmp(a));
    let back = pick(sleepers, set).fold(Millis::ZERO, |sum, s| sum + s.restart_time);
    (wanted, within.len(), current, short.surplus_gib(pick(sleepers, set)), used, back)
}

#[cfg(test)]
mod tests;
