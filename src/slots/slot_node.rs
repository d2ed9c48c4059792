//! What the leader knows of one node, and from when the node counts as lost.

use std::collections::BTreeSet;

use super::{command::NodeLoss, event::NodeState, ids::InstanceName};
use crate::units::{Millis, Tick};

/// Time until a node that an instance names must be observed. Instances and nodes are watched apart, so a new node may
/// be named before it is seen.
const OBSERVED_WITHIN: Millis = Millis::secs(30);

/// One node that exists, or that an instance names.
#[derive(Clone, Debug)]
pub(super) struct SlotNode {
    presence: NodePresence,
    /// Pods with slots there. Unknown until they were counted after the node became unready.
    pods: Option<u32>,
    /// The instances that name the node.
    pub(super) instances: BTreeSet<InstanceName>,
}

#[derive(Clone, Copy, Debug)]
enum NodePresence {
    Ready,
    NotReady { since: Tick },
    Absent { lost_from: Tick },
}

impl SlotNode {
    /// A node that has not been observed.
    pub(super) fn unseen(now: Tick) -> Self {
        let presence = NodePresence::Absent { lost_from: now + OBSERVED_WITHIN };
        Self { presence, pods: None, instances: BTreeSet::new() }
    }

    pub(super) fn observe(&mut self, state: Option<NodeState>, now: Tick) {
        let before = self.presence;
        self.presence = match (state, before) {
            (Some(NodeState { ready: true }), _) => NodePresence::Ready,
            (Some(_), NodePresence::NotReady { .. }) | (None, NodePresence::Absent { .. }) => before,
            (Some(_), _) => NodePresence::NotReady { since: now },
            (None, _) => NodePresence::Absent { lost_from: now },
        };
        if !matches!(before, NodePresence::NotReady { .. }) {
            self.pods = None;
        }
    }

    pub(super) const fn count_pods(&mut self, pods: u32) {
        self.pods = Some(pods);
    }

    /// The moment from which the node counts as lost, if nothing changes until then.
    ///
    /// A node that is not ready may still run containers. Its slots are free only once its Pods are gone, too.
    pub(super) fn lost_from(&self, timeout: Millis) -> Option<(Tick, NodeLoss)> {
        match self.presence {
            NodePresence::Ready => None,
            NodePresence::NotReady { since } if self.pods == Some(0) => {
                Some((since + timeout, NodeLoss::NotReady))
            }
            NodePresence::NotReady { .. } => None,
            NodePresence::Absent { lost_from } => Some((lost_from, NodeLoss::Gone)),
        }
    }

    /// Whether nothing is known of the node, and no instance names it.
    pub(super) fn is_forgettable(&self) -> bool {
        self.instances.is_empty() && matches!(self.presence, NodePresence::Absent { .. })
    }
}
