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
    index::{PodIndex, RequesterPod},
};
use crate::metrics::ActuationPath;
use crate::{
    crd::ledger::ObjectName,
    event_content::{EventContent, EventReason},
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
    pub(super) const fn new(herald: EventSender) -> Self {
        Self { sender: herald, waiting: BTreeMap::new() }
    }

    pub(super) fn forget(&mut self) {
        self.waiting.clear();
    }

    pub(super) fn send(&self, notices: impl IntoIterator<Item = EventRequest>) {
        notices.into_iter().for_each(|notice| self.sender.send(notice));
    }

    /// Reports that the requester's engine serves, this long after its stub started.
    pub(super) fn report_served(&self, own: &RequesterPod, path: ActuationPath, took: Millis) {
        let how = match path {
            ActuationPath::Hot => "was woken",
            ActuationPath::Warm => "was started in an existing launcher",
            ActuationPath::Cold => "was started in a new Pod",
        };
        tracing::info!(requester = %own.name, start = how, duration = %took, "engine serves the requester");
        self.send([requester_event(
            own,
            EventReason::Served.with_note(format!("the engine {how} and serves after {took}")),
        )]);
    }

    /// Reports why the request cannot be served.
    pub(super) fn report_failed(&self, own: &RequesterPod, why: &str) {
        self.send([requester_event(own, EventReason::Failed.with_note(why.to_owned()))]);
    }

    /// Reports a grace period that is too short for the engine, and a sufficient one.
    pub(super) fn report_short_grace(&self, own: &RequesterPod, why: &str) {
        tracing::warn!(requester = %own.name, reason = why, "requester's terminationGracePeriodSeconds is too short");
        self.send([requester_event(own, EventReason::ShortGrace.with_note(why.to_owned()))]);
    }

    /// Updates why the requesters of these nodes wait.
    pub(super) fn update_waiting(
        &mut self,
        looked: &[NodeName],
        reasons: &BTreeMap<(NodeName, RequesterId), String>,
        tasks: &mut JoinSet<FinishedTask>,
    ) {
        let looked: BTreeSet<&NodeName> = looked.iter().collect();
        self.waiting.retain(|id, known| {
            !looked.contains(&known.node) || reasons.contains_key(&(known.node.clone(), id.clone()))
        });
        for ((node, id), why) in reasons {
            if let Some(known) = self.waiting.get_mut(id) {
                known.reason.clone_from(why);
                continue;
            }
            self.waiting.insert(
                id.clone(),
                WaitingRequester { node: node.clone(), reason: why.clone(), reported: None },
            );
            schedule_wait_report(id.clone(), tasks);
        }
    }

    /// Reports a waiting requester's reason if it changed, and schedules the next check.
    pub(super) fn report_waiting(
        &mut self,
        id: RequesterId,
        directory: &PodIndex,
        tasks: &mut JoinSet<FinishedTask>,
    ) {
        let Some(known) = self.waiting.get_mut(&id) else { return };
        if known.reported.as_ref() != Some(&known.reason) {
            known.reported = Some(known.reason.clone());
            let news = EventReason::Waiting.with_note(known.reason.clone());
            let notice = directory.requester(&id).map(|own| requester_event(own, news));
            self.send(notice);
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
pub(super) fn completion_events(job: &CommandContext) -> Vec<EventRequest> {
    let requester = |news: EventContent| job.requester.as_ref().map(|own| requester_event(own, news));
    let provider =
        |news: EventContent| job.provider.as_ref().map(|own| pod_event(&own.name, own.uid.as_str(), news));
    match &job.command.action {
        PairingAction::Requester { step: RequesterStep::Delete { reason: why }, .. } => {
            requester(delete_news(*why)).into_iter().collect()
        }
        PairingAction::Engine { engine, step: EngineStep::Sleep { level, .. }, .. } => {
            let news = EventReason::Slept.with_note(format!("{engine} sleeps at level {}", level.number()));
            provider(news).into_iter().collect()
        }
        PairingAction::Engine { engine, step: EngineStep::Stop { reason: why }, .. } => {
            let reason = if is_failure(*why) { EventReason::Failed } else { EventReason::Ended };
            let to_requester = requester(reason.with_note(format!("the engine was stopped: {why}")));
            let to_provider = provider(reason.with_note(format!("{engine} was stopped: {why}")));
            to_requester.into_iter().chain(to_provider).collect()
        }
        _ => Vec::new(),
    }
}

fn delete_news(why: RequesterDeleteReason) -> EventContent {
    EventReason::Deleted
        .with_note(format!("the requester was deleted, so that its owner creates another: {why}"))
}

/// Whether the engine itself failed, independent of its requester.
pub(super) const fn is_failure(why: EngineStopReason) -> bool {
    match why {
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

fn requester_event(own: &RequesterPod, news: EventContent) -> EventRequest {
    pod_event(&own.name, own.id.as_str(), news)
}

fn pod_event(name: &ObjectName, uid: &str, news: EventContent) -> EventRequest {
    EventRequest { regarding: RegardingKind::Pod, object: name.clone(), uid: uid.to_owned(), content: news }
}
