//! What one node adds to the numbers and lists of its Warmup.
//!
//! A Warmup of thousands of nodes never walks over all of them. When a node changes, its former view is subtracted from
//! the Warmup's tally and its new view added.

use std::collections::BTreeSet;

use super::{ids::ImageName, node_progress::NodeOutcome, report::ItemState};
use crate::{pairing::ids::NodeName, units::Tick};

/// The view of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeView {
    /// The outcome, if the node counts.
    pub(super) outcome: Option<NodeOutcome>,
    pub(super) is_active: bool,
    /// It waits for its node, for the pull of an engine or for a back-off.
    pub(super) is_blocked: bool,
    pub(super) items: ItemCounts,
    pub(super) rank: Option<ListRank>,
    pub(super) startable: Option<StartClass>,
    /// Some of its Pods may be deleted now.
    pub(super) has_deletable_pods: bool,
    /// The stored progress decides when its Pods may be deleted.
    pub(super) awaits_store: bool,
    /// Next moment at which the view changes by itself.
    pub(super) due: Option<Tick>,
    pub(super) pulls: BTreeSet<ImageName>,
}

/// The order in which nodes begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StartClass {
    /// It is active already, so it takes no room.
    Active,
    /// A node that has begun ends before another begins.
    Begun,
    Fresh,
    /// This number of attempts was interrupted. The others go first, or a node whose Pods are always refused would keep
    /// them waiting.
    Interrupted(u32),
}

/// The order in which a report lists nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ListRank {
    Failed,
    HasCause,
    Active,
    Waiting,
}

/// Numbers of items by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ItemCounts {
    pending: u32,
    pulling: u32,
    present: u32,
    failed: u32,
    skipped: u32,
}

impl ItemCounts {
    pub(super) const fn add(&mut self, state: ItemState, number: u32) {
        let count = self.of(state);
        *count = count.saturating_add(number);
    }

    const fn of(&mut self, state: ItemState) -> &mut u32 {
        match state {
            ItemState::Pending => &mut self.pending,
            ItemState::Pulling => &mut self.pulling,
            ItemState::Present => &mut self.present,
            ItemState::Failed => &mut self.failed,
            ItemState::Skipped => &mut self.skipped,
        }
    }

    /// The states that have items.
    pub(super) fn states(self) -> impl Iterator<Item = (ItemState, u32)> {
        let all = [
            (ItemState::Pending, self.pending),
            (ItemState::Pulling, self.pulling),
            (ItemState::Present, self.present),
            (ItemState::Failed, self.failed),
            (ItemState::Skipped, self.skipped),
        ];
        all.into_iter().filter(|(_, number)| *number > 0)
    }
}

/// The sum of the views of all nodes of a Warmup.
#[derive(Clone, Debug, Default)]
pub(super) struct WarmupTally {
    pub(super) open: u32,
    pub(super) succeeded: u32,
    pub(super) failed: u32,
    pub(super) active: u32,
    /// Open nodes of which each waits for its node, for the pull of an engine or for a back-off.
    pub(super) blocked: u32,
    pub(super) items: ItemCounts,
    pub(super) listed: BTreeSet<(ListRank, NodeName)>,
    pub(super) startable: BTreeSet<(StartClass, NodeName)>,
    pub(super) deletable: BTreeSet<NodeName>,
    pub(super) awaits_store: BTreeSet<NodeName>,
    pub(super) due: BTreeSet<(Tick, NodeName)>,
}

impl WarmupTally {
    pub(super) const fn desired(&self) -> u32 {
        self.open + self.succeeded + self.failed
    }

    /// Replaces the former view of a node by its new one.
    pub(super) fn replace(&mut self, name: &NodeName, old: &NodeView, new: &NodeView) {
        if old == new {
            return;
        }
        self.count(old, false);
        self.count(new, true);
        move_key(&mut self.listed, name, old.rank, new.rank);
        move_key(&mut self.startable, name, old.startable, new.startable);
        move_key(&mut self.due, name, old.due, new.due);
        move_name(&mut self.deletable, name, old.has_deletable_pods, new.has_deletable_pods);
        move_name(&mut self.awaits_store, name, old.awaits_store, new.awaits_store);
    }

    fn count(&mut self, view: &NodeView, is_added: bool) {
        let change = |count: &mut u32, by: u32| {
            *count = if is_added { count.saturating_add(by) } else { count.saturating_sub(by) };
        };
        match view.outcome {
            Some(NodeOutcome::Open) => change(&mut self.open, 1),
            Some(NodeOutcome::Done) => change(&mut self.succeeded, 1),
            Some(NodeOutcome::Failed) => change(&mut self.failed, 1),
            None => {}
        }
        change(&mut self.active, u32::from(view.is_active));
        change(&mut self.blocked, u32::from(view.is_blocked));
        for (state, number) in view.items.states() {
            change(self.items.of(state), number);
        }
    }
}

fn move_key<T: Copy + Ord>(
    set: &mut BTreeSet<(T, NodeName)>,
    name: &NodeName,
    old: Option<T>,
    new: Option<T>,
) {
    if old == new {
        return;
    }
    if let Some(old) = old {
        set.remove(&(old, name.clone()));
    }
    if let Some(new) = new {
        set.insert((new, name.clone()));
    }
}

fn move_name(set: &mut BTreeSet<NodeName>, name: &NodeName, old: bool, new: bool) {
    if new && !old {
        set.insert(name.clone());
    } else if old && !new {
        set.remove(name);
    }
}
