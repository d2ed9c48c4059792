//! The instances and the log of their events, always changed together: a list and a watch from its revision miss
//! nothing in between.

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

/// Result of a stop: the instance's last state, or why it still exists.
pub(crate) type StopResult = Result<String, String>;

/// Stops an instance through its supervisor.
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
    /// In creation order.
    instances: Vec<HostedInstance>,
    /// Ids of instances that are starting.
    starting: Vec<Arc<str>>,
    /// New instances are refused.
    shutting_down: bool,
    /// No further event will happen.
    finished: bool,
}

/// All instances and their events.
#[derive(Debug, Default)]
pub(crate) struct InstanceRegistry {
    state: Mutex<RegistryState>,
    change_tx: watch::Sender<()>,
}

/// Reserves an id until the instance is registered or this value is dropped.
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

/// A watcher's next step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WatchStep {
    Lines(Bytes, EventRevision),
    Wait,
    /// The watcher has missed events, or the launcher ends.
    End,
}

impl InstanceRegistry {
    fn state(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies of every change.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.change_tx.subscribe()
    }

    /// Reserves an id. `most` limits the instances, starting ones included.
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

    /// Registers a started instance and returns the response to its creator.
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
        // The drop also notifies the watchers.
        drop(reservation);
        text
    }

    /// Records that the process ended by itself.
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

    /// Removes an instance whose processes are all gone, and returns its last state.
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

    /// Returns the state as the events that produce it, with the revision to continue from.
    pub(crate) fn snapshot(&self) -> (Bytes, EventRevision) {
        let inner = self.state();
        let mut lines = BytesMut::new();
        for instance in &inner.instances {
            lines.extend_from_slice(&events::event_line(InstanceEventKind::Created, &instance.object()));
        }
        (lines.freeze(), inner.revision)
    }

    /// Revision of the newest dropped event.
    pub(crate) fn last_dropped(&self) -> EventRevision {
        self.state().events.last_dropped()
    }

    /// Returns the events after `last_seen`.
    pub(crate) fn events_after(&self, last_seen: EventRevision, updates: bool) -> WatchStep {
        let inner = self.state();
        match inner.events.events_after(last_seen, updates) {
            Ok(Some((lines, revision))) => WatchStep::Lines(lines, revision),
            Ok(None) if !inner.finished => WatchStep::Wait,
            Ok(None) | Err(EventsMissed) => WatchStep::End,
        }
    }

    /// Refuses new instances from then on.
    pub(crate) fn stop_accepting(&self) {
        self.state().shutting_down = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        let inner = self.state();
        inner.instances.is_empty() && inner.starting.is_empty()
    }

    /// Ends all watch streams.
    pub(crate) fn end_watches(&self) {
        self.state().finished = true;
        self.change_tx.send_replace(());
    }
}

impl RegistryState {
    fn find(&self, id: &str) -> Option<&HostedInstance> {
        self.instances.iter().find(|instance| *instance.id == *id)
    }

    /// Publishes the next event about this instance and returns its object.
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
    // Serialization fails only for keys that are not strings, and these types have none.
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests;
