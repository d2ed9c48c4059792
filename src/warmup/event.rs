//! Events that the decisions of Warmups receive.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    command::WarmupCommand,
    facts::{WarmupNodeFacts, WarmupPod},
    ids::{WarmPodName, WarmSet, WarmupId},
    progress::WarmupProgress,
    request::{WarmupRequest, WarmupTargets},
};
use crate::pairing::ids::NodeName;

/// One observation or outcome. Everything but [`Self::LeadershipGained`] is ignored by a gateway that does not lead.
#[derive(Clone, Debug, PartialEq)]
pub enum WarmupEvent {
    /// Forgets everything. What exists is observed anew, and then [`Self::Listed`] follows.
    LeadershipGained,
    LeadershipLost,
    /// Everything that exists was observed once. Nothing is planned before.
    Listed,
    /// A Warmup, with the progress that its status has.
    Warmup {
        id: WarmupId,
        request: Arc<WarmupRequest>,
        stored: Arc<WarmupProgress>,
    },
    /// The Warmup is deleted or being deleted. Its Pods follow it without commands.
    WarmupDeleted(WarmupId),
    /// The nodes of a Warmup. After an edit, they come before the next plan.
    Targets {
        id: WarmupId,
        targets: WarmupTargets,
    },
    /// A node; `None` if it does not exist any more.
    Node {
        name: NodeName,
        facts: Option<WarmupNodeFacts>,
    },
    /// A Pod of a Warmup; `None` if it does not exist any more.
    Pod {
        name: WarmPodName,
        pod: Option<WarmupPod>,
    },
    /// Number of Pods of engines on the node that wait for an image.
    EnginesPulling {
        node: NodeName,
        pods: u32,
    },
    /// The command was executed. What it changed is observed afterwards or before.
    Executed(WarmupCommand),
    Failed {
        command: WarmupCommand,
        error: CommandError,
    },
    /// Sets whose labels stay on nodes without a Warmup: those of models that are to be kept warm.
    KnownSets(BTreeSet<WarmSet>),
}

/// Why a command was not executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// The API server refuses it, with its message: admission, quota, rights.
    Refused(String),
    /// It may succeed if it is repeated.
    Transient,
}
