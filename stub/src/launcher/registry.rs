//! The instances as clients see them, and the record of what happened to them: always changed together, so that a list
//! and the watch that begins with its revision miss nothing between them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use tokio::sync::{Notify, watch};

use super::{
    answer::Refusal,
    events::{self, Events, Kind, Missed, Revision},
    log::Log,
    spec::Spec,
};

/// What became of a stop: the instance as it was last, or why it is still there.
pub(crate) type Outcome = Result<String, String>;

/// A client's hand on an instance's keeper.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub(crate) stop: Arc<Notify>,
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
}

#[derive(Debug)]
struct Instance {
    id: Arc<str>,
    spec: Spec,
    revision: Revision,
    alive: bool,
    ready: bool,
    control: Control,
    log: Arc<Log>,
}

#[derive(Serialize)]
struct Object<'a> {
    status: &'static str,
    instance_id: &'a str,
    revision: Revision,
    #[serde(flatten)]
    spec: &'a Spec,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    ready: bool,
}

impl Instance {
    fn object(&self) -> Object<'_> {
        Object {
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
struct Inner {
    revision: Revision,
    events: Events,
    /// In the order of their creation.
    instances: Vec<Instance>,
    /// Ids of those that are being made.
    starting: Vec<Arc<str>>,
    /// Nothing more is started.
    ending: bool,
    /// Nothing more will happen.
    over: bool,
}

/// All instances.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
    news: watch::Sender<()>,
}

/// An id that nobody else can take until the instance is there, or this is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    id: Arc<str>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.registry.inner().starting.retain(|id| *id != self.id);
        self.registry.news.send_replace(());
    }
}

/// What a watcher gets next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Lines(Bytes, Revision),
    Wait,
    /// The watcher has missed something, or the launcher ends.
    End,
}

impl Registry {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes with everything that happens.
    pub(crate) fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// `most`: instances there may be, with those that are being made.
    pub(crate) fn reserve(self: &Arc<Self>, id: &str, most: usize) -> Result<Reservation, Refusal> {
        let mut inner = self.inner();
        if inner.ending {
            return Err(Refusal::Ending);
        }
        if inner.find(id).is_some() || inner.starting.iter().any(|starting| **starting == *id) {
            return Err(Refusal::Exists(id.to_owned()));
        }
        if inner.instances.len() + inner.starting.len() >= most {
            return Err(Refusal::Full { most });
        }
        let id: Arc<str> = id.into();
        inner.starting.push(Arc::clone(&id));
        Ok(Reservation { registry: Arc::clone(self), id })
    }

    /// It runs; the answer to whoever created it.
    pub(crate) fn started(
        &self,
        reservation: Reservation,
        spec: Spec,
        control: Control,
        log: Arc<Log>,
    ) -> String {
        let id = Arc::clone(&reservation.id);
        let text = {
            let mut inner = self.inner();
            let instance =
                Instance { id: Arc::clone(&id), spec, revision: 0, alive: true, ready: false, control, log };
            inner.instances.push(instance);
            inner.publish(Kind::Created, &id, None)
        };
        // Tells the news, too.
        drop(reservation);
        text
    }

    /// Its process ended by itself.
    pub(crate) fn stopped(&self, id: &str, exit_code: Option<i32>) {
        self.change(id, |instance| {
            (instance.alive, instance.ready) = (false, false);
            Some((Kind::Stopped, exit_code))
        });
    }

    pub(crate) fn ready(&self, id: &str, ready: bool) {
        self.change(id, |instance| {
            let before = std::mem::replace(&mut instance.ready, ready);
            (before != ready).then_some((Kind::Updated, None))
        });
    }

    /// Nothing of it is left; its last state.
    pub(crate) fn deleted(&self, id: &str) -> String {
        let text = self.change(id, |instance| {
            (instance.alive, instance.ready) = (false, false);
            Some((Kind::Deleted, None))
        });
        self.inner().instances.retain(|instance| *instance.id != *id);
        self.news.send_replace(());
        text
    }

    fn change(&self, id: &str, change: impl FnOnce(&mut Instance) -> Option<(Kind, Option<i32>)>) -> String {
        let text = {
            let mut inner = self.inner();
            let change = inner.instances.iter_mut().find(|instance| *instance.id == *id).and_then(change);
            let Some((kind, exit_code)) = change else {
                return String::new();
            };
            inner.publish(kind, id, exit_code)
        };
        self.news.send_replace(());
        text
    }

    pub(crate) fn status(&self, id: &str) -> Result<String, Refusal> {
        let inner = self.inner();
        let instance = inner.find(id).ok_or_else(|| Refusal::Unknown(id.to_owned()))?;
        Ok(json(&instance.object()))
    }

    pub(crate) fn list(&self) -> String {
        #[derive(Serialize)]
        struct List<'a> {
            revision: Revision,
            total_instances: usize,
            running_instances: usize,
            instances: Vec<Object<'a>>,
        }
        let inner = self.inner();
        json(&List {
            revision: inner.revision,
            total_instances: inner.instances.len(),
            running_instances: inner.instances.iter().filter(|instance| instance.alive).count(),
            instances: inner.instances.iter().map(Instance::object).collect(),
        })
    }

    pub(crate) fn ids(&self) -> String {
        #[derive(Serialize)]
        struct Ids<'a> {
            revision: Revision,
            instance_ids: Vec<&'a str>,
            count: usize,
        }
        let inner = self.inner();
        let instance_ids: Vec<&str> = inner.instances.iter().map(|instance| &*instance.id).collect();
        json(&Ids { revision: inner.revision, count: instance_ids.len(), instance_ids })
    }

    pub(crate) fn control(&self, id: &str) -> Result<Control, Refusal> {
        let inner = self.inner();
        let instance = inner.find(id).ok_or_else(|| Refusal::Unknown(id.to_owned()))?;
        Ok(instance.control.clone())
    }

    pub(crate) fn controls(&self) -> Vec<Control> {
        self.inner().instances.iter().map(|instance| instance.control.clone()).collect()
    }

    pub(crate) fn log(&self, id: &str) -> Result<Arc<Log>, Refusal> {
        let inner = self.inner();
        let instance = inner.find(id).ok_or_else(|| Refusal::Unknown(id.to_owned()))?;
        Ok(Arc::clone(&instance.log))
    }

    /// The state as events that would lead to it, and the revision that goes on from there.
    pub(crate) fn snapshot(&self) -> (Bytes, Revision) {
        let inner = self.inner();
        let mut lines = BytesMut::new();
        for instance in &inner.instances {
            lines.extend_from_slice(&events::line(Kind::Created, &instance.object()));
        }
        (lines.freeze(), inner.revision)
    }

    /// Of the newest event that is not kept any more.
    pub(crate) fn oldest(&self) -> Revision {
        self.inner().events.oldest()
    }

    /// What happened after `seen`.
    pub(crate) fn after(&self, seen: Revision, updates: bool) -> Next {
        let inner = self.inner();
        match inner.events.after(seen, updates) {
            Ok(Some((lines, revision))) => Next::Lines(lines, revision),
            Ok(None) if !inner.over => Next::Wait,
            Ok(None) | Err(Missed) => Next::End,
        }
    }

    /// Starts nothing more.
    pub(crate) fn close(&self) {
        self.inner().ending = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        let inner = self.inner();
        inner.instances.is_empty() && inner.starting.is_empty()
    }

    /// Lets watchers go.
    pub(crate) fn finish(&self) {
        self.inner().over = true;
        self.news.send_replace(());
    }
}

impl Inner {
    fn find(&self, id: &str) -> Option<&Instance> {
        self.instances.iter().find(|instance| *instance.id == *id)
    }

    /// The next event, about this instance; its object.
    fn publish(&mut self, kind: Kind, id: &str, exit_code: Option<i32>) -> String {
        self.revision += 1;
        let Some(instance) = self.instances.iter_mut().find(|instance| *instance.id == *id) else {
            return String::new();
        };
        instance.revision = self.revision;
        let object = Object { exit_code, ..instance.object() };
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
