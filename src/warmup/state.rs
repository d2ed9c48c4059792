//! One Warmup: its request, its progress, and its nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    cause::WarmupCause,
    ids::{ImageName, WarmupId},
    node_progress::{KnownNode, NodeProgress},
    node_step::NodeContext,
    node_view::{NodeView, WarmupTally},
    progress::WarmupProgress,
    record::{NodeKey, NodeUidKey},
    report::{WarmupReason, WarmupReport},
    request::{WarmupLimits, WarmupRequest, WarmupTargets},
    verdict::NodeCounts,
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

#[derive(Clone, Debug, Default)]
pub(super) struct WarmupState {
    /// `None` if the Warmup does not exist, or not any more, and some of its Pods still do.
    pub(super) request: Option<Arc<WarmupRequest>>,
    /// What the API server has.
    pub(super) stored: Arc<WarmupProgress>,
    pub(super) progress: WarmupProgress,
    pub(super) targets: Option<WarmupTargets>,
    /// [`Self::nodes`] are those of the targets.
    pub(super) has_nodes: bool,
    /// The elapsed time at which the target was found missing.
    pub(super) missing_since: Option<Millis>,
    /// Why it has ended, if it ended under this leader.
    pub(super) ended: Option<WarmupReason>,
    pub(super) nodes: BTreeMap<NodeName, NodeProgress>,
    pub(super) dirty: BTreeSet<NodeName>,
    pub(super) tally: WarmupTally,
    /// Nodes that were deleted while they were warmed, under an earlier leader: their names are not known any more.
    pub(super) lost_earlier: u32,
    pub(super) creation: CreationHold,
    /// The deletion of the Warmup was ordered, and is not ordered again before.
    pub(super) deleting_until: Option<Tick>,
    pub(super) last_report: Option<Arc<WarmupReport>>,
}

/// Refusals of new Pods. A quota refuses all nodes alike, so the Warmup pauses as a whole, and then tries one Pod.
#[derive(Clone, Debug, Default)]
pub(super) struct CreationHold {
    pub(super) refusals: u32,
    pub(super) until: Option<Tick>,
    pub(super) cause: Option<WarmupCause>,
}

/// What a refresh found that concerns others.
#[derive(Debug, Default)]
pub(super) struct RefreshEffects {
    /// Nodes on which the pulls of this Warmup have changed: other Warmups may wait for them.
    pub(super) pulls_changed: Vec<NodeName>,
    /// Nodes whose outcome has changed, and with it perhaps their labels.
    pub(super) outcomes_changed: Vec<NodeName>,
}

impl WarmupState {
    pub(super) fn counts(&self) -> NodeCounts {
        NodeCounts {
            desired: self.tally.desired().saturating_add(self.lost_earlier),
            succeeded: self.tally.succeeded,
            failed: self.tally.failed.saturating_add(self.lost_earlier),
            active: self.tally.active,
        }
    }

    pub(super) fn mark_all_dirty(&mut self) {
        self.dirty.extend(self.nodes.keys().cloned());
    }

    /// Brings the changed nodes up to date, and those whose time has come.
    pub(super) fn refresh(
        &mut self,
        id: &WarmupId,
        all_nodes: &mut BTreeMap<NodeName, KnownNode>,
        now: Tick,
    ) -> RefreshEffects {
        let mut effects = RefreshEffects::default();
        let due = self.tally.due.iter().take_while(|(at, _)| *at <= now).map(|(_, name)| name.clone());
        self.dirty.extend(due);
        let is_finished = self.progress.phase.is_finished();
        let start_generation = self.progress.start_generation;
        for name in std::mem::take(&mut self.dirty) {
            let Some(node) = self.nodes.get_mut(&name) else { continue };
            let known = all_nodes.entry(name.clone()).or_default();
            let old = std::mem::take(&mut node.view);
            match &self.request {
                Some(request) if self.has_nodes || is_finished => {
                    let (stored, known) = (&*self.stored, &*known);
                    let name = &name;
                    let context =
                        NodeContext { id, name, request, stored, start_generation, is_finished, known, now };
                    context.refresh(node, &mut self.progress.record);
                }
                // Its Pods go with it, or it is not known yet what they are for.
                _ => node.view = NodeView { pulls: node.pulls(), ..NodeView::default() },
            }
            self.tally.replace(&name, &old, &node.view);
            if old.pulls != node.view.pulls {
                known.replace_pulls(id, &old.pulls, &node.view.pulls);
                effects.pulls_changed.push(name.clone());
            }
            if old.outcome != node.view.outcome {
                effects.outcomes_changed.push(name.clone());
            }
            if node.is_unused() {
                self.tally.replace(&name, &node.view, &NodeView::default());
                self.nodes.remove(&name);
                known.warmups.remove(id);
            } else if !known.warmups.contains(id) {
                known.warmups.insert(id.clone());
            }
            if known.is_unused() {
                all_nodes.remove(&name);
            }
        }
        effects
    }

    /// The context of one node for a question about it.
    pub(super) fn context<'a>(
        &'a self,
        id: &'a WarmupId,
        name: &'a NodeName,
        all_nodes: &'a BTreeMap<NodeName, KnownNode>,
        now: Tick,
    ) -> Option<NodeContext<'a>> {
        let is_finished = self.progress.phase.is_finished();
        let (request, stored) = (self.request.as_deref()?, &*self.stored);
        let (start_generation, known) = (self.progress.start_generation, all_nodes.get(name)?);
        Some(NodeContext { id, name, request, stored, start_generation, is_finished, known, now })
    }

    /// The pause after the first attempt of a node that ends without success.
    pub(super) fn retry_delay(&self) -> Millis {
        self.request
            .as_ref()
            .map_or_else(|| WarmupLimits::default().retry_delay, |request| request.limits.retry_delay)
    }

    pub(super) fn keeps_warm(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.keep_warm)
    }

    /// Records that a new Pod was refused, with the pause of the whole Warmup if it is the first since the last pause.
    pub(super) fn refuse_creation(&mut self, pause: Millis, cause: WarmupCause, now: Tick) {
        if self.creation.until.is_none_or(|until| until <= now) {
            self.creation.refusals = self.creation.refusals.saturating_add(1);
            self.creation.until = Some(now + pause);
        }
        self.creation.cause = Some(cause);
    }

    pub(super) fn node_mut(&mut self, name: &NodeName) -> &mut NodeProgress {
        self.dirty.insert(name.clone());
        self.nodes.entry(name.clone()).or_insert_with(|| NodeProgress::new(name))
    }

    /// Whether what is recorded of the node is about a deleted one of its name. A finished Warmup keeps such a record.
    pub(super) fn has_recorded_another(&self, key: NodeKey, uid: NodeUidKey) -> bool {
        self.progress.record.get(key).is_some_and(|recorded| recorded.uid.differs_from(uid))
    }

    pub(super) fn is_creating(&self) -> bool {
        self.nodes.values().any(|node| !node.creating.is_empty())
    }
}

impl KnownNode {
    fn replace_pulls(&mut self, id: &WarmupId, old: &BTreeSet<ImageName>, new: &BTreeSet<ImageName>) {
        for image in old.difference(new) {
            if let Some(ids) = self.pulls.get_mut(image) {
                ids.remove(id);
                if ids.is_empty() {
                    self.pulls.remove(image);
                }
            }
        }
        for image in new.difference(old) {
            self.pulls.entry(image.clone()).or_default().insert(id.clone());
        }
    }

    /// Neither existing nor of interest.
    pub(super) fn is_unused(&self) -> bool {
        self.facts.is_none() && self.warmups.is_empty() && self.engines_pulling == 0 && self.pulls.is_empty()
    }
}
