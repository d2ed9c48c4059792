//! Whether Pods may begin on a node, and for which of its items.

use std::collections::BTreeSet;

use super::{
    cause::WarmupCause,
    facts::{NodeTaint, TaintEffect, WarmupNodeFacts, WarmupPod},
    ids::WarmupItem,
    node_progress::NodeProgress,
    node_step::NodeContext,
};

const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
const NOT_READY: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

impl NodeContext<'_> {
    /// Why no Pod may begin on the node, whatever the Warmup wants.
    pub(super) fn unusable(&self) -> Option<WarmupCause> {
        let Some(facts) = &self.known.facts else { return Some(WarmupCause::NodeGone) };
        if !facts.ready {
            return Some(WarmupCause::NodeNotReady);
        }
        if facts.cordoned && !self.tolerates(UNSCHEDULABLE, TaintEffect::NoSchedule) {
            return Some(WarmupCause::Cordoned);
        }
        if facts.disk_pressure {
            return Some(WarmupCause::DiskPressure);
        }
        self.untolerated_taint(facts)
    }

    fn untolerated_taint(&self, facts: &WarmupNodeFacts) -> Option<WarmupCause> {
        let keeps_away = |taint: &&NodeTaint| {
            taint.effect != TaintEffect::PreferNoSchedule
                && !self.request.tolerations.iter().any(|toleration| toleration.tolerates(taint))
        };
        let taint = facts.taints.iter().find(keeps_away)?;
        Some(match taint.key.as_str() {
            UNSCHEDULABLE => WarmupCause::Cordoned,
            key if NOT_READY.contains(&key) => WarmupCause::NodeNotReady,
            key => WarmupCause::Taint(key.to_owned()),
        })
    }

    fn tolerates(&self, key: &str, effect: TaintEffect) -> bool {
        let taint = NodeTaint { key: key.to_owned(), value: String::new(), effect };
        self.request.tolerations.iter().any(|toleration| toleration.tolerates(&taint))
    }

    /// Whether the node, which nothing else keeps from beginning, waits for the pull of an engine.
    pub(super) fn waits_for_engine(&self, node: &NodeProgress) -> bool {
        self.known.engines_pulling > 0
            && !self.is_finished
            && node.is_open_target()
            && !node.has_unfinished_pods()
            && node.next_try.is_none_or(|at| at <= self.now)
    }

    /// The items for which a Pod may be created now: all missing images, and then the action.
    ///
    /// An image that another Warmup pulls waits: afterwards its own Pod finds it at once.
    pub(super) fn creatable(&self, node: &NodeProgress) -> Vec<WarmupItem> {
        let Some(items) = &node.items else { return Vec::new() };
        if self.known.engines_pulling > 0 || node.next_try.is_some_and(|at| at > self.now) {
            return Vec::new();
        }
        let missing: BTreeSet<WarmupItem> =
            items.items().filter(|item| !node.present.contains_key(item)).collect();
        let waits_for_images = missing.iter().any(|item| !item.is_action());
        let is_held = |item: &WarmupItem| {
            let blocks = |pod: &WarmupPod| {
                pod.item == *item
                    && (pod.is_unfinished() || (self.is_of_this_run(pod) && pod.attempt >= node.failures))
            };
            let others = item.image().and_then(|image| self.known.pulls.get(image));
            waits_for_images && item.is_action()
                || node.creating.contains_key(item)
                || node.pods.values().any(|tracked| blocks(&tracked.pod))
                || others.is_some_and(|ids| ids.iter().any(|id| id != self.id))
        };
        missing.into_iter().filter(|item| !is_held(item)).collect()
    }
}
