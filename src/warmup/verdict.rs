//! The rules in numbers: how many nodes may begin, when a node has failed, and when a Warmup has ended.

/// Numbers of nodes of one Warmup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    pub desired: u32,
    pub succeeded: u32,
    pub failed: u32,
    /// Nodes with a Pod that has not ended.
    pub active: u32,
}

/// Where a Warmup is, by its numbers alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarmupVerdict {
    /// It has no nodes, which is no success.
    WaitingForTarget,
    InProgress,
    Completed,
    /// More nodes have failed than may.
    Failed,
}

/// Returns how many of the pending nodes may begin now.
#[must_use]
pub const fn nodes_to_begin(parallelism: Option<u32>, active: u32, pending: u32) -> u32 {
    let room = match parallelism {
        Some(parallelism) => parallelism.saturating_sub(active),
        None => u32::MAX,
    };
    if room < pending { room } else { pending }
}

/// Whether a node with this number of failures has failed for good.
#[must_use]
pub const fn is_permanent(failures: u32, backoff_limit: Option<u32>) -> bool {
    match backoff_limit {
        Some(limit) => failures > limit,
        None => false,
    }
}

/// Judges a Warmup. Too many failures end it at once, a success only once nothing is active.
#[must_use]
pub const fn judge(counts: &NodeCounts, max_failed_nodes: u32) -> WarmupVerdict {
    if counts.failed > max_failed_nodes {
        WarmupVerdict::Failed
    } else if counts.desired == 0 {
        WarmupVerdict::WaitingForTarget
    } else if counts.succeeded + counts.failed >= counts.desired && counts.active == 0 {
        WarmupVerdict::Completed
    } else {
        WarmupVerdict::InProgress
    }
}
