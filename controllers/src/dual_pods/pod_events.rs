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
use tokio::{task::JoinSet, time};

use super::{
    FinishedTask,
    command_context::CommandContext,
    host_memory,
    index::{PodIndex, RequesterPod},
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
}

#[derive(Debug)]
struct WaitingRequester {
    node: NodeName,
    reason: String,
    reported: Option<String>,
}

impl PodEvents {
    pub(super) const fn new(event_sender: EventSender) -> Self {
        Self { sender: event_sender, waiting: BTreeMap::new() }
    }

    pub(super) fn forget(&mut self) {
        self.waiting.clear();
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
        tasks: &mut JoinSet<FinishedTask>,
    ) {
        let replanned: BTreeSet<&NodeName> = replanned.iter().collect();
        self.waiting.retain(|id, waiting| {
            !replanned.contains(&waiting.node) || reasons.contains_key(&(waiting.node.clone(), id.clone()))
        });
        for ((node, id), reason) in reasons {
            if let Some(waiting) = self.waiting.get_mut(id) {
                waiting.reason.clone_from(reason);
                continue;
            }
            self.waiting.insert(
                id.clone(),
                WaitingRequester { node: node.clone(), reason: reason.clone(), reported: None },
            );
            schedule_wait_report(id.clone(), tasks);
        }
    }

    /// Reports a waiting requester's reason if it changed, and schedules the next check.
    pub(super) fn report_waiting(
        &mut self,
        id: RequesterId,
        index: &PodIndex,
        tasks: &mut JoinSet<FinishedTask>,
    ) {
        let Some(waiting) = self.waiting.get_mut(&id) else { return };
        if waiting.reported.as_ref() != Some(&waiting.reason) {
            waiting.reported = Some(waiting.reason.clone());
            let event = EventReason::Waiting.with_note(waiting.reason.clone());
            let request = index.requester(&id).map(|requester| requester_event(requester, event));
            self.send(request);
        }
        schedule_wait_report(id, tasks);
    }
}

fn schedule_wait_report(id: RequesterId, tasks: &mut JoinSet<FinishedTask>) {
    tasks.spawn(async move {
        time::sleep(WAIT_EVENT_INTERVAL).await;
        FinishedTask::WaitElapsed(id)
    });
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
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use rouse::{
        model::SleepLevel,
        pairing::{
            command::PairingCommand,
            event::LeaderEpoch,
            ids::{ProviderId, ProviderMode},
            node::HostMemoryShortage,
        },
        units::Bytes,
    };

    use super::*;
    use crate::{
        dual_pods::{facts::ClusterFacts, record, testing::engine_record},
        watch::{Delta, WatchedObject},
    };

    #[test]
    fn the_event_of_a_sleep_at_level_2_names_the_annotation_that_allows_level_1() {
        let node = NodeName::from("n");
        let record = engine_record(Bytes::gib(72), Bytes::gib(2), Bytes::gib(72));
        let mut pod = Pod::default();
        pod.metadata.name = Some("n-1-dual".to_owned());
        pod.metadata.namespace = Some("ns".to_owned());
        pod.metadata.uid = Some("uid".to_owned());
        record::write(&mut pod, &node, "chat", &record, 8000);
        let mut index = PodIndex::new(ProviderMode::Sleep);
        let change = Delta::Applied(Box::new(WatchedObject::Readable(pod)));
        index.apply(change, &ClusterFacts::default(), &mut drop);
        let provider = index.provider(&node, &ProviderId::direct(&record.engine)).cloned();
        assert!(provider.is_some());

        let note = |shortage: Option<HostMemoryShortage>, level: SleepLevel| {
            let step = EngineStep::Sleep { level, via: None };
            let action =
                PairingAction::Engine { engine: record.engine.clone(), generation: record.generation, step };
            let command = PairingCommand { node: node.clone(), epoch: LeaderEpoch(1), serial: 1, action };
            let mut job = CommandContext::for_test(command);
            (job.record, job.provider) = (Some(record.clone()), provider.clone());
            job.host_memory_shortage = shortage;
            let mut sent = completion_events(&job);
            assert_eq!(sent.len(), 1, "{sent:?}");
            let EventRequest { object, content, .. } = sent.remove(0);
            assert_eq!((object.name.as_str(), content.reason), ("n-1-dual", EventReason::Slept));
            content.note
        };
        let full = HostMemoryShortage::Node { budget: Bytes::gib(64), left: Bytes::gib(64) };
        let deep = note(Some(full), SleepLevel::Two);
        assert!(deep.contains(" sleeps at level 2; no level 1: ") && deep.contains("72Gi"), "{deep}");
        assert!(deep.contains("set the annotation rouse.dev/host-memory"), "{deep}");
        let light = note(None, SleepLevel::One);
        assert!(light.ends_with(" sleeps at level 1"), "{light}");
        // An Event keeps its first note, so each note has its own.
        assert!(EventReason::Slept.is_keyed_by_note());
    }
}
