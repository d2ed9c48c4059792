//! What the leader observes of slots.

use std::collections::BTreeSet;

use super::{
    command::SlotsCommand,
    ids::{ConfigurationName, InstanceName},
    instance::InstanceUsage,
};
use crate::pairing::ids::{NodeName, Uid};

/// One observation or outcome. Everything but [`Self::LeadershipGained`] is ignored by a gateway that does not lead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotsEvent {
    /// Forgets everything. What exists is observed anew, and then [`Self::Listed`] follows.
    LeadershipGained,
    LeadershipLost,
    /// Everything that exists was observed once. Nothing is planned before.
    Listed,
    /// A configuration; `None` if it does not exist any more.
    Configuration {
        name: ConfigurationName,
        facts: Option<ConfigurationFacts>,
    },
    /// An instance; `None` if it does not exist any more.
    Instance {
        name: InstanceName,
        observed: Option<(InstanceFacts, InstanceUsage)>,
    },
    /// A node; `None` if it does not exist.
    Node {
        name: NodeName,
        state: Option<NodeState>,
    },
    /// The resources of [`RESOURCE_DOMAIN`](super::RESOURCE_DOMAIN) that Pods on the node request which have not ended.
    /// They matter only for a node that is not ready, or whose kubelet does not offer an instance that names the node.
    NodePods {
        node: NodeName,
        requested: BTreeSet<String>,
    },
    /// A kubelet rejected a Pod that requests such a resource.
    Rejected {
        pod: RejectedPod,
    },
    /// The rejected Pod does not exist any more.
    RejectedGone {
        uid: Uid,
    },
    /// The command was executed. What it changed is observed afterwards or before.
    Executed(SlotsCommand),
    /// The command was not executed. A refused one is refused again until somebody changes rights or policies.
    Failed {
        command: SlotsCommand,
        is_refused: bool,
    },
}

/// A configuration, as far as the leader is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigurationFacts {
    /// Slots per device.
    pub capacity: u32,
}

/// Which object an instance is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceFacts {
    pub configuration: ConfigurationName,
    /// Its resource version, with which the usage was read.
    pub version: String,
}

/// A node that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// The condition Ready is true.
    pub ready: bool,
    /// The instances whose slots its kubelet offers, healthy or not. A kubelet stops offering them some minutes after
    /// it has lost the agent of its node. One that has restarted offers none until the agent has registered again.
    pub offered: BTreeSet<InstanceName>,
}

impl NodeState {
    /// Whether the kubelet is ready, and does not offer the slots of this instance: no agent of the node does.
    #[must_use]
    pub fn lacks_agent(&self, instance: &InstanceName) -> bool {
        self.ready && !self.offered.contains(instance)
    }
}

/// A Pod that has failed because the kubelet got no slot for it, and that a controller replaces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RejectedPod {
    pub namespace: String,
    pub name: String,
    pub uid: Uid,
    /// UID of its controller. A Pod without one is not reported: no other Pod follows it.
    pub owner: Uid,
}
