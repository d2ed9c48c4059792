//! Takes commands as issued, and their outcomes.

use super::{
    Warmups, back_off,
    cause::WarmupCause,
    command::WarmupCommand,
    event::CommandError,
    ids::{WarmupId, WarmupItem},
    node_progress::{LabelHold, PendingCreate},
    state::CreationHold,
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Time after which a command without an outcome counts as lost.
const ISSUED_WITHIN: Millis = Millis::secs(120);
/// Time from an executed creation until the Pod must be observed. Then it was deleted meanwhile.
const CREATED_WITHIN: Millis = Millis::secs(30);
/// Time until the effect of a creation whose reply was lost must be observed.
const UNKNOWN_WITHIN: Millis = Millis::secs(10);
/// Pause after a deletion or a write of a label that failed.
const RETRY_PAUSE: Millis = Millis::secs(10);
/// Pause after a refused label. Then one label is tried: the right to patch nodes is missing for all of them.
const LABEL_REFUSED_PAUSE: Millis = Millis::secs(10);

impl Warmups {
    pub(super) fn executed(&mut self, command: &WarmupCommand, now: Tick) {
        if matches!(command, WarmupCommand::SetWarm { .. } | WarmupCommand::RemoveWarm { .. }) {
            self.refused_labels = None;
        }
        let WarmupCommand::CreatePod { id, node, item, .. } = command else { return };
        let Some(state) = self.warmups.get_mut(id) else { return };
        state.creation = CreationHold::default();
        state.dirty.insert(node.clone());
        if let Some(create) = state.nodes.get_mut(node).and_then(|node| node.creating.get_mut(item)) {
            create.until = now + CREATED_WITHIN;
        }
        self.dirty.insert(id.clone());
    }

    pub(super) fn failed(&mut self, command: &WarmupCommand, error: &CommandError, now: Tick) {
        match command {
            WarmupCommand::CreatePod { id, node, item, .. } => {
                self.creation_failed(id, node, item, error, now)
            }
            WarmupCommand::DeletePod { id, name } => {
                let at = self.pods.get(name).map(|(_, node)| node.clone());
                let Some((node, state)) = at.zip(self.warmups.get_mut(id)) else { return };
                if let Some(tracked) = state.node_mut(&node).pods.get_mut(name) {
                    tracked.deleting_until = Some(now + RETRY_PAUSE);
                }
                self.dirty.insert(id.clone());
            }
            WarmupCommand::SetWarm { node, set } | WarmupCommand::RemoveWarm { node, set } => {
                self.hold_label(node, set, LabelHold { expected: None, until: now + RETRY_PAUSE });
                if self.refused_labels.is_some() || matches!(error, CommandError::Refused(_)) {
                    self.pause_labels(node, now + LABEL_REFUSED_PAUSE);
                }
            }
            WarmupCommand::DeleteWarmup { id } => {
                if let Some(state) = self.warmups.get_mut(id) {
                    state.deleting_until = Some(now + RETRY_PAUSE);
                    self.dirty.insert(id.clone());
                }
            }
        }
    }

    fn creation_failed(
        &mut self,
        id: &WarmupId,
        name: &NodeName,
        item: &WarmupItem,
        error: &CommandError,
        now: Tick,
    ) {
        let Some(state) = self.warmups.get_mut(id) else { return };
        state.dirty.insert(name.clone());
        let (refusals, retry_delay) = (state.creation.refusals.saturating_add(1), state.retry_delay());
        let node = state.nodes.get_mut(name);
        match error {
            CommandError::Refused(message) => {
                let cause = WarmupCause::refused(message);
                if let Some(node) = node {
                    node.creating.remove(item);
                    node.interrupt(name, Some((item.clone(), cause.clone())), retry_delay, now);
                }
                let pause = back_off::delay(retry_delay, name, refusals, None);
                state.refuse_creation(pause, cause, now);
            }
            // It may have been executed: until its Pod would be observed, the node counts as active.
            CommandError::Transient => {
                if let Some(node) = node {
                    node.interrupt(name, None, retry_delay, now);
                    if let Some(create) = node.creating.get_mut(item) {
                        create.until = now + UNKNOWN_WITHIN;
                    }
                }
            }
        }
        self.dirty.insert(id.clone());
    }

    /// Takes a command as issued.
    pub(super) fn record_issued(&mut self, command: &WarmupCommand, now: Tick) {
        let until = now + ISSUED_WITHIN;
        match command {
            WarmupCommand::CreatePod { id, node, item, generation, attempt, .. } => {
                if let Some(state) = self.warmups.get_mut(id) {
                    let create = PendingCreate { generation: *generation, attempt: *attempt, until };
                    state.node_mut(node).creating.insert(item.clone(), create);
                    self.dirty.insert(id.clone());
                }
            }
            WarmupCommand::DeletePod { id, name } => {
                let at = self.pods.get(name).map(|(_, node)| node.clone());
                let Some((node, state)) = at.zip(self.warmups.get_mut(id)) else { return };
                if let Some(tracked) = state.node_mut(&node).pods.get_mut(name) {
                    tracked.deleting_until = Some(until);
                }
                self.dirty.insert(id.clone());
            }
            WarmupCommand::SetWarm { node, set } => self.label_issued(node, set, true, now),
            WarmupCommand::RemoveWarm { node, set } => self.label_issued(node, set, false, now),
            WarmupCommand::DeleteWarmup { id } => {
                if let Some(state) = self.warmups.get_mut(id) {
                    state.deleting_until = Some(until);
                    self.dirty.insert(id.clone());
                }
            }
        }
    }
}
