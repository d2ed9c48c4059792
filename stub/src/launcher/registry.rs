//! The instances as clients see them, and the record of what happened to them: always changed together, so that a list
//! and the watch that begins with its revision miss nothing between them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use tokio::sync::{Notify, watch};

use super::{
    events::{self, EventRevision, EventsMissed, InstanceEventKind, InstanceEventLog},
    log::InstanceLog,
    rejection::LauncherRejection,
    spec::InstanceSpec,
};

/// What became of a stop: the instance as it was last, or why it is still there.
pub(crate) type StopResult = Result<String, String>;

/// A client's hand on an instance's keeper.
#[derive(Clone, Debug)]
pub(crate) struct StopHandle {
    pub(crate) stop: Arc<Notify>,
    pub(crate) outcome: watch::Receiver<Option<StopResult>>,
}

#[derive(Debug)]
struct HostedInstance {
    id: Arc<str>,
    spec: InstanceSpec,
    revision: EventRevision,
    alive: bool,
    ready: bool,
    stop_handle: StopHandle,
    log: Arc<InstanceLog>,
}

#[derive(Serialize)]
struct InstanceObject<'a> {
    status: &'static str,
    instance_id: &'a str,
    revision: EventRevision,
    #[serde(flatten)]
    spec: &'a InstanceSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    ready: bool,
}

impl HostedInstance {
    fn object(&self) -> InstanceObject<'_> {
        InstanceObject {
            status: if self.alive { "running" } else { "stopped" },
            instance_id: &self.id,
            revision: self.revision,
            spec: &self.spec,
            exit_code: None,
            ready: self.ready,
        }
    }
}

#[derive(Debug, Default)]
struct RegistryState {
    revision: EventRevision,
    events: InstanceEventLog,
    /// In the order of their creation.
    instances: Vec<HostedInstance>,
    /// Ids of those that are being made.
    starting: Vec<Arc<str>>,
    /// Nothing more is started.
    shutting_down: bool,
    /// Nothing more will happen.
    finished: bool,
}

/// All instances.
#[derive(Debug, Default)]
pub(crate) struct InstanceRegistry {
    state: Mutex<RegistryState>,
    change_tx: watch::Sender<()>,
}

/// An id that nobody else can take until the instance is there, or this is dropped.
#[derive(Debug)]
pub(crate) struct InstanceIdReservation {
    registry: Arc<InstanceRegistry>,
    id: Arc<str>,
}

impl Drop for InstanceIdReservation {
    fn drop(&mut self) {
        self.registry.state().starting.retain(|id| *id != self.id);
        self.registry.change_tx.send_replace(());
    }
}

/// What a watcher gets next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WatchStep {
    Lines(Bytes, EventRevision),
    Wait,
    /// The watcher has missed something, or the launcher ends.
    End,
}

impl InstanceRegistry {
    fn state(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes with everything that happens.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.change_tx.subscribe()
    }

    /// `most`: instances there may be, with those that are being made.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        id: &str,
        most: usize,
    ) -> Result<InstanceIdReservation, LauncherRejection> {
        let mut inner = self.state();
        if inner.shutting_down {
            return Err(LauncherRejection::ShuttingDown);
        }
        if inner.find(id).is_some() || inner.starting.iter().any(|starting| **starting == *id) {
            return Err(LauncherRejection::Exists(id.to_owned()));
        }
        if inner.instances.len() + inner.starting.len() >= most {
            return Err(LauncherRejection::Full { most });
        }
        let id: Arc<str> = id.into();
        inner.starting.push(Arc::clone(&id));
        Ok(InstanceIdReservation { registry: Arc::clone(self), id })
    }

    /// It runs; the answer to whoever created it.
    pub(crate) fn add_started(
        &self,
        reservation: InstanceIdReservation,
        spec: InstanceSpec,
        control: StopHandle,
        log: Arc<InstanceLog>,
    ) -> String {
        let id = Arc::clone(&reservation.id);
        let text = {
            let mut inner = self.state();
            let instance = HostedInstance {
                id: Arc::clone(&id),
                spec,
                revision: 0,
                alive: true,
                ready: false,
                stop_handle: control,
                log,
            };
            inner.instances.push(instance);
            inner.publish(InstanceEventKind::Created, &id, None)
        };
        // Tells the news, too.
        drop(reservation);
        text
    }

    /// Its process ended by itself.
    pub(crate) fn mark_stopped(&self, id: &str, exit_code: Option<i32>) {
        self.change(id, |instance| {
            (instance.alive, instance.ready) = (false, false);
            Some((InstanceEventKind::Stopped, exit_code))
        });
    }

    pub(crate) fn set_ready(&self, id: &str, ready: bool) {
        self.change(id, |instance| {
            let before = std::mem::replace(&mut instance.ready, ready);
            (before != ready).then_some((InstanceEventKind::Updated, None))
        });
    }

    /// Nothing of it is left; its last state.
    pub(crate) fn remove(&self, id: &str) -> String {
        let text = self.change(id, |instance| {
            (instance.alive, instance.ready) = (false, false);
            Some((InstanceEventKind::Deleted, None))
        });
        self.state().instances.retain(|instance| *instance.id != *id);
        self.change_tx.send_replace(());
        text
    }

    fn change(
        &self,
        id: &str,
        change: impl FnOnce(&mut HostedInstance) -> Option<(InstanceEventKind, Option<i32>)>,
    ) -> String {
        let text = {
            let mut inner = self.state();
            let change = inner.instances.iter_mut().find(|instance| *instance.id == *id).and_then(change);
            let Some((kind, exit_code)) = change else {
                return String::new();
            };
            inner.publish(kind, id, exit_code)
        };
        self.change_tx.send_replace(());
        text
    }

    pub(crate) fn status(&self, id: &str) -> Result<String, LauncherRejection> {
        let inner = self.state();
        let instance = inner.find(id).ok_or_else(|| LauncherRejection::Unknown(id.to_owned()))?;
        Ok(json(&instance.object()))
    }

    pub(crate) fn list(&self) -> String {
        #[derive(Serialize)]
        struct InstanceListBody<'a> {
            revision: EventRevision,
            total_instances: usize,
            running_instances: usize,
            instances: Vec<InstanceObject<'a>>,
        }
        let inner = self.state();
        json(&InstanceListBody {
            revision: inner.revision,
            total_instances: inner.instances.len(),
            running_instances: inner.instances.iter().filter(|instance| instance.alive).count(),
            instances: inner.instances.iter().map(HostedInstance::object).collect(),
        })
    }

    pub(crate) fn ids(&self) -> String {
        #[derive(Serialize)]
        struct InstanceIdsBody<'a> {
            revision: EventRevision,
            instance_ids: Vec<&'a str>,
            count: usize,
        }
        let inner = self.state();
        let instance_ids: Vec<&str> = inner.instances.iter().map(|instance| &*instance.id).collect();
        json(&InstanceIdsBody { revision: inner.revision, count: instance_ids.len(), instance_ids })
    }

    pub(crate) fn stop_handle(&self, id: &str) -> Result<StopHandle, LauncherRejection> {
        let inner = self.state();
        let instance = inner.find(id).ok_or_else(|| LauncherRejection::Unknown(id.to_owned()))?;
        Ok(instance.stop_handle.clone())
    }

    pub(crate) fn stop_handles(&self) -> Vec<StopHandle> {
        self.state().instances.iter().map(|instance| instance.stop_handle.clone()).collect()
    }

    pub(crate) fn log(&self, id: &str) -> Result<Arc<InstanceLog>, LauncherRejection> {
        let inner = self.state();
        let instance = inner.find(id).ok_or_else(|| LauncherRejection::Unknown(id.to_owned()))?;
        Ok(Arc::clone(&instance.log))
    }

    /// The state as events that would lead to it, and the revision that goes on from there.
    pub(crate) fn snapshot(&self) -> (Bytes, EventRevision) {
        let inner = self.state();
        let mut lines = BytesMut::new();
        for instance in &inner.instances {
            lines.extend_from_slice(&events::event_line(InstanceEventKind::Created, &instance.object()));
        }
        (lines.freeze(), inner.revision)
    }

    /// Of the newest event that is not kept any more.
    pub(crate) fn last_dropped(&self) -> EventRevision {
        self.state().events.last_dropped()
    }

    /// What happened after `seen`.
    pub(crate) fn events_after(&self, seen: EventRevision, updates: bool) -> WatchStep {
        let inner = self.state();
        match inner.events.events_after(seen, updates) {
            Ok(Some((lines, revision))) => WatchStep::Lines(lines, revision),
            Ok(None) if !inner.finished => WatchStep::Wait,
            Ok(None) | Err(EventsMissed) => WatchStep::End,
        }
    }

    /// Starts nothing more.
    pub(crate) fn stop_accepting(&self) {
        self.state().shutting_down = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        let inner = self.state();
        inner.instances.is_empty() && inner.starting.is_empty()
    }

    /// Lets watchers go.
    pub(crate) fn end_watches(&self) {
        self.state().finished = true;
        self.change_tx.send_replace(());
    }
}

impl RegistryState {
    fn find(&self, id: &str) -> Option<&HostedInstance> {
        self.instances.iter().find(|instance| *instance.id == *id)
    }

    /// The next event, about this instance; its object.
    fn publish(&mut self, kind: InstanceEventKind, id: &str, exit_code: Option<i32>) -> String {
        self.revision += 1;
        let Some(instance) = self.instances.iter_mut().find(|instance| *instance.id == *id) else {
            return String::new();
        };
        instance.revision = self.revision;
        let object = InstanceObject { exit_code, ..instance.object() };
        self.events.publish(kind, self.revision, id, &object);
        json(&object)
    }
}

fn json(value: &impl Serialize) -> String {
    // Nothing here has a key that is no string, the only thing that can fail.
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests;
