//! One node of one Warmup: what is known of its items and its Pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    back_off,
    cause::WarmupCause,
    facts::{WarmupNodeFacts, WarmupPod},
    ids::{ImageName, WarmPodName, WarmSet, WarmupId, WarmupItem},
    node_view::NodeView,
    record::{NodeKey, NodeUidKey, RecordedNode, RecordedOutcome, WarmupRecord},
    request::NodeItems,
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// A node, as all Warmups see it.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownNode {
    /// `None` if the node does not exist.
    pub(super) facts: Option<WarmupNodeFacts>,
    /// Pods of engines that wait for an image.
    pub(super) engines_pulling: u32,
    /// Warmups that have the node as a target, or a Pod on it.
    pub(super) warmups: BTreeSet<WarmupId>,
    /// The Warmups that are pulling each image.
    pub(super) pulls: BTreeMap<ImageName, BTreeSet<WarmupId>>,
    pub(super) label_holds: BTreeMap<WarmSet, LabelHold>,
}

/// A write of a label whose effect is not observed yet, or that has failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct LabelHold {
    /// Whether the node has the label after the write. `None`: it failed, and is not repeated yet.
    pub(super) expected: Option<bool>,
    pub(super) until: Tick,
}

#[derive(Clone, Debug)]
pub(super) struct NodeProgress {
    pub(super) key: NodeKey,
    /// The node that the rest is about, among those that had or will have its name.
    pub(super) uid: NodeUidKey,
    /// `None` if the node is no target, or not any more.
    pub(super) items: Option<Arc<NodeItems>>,
    pub(super) items_hash: u32,
    pub(super) outcome: NodeOutcome,
    /// Failures of all items together.
    pub(super) failures: u32,
    /// Attempts in a row that ended without a failure: no room, a refusal, a Pod that another client deleted.
    pub(super) interruptions: u32,
    pub(super) next_try: Option<Tick>,
    pub(super) last_cause: Option<(WarmupItem, WarmupCause)>,
    pub(super) last_duration: Option<Millis>,
    pub(super) pods: BTreeMap<WarmPodName, TrackedPod>,
    /// Pods that were ordered and not observed yet.
    pub(super) creating: BTreeMap<WarmupItem, PendingCreate>,
    pub(super) present: BTreeMap<WarmupItem, PresentItem>,
    /// Images that the node's own list has shown. Only then does its silence mean something.
    pub(super) listed_images: BTreeSet<ImageName>,
    /// What the last refresh found.
    pub(super) view: NodeView,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NodeOutcome {
    #[default]
    Open,
    Done,
    Failed,
}

/// An item that the node has.
#[derive(Clone, Debug, Default)]
pub(super) struct PresentItem {
    pub(super) digest: Option<String>,
    /// Present, but of no use: for another platform.
    pub(super) note: Option<WarmupCause>,
}

/// An ordered Pod, until it is observed or this moment passes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingCreate {
    pub(super) generation: u64,
    pub(super) attempt: u32,
    pub(super) until: Tick,
}

impl PendingCreate {
    /// Whether this is the ordered Pod, and not one of an earlier attempt or generation.
    pub(super) const fn is_for(&self, pod: &WarmupPod) -> bool {
        self.generation == pod.generation && self.attempt == pod.attempt
    }
}

/// An observed Pod.
#[derive(Clone, Debug)]
pub(super) struct TrackedPod {
    pub(super) pod: WarmupPod,
    /// It had failed before this controller began to lead, so the record may count it already.
    pub(super) had_failed: bool,
    /// The node's failures with this one. The Pod may go once the stored record has as many.
    pub(super) counted: Option<u32>,
    /// It ended without a failure, and the pause for it was set.
    pub(super) interrupted: bool,
    /// It proves nothing any more: the node has lost the image since.
    pub(super) is_stale: bool,
    /// Its deletion was ordered, and is not ordered again before.
    pub(super) deleting_until: Option<Tick>,
}

impl NodeProgress {
    pub(super) fn new(name: &NodeName) -> Self {
        Self {
            key: NodeKey::new(name),
            uid: NodeUidKey::default(),
            items: None,
            items_hash: 0,
            outcome: NodeOutcome::Open,
            failures: 0,
            interruptions: 0,
            next_try: None,
            last_cause: None,
            last_duration: None,
            pods: BTreeMap::new(),
            creating: BTreeMap::new(),
            present: BTreeMap::new(),
            listed_images: BTreeSet::new(),
            view: NodeView::default(),
        }
    }

    /// Sets what the node should have, and continues from its record.
    ///
    /// The record of a node with other items counts no more: the node is warmed again. A node that was tried pauses for
    /// `retry_delay`, doubled with each of its failures.
    pub(super) fn set_items(
        &mut self,
        name: &NodeName,
        items: &Arc<NodeItems>,
        items_hash: u32,
        record: &mut WarmupRecord,
        retry_delay: Millis,
        now: Tick,
    ) {
        if self.items.is_some() && self.items_hash == items_hash {
            self.items = Some(Arc::clone(items));
            return;
        }
        self.items = Some(Arc::clone(items));
        self.items_hash = items_hash;
        self.present.retain(|item, _| items.contains(item));
        self.forget_attempts();
        match record.get(self.key).copied() {
            Some(known) if known.items == items_hash => {
                self.failures = known.attempts;
                if known.uid.is_known() {
                    self.uid = known.uid;
                }
                match known.outcome {
                    RecordedOutcome::Done => self.outcome = NodeOutcome::Done,
                    RecordedOutcome::Failed(reason) => {
                        self.outcome = NodeOutcome::Failed;
                        self.restore_cause(items, WarmupCause::from_reason(reason));
                    }
                    RecordedOutcome::Retried => {
                        self.next_try = Some(now + back_off::delay(retry_delay, name, known.attempts, None));
                    }
                }
            }
            Some(_) => record.remove(self.key),
            None => {}
        }
    }

    /// Takes the node out of the targets. It counts no more, unless it was deleted while it was warmed.
    ///
    /// A Warmup that is kept warm never ends, so it would count such nodes for ever: it counts none.
    pub(super) fn leave(&mut self, keeps_warm: bool) {
        self.items = None;
        let was_deleted = matches!(self.last_cause, Some((_, WarmupCause::NodeGone)));
        if keeps_warm || !(self.outcome == NodeOutcome::Failed && was_deleted) {
            self.forget_attempts();
        }
    }

    /// Forgets what the node had, because the node was deleted. Another of the same name has nothing.
    pub(super) fn lose_items(&mut self) {
        self.present.clear();
        self.listed_images.clear();
        for tracked in self.pods.values_mut() {
            tracked.is_stale = !tracked.pod.is_unfinished();
        }
        if self.outcome == NodeOutcome::Done {
            self.forget_attempts();
        }
    }

    /// Forgets everything of a node that was deleted, because another has its name now.
    pub(super) fn begin_with(&mut self, uid: NodeUidKey) {
        self.lose_items();
        self.forget_attempts();
        self.uid = uid;
    }

    /// The record of this outcome.
    pub(super) const fn recorded(&self, outcome: RecordedOutcome) -> RecordedNode {
        RecordedNode { outcome, items: self.items_hash, attempts: self.failures, uid: self.uid }
    }

    /// Begins from nothing but what the node has.
    pub(super) fn forget_attempts(&mut self) {
        self.outcome = NodeOutcome::Open;
        self.failures = 0;
        self.interruptions = 0;
        self.next_try = None;
        self.last_cause = None;
    }

    /// The record does not say which item failed. The last item is most likely to be the only one left.
    fn restore_cause(&mut self, items: &NodeItems, cause: WarmupCause) {
        self.last_cause = items.items().last().map(|item| (item, cause));
    }

    pub(super) fn is_open_target(&self) -> bool {
        self.items.is_some() && self.outcome == NodeOutcome::Open
    }

    pub(super) fn has_unfinished_pods(&self) -> bool {
        !self.creating.is_empty() || self.pods.values().any(|tracked| tracked.pod.is_unfinished())
    }

    /// The images that the node pulls for this Warmup.
    pub(super) fn pulls(&self) -> BTreeSet<ImageName> {
        let unfinished = self.pods.values().filter(|tracked| tracked.pod.is_unfinished());
        let items = unfinished.map(|tracked| &tracked.pod.item).chain(self.creating.keys());
        items.filter_map(WarmupItem::image).cloned().collect()
    }

    /// Neither a target nor of any other interest.
    pub(super) fn is_unused(&self) -> bool {
        self.items.is_none()
            && self.outcome != NodeOutcome::Failed
            && self.pods.is_empty()
            && self.creating.is_empty()
    }

    /// Pauses after an attempt that ended without a failure of the node: for `retry_delay`, doubled with each in a row.
    pub(super) fn interrupt(
        &mut self,
        name: &NodeName,
        cause: Option<(WarmupItem, WarmupCause)>,
        retry_delay: Millis,
        now: Tick,
    ) {
        self.interruptions = self.interruptions.saturating_add(1);
        let until = now + back_off::delay(retry_delay, name, self.interruptions, None);
        self.next_try = self.next_try.max(Some(until));
        if cause.is_some() {
            self.last_cause = cause;
        }
    }
}

impl TrackedPod {
    pub(super) fn new(pod: WarmupPod, had_failed: bool) -> Self {
        Self { pod, had_failed, counted: None, interrupted: false, is_stale: false, deleting_until: None }
    }
}
