//! What the leader knows of one node, and from when the node counts as lost.

use std::collections::BTreeSet;

use super::{
    command::NodeLoss,
    event::NodeState,
    ids::{ConfigurationName, InstanceName},
    names::device_resources,
};
use crate::units::{Millis, Tick};

/// Time until a node that an instance names must be observed. Instances and nodes are watched apart, so a new node may
/// be named before it is seen.
const OBSERVED_WITHIN: Millis = Millis::secs(30);

/// One node that exists, or that an instance names.
#[derive(Clone, Debug)]
pub(super) struct SlotNode {
    presence: NodePresence,
    /// Resources of slots that Pods there request. Unknown until they were listed after the node last changed.
    requested: Option<BTreeSet<String>>,
    /// The instances that name the node.
    pub(super) instances: BTreeSet<InstanceName>,
}

#[derive(Clone, Debug)]
enum NodePresence {
    Ready(NodeState),
    NotReady { since: Tick },
    Absent { lost_from: Tick },
}

impl SlotNode {
    /// A node that has not been observed.
    pub(super) fn unseen(now: Tick) -> Self {
        let presence = NodePresence::Absent { lost_from: now + OBSERVED_WITHIN };
        Self { presence, requested: None, instances: BTreeSet::new() }
    }

    pub(super) fn observe(&mut self, state: Option<NodeState>, now: Tick) {
        let goes_on = match (&state, &self.presence) {
            (Some(state), NodePresence::NotReady { .. }) => !state.ready,
            (None, NodePresence::Absent { .. }) => true,
            _ => false,
        };
        if goes_on {
            return;
        }
        self.presence = match state {
            Some(state) if state.ready => NodePresence::Ready(state),
            Some(_) => NodePresence::NotReady { since: now },
            None => NodePresence::Absent { lost_from: now },
        };
        self.requested = None;
    }

    pub(super) fn set_requested(&mut self, requested: BTreeSet<String>) {
        self.requested = Some(requested);
    }

    /// The moment from which the node counts as lost, if nothing changes until then.
    ///
    /// A node that is not ready may still run containers. Its slots are free only once its Pods are gone, too.
    pub(super) fn lost_from(&self, timeout: Millis) -> Option<(Tick, NodeLoss)> {
        match &self.presence {
            NodePresence::Ready(_) => None,
            NodePresence::NotReady { since } => {
                let has_no_pods = self.requested.as_ref().is_some_and(BTreeSet::is_empty);
                has_no_pods.then(|| (*since + timeout, NodeLoss::NotReady))
            }
            NodePresence::Absent { lost_from } => Some((*lost_from, NodeLoss::Gone)),
        }
    }

    /// Whether the node is ready, and no agent there offers this instance.
    pub(super) fn lacks_agent(&self, instance: &InstanceName) -> bool {
        matches!(&self.presence, NodePresence::Ready(state) if state.lacks_agent(instance))
    }

    /// Whether a Pod on the node may have a slot of this instance. One may as long as that is not known.
    pub(super) fn may_use(&self, instance: &InstanceName, configuration: &ConfigurationName) -> bool {
        let resources = device_resources(instance, configuration);
        let uses =
            |requested: &BTreeSet<String>| resources.iter().any(|resource| requested.contains(resource));
        self.requested.as_ref().is_none_or(uses)
    }

    /// Whether nothing is known of the node, and no instance names it.
    pub(super) fn is_forgettable(&self) -> bool {
        self.instances.is_empty() && matches!(self.presence, NodePresence::Absent { .. })
    }
}
