//! Finds the pools whose selector a set of labels satisfies.
//!
//! The lookup serves three questions: whether a node is in the pool, whether the nodes that a model selects are in the
//! pool, and whether another pool's nodes are also in this one.

use std::collections::{BTreeMap, HashMap};

type LabelSet = BTreeMap<String, String>;
/// A label key and its value.
type LabelPair<'a> = (&'a str, &'a str);

/// Indexes each selector by its rarest label pair, so that a lookup need not scan all selectors.
pub(super) struct Selectors<'a> {
    by_pair: HashMap<LabelPair<'a>, Vec<(&'a str, &'a LabelSet)>>,
}

impl<'a> Selectors<'a> {
    /// Builds the index from pool names and selectors. An empty selector matches nothing.
    pub(super) fn new(pools: impl Iterator<Item = (&'a str, &'a LabelSet)> + Clone) -> Self {
        let mut common: HashMap<LabelPair<'_>, usize> = HashMap::new();
        for (key, value) in pools.clone().flat_map(|(_, selector)| selector) {
            *common.entry((key, value)).or_default() += 1;
        }
        let mut by_pair: HashMap<_, Vec<_>> = HashMap::new();
        for (pool, selector) in pools {
            let pairs = selector.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            if let Some(rarest) = pairs.min_by_key(|pair| common.get(pair)) {
                by_pair.entry(rarest).or_default().push((pool, selector));
            }
        }
        Self { by_pair }
    }

    /// Returns the pools whose every pair is among `labels`, sorted by name.
    pub(super) fn matching_pools(&self, labels: &LabelSet) -> Vec<&'a str> {
        let candidates =
            labels.iter().filter_map(|(key, value)| self.by_pair.get(&(key.as_str(), value.as_str())));
        let all_there =
            |selector: &LabelSet| selector.iter().all(|(key, value)| labels.get(key) == Some(value));
        let mut found: Vec<_> =
            candidates.flatten().filter(|(_, selector)| all_there(selector)).map(|(pool, _)| *pool).collect();
        found.sort_unstable();
        found
    }
}
