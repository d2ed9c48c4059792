//! Takes the request and the targets of a Warmup: it continues with them, or begins anew.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    cause::WarmupCause,
    node_progress::{NodeOutcome, NodeProgress},
    progress::{WarmupPhase, WarmupProgress},
    record::{NodeKey, RecordedOutcome},
    request::{NodeItems, WarmupRequest, WarmupTargets},
    state::{CreationHold, WarmupState},
};
use crate::{pairing::ids::NodeName, units::Tick};

/// A record with fewer nodes is not pruned.
const MIN_PRUNED_LEN: usize = 1000;

impl WarmupState {
    /// Takes the request, and begins anew if the edit does more than to pause or resume.
    pub(super) fn set_request(
        &mut self,
        request: Arc<WarmupRequest>,
        stored: Arc<WarmupProgress>,
        now: Tick,
    ) {
        let previous = self.request.replace(Arc::clone(&request));
        if previous.is_none() {
            self.progress = WarmupProgress::clone(&stored);
        }
        let continues = is_progress_of(&self.progress, &request);
        self.stored = stored;
        if !continues {
            self.begin_anew(request.generation);
        }
        self.progress.generation = request.generation;
        self.progress.spec_hash = Some(request.spec_hash.clone());
        if previous.is_none() || !continues {
            self.apply_targets(now);
        }
        if previous.as_ref() != Some(&request) {
            self.mark_all_dirty();
        } else {
            self.dirty.extend(self.tally.awaits_store.iter().cloned());
        }
    }

    /// Done nodes stay done as long as their items stay the same. Everything else is forgotten.
    fn begin_anew(&mut self, generation: u64) {
        let mut record = std::mem::take(&mut self.progress.record);
        record.retain(|_, node| node.outcome == RecordedOutcome::Done);
        let start_generation = generation;
        self.progress = WarmupProgress { generation, start_generation, record, ..WarmupProgress::default() };
        for node in self.nodes.values_mut().filter(|node| node.outcome != NodeOutcome::Done) {
            node.forget_attempts();
        }
        self.has_nodes = false;
        self.missing_since = None;
        self.ended = None;
        self.lost_earlier = 0;
        self.creation = CreationHold::default();
        self.deleting_until = None;
    }

    /// Makes the targets the nodes of this Warmup.
    ///
    /// A finished Warmup keeps the nodes with which it finished. A completed one of an earlier leader has those with an
    /// outcome: others have become targets since.
    pub(super) fn apply_targets(&mut self, now: Tick) {
        let Some(WarmupTargets::Nodes(targets)) = &self.targets else { return };
        let phase = self.progress.phase;
        if self.request.is_none() || (phase.is_finished() && self.has_nodes) {
            return;
        }
        let (keeps_warm, retry_delay) = (self.keeps_warm(), self.retry_delay());
        for (name, node) in &mut self.nodes {
            if !targets.contains_key(name) && node.items.is_some() {
                node.leave(keeps_warm);
                self.dirty.insert(name.clone());
            }
        }
        let mut last: Option<(&Arc<NodeItems>, u32)> = None;
        for (name, items) in targets {
            let hash = match last {
                // Most nodes share their items.
                Some((known, hash)) if Arc::ptr_eq(known, items) => hash,
                _ => items.hash(),
            };
            last = Some((items, hash));
            let recorded = || self.progress.record.get(NodeKey::new(name));
            let has_ended = || recorded().is_some_and(|node| node.outcome != RecordedOutcome::Retried);
            if phase == WarmupPhase::Completed && !has_ended() {
                continue;
            }
            let node = self.nodes.entry(name.clone()).or_insert_with(|| NodeProgress::new(name));
            if !(self.has_nodes && node.items.is_some() && node.items_hash == hash) {
                self.dirty.insert(name.clone());
            }
            node.set_items(name, items, hash, &mut self.progress.record, retry_delay, now);
        }
        self.has_nodes = true;
        let target_count = targets.len();
        self.prune_record(target_count);
        self.count_lost_nodes();
    }

    /// Forgets what a node had that was deleted, if the Warmup is kept warm: another node of the same name has nothing.
    ///
    /// Returns whether that changes anything.
    pub(super) fn forget_deleted_node(&mut self, name: &NodeName) -> bool {
        if !self.keeps_warm() {
            return false;
        }
        let key = NodeKey::new(name);
        let was_done =
            self.progress.record.get(key).is_some_and(|node| node.outcome == RecordedOutcome::Done);
        if was_done {
            self.progress.record.remove(key);
        }
        let Some(node) = self.nodes.get_mut(name) else { return was_done };
        node.lose_items();
        self.dirty.insert(name.clone());
        true
    }

    /// Forgets nodes that are no targets any more, once they are many: nodes of an autoscaler have ever new names.
    fn prune_record(&mut self, targets: usize) {
        if self.progress.record.len() <= targets.saturating_mul(2).max(MIN_PRUNED_LEN) {
            return;
        }
        let keys: BTreeSet<NodeKey> = self.nodes.values().map(|node| node.key).collect();
        let gone = RecordedOutcome::Failed(WarmupCause::NodeGone.reason());
        // Lost nodes count, except in a Warmup that never ends.
        let keeps_lost = !self.keeps_warm();
        self.progress.record.retain(|key, node| keys.contains(&key) || (keeps_lost && node.outcome == gone));
    }

    fn count_lost_nodes(&mut self) {
        if self.keeps_warm() {
            self.lost_earlier = 0;
            return;
        }
        let gone = RecordedOutcome::Failed(WarmupCause::NodeGone.reason());
        let mut lost: BTreeSet<_> = self
            .progress
            .record
            .iter()
            .filter(|(_, node)| node.outcome == gone)
            .map(|(key, _)| key)
            .collect();
        if !lost.is_empty() {
            self.nodes.values().for_each(|node| {
                lost.remove(&node.key);
            });
        }
        self.lost_earlier = u32::try_from(lost.len()).unwrap_or(u32::MAX);
    }
}

/// Whether this is the progress of the same spec, apart from pauses.
fn is_progress_of(progress: &WarmupProgress, request: &WarmupRequest) -> bool {
    let is_same = match &progress.spec_hash {
        Some(hash) => *hash == request.spec_hash,
        None => was_only_paused(progress, request),
    };
    is_same || progress.generation == request.generation
}

/// Whether the only edit since then may be a pause or its end, as far as the status of an earlier version shows.
fn was_only_paused(progress: &WarmupProgress, request: &WarmupRequest) -> bool {
    let is_toggled = progress.paused_since.is_some() != request.paused;
    matches!(progress.phase, WarmupPhase::InProgress | WarmupPhase::Paused)
        && progress.generation + 1 == request.generation
        && is_toggled
}
