//! The status of a Warmup: written from a report, and read back as stored progress.

#[cfg(test)]
mod tests;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use rouse::{
    units::{Millis, Tick, pluralize},
    warmup::{
        ItemState, NodeReport, RecordError, RecordGroup, RecordState, WarmupPhase, WarmupProgress,
        WarmupReason, WarmupRecord, WarmupReport, WarmupSpecHash,
    },
};
use serde_json::{Value, json};

use crate::{
    condition::{ACCEPTED, condition, tick, time},
    crd::{
        GROUP, Warmup, WarmupStatus,
        ledger::ObjectName,
        warmup::{
            WarmupItemCounts, WarmupNodeState, WarmupNodeStatus, WarmupRecordGroup, WarmupRecordState,
            WarmupStatusPhase,
        },
    },
};

/// The target exists and has nodes.
const TARGETS_FOUND: &str = "TargetsFound";
/// Every node is warm.
const COMPLETE: &str = "Complete";
/// Number of nodes whose status has a sentence, so that the status stays small.
const MAX_MESSAGES: usize = 50;
/// Room for the record and the listed nodes in bytes, of 100 KB for the object. Each version goes to all watchers.
const MAX_BYTES: usize = 90_000;
/// Upper bound of a group of the record without its nodes, in bytes.
const GROUP_BYTES: usize = 120;

/// Returns the status that shows this report. `target`: the target in a few words.
pub(super) fn status(
    warmup: &Warmup,
    target: Option<String>,
    report: &WarmupReport,
    now: Tick,
) -> WarmupStatus {
    let progress = &report.progress;
    let before = warmup.status.as_ref();
    let record: Vec<WarmupRecordGroup> = progress.record.groups().into_iter().map(written_group).collect();
    let record_bytes: usize = record.iter().map(group_bytes).sum();
    let nodes = listed_nodes(&report.nodes, MAX_BYTES.saturating_sub(record_bytes));
    let left_out = u32::try_from(report.nodes.len() - nodes.len()).unwrap_or(u32::MAX);
    let failed = nodes.iter().filter(|node| node.state == WarmupNodeState::Failed);
    let mut failed_nodes: Vec<String> = failed.map(|node| node.node.clone()).collect();
    failed_nodes.dedup();
    WarmupStatus {
        observed_generation: i64::try_from(progress.generation).ok(),
        phase: phase(progress.phase),
        target: target.or_else(|| before.and_then(|status| status.target.clone())),
        start_time: progress.start.map(time),
        start_generation: i64::try_from(progress.start_generation).ok(),
        spec_hash: progress.spec_hash.as_ref().map(ToString::to_string),
        completion_time: progress.completion.map(time),
        desired_node_num: report.desired,
        active_node_num: report.active,
        succeeded_node_num: report.succeeded,
        failed_node_num: report.failed,
        failed_nodes,
        items: Some(item_counts(report)),
        nodes,
        more_nodes: report.more_nodes.saturating_add(left_out),
        record,
        paused_since: progress.paused_since.map(time),
        paused_seconds: progress.paused_for.0 / 1000,
        conditions: conditions(warmup, report, now),
    }
}

/// Renders the object whose status is applied. Its version is that of the Warmup.
pub(super) fn object(name: &ObjectName, warmup: &Warmup, status: &WarmupStatus) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/v1alpha1"),
        "kind": "Warmup",
        "metadata": {
            "name": name.name,
            "namespace": name.namespace,
            "uid": warmup.uid(),
            "resourceVersion": warmup.resource_version(),
        },
        "status": status,
    })
}

/// Reads the stored progress. A damaged record is left out: its nodes are warmed again.
pub(super) fn progress(name: &ObjectName, status: Option<&WarmupStatus>) -> WarmupProgress {
    let Some(status) = status else { return WarmupProgress::default() };
    let record = record(status).unwrap_or_else(|error| {
        tracing::warn!(warmup = %name, %error, "the record of a Warmup's nodes cannot be read");
        WarmupRecord::default()
    });
    let generation = |written: Option<i64>| written.and_then(|at| u64::try_from(at).ok());
    let observed = generation(status.observed_generation).unwrap_or_default();
    WarmupProgress {
        phase: status.phase.map_or(WarmupPhase::New, read_phase),
        generation: observed,
        // An earlier version wrote none, and counted no Pod of an earlier generation.
        start_generation: generation(status.start_generation).unwrap_or(observed),
        spec_hash: status.spec_hash.as_deref().map(WarmupSpecHash::from),
        start: status.start_time.as_ref().map(tick),
        completion: status.completion_time.as_ref().map(tick),
        paused_since: status.paused_since.as_ref().map(tick),
        paused_for: Millis(status.paused_seconds.saturating_mul(1000)),
        record,
    }
}

/// Returns the phase as a status has it; `None` if nothing has begun.
pub(super) const fn phase(phase: WarmupPhase) -> Option<WarmupStatusPhase> {
    match phase {
        WarmupPhase::New => None,
        WarmupPhase::InProgress => Some(WarmupStatusPhase::InProgress),
        WarmupPhase::Paused => Some(WarmupStatusPhase::Paused),
        WarmupPhase::Completed => Some(WarmupStatusPhase::Completed),
        WarmupPhase::Failed => Some(WarmupStatusPhase::Failed),
    }
}

pub(super) const fn read_phase(phase: WarmupStatusPhase) -> WarmupPhase {
    match phase {
        WarmupStatusPhase::InProgress => WarmupPhase::InProgress,
        WarmupStatusPhase::Paused => WarmupPhase::Paused,
        WarmupStatusPhase::Completed => WarmupPhase::Completed,
        WarmupStatusPhase::Failed => WarmupPhase::Failed,
    }
}

fn record(status: &WarmupStatus) -> Result<WarmupRecord, RecordError> {
    let groups: Vec<RecordGroup> = status.record.iter().map(read_group).collect();
    WarmupRecord::from_groups(&groups)
}

fn written_group(group: RecordGroup) -> WarmupRecordGroup {
    let RecordGroup { state, items, attempts, cause, nodes, uids } = group;
    let state = match state {
        RecordState::Done => WarmupRecordState::Done,
        RecordState::Failed => WarmupRecordState::Failed,
        RecordState::Retried => WarmupRecordState::Retried,
    };
    WarmupRecordGroup { state, items, attempts, cause, nodes, uids }
}

fn read_group(group: &WarmupRecordGroup) -> RecordGroup {
    let WarmupRecordGroup { state, items, attempts, cause, nodes, uids } = group.clone();
    let state = match state {
        WarmupRecordState::Done => RecordState::Done,
        WarmupRecordState::Failed => RecordState::Failed,
        WarmupRecordState::Retried => RecordState::Retried,
    };
    RecordGroup { state, items, attempts, cause, nodes, uids }
}

fn group_bytes(group: &WarmupRecordGroup) -> usize {
    group.nodes.len() + group.uids.as_ref().map_or(0, String::len) + GROUP_BYTES
}

fn item_counts(report: &WarmupReport) -> WarmupItemCounts {
    let count = |state: ItemState| report.items.get(&state).copied().unwrap_or_default();
    WarmupItemCounts {
        pending: count(ItemState::Pending),
        pulling: count(ItemState::Pulling),
        present: count(ItemState::Present),
        failed: count(ItemState::Failed),
        skipped: count(ItemState::Skipped),
    }
}

/// Returns the first nodes, as many as have room in so many bytes.
fn listed_nodes(reports: &[NodeReport], mut room: usize) -> Vec<WarmupNodeStatus> {
    let mut listed = Vec::with_capacity(reports.len());
    for report in reports {
        let node = node_status(report, listed.len() < MAX_MESSAGES);
        // A status always serializes. The name of a failed node is in the object twice, with quotes and a comma each.
        let length = serde_json::to_string(&node).map_or(0, |text| text.len()) + node.node.len() + 4;
        let Some(left) = room.checked_sub(length) else { break };
        room = left;
        listed.push(node);
    }
    listed
}

fn node_status(node: &NodeReport, has_message: bool) -> WarmupNodeStatus {
    let state = match node.state {
        ItemState::Pending => WarmupNodeState::Pending,
        ItemState::Pulling => WarmupNodeState::Pulling,
        ItemState::Present => WarmupNodeState::Present,
        ItemState::Failed => WarmupNodeState::Failed,
        ItemState::Skipped => WarmupNodeState::Skipped,
    };
    WarmupNodeStatus {
        node: node.node.to_string(),
        item: node.item.as_ref().map(ToString::to_string),
        state,
        cause: node.cause.as_ref().map(|cause| cause.reason().to_owned()),
        message: node.cause.as_ref().filter(|_| has_message).map(ToString::to_string),
        attempts: node.attempts,
        next_try: node.next_try.map(time),
        duration_millis: node.duration.map(|duration| duration.0),
        digest: node.digest.clone(),
    }
}

fn conditions(warmup: &Warmup, report: &WarmupReport, now: Tick) -> Vec<Condition> {
    let before = warmup.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let generation = i64::try_from(report.progress.generation).ok();
    let (reason, message) = (report.reason, report.message.as_str());
    let make = |kind: &str, holds: bool, reason: &str, message: &str| {
        condition(kind, holds, reason, message, generation, before, now)
    };
    let is_refused = reason == WarmupReason::InvalidSpec;
    let is_missing = matches!(reason, WarmupReason::WaitingForTarget | WarmupReason::TargetNotFound);
    let is_complete = matches!(reason, WarmupReason::AllNodesWarm | WarmupReason::CompletedWithFailures);
    let accepted = if is_refused {
        make(ACCEPTED, false, reason.as_str(), message)
    } else {
        make(ACCEPTED, true, ACCEPTED, "the spec is valid")
    };
    // The leader does not look for the targets of a refused spec.
    let found = if is_refused {
        None
    } else if is_missing {
        Some(make(TARGETS_FOUND, false, reason.as_str(), message))
    } else {
        let nodes = pluralize(report.desired, "target node");
        Some(make(TARGETS_FOUND, true, TARGETS_FOUND, &nodes))
    };
    let complete = make(COMPLETE, is_complete, reason.as_str(), message);
    [Some(accepted), found, Some(complete)].into_iter().flatten().collect()
}
