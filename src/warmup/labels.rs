//! Labels of warm nodes, which scheduling prefers.
//!
//! A node has the label of a set while a Warmup of that set has it done. A label of a set that belongs to no Warmup, and
//! to no model that is to be kept warm, is removed. Labels stay while a Warmup's nodes are unknown. A node that is
//! created again under the name of a done one is another node, which a finished Warmup has not warmed.

use std::{collections::BTreeSet, ops::Bound};

use super::{
    Warmups,
    command::WarmupCommand,
    ids::{WarmSet, WarmupId},
    node_progress::{KnownNode, LabelHold, NodeOutcome},
    record::{NodeKey, NodeUidKey, RecordedOutcome},
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Time in which the effect of a write must be observed. Then it is repeated.
const OBSERVED_WITHIN: Millis = Millis::secs(60);

/// The API server refuses labels. One of them at a time shows whether it still does.
#[derive(Clone, Debug)]
pub(super) struct RefusedLabels {
    /// No label is written before.
    pub(super) until: Tick,
    /// The node whose label was written last.
    last: NodeName,
}

impl Warmups {
    /// The writes of labels that are due. Nodes without one are clean from now on.
    pub(super) fn label_commands(&mut self, now: Tick) -> Vec<WarmupCommand> {
        let due: Vec<(Tick, NodeName)> =
            self.labels_due.iter().take_while(|(at, _)| *at <= now).cloned().collect();
        for entry in due {
            self.labels_due.remove(&entry);
            self.labels_dirty.insert(entry.1);
        }
        if self.refused_labels.as_ref().is_some_and(|refused| refused.until > now) {
            return Vec::new();
        }
        let max_writes = if self.refused_labels.is_some() { 1 } else { usize::MAX };
        let mut commands = Vec::new();
        let mut clean = Vec::new();
        for name in self.unlabelled() {
            if commands.len() >= max_writes {
                break;
            }
            let before = commands.len();
            if let Some(known) = self.nodes.get(name) {
                self.label_commands_of(name, known, now, &mut commands);
            }
            if commands.len() == before {
                clean.push(name.clone());
            }
        }
        for name in &clean {
            self.labels_dirty.remove(name);
        }
        commands.truncate(max_writes);
        commands
    }

    /// The nodes whose labels may have to be written.
    ///
    /// While labels are refused, those after the last one come first: a node may be refused for a reason of its own.
    fn unlabelled(&self) -> impl Iterator<Item = &NodeName> {
        let last = self.refused_labels.as_ref().map(|refused| &refused.last);
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let later = self.labels_dirty.range::<NodeName, _>((after, Bound::Unbounded));
        let earlier = last
            .map(|last| self.labels_dirty.range::<NodeName, _>((Bound::Unbounded, Bound::Included(last))));
        later.chain(earlier.into_iter().flatten())
    }

    /// Writes no label until then, and one after that.
    pub(super) fn pause_labels(&mut self, last: &NodeName, until: Tick) {
        self.labels_due.insert((until, last.clone()));
        self.refused_labels = Some(RefusedLabels { until, last: last.clone() });
    }

    fn label_commands_of(
        &self,
        node: &NodeName,
        known: &KnownNode,
        now: Tick,
        commands: &mut Vec<WarmupCommand>,
    ) {
        let Some(facts) = &known.facts else { return };
        let hold = |set: &WarmSet| known.label_holds.get(set).filter(|hold| hold.until > now);
        let mut wanted = BTreeSet::new();
        for id in &known.warmups {
            let Some(state) = self.warmups.get(id) else { continue };
            let is_done = state.nodes.get(node).is_some_and(|node| {
                node.view.outcome == Some(NodeOutcome::Done)
                    && !state.has_recorded_another(node.key, facts.uid)
            });
            if let Some(request) = state.request.as_ref().filter(|_| is_done) {
                wanted.insert(&request.set);
            }
        }
        for set in &wanted {
            // A write under way decides, and what is observed of it may still be old.
            let is_warm = hold(set)
                .map_or_else(|| facts.labels_warm.contains(*set), |hold| hold.expected != Some(false));
            if !is_warm {
                commands.push(WarmupCommand::SetWarm { node: node.clone(), set: WarmSet::clone(set) });
            }
        }
        let observed = facts.labels_warm.iter();
        let expected =
            known.label_holds.iter().filter(|(_, hold)| hold.expected == Some(true)).map(|(set, _)| set);
        for set in observed.chain(expected).collect::<BTreeSet<_>>() {
            let is_warm = hold(set).is_none_or(|hold| hold.expected == Some(true));
            if is_warm && !wanted.contains(set) && self.is_cold(node, facts.uid, set) {
                commands.push(WarmupCommand::RemoveWarm { node: node.clone(), set: set.clone() });
            }
        }
    }

    /// Whether the node is known not to be warm for the set.
    fn is_cold(&self, node: &NodeName, uid: NodeUidKey, set: &WarmSet) -> bool {
        match self.sets.get(set) {
            Some(ids) => ids.iter().all(|id| self.is_cold_for(id, node, uid)),
            None => self.known_sets.as_ref().is_some_and(|known| !known.contains(set)),
        }
    }

    fn is_cold_for(&self, id: &WarmupId, name: &NodeName, uid: NodeUidKey) -> bool {
        let Some(state) = self.warmups.get(id).filter(|state| state.has_nodes) else { return false };
        let key = NodeKey::new(name);
        if state.has_recorded_another(key, uid) {
            return true;
        }
        match state.nodes.get(name).filter(|node| node.items.is_some()) {
            Some(node) => node.outcome != NodeOutcome::Done,
            // A node that was warmed and is no target any more is warm still.
            None => {
                let recorded = state.progress.record.get(key);
                recorded.is_none_or(|node| node.outcome != RecordedOutcome::Done)
            }
        }
    }

    /// Holds the label until the write is observed.
    pub(super) fn label_issued(&mut self, node: &NodeName, set: &WarmSet, is_set: bool, now: Tick) {
        let until = now + OBSERVED_WITHIN;
        self.hold_label(node, set, LabelHold { expected: Some(is_set), until });
        if self.refused_labels.is_some() {
            self.pause_labels(node, until);
        }
    }

    pub(super) fn hold_label(&mut self, node: &NodeName, set: &WarmSet, hold: LabelHold) {
        if let Some(known) = self.nodes.get_mut(node) {
            known.label_holds.insert(set.clone(), hold);
            self.labels_due.insert((hold.until, node.clone()));
            self.labels_dirty.insert(node.clone());
        }
    }

    /// Marks all nodes that have the label, because it has become open whether they should.
    pub(super) fn mark_labels_of(&mut self, set: &WarmSet) {
        let has = |known: &KnownNode| {
            known.label_holds.contains_key(set)
                || known.facts.as_ref().is_some_and(|facts| facts.labels_warm.contains(set))
        };
        let nodes = self.nodes.iter().filter(|(_, known)| has(known)).map(|(name, _)| name.clone());
        self.labels_dirty.extend(nodes);
    }
}

impl KnownNode {
    /// Forgets writes whose effect is observed, and those that nothing was observed of. Returns when they were due.
    pub(super) fn resolve_label_holds(&mut self, now: Tick) -> Vec<Tick> {
        let labels = self.facts.as_ref().map(|facts| &facts.labels_warm);
        let mut settled = Vec::new();
        self.label_holds.retain(|set, hold| {
            let is_observed = hold.expected == labels.map(|labels| labels.contains(set));
            let is_kept = hold.until > now && !is_observed;
            if !is_kept {
                settled.push(hold.until);
            }
            is_kept
        });
        settled
    }
}
