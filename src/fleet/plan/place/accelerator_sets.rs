//! Sets of accelerators: out of a list, or out of a pool, each set of one node.

use std::collections::BTreeMap;

use crate::model::AcceleratorId;

/// Limit on combinations; those with the most free memory come first.
pub(super) const MAX_CANDIDATES: usize = 64;

/// Returns sets of `count` accelerators of one node, at most `limit`.
///
/// `accelerators`: each with its node, the most free first. In that order each accelerator completes the sets with those
/// before it. So of all sets, whatever their nodes, those come first whose fullest accelerator has the most free.
pub(super) fn sets_of_one_node<'a>(
    accelerators: impl Iterator<Item = (&'a AcceleratorId, Option<&'a str>)>,
    count: usize,
    limit: usize,
) -> Vec<Vec<AcceleratorId>> {
    let mut sets: Vec<Vec<AcceleratorId>> = Vec::new();
    let mut before: BTreeMap<Option<&str>, Vec<AcceleratorId>> = BTreeMap::new();
    for (id, node) in accelerators {
        if sets.len() >= limit {
            break;
        }
        let of_node = before.entry(node).or_default();
        for mut set in combinations(of_node, count.saturating_sub(1)) {
            set.push(id.clone());
            // The same accelerators are one choice, in whatever order their memory became free.
            set.sort_unstable();
            sets.push(set);
        }
        of_node.push(id.clone());
    }
    sets.truncate(limit);
    sets
}

/// Returns sets of `n`, in the order of the list, at most [`MAX_CANDIDATES`].
pub(super) fn combinations(ids: &[AcceleratorId], n: usize) -> Vec<Vec<AcceleratorId>> {
    let mut out = Vec::new();
    let mut chosen = Vec::new();
    collect_combinations(ids, n, &mut chosen, &mut out);
    out
}

fn collect_combinations(
    ids: &[AcceleratorId],
    n: usize,
    chosen: &mut Vec<AcceleratorId>,
    out: &mut Vec<Vec<AcceleratorId>>,
) {
    if out.len() >= MAX_CANDIDATES {
        return;
    }
    if n == 0 {
        out.push(chosen.clone());
        return;
    }
    for (at, id) in ids.iter().enumerate() {
        if ids.len() - at < n {
            return;
        }
        chosen.push(id.clone());
        collect_combinations(ids.get(at + 1..).unwrap_or_default(), n - 1, chosen, out);
        chosen.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sets as text, of accelerators named by their node and a digit.
    fn sets(accelerators: &[&str], count: usize, limit: usize) -> Vec<String> {
        let ids: Vec<AcceleratorId> = accelerators.iter().map(|id| (*id).into()).collect();
        let with_nodes = ids.iter().map(|id| (id, id.as_str().get(..1)));
        let sets = sets_of_one_node(with_nodes, count, limit);
        sets.iter().map(|set| set.iter().map(AcceleratorId::as_str).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn a_set_has_accelerators_of_one_node_and_the_most_free_sets_come_first() {
        let pool = ["a1", "b1", "b2", "a2", "a3", "c1"];
        assert_eq!(sets(&pool, 1, 64), pool);
        assert_eq!(sets(&pool, 2, 64), ["b1 b2", "a1 a2", "a1 a3", "a2 a3"]);
        assert_eq!(sets(&pool, 3, 64), ["a1 a2 a3"]);
        assert!(sets(&pool, 4, 64).is_empty());
    }

    #[test]
    fn a_set_is_in_the_order_of_names_whichever_of_its_accelerators_has_the_most_free() {
        assert_eq!(sets(&["a2", "a1"], 2, 64), ["a1 a2"]);
    }

    #[test]
    fn no_more_sets_are_made_than_asked_for() {
        assert_eq!(sets(&["a1", "b1", "b2", "a2", "a3"], 2, 3), ["b1 b2", "a1 a2", "a1 a3"]);
        assert_eq!(sets(&["a1", "b1"], 1, 1), ["a1"]);
    }

    #[test]
    fn combinations_are_complete_and_bounded() {
        let ids: Vec<AcceleratorId> = (0..4).map(|i| AcceleratorId::from(format!("gpu-{i}"))).collect();
        assert_eq!(combinations(&ids, 2).len(), 6);
        assert_eq!(combinations(&ids, 4).len(), 1);
        assert!(combinations(&ids, 5).is_empty());
        let many: Vec<AcceleratorId> = (0..16).map(|i| AcceleratorId::from(format!("gpu-{i}"))).collect();
        assert_eq!(combinations(&many, 8).len(), MAX_CANDIDATES);
    }
}
