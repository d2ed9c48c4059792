//! Builds the report of a Warmup from its tally.

use std::collections::BTreeMap;

use super::{
    cause::WarmupCause,
    ids::WarmupId,
    node_progress::KnownNode,
    node_view::ListRank,
    progress::WarmupPhase,
    report::{MAX_LISTED_NODES, NodeReport, WarmupReason, WarmupReport},
    request::WarmupTargets,
    state::WarmupState,
    verdict::NodeCounts,
};
use crate::{
    pairing::ids::NodeName,
    units::{Tick, pluralize},
};

impl WarmupState {
    /// Returns the report. `None` while it is not known what the targets are.
    pub(super) fn report(
        &self,
        id: &WarmupId,
        all_nodes: &BTreeMap<NodeName, KnownNode>,
        now: Tick,
    ) -> Option<WarmupReport> {
        self.targets.as_ref().filter(|_| self.request.is_some())?;
        let counts = self.counts();
        let report_of = |name: &NodeName| {
            let node = self.nodes.get(name)?;
            Some(self.context(id, name, all_nodes, now)?.report(node))
        };
        let listed = self.tally.listed.iter().take(MAX_LISTED_NODES);
        let nodes: Vec<NodeReport> = listed.filter_map(|(_, name)| report_of(name)).collect();
        let more_nodes = self.tally.listed.len().saturating_sub(nodes.len());
        let reason = self.reason(&counts);
        Some(WarmupReport {
            progress: self.progress.clone(),
            desired: counts.desired,
            active: self.active_nodes(),
            succeeded: counts.succeeded,
            failed: counts.failed,
            items: self.tally.items.states().collect(),
            message: self.message(reason, &counts, &nodes),
            nodes,
            more_nodes: u32::try_from(more_nodes).unwrap_or(u32::MAX),
            reason,
        })
    }

    fn reason(&self, counts: &NodeCounts) -> WarmupReason {
        if let Some(reason) = self.ended {
            return reason;
        }
        match self.progress.phase {
            WarmupPhase::Completed if counts.failed > 0 => WarmupReason::CompletedWithFailures,
            WarmupPhase::Completed => WarmupReason::AllNodesWarm,
            WarmupPhase::Failed => self.former_failure(counts),
            WarmupPhase::Paused => WarmupReason::Paused,
            WarmupPhase::New | WarmupPhase::InProgress => {
                if matches!(self.targets, Some(WarmupTargets::Refused { .. })) {
                    WarmupReason::InvalidSpec
                } else if counts.desired == 0 {
                    WarmupReason::WaitingForTarget
                } else if self.creation.cause.is_some() && self.tally.open > 0 {
                    WarmupReason::PodsRefused
                } else if self.keeps_warm() && self.tally.open == 0 {
                    WarmupReason::KeepingWarm
                } else if self.tally.open > 0 && self.tally.blocked == self.tally.open {
                    WarmupReason::WaitingForNodes
                } else {
                    WarmupReason::Warming
                }
            }
        }
    }

    /// Why the Warmup failed under an earlier leader. The phase is stored, and its reason follows from the rest.
    fn former_failure(&self, counts: &NodeCounts) -> WarmupReason {
        let max_failed = self.request.as_ref().map_or(0, |request| request.limits.max_failed_nodes);
        match &self.targets {
            _ if counts.failed > max_failed => WarmupReason::MaxFailedNodesExceeded,
            Some(WarmupTargets::Refused { .. }) => WarmupReason::InvalidSpec,
            Some(WarmupTargets::Nodes(nodes)) if !nodes.is_empty() => WarmupReason::TimeoutExceeded,
            _ => WarmupReason::TargetNotFound,
        }
    }

    fn message(&self, reason: WarmupReason, counts: &NodeCounts, nodes: &[NodeReport]) -> String {
        let why = match &self.targets {
            Some(WarmupTargets::Refused { reason } | WarmupTargets::Pending { reason }) => reason.as_str(),
            Some(WarmupTargets::Nodes(_)) | None => "no node matches the target",
        };
        match reason {
            WarmupReason::InvalidSpec => return why.to_owned(),
            WarmupReason::WaitingForTarget => return format!("The Warmup waits for its target: {why}"),
            WarmupReason::TargetNotFound => return format!("The target was not found in time: {why}"),
            _ => {}
        }
        let NodeCounts { desired, succeeded, failed, .. } = *counts;
        let mut message = format!("{succeeded} of {} warm", pluralize(desired, "node"));
        for (number, what) in
            [(self.active_nodes(), "active"), (failed, "failed"), (self.tally.blocked, "waiting")]
        {
            if number > 0 {
                message.push_str(&format!(", {number} {what}"));
            }
        }
        if let (WarmupReason::PodsRefused, Some(cause)) = (reason, &self.creation.cause) {
            message.push_str(&format!("; {cause}"));
            return message;
        }
        let has_cause = self.tally.listed.first().is_some_and(|(rank, _)| *rank <= ListRank::HasCause);
        let named = nodes.first().and_then(|first| Some((&first.node, first.cause.as_ref()?)));
        let named = named.filter(|_| has_cause);
        if let Some((node, cause)) = named {
            message.push_str(&format!("; {node}: {cause}"));
        }
        // The pull of an engine ends by itself.
        let ends_itself = named.is_some_and(|(_, cause)| *cause == WarmupCause::EnginePulling);
        if reason == WarmupReason::WaitingForNodes && self.has_no_timeout() && !ends_itself {
            message.push_str("; without timeoutSeconds the Warmup waits for them without an end");
        }
        message
    }

    /// Returns the number of nodes at work. Of a Warmup that has ended, the Pods that are left are being deleted.
    const fn active_nodes(&self) -> u32 {
        if self.progress.phase.is_finished() { 0 } else { self.tally.active }
    }

    fn has_no_timeout(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.limits.timeout.is_none())
    }
}
