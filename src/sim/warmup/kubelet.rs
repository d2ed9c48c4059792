//! Kubelets and the registry: Pods pull, run, end and fail.

use super::{
    ACTION_TIME, PULL_TIME,
    world::{WarmupWorld, WarmupWorldEvent},
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{ImageName, WarmPodName, WarmupCause, WarmupItem, WarmupPodState},
};

/// Time until a kubelet has seen a new Pod.
const SYNC_TIME: Millis = Millis(100);
/// Time after which a kubelet pulls again, if the Pod is still there.
const KUBELET_BACK_OFF: Millis = Millis::secs(10);
const CORDON_TIME: Millis = Millis::secs(90);

impl WarmupWorld {
    pub(super) fn start_pod(&mut self, name: &WarmPodName) {
        self.schedule(SYNC_TIME, WarmupWorldEvent::PodMoves(name.clone(), self.now));
    }

    /// Moves the Pod to its next state.
    pub(super) fn move_pod(&mut self, name: &WarmPodName, created: Tick) {
        let Some(pod) = self.pods.get(name).filter(|pod| pod.created == created) else { return };
        if pod.terminating || !pod.is_unfinished() || !self.nodes.contains_key(&pod.node) {
            return;
        }
        let (node, item) = (pod.node.clone(), pod.item.clone());
        let state = pod.state.clone();
        let (next, after) = match (&item, state) {
            (WarmupItem::Image(image), WarmupPodState::Pending { .. }) => {
                if self.images.contains(&(node.clone(), image.clone())) {
                    (self.present(), None)
                } else {
                    self.maybe_cordon(&node);
                    self.maybe_delete_node(&node);
                    (WarmupPodState::Pulling, Some(self.between(PULL_TIME)))
                }
            }
            (WarmupItem::Image(image), _) => match self.pull_failure(image) {
                Some(cause) => (WarmupPodState::Pending { cause: Some(cause) }, Some(KUBELET_BACK_OFF)),
                None => {
                    *self.pulls.entry((node.clone(), image.clone())).or_default() += 1;
                    self.images.insert((node, image.clone()));
                    (self.present(), None)
                }
            },
            (WarmupItem::Action(_), WarmupPodState::Pending { .. }) => {
                (WarmupPodState::Running, Some(self.between(ACTION_TIME)))
            }
            (WarmupItem::Action(_), _) => {
                let cause = WarmupCause::ActionFailed { exit_code: 1 };
                let has_failed = self.random.chance(self.scenario.faults.failed_action);
                let failed = WarmupPodState::Failed { cause, at: self.now };
                (if has_failed { failed } else { WarmupPodState::Done { at: self.now } }, None)
            }
        };
        if let Some(pod) = self.pods.get_mut(name) {
            pod.state = next;
        }
        if let Some(after) = after {
            self.schedule(after, WarmupWorldEvent::PodMoves(name.clone(), created));
        }
        self.show_pod(name);
    }

    fn present(&self) -> WarmupPodState {
        WarmupPodState::Present { digest: Some("sha256:0".to_owned()), note: None, at: self.now }
    }

    fn pull_failure(&mut self, image: &ImageName) -> Option<WarmupCause> {
        if self.missing_images.contains(image) {
            return Some(WarmupCause::NotFound);
        }
        let causes = [WarmupCause::Network, WarmupCause::RateLimited, WarmupCause::NoSpace];
        let has_failed = self.random.chance(self.scenario.faults.failed_pull);
        if has_failed { self.random.pick(&causes).cloned() } else { None }
    }

    fn maybe_cordon(&mut self, node: &NodeName) {
        if self.random.chance(self.scenario.faults.cordoned_node) {
            self.set_cordoned(node, true);
            self.schedule(CORDON_TIME, WarmupWorldEvent::Uncordoned(node.clone()));
        }
    }

    pub(super) fn set_cordoned(&mut self, node: &NodeName, is_cordoned: bool) {
        if let Some(facts) = self.nodes.get_mut(node) {
            facts.cordoned = is_cordoned;
        }
        self.show_node(node);
    }
}
