//! Takes observations. Decides nothing.

use std::sync::Arc;

use super::{
    Warmups,
    cause::WarmupCause,
    event::WarmupEvent,
    facts::{WarmupNodeFacts, WarmupPod, WarmupPodState},
    ids::{WarmPodName, WarmSet, WarmupId},
    node_progress::{KnownNode, TrackedPod},
    node_view::NodeView,
    progress::WarmupProgress,
    request::{WarmupRequest, WarmupTargets},
    state::WarmupState,
};
use crate::{pairing::ids::NodeName, units::Tick};

impl Warmups {
    pub(super) fn observe(&mut self, event: WarmupEvent, now: Tick) {
        match event {
            WarmupEvent::LeadershipGained => *self = Self { leads: true, ..Self::default() },
            WarmupEvent::LeadershipLost => *self = Self::default(),
            WarmupEvent::Listed => {
                self.is_listed = true;
                self.dirty.extend(self.warmups.keys().cloned());
            }
            WarmupEvent::Warmup { id, request, stored } => self.observe_warmup(id, request, stored, now),
            WarmupEvent::WarmupDeleted(id) => self.forget_warmup(&id),
            WarmupEvent::Targets { id, targets } => {
                let state = self.warmups.entry(id.clone()).or_default();
                if state.targets.as_ref() != Some(&targets) {
                    self.observe_targets(id, targets, now);
                }
            }
            WarmupEvent::Node { name, facts } => self.observe_node(&name, facts, now),
            WarmupEvent::Pod { name, pod: Some(pod) } => self.observe_pod(name, pod),
            WarmupEvent::Pod { name, pod: None } => self.observe_pod_gone(&name, now),
            WarmupEvent::EnginesPulling { node, pods } => {
                let known = self.nodes.entry(node.clone()).or_default();
                if std::mem::replace(&mut known.engines_pulling, pods) != pods {
                    self.touch_node(&node);
                }
                self.forget_if_unused(&node);
            }
            WarmupEvent::Executed(command) => self.executed(&command, now),
            WarmupEvent::Failed { command, error } => self.failed(&command, &error, now),
            WarmupEvent::KnownSets(sets) => {
                let labelled = self.nodes.iter().filter(|(_, known)| {
                    known.facts.as_ref().is_some_and(|facts| !facts.labels_warm.is_empty())
                });
                self.labels_dirty.extend(labelled.map(|(name, _)| name.clone()));
                self.known_sets = Some(sets);
            }
        }
    }

    fn observe_warmup(
        &mut self,
        id: WarmupId,
        request: Arc<WarmupRequest>,
        stored: Arc<WarmupProgress>,
        now: Tick,
    ) {
        let state = self.warmups.entry(id.clone()).or_default();
        let former_set = state.request.as_ref().map(|request| request.set.clone());
        let set = request.set.clone();
        state.set_request(request, stored, now);
        if former_set.as_ref() != Some(&set) {
            self.sets.entry(set.clone()).or_default().insert(id.clone());
            self.mark_labels_of(&set);
            if let Some(former) = former_set {
                self.forget_set(&former, &id);
            }
        }
        self.dirty.insert(id);
    }

    fn observe_targets(&mut self, id: WarmupId, targets: WarmupTargets, now: Tick) {
        let state = self.warmups.entry(id.clone()).or_default();
        state.targets = Some(targets);
        let had_nodes = state.has_nodes;
        state.apply_targets(now);
        // Labels of nodes that are no targets can be judged from now on.
        let set = state.request.as_ref().map(|request| request.set.clone());
        if let Some(set) = set.filter(|_| !had_nodes && state.has_nodes) {
            self.mark_labels_of(&set);
        }
        self.dirty.insert(id);
    }

    /// Forgets a Warmup, but not its Pods: while they pull, others wait.
    fn forget_warmup(&mut self, id: &WarmupId) {
        let Some(mut state) = self.warmups.remove(id) else { return };
        self.due.set(id, None);
        if let Some(request) = state.request.take() {
            self.forget_set(&request.set, id);
        }
        let mut orphaned = WarmupState::default();
        for (name, mut node) in state.nodes {
            self.labels_dirty.insert(name.clone());
            node.items = None;
            node.forget_attempts();
            node.creating.clear();
            // The view stays until the next refresh, which takes it out of the indexes by the difference.
            orphaned.tally.replace(&name, &NodeView::default(), &node.view);
            orphaned.dirty.insert(name.clone());
            orphaned.nodes.insert(name, node);
        }
        if !orphaned.nodes.is_empty() {
            self.warmups.insert(id.clone(), orphaned);
            self.dirty.insert(id.clone());
        }
    }

    fn forget_set(&mut self, set: &WarmSet, id: &WarmupId) {
        if let Some(ids) = self.sets.get_mut(set) {
            ids.remove(id);
            if ids.is_empty() {
                self.sets.remove(set);
            }
        }
        self.mark_labels_of(set);
    }

    fn observe_node(&mut self, name: &NodeName, facts: Option<WarmupNodeFacts>, now: Tick) {
        let known = self.nodes.entry(name.clone()).or_default();
        if known.facts == facts {
            self.forget_if_unused(name);
            return;
        }
        let is_deleted = facts.is_none();
        known.facts = facts;
        for until in known.resolve_label_holds(now) {
            self.labels_due.remove(&(until, name.clone()));
        }
        // Another write may have been due at the same moment, and so may the next try while labels are refused.
        let refused = self.refused_labels.as_ref().map(|refused| refused.until);
        let due = known.label_holds.values().map(|hold| hold.until).chain(refused);
        self.labels_due.extend(due.map(|until| (until, name.clone())));
        self.labels_dirty.insert(name.clone());
        if is_deleted {
            for (id, state) in &mut self.warmups {
                if state.forget_deleted_node(name) {
                    self.dirty.insert(id.clone());
                }
            }
        }
        self.touch_node(name);
        self.forget_if_unused(name);
    }

    /// Events also name nodes that do not exist any more, or that no Warmup has.
    fn forget_if_unused(&mut self, name: &NodeName) {
        if self.nodes.get(name).is_some_and(KnownNode::is_unused) {
            self.nodes.remove(name);
        }
    }

    fn observe_pod(&mut self, name: WarmPodName, pod: WarmupPod) {
        let at = (pod.warmup.clone(), pod.node.clone());
        if self.pods.get(&name).is_some_and(|known| *known != at) {
            self.remove_pod(&name);
        }
        self.pods.insert(name.clone(), at);
        let (id, node_name) = (pod.warmup.clone(), pod.node.clone());
        let node = self.warmups.entry(id.clone()).or_default().node_mut(&node_name);
        if node.creating.get(&pod.item).is_some_and(|create| create.is_for(&pod)) {
            node.creating.remove(&pod.item);
        }
        // A Pod that pulls can still be interrupted, and then the pauses must grow.
        if matches!(pod.state, WarmupPodState::Present { .. } | WarmupPodState::Done { .. }) {
            node.interruptions = 0;
        }
        let had_failed = !self.is_listed && pod.cause().is_some_and(WarmupCause::is_failure);
        // A Pod of the same name that was created at another moment is another Pod.
        let same = node.pods.get_mut(&name).filter(|tracked| tracked.pod.created == pod.created);
        if let Some(tracked) = same {
            tracked.pod = pod;
        } else {
            node.pods.insert(name, TrackedPod::new(pod, had_failed));
        }
        self.nodes.entry(node_name).or_default().warmups.insert(id.clone());
        self.dirty.insert(id);
    }

    fn observe_pod_gone(&mut self, name: &WarmPodName, now: Tick) {
        let Some((id, node_name, tracked)) = self.remove_pod(name) else { return };
        let Some(state) = self.warmups.get_mut(&id) else { return };
        // Another client has deleted the Pod. Without a pause, Rouse and that client could create and delete it for
        // ever.
        let was_expected = tracked.deleting_until.is_some() || !tracked.pod.is_unfinished();
        if !was_expected {
            let retry_delay = state.retry_delay();
            state.node_mut(&node_name).interrupt(&node_name, None, retry_delay, now);
        }
    }

    fn remove_pod(&mut self, name: &WarmPodName) -> Option<(WarmupId, NodeName, TrackedPod)> {
        let (id, node_name) = self.pods.remove(name)?;
        let tracked = self.warmups.get_mut(&id)?.node_mut(&node_name).pods.remove(name)?;
        self.dirty.insert(id.clone());
        Some((id, node_name, tracked))
    }

    /// Marks a node in all Warmups that have it.
    pub(super) fn touch_node(&mut self, name: &NodeName) {
        let ids = self.nodes.get(name).map(|known| known.warmups.clone()).unwrap_or_default();
        for id in ids {
            if let Some(state) = self.warmups.get_mut(&id) {
                state.dirty.insert(name.clone());
                self.dirty.insert(id);
            }
        }
    }
}
