//! Sets of accelerators of one node, out of all accelerators of a pool.

use std::collections::BTreeMap;

use super::combinations;
use crate::model::AcceleratorId;

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
}
