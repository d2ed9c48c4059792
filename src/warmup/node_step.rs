//! What the observations of one node mean: which items it has, how often it has failed, and whether it has ended.

use super::{
    back_off,
    cause::WarmupCause,
    facts::{WarmupPod, WarmupPodState},
    ids::{WarmupId, WarmupItem},
    node_progress::{KnownNode, NodeOutcome, NodeProgress, PresentItem},
    progress::WarmupProgress,
    record::{RecordedNode, RecordedOutcome, WarmupRecord},
    request::{NodeItems, WarmupRequest},
    verdict::is_permanent,
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Pause before a failed node is tried again if the Warmup never ends: no edit restarts such a Warmup once its registry
/// has the image or accepts the password again.
const FAILED_NODE_PAUSE: Millis = Millis::secs(900);

/// What the decisions about one node depend on, besides the node's own progress.
#[derive(Clone, Copy)]
pub(super) struct NodeContext<'a> {
    pub(super) id: &'a WarmupId,
    pub(super) name: &'a NodeName,
    pub(super) request: &'a WarmupRequest,
    pub(super) stored: &'a WarmupProgress,
    /// [`WarmupProgress::start_generation`] of the present progress.
    pub(super) start_generation: u64,
    /// The Warmup has ended: outcomes change no more.
    pub(super) is_finished: bool,
    pub(super) known: &'a KnownNode,
    pub(super) now: Tick,
}

impl NodeContext<'_> {
    /// Whether the Pod was created after the Warmup began, or began anew: only then its failure counts.
    ///
    /// A pause is an edit, too, but Pods from before it still belong to this run.
    pub(super) fn is_of_this_run(&self, pod: &WarmupPod) -> bool {
        (self.start_generation..=self.request.generation).contains(&pod.generation)
    }

    /// Updates the outcome of the node, and the record with it. Repeating it changes nothing.
    pub(super) fn refresh(&self, node: &mut NodeProgress, record: &mut WarmupRecord) {
        let now = self.now;
        node.creating.retain(|_, create| create.until > now);
        if !self.is_finished {
            match node.items.clone() {
                Some(items) => self.refresh_target(node, &items, record),
                None => self.refresh_departed(node, record),
            }
        }
        node.view = self.view(node);
    }

    /// A node that leaves the targets does not count, unless it was deleted while it was being warmed.
    fn refresh_departed(&self, node: &mut NodeProgress, record: &mut WarmupRecord) {
        let is_lost = self.known.facts.is_none() && node.has_unfinished_pods();
        if is_lost && !self.request.keep_warm && node.outcome == NodeOutcome::Open {
            self.fail(node, None, record);
        }
    }

    /// Forgets what the node had if another has its name now: that one has nothing.
    fn notice_another_node(&self, node: &mut NodeProgress, record: &mut WarmupRecord) {
        let uid = self.known.facts.as_ref().map(|facts| facts.uid).unwrap_or_default();
        if !uid.is_known() || node.uid == uid {
            return;
        }
        if node.uid.is_known() {
            node.begin_with(uid);
            record.remove(node.key);
            return;
        }
        // An earlier version recorded no uids: the record is that of this node.
        node.uid = uid;
        if let Some(recorded) = record.get(node.key).copied() {
            record.set(node.key, RecordedNode { uid, ..recorded });
        }
    }

    fn refresh_target(&self, node: &mut NodeProgress, items: &NodeItems, record: &mut WarmupRecord) {
        self.notice_another_node(node, record);
        if self.request.keep_warm {
            self.notice_lost_images(node, items, record);
            self.reopen(node, record);
        }
        if node.outcome != NodeOutcome::Open {
            return;
        }
        self.note_present_items(node, items);
        self.count_attempts(node, items, record);
        if node.present.len() >= items.len() {
            node.outcome = NodeOutcome::Done;
            (node.next_try, node.last_cause, node.failures) = (None, None, 0);
            record.set(node.key, node.recorded(RecordedOutcome::Done));
        } else if node.outcome == NodeOutcome::Open && self.known.facts.is_none() {
            self.fail(node, None, record);
        }
    }

    /// An image that the node's list showed and shows no more was collected: its node is warmed again.
    fn notice_lost_images(&self, node: &mut NodeProgress, items: &NodeItems, record: &mut WarmupRecord) {
        let Some(facts) = &self.known.facts else { return };
        let mut has_lost = false;
        for image in &items.images {
            if facts.images.contains(image) {
                // A membership test first: nearly always the image is known, and a clone would be for nothing.
                if !node.listed_images.contains(image) {
                    node.listed_images.insert(image.clone());
                }
            } else if node.listed_images.remove(image) {
                let item = WarmupItem::Image(image.clone());
                node.present.remove(&item);
                node.pods.values_mut().filter(|tracked| tracked.pod.item == item).for_each(|tracked| {
                    tracked.is_stale = !tracked.pod.is_unfinished();
                });
                has_lost = true;
            }
        }
        if has_lost && node.outcome == NodeOutcome::Done {
            node.forget_attempts();
            record.remove(node.key);
        }
    }

    /// Tries a failed node again if the Warmup never ends.
    fn reopen(&self, node: &mut NodeProgress, record: &mut WarmupRecord) {
        if node.outcome != NodeOutcome::Failed {
            return;
        }
        let was_gone = matches!(node.last_cause, Some((_, WarmupCause::NodeGone)));
        let retry_at = *node.next_try.get_or_insert(self.now + FAILED_NODE_PAUSE);
        if retry_at <= self.now || (was_gone && self.known.facts.is_some()) {
            node.forget_attempts();
            record.remove(node.key);
            // Else the Pod that stays for its log would stand for the attempt that follows.
            for tracked in node.pods.values_mut() {
                tracked.is_stale |= matches!(tracked.pod.state, WarmupPodState::Failed { .. });
            }
        }
    }

    fn note_present_items(&self, node: &mut NodeProgress, items: &NodeItems) {
        for tracked in node.pods.values().filter(|tracked| !tracked.is_stale) {
            let pod = &tracked.pod;
            let (found, at) = match &pod.state {
                WarmupPodState::Present { digest, note, at } => {
                    (PresentItem { digest: digest.clone(), note: note.clone() }, *at)
                }
                WarmupPodState::Done { at } => (PresentItem::default(), *at),
                _ => continue,
            };
            if items.contains(&pod.item) && !node.present.contains_key(&pod.item) {
                node.last_duration = Some(at.since(pod.created));
                node.present.insert(pod.item.clone(), found);
            }
        }
        let Some(facts) = &self.known.facts else { return };
        for image in items.images.intersection(&facts.images) {
            node.present.entry(WarmupItem::Image(image.clone())).or_default();
        }
    }

    /// Counts each failure once, and pauses after it.
    fn count_attempts(&self, node: &mut NodeProgress, items: &NodeItems, record: &mut WarmupRecord) {
        let mut fatal = None;
        let mut ended = Vec::new();
        for (name, tracked) in &node.pods {
            let Some(cause) = tracked.pod.cause() else { continue };
            let is_current = !tracked.is_stale
                && self.is_of_this_run(&tracked.pod)
                && tracked.pod.items_hash == node.items_hash
                && items.contains(&tracked.pod.item)
                && !node.present.contains_key(&tracked.pod.item);
            if is_current && tracked.counted.is_none() && (!tracked.interrupted || cause.is_failure()) {
                ended.push((name.clone(), tracked.pod.item.clone(), cause.clone(), tracked.had_failed));
            }
        }
        for (name, item, cause, had_failed) in ended {
            let Some(tracked) = node.pods.get_mut(&name) else { continue };
            if !cause.is_failure() {
                tracked.interrupted = true;
                let retry_delay = self.request.limits.retry_delay;
                node.interrupt(self.name, Some((item, cause)), retry_delay, self.now);
                continue;
            }
            let at = match tracked.pod.state {
                WarmupPodState::Failed { at, .. } => at,
                _ => self.now,
            };
            node.last_duration = Some(at.since(tracked.pod.created));
            // A former leader has counted it: its attempt is less than the recorded number of failures. If two items of
            // the node failed within the second before the leader changed, one of them may go uncounted.
            if had_failed && tracked.pod.attempt < node.failures {
                tracked.counted = Some(tracked.pod.attempt.saturating_add(1));
            } else {
                node.failures = node.failures.saturating_add(1);
                tracked.counted = Some(node.failures);
            }
            let pause =
                back_off::delay(self.request.limits.retry_delay, self.name, node.failures, Some(&cause));
            node.next_try = node.next_try.max(Some(at + pause));
            if cause.is_final() || is_permanent(node.failures, self.request.limits.backoff_limit) {
                fatal.get_or_insert_with(|| (item.clone(), cause.clone()));
            }
            node.last_cause = Some((item, cause));
            record.set(node.key, node.recorded(RecordedOutcome::Retried));
        }
        if fatal.is_some() {
            self.fail(node, fatal, record);
        }
    }

    /// Fails the node for good. Without a cause it is gone.
    fn fail(
        &self,
        node: &mut NodeProgress,
        cause: Option<(WarmupItem, WarmupCause)>,
        record: &mut WarmupRecord,
    ) {
        let first_item = || node.items.as_ref().and_then(|items| items.items().next());
        let cause = cause.or_else(|| {
            let item =
                first_item().or_else(|| node.pods.values().next().map(|tracked| tracked.pod.item.clone()));
            item.map(|item| (item, WarmupCause::NodeGone))
        });
        let reason = cause.as_ref().map_or(WarmupCause::NodeGone.reason(), |(_, cause)| cause.reason());
        node.outcome = NodeOutcome::Failed;
        node.next_try = self.request.keep_warm.then(|| self.now + FAILED_NODE_PAUSE);
        node.last_cause = cause;
        record.set(node.key, node.recorded(RecordedOutcome::Failed(reason)));
    }
}
