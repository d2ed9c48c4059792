//! What is observed of nodes and of the Pods of Warmups.

use std::collections::BTreeSet;

use super::{
    cause::WarmupCause,
    ids::{ImageName, WarmSet, WarmupId, WarmupItem},
    record::NodeUidKey,
};
use crate::{pairing::ids::NodeName, units::Tick};

/// One node, as far as Warmups are concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WarmupNodeFacts {
    /// A node that is created again under its name has another.
    pub uid: NodeUidKey,
    pub ready: bool,
    pub cordoned: bool,
    pub disk_pressure: bool,
    pub taints: Vec<NodeTaint>,
    /// Wanted images that the node reports to have, by their names in the Warmups. The node's list is capped: that an
    /// image is missing in it proves nothing.
    pub images: BTreeSet<ImageName>,
    /// The sets whose labels the node has.
    pub labels_warm: BTreeSet<WarmSet>,
}

/// A taint of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeTaint {
    pub key: String,
    pub value: String,
    pub effect: TaintEffect,
}

/// What a taint does to Pods that do not tolerate it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TaintEffect {
    NoSchedule,
    /// Keeps no Pod away.
    PreferNoSchedule,
    NoExecute,
}

/// A taint that the Pods of a Warmup tolerate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WarmupToleration {
    /// `None` with operator Exists tolerates every taint.
    pub key: Option<String>,
    pub operator: TolerationOperator,
    pub value: String,
    /// `None`: all effects.
    pub effect: Option<TaintEffect>,
}

/// How a toleration is compared with a taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TolerationOperator {
    Equal,
    Exists,
}

impl WarmupToleration {
    #[must_use]
    pub fn tolerates(&self, taint: &NodeTaint) -> bool {
        self.effect.is_none_or(|effect| effect == taint.effect)
            && match &self.key {
                None => self.operator == TolerationOperator::Exists,
                Some(key) => {
                    *key == taint.key
                        && (self.operator == TolerationOperator::Exists || self.value == taint.value)
                }
            }
    }
}

/// A Pod of a Warmup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupPod {
    pub warmup: WarmupId,
    pub node: NodeName,
    pub item: WarmupItem,
    /// [`WarmupRequest::generation`](super::WarmupRequest::generation) at its creation. Its failure counts until the
    /// Warmup begins anew.
    pub generation: u64,
    /// [`NodeItems::hash`](super::NodeItems::hash) at its creation.
    pub items_hash: u32,
    /// Failures of the node at its creation.
    pub attempt: u32,
    pub created: Tick,
    pub terminating: bool,
    pub state: WarmupPodState,
}

/// How far a Pod of a Warmup is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WarmupPodState {
    /// Nothing runs and nothing is pulled. A failed pull is a cause, as is what keeps the scheduler from binding it.
    Pending {
        cause: Option<WarmupCause>,
    },
    Pulling,
    /// The action runs.
    Running,
    /// The node has the image, whatever became of the container.
    Present {
        digest: Option<String>,
        note: Option<WarmupCause>,
        at: Tick,
    },
    /// The action is done.
    Done {
        at: Tick,
    },
    Failed {
        cause: WarmupCause,
        at: Tick,
    },
}

impl WarmupPod {
    /// Whether it may still pull or run.
    #[must_use]
    pub const fn is_unfinished(&self) -> bool {
        matches!(
            self.state,
            WarmupPodState::Pending { .. } | WarmupPodState::Pulling | WarmupPodState::Running
        )
    }

    /// Why it has not succeeded, if a cause is known.
    #[must_use]
    pub const fn cause(&self) -> Option<&WarmupCause> {
        match &self.state {
            WarmupPodState::Pending { cause } => cause.as_ref(),
            WarmupPodState::Failed { cause, .. } => Some(cause),
            _ => None,
        }
    }
}
