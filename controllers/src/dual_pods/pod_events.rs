//! Sends Events for requesters' and providers' Pods: what was done, and why a requester waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rouse::{
    pairing::{
        command::{EngineStep, EngineStopReason, PairingAction, RequesterDeleteReason, RequesterStep},
        ids::{NodeName, RequesterId},
    },
    units::Millis,
};

use super::{
    FinishedTask, PairingTasks,
    command_context::CommandContext,
    host_memory,
    index::{PairingPodIndex, RequesterPod},
};
use crate::{
    crd::ledger::ObjectName,
    event_content::{EventContent, EventReason},
    metrics::ActuationPath,
    recorder::{EventRequest, EventSender, RegardingKind},
};

/// A wait longer than this gets an Event. Each later interval gets another if the reason changed.
const WAIT_EVENT_INTERVAL: Duration = Duration::from_secs(10);

pub(super) struct PodEvents {
    sender: EventSender,
    waiting: BTreeMap<RequesterId, WaitingRequester>,
    waiting_by_node: BTreeMap<NodeName, BTreeSet<RequesterId>>,
    /// Number of waits that have begun.
    waits: u64,
}

#[derive(Debug)]
struct WaitingRequester {
    /// Number of this wait. The timer of an earlier one, which may still run, does not count.
    wait: u64,
    reason: String,
    reported: Option<String>,
}

impl PodEvents {
    pub(super) const fn new(event_sender: EventSender) -> Self {
        Self { sender: event_sender, waiting: BTreeMap::new(), waiting_by_node: BTreeMap::new(), waits: 0 }
    }

    pub(super) fn forget(&mut self) {
        self.waiting.clear();
        self.waiting_by_node.clear();
    }

    pub(super) fn send(&self, requests: impl IntoIterator<Item = EventRequest>) {
        requests.into_iter().for_each(|request| self.sender.send(request));
    }

    /// Reports that the requester's engine serves, this long after its stub started.
    pub(super) fn report_served(&self, requester: &RequesterPod, path: ActuationPath, took: Millis) {
        let how = match path {
            ActuationPath::Hot => "was woken",
            ActuationPath::Warm => "was started in an existing launcher",
            ActuationPath::Cold => "was started in a new Pod",
        };
        tracing::info!(requester = %requester.name, start = how, duration = %took, "engine serves the requester");
        self.send([requester_event(
            requester,
            EventReason::Served.with_note(format!("the engine {how} and serves after {took}")),
        )]);
    }

    /// Reports why the request cannot be served.
    pub(super) fn report_failed(&self, requester: &RequesterPod, reason: &str) {
        self.send([requester_event(requester, EventReason::Failed.with_note(reason.to_owned()))]);
    }

    /// Reports a grace period that is too short for the engine, and a sufficient one.
    pub(super) fn report_short_grace(&self, requester: &RequesterPod, reason: &str) {
        tracing::warn!(requester = %requester.name, reason, "requester's terminationGracePeriodSeconds is too short");
        self.send([requester_event(requester, EventReason::ShortGrace.with_note(reason.to_owned()))]);
    }

    /// Updates why the requesters of these nodes wait.
    pub(super) fn update_waiting(
        &mut self,
        replanned: &[NodeName],
        reasons: &BTreeMap<(NodeName, RequesterId), String>,
        tasks: &mut PairingTasks,
    ) {
        for node in replanned {
            let Some(waiting) = self.waiting_by_node.get_mut(node) else { continue };
            waiting.retain(|id| {
                let waits = reasons.contains_key(&(node.clone(), id.clone()));
                if !waits {
                    self.waiting.remove(id);
                }
                waits
            });
            if waiting.is_empty() {
                self.waiting_by_node.remove(node);
            }
        }
        for ((node, id), reason) in reasons {
            if let Some(waiting) = self.waiting.get_mut(id) {
                waiting.reason.clone_from(reason);
                continue;
            }
            self.waits += 1;
            let waiting = WaitingRequester { wait: self.waits, reason: reason.clone(), reported: None };
            self.waiting.insert(id.clone(), waiting);
            self.waiting_by_node.entry(node.clone()).or_default().insert(id.clone());
            schedule_wait_report(id.clone(), self.waits, tasks);
        }
    }

    /// Reports a waiting requester's reason if it changed, and schedules the next check.
    pub(super) fn report_waiting(
        &mut self,
        id: RequesterId,
        wait: u64,
        index: &PairingPodIndex,
        tasks: &mut PairingTasks,
    ) {
        let Some(waiting) = self.waiting.get_mut(&id).filter(|waiting| waiting.wait == wait) else { return };
        if waiting.reported.as_ref() != Some(&waiting.reason) {
            waiting.reported = Some(waiting.reason.clone());
            let event = EventReason::Waiting.with_note(waiting.reason.clone());
            let request = index.requester(&id).map(|requester| requester_event(requester, event));
            self.send(request);
        }
        schedule_wait_report(id, wait, tasks);
    }
}

fn schedule_wait_report(requester: RequesterId, wait: u64, tasks: &mut PairingTasks) {
    tasks.after(WAIT_EVENT_INTERVAL, FinishedTask::WaitElapsed { requester, wait });
}

/// Returns the Events to send once this command has succeeded.
pub(super) fn completion_events(context: &CommandContext) -> Vec<EventRequest> {
    let requester =
        |event: EventContent| context.requester.as_ref().map(|requester| requester_event(requester, event));
    let provider = |event: EventContent| {
        context.provider.as_ref().map(|provider| pod_event(&provider.name, provider.uid.as_str(), event))
    };
    match &context.command.action {
        PairingAction::Requester { step: RequesterStep::Delete { reason }, .. } => {
            requester(delete_news(*reason)).into_iter().collect()
        }
        PairingAction::Engine { engine, step: EngineStep::Sleep { level, .. }, .. } => {
            if context.stays_for_gateway() {
                // The gateway itself reports what it orders.
                return Vec::new();
            }
            let note = with_shortage(context, format!("{engine} sleeps at level {}", level.number()));
            provider(EventReason::Slept.with_note(note)).into_iter().collect()
        }
        PairingAction::Engine { engine, step: EngineStep::Stop { reason: stop_reason }, .. } => {
            let reason = if is_failure(*stop_reason) { EventReason::Failed } else { EventReason::Ended };
            let note = |engine: &str| with_shortage(context, format!("{engine} was stopped: {stop_reason}"));
            let to_requester = requester(reason.with_note(note("the engine")));
            let to_provider = provider(reason.with_note(note(&engine.to_string())));
            to_requester.into_iter().chain(to_provider).collect()
        }
        _ => Vec::new(),
    }
}

/// Appends what keeps the engine from a sleep at level 1, if something does.
fn with_shortage(job: &CommandContext, note: String) -> String {
    match host_memory::shortage_note(job) {
        Some(shortage) => format!("{note}; {shortage}"),
        None => note,
    }
}

fn delete_news(reason: RequesterDeleteReason) -> EventContent {
    EventReason::Deleted
        .with_note(format!("the requester was deleted, so that its owner creates another: {reason}"))
}

/// Whether the engine itself failed, independent of its requester.
pub(super) const fn is_failure(reason: EngineStopReason) -> bool {
    match reason {
        EngineStopReason::StartFailed
        | EngineStopReason::WakeFailed
        | EngineStopReason::CanaryFailed
        | EngineStopReason::SleepFailed
        | EngineStopReason::Lost => true,
        EngineStopReason::Unneeded
        | EngineStopReason::Idle
        | EngineStopReason::Evicted
        | EngineStopReason::Displaced
        | EngineStopReason::Obsolete
        | EngineStopReason::LoraAdapters
        | EngineStopReason::CannotSleep
        | EngineStopReason::Overdue
        | EngineStopReason::Leaving => false,
    }
}

fn requester_event(requester: &RequesterPod, event: EventContent) -> EventRequest {
    pod_event(&requester.name, requester.id.as_str(), event)
}

fn pod_event(name: &ObjectName, uid: &str, event: EventContent) -> EventRequest {
    EventRequest { regarding: RegardingKind::Pod, object: name.clone(), uid: uid.to_owned(), content: event }
}

#[cfg(test)]
mod tests;
