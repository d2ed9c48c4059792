//! When a Pod of a Warmup may be deleted: once the stored progress has all that it shows.
//!
//! A leader that dies between two writes loses nothing then. What the Pod showed is in the status, or the Pod is still
//! there and shows it to the next leader.

use super::{
    facts::WarmupPodState,
    node_progress::{NodeOutcome, NodeProgress, TrackedPod},
    node_step::NodeContext,
    record::{RecordedNode, RecordedOutcome},
};

impl NodeContext<'_> {
    /// Whether to order the deletion of the Pod now.
    pub(super) fn may_delete(&self, node: &NodeProgress, tracked: &TrackedPod) -> bool {
        let is_issued = tracked.deleting_until.is_some_and(|until| until > self.now);
        !tracked.pod.terminating && !is_issued && self.is_spent(node, tracked)
    }

    fn is_spent(&self, node: &NodeProgress, tracked: &TrackedPod) -> bool {
        let pod = &tracked.pod;
        let is_wanted = node.items.as_ref().is_some_and(|items| items.contains(&pod.item));
        if !is_wanted || tracked.is_stale {
            return true;
        }
        let is_current = self.is_of_this_run(pod) && pod.items_hash == node.items_hash;
        if pod.cause().is_some_and(|cause| !is_current || !cause.is_failure()) {
            return true;
        }
        if is_kept_for_its_log(node, tracked) {
            return false;
        }
        if self.is_finished {
            return self.stored.completion.is_some() && self.stored.generation == self.request.generation;
        }
        let stored = self.stored_outcome(node);
        match node.outcome {
            NodeOutcome::Done => stored.is_some_and(|stored| stored.outcome == RecordedOutcome::Done),
            NodeOutcome::Failed => {
                stored.is_some_and(|stored| matches!(stored.outcome, RecordedOutcome::Failed(_)))
            }
            // A success stays until its node is done: no record has single items. A pull may succeed after it was
            // counted as failed, because the kubelet goes on trying.
            NodeOutcome::Open => {
                let is_stored = |counted| stored.is_some_and(|stored| stored.attempts >= counted);
                !shows_success(tracked) && tracked.counted.is_some_and(is_stored)
            }
        }
    }

    fn stored_outcome(&self, node: &NodeProgress) -> Option<RecordedNode> {
        let is_current = self.stored.generation == self.request.generation;
        let stored = self.stored.record.get(node.key).filter(|_| is_current)?;
        let is_of_node = stored.items == node.items_hash && !stored.uid.differs_from(node.uid);
        is_of_node.then_some(*stored)
    }
}

const fn shows_success(tracked: &TrackedPod) -> bool {
    matches!(tracked.pod.state, WarmupPodState::Present { .. } | WarmupPodState::Done { .. })
}

/// The last Pod of an action that failed on a node that is not done.
///
/// It goes when the node's next attempt has begun, or with its Warmup.
fn is_kept_for_its_log(node: &NodeProgress, tracked: &TrackedPod) -> bool {
    let pod = &tracked.pod;
    let is_newest = || {
        let same = node.pods.values().filter(|other| other.pod.item == pod.item);
        same.map(|other| other.pod.attempt).max() <= Some(pod.attempt)
    };
    node.outcome != NodeOutcome::Done
        && pod.item.is_action()
        && !pod.is_unfinished()
        && pod.cause().is_some()
        && is_newest()
}
