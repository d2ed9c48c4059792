//! Sums one node up: for the numbers of its Warmup, and as a line of the report.

use super::{
    cause::WarmupCause,
    ids::WarmupItem,
    node_progress::{NodeOutcome, NodeProgress},
    node_step::NodeContext,
    node_view::{ItemCounts, ListRank, NodeView, StartClass},
    report::{ItemState, NodeReport},
};
use crate::units::Tick;

impl NodeContext<'_> {
    pub(super) fn view(&self, node: &NodeProgress) -> NodeView {
        let is_ready = self.known.facts.as_ref().is_some_and(|facts| facts.ready);
        let is_target = node.items.is_some();
        let is_open = node.is_open_target();
        // Nothing is pulled on a node whose kubelet is silent. Should it come back, it counts again, and nothing
        // begins until there is room.
        let is_active = is_ready && node.has_unfinished_pods();
        let is_unusable = is_open && self.unusable().is_some();
        let waits_for_engine = self.waits_for_engine(node);
        let waits = waits_for_engine || node.next_try.is_some_and(|at| at > self.now);
        let can_start = is_open && !self.is_finished && !is_unusable && !self.creatable(node).is_empty();
        let is_fresh = node.failures == 0 && node.pods.is_empty() && node.present.is_empty();
        let start_class = || match (is_active, node.interruptions, is_fresh) {
            (true, _, _) => StartClass::Active,
            (false, 0, false) => StartClass::Begun,
            (false, 0, true) => StartClass::Fresh,
            (false, times, _) => StartClass::Interrupted(times),
        };
        let has_deletable_pods = node.pods.values().any(|tracked| self.may_delete(node, tracked));
        let has_ended = self.is_finished || node.outcome != NodeOutcome::Open;
        NodeView {
            outcome: (is_target || node.outcome == NodeOutcome::Failed).then_some(node.outcome),
            is_active,
            is_blocked: is_open && !is_active && (is_unusable || waits),
            items: self.count_items(node),
            rank: self.rank(node, is_active, is_unusable || waits_for_engine),
            startable: can_start.then(start_class),
            has_deletable_pods,
            awaits_store: node.pods.values().any(|tracked| has_ended || tracked.counted.is_some()),
            due: self.next_change(node),
            pulls: node.pulls(),
        }
    }

    fn rank(&self, node: &NodeProgress, is_active: bool, is_held_up: bool) -> Option<ListRank> {
        match node.outcome {
            NodeOutcome::Failed => Some(ListRank::Failed),
            NodeOutcome::Open if node.items.is_some() => Some(if is_held_up || node.last_cause.is_some() {
                ListRank::HasCause
            } else if is_active {
                ListRank::Active
            } else {
                ListRank::Waiting
            }),
            NodeOutcome::Open | NodeOutcome::Done => None,
        }
    }

    fn next_change(&self, node: &NodeProgress) -> Option<Tick> {
        let creates = node.creating.values().map(|create| create.until);
        let deletes = node.pods.values().filter_map(|tracked| tracked.deleting_until);
        let all = creates.chain(deletes).chain(node.next_try);
        all.filter(|at| *at > self.now).min()
    }

    fn count_items(&self, node: &NodeProgress) -> ItemCounts {
        let mut counts = ItemCounts::default();
        let Some(items) = &node.items else { return counts };
        if node.outcome == NodeOutcome::Done {
            counts.add(ItemState::Present, u32::try_from(items.len()).unwrap_or(u32::MAX));
            return counts;
        }
        items.items().for_each(|item| counts.add(self.item_state(node, &item), 1));
        counts
    }

    fn item_state(&self, node: &NodeProgress, item: &WarmupItem) -> ItemState {
        if node.outcome == NodeOutcome::Done || node.present.contains_key(item) {
            return ItemState::Present;
        }
        if node.outcome == NodeOutcome::Failed {
            let is_cause = node.last_cause.as_ref().is_some_and(|(failed, _)| failed == item);
            return if is_cause { ItemState::Failed } else { ItemState::Skipped };
        }
        if self.is_finished {
            return ItemState::Skipped;
        }
        let mut pods = node.pods.values().map(|tracked| &tracked.pod);
        let pulls = pods.any(|pod| pod.item == *item && pod.is_unfinished() && pod.cause().is_none());
        if pulls || node.creating.contains_key(item) { ItemState::Pulling } else { ItemState::Pending }
    }

    /// The line of the node in the report: about the item that needs attention most.
    pub(super) fn report(&self, node: &NodeProgress) -> NodeReport {
        let held_up = if node.outcome == NodeOutcome::Open {
            self.unusable().or_else(|| self.waits_for_engine(node).then_some(WarmupCause::EnginePulling))
        } else {
            None
        };
        let missing = || {
            node.items.iter().flat_map(|items| items.items()).find(|item| !node.present.contains_key(item))
        };
        let (item, cause) = match (&node.last_cause, held_up) {
            (Some((item, cause)), None) => (Some(item.clone()), Some(cause.clone())),
            (_, Some(cause)) => (None, Some(cause)),
            (None, None) => (missing(), None),
        };
        let state = match (&item, node.outcome) {
            (_, NodeOutcome::Failed) => ItemState::Failed,
            (Some(item), _) => self.item_state(node, item),
            (None, NodeOutcome::Done) => ItemState::Present,
            (None, NodeOutcome::Open) if self.is_finished => ItemState::Skipped,
            (None, NodeOutcome::Open) => ItemState::Pending,
        };
        let known = item.as_ref().and_then(|item| node.present.get(item));
        NodeReport {
            node: self.name.clone(),
            state,
            cause: cause.or_else(|| known.and_then(|present| present.note.clone())),
            attempts: node.failures,
            next_try: node.next_try.filter(|at| *at > self.now),
            duration: node.last_duration,
            digest: known.and_then(|present| present.digest.clone()),
            item,
        }
    }
}
