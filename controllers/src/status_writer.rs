//! Writes the leader's view of every model, pool and node into their statuses, where they differ.
//!
//! One task has the index, the facts from the decisions, and the stored statuses. It writes an object's status again
//! only after the last write of it has ended. Each write carries the version that was read, so that the API server
//! refuses late writes of a replaced leader. After a conflict the task waits until the watch delivers the newer
//! version, and compares again.

mod last_requests;
mod nodes;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kube::{Api, Client, Resource as _};
use rouse::{
    model::ModelName,
    units::{Millis, Tick},
};
use rouse_net::lease::TickClock;
use serde_json::json;

use self::last_requests::LastRequestPacer;
use super::{
    condition::ACCEPTED,
    crd::{InferenceModel, InferenceModelStatus, ledger::ObjectName},
    event_content::{EventContent, EventReason},
    index::{ClusterIndex, Resolved, ServedModel},
    kit,
    ledger::PoolLedger,
    recorder::{EventRequest, EventSender, RegardingKind},
    status::{self, ModelFacts, ResolvedModel, StatusDifference},
    writer::{Error, ObjectWriter},
};

/// Delay before a retry after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Delay before a retry after the API server refused the write.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Delay before a retry while the renewal of the Lease is late.
const LATE_RENEWAL_DELAY: Millis = Millis::secs(1);
/// Maximum number of concurrent status writes.
const MAX_CONCURRENT_WRITES: usize = 8;

/// Writes statuses.
pub(crate) struct StatusWriter {
    client: Client,
    writer: ObjectWriter,
    pool_ledger: PoolLedger,
    clock: TickClock,
    events: EventSender,
    facts: BTreeMap<ModelName, ModelFacts>,
    /// The last seen version of each model's object.
    versions: BTreeMap<ObjectName, String>,
    /// The existing AcceleratorNodes.
    nodes: BTreeMap<String, nodes::StoredNode>,
    /// Pools that models use. Another installation in the same cluster may have pools of its own.
    used_pools: BTreeSet<String>,
    due: BTreeSet<StatusTarget>,
    writing: BTreeSet<StatusTarget>,
    /// The models of whose statuses only the time of the last request is to be written.
    last_requests: LastRequestPacer,
    /// When to try again: the renewal of the Lease is late, or a paced write is due.
    retry_at: Option<Tick>,
}

/// Tasks that write statuses.
pub(crate) type StatusWriteTasks = kit::Tasks<WriteCompletion>;

/// The end of a write or of a pause.
#[derive(Debug)]
pub(crate) enum WriteCompletion {
    Write(StatusTarget, Result<(), Error>, Option<EventRequest>),
    /// The pause after a failed write is over.
    Pause(StatusTarget),
}

/// The object whose status is written. Pools come first, since starts wait for their totals.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StatusTarget {
    Pool(String),
    Model(ObjectName),
    Node(String),
}

impl StatusWriter {
    #[must_use]
    pub(crate) fn new(
        client: Client,
        writer: ObjectWriter,
        pool_ledger: PoolLedger,
        clock: TickClock,
        event_sender: EventSender,
    ) -> Self {
        Self {
            client,
            writer,
            pool_ledger,
            clock,
            events: event_sender,
            facts: BTreeMap::new(),
            versions: BTreeMap::new(),
            nodes: BTreeMap::new(),
            used_pools: BTreeSet::new(),
            due: BTreeSet::new(),
            writing: BTreeSet::new(),
            last_requests: LastRequestPacer::default(),
            retry_at: None,
        }
    }

    /// Records a new version of a model's object.
    pub(crate) fn model_applied(&mut self, model: &InferenceModel) {
        let name = super::conflicts::object_name(model);
        if let Some(version) = model.meta().resource_version.clone() {
            self.versions.insert(name.clone(), version);
        }
        self.due.insert(StatusTarget::Model(name));
    }

    /// Takes changed facts from the decisions.
    pub(crate) fn update_facts(&mut self, facts: BTreeMap<ModelName, ModelFacts>, resolved: &Resolved) {
        let objects = facts.keys().filter_map(|model| resolved.object_of(model));
        self.due.extend(objects.cloned().map(StatusTarget::Model));
        self.facts.extend(facts);
    }

    /// Marks all statuses as due, when this gateway begins to lead.
    pub(crate) fn mark_all_due(&mut self, resolved: &Resolved) {
        self.changed(&Resolved::default(), resolved);
        self.due.extend(self.nodes.keys().cloned().map(StatusTarget::Node));
    }

    /// Marks the statuses as due that a change of the resolved objects may affect.
    pub(crate) fn changed(&mut self, before: &Resolved, now: &Resolved) {
        let served = now.served.iter().filter(|(object, served)| before.served.get(object) != Some(served));
        let served = served.map(|(object, _)| object);
        let rejected =
            now.rejected.iter().filter(|(object, rejection)| before.rejected.get(object) != Some(rejection));
        let objects = served.chain(rejected.map(|(object, _)| object));
        self.due.extend(objects.cloned().map(StatusTarget::Model));
        let used: BTreeSet<String> = now.served.values().flat_map(ServedModel::pools).cloned().collect();
        let newly =
            |pool: Option<&String>| pool.is_some_and(|p| used.contains(p) && !self.used_pools.contains(p));
        let pools = now.pools.iter();
        let pools = pools.filter(|(name, pool)| newly(Some(name)) || before.pools.get(*name) != Some(pool));
        self.due.extend(pools.map(|(name, _)| StatusTarget::Pool(name.clone())));
        let nodes = now
            .nodes
            .iter()
            .filter(|(name, node)| newly(node.pool.as_ref()) || before.nodes.get(*name) != Some(node));
        let removed = before.nodes.keys().filter(|name| !now.nodes.contains_key(*name));
        self.due.extend(nodes.map(|(name, _)| name).chain(removed).cloned().map(StatusTarget::Node));
        self.used_pools = used;
        self.facts.retain(|model, _| now.object_of(model).is_some());
    }

    /// Takes the end of a write or of a pause.
    pub(crate) fn finished(&mut self, completion: WriteCompletion, tasks: &mut StatusWriteTasks) {
        match completion {
            WriteCompletion::Pause(target) => {
                self.writing.remove(&target);
                self.due.insert(target);
            }
            WriteCompletion::Write(target, outcome, event) => {
                if let Some(event) = event.filter(|_| outcome.is_ok()) {
                    self.events.send(event);
                }
                self.finish_write(target, outcome, tasks);
            }
        }
    }

    /// Forgets the writes and pauses of a term that has ended.
    pub(crate) fn writes_dropped(&mut self) {
        self.due.append(&mut self.writing);
    }

    /// Sends Events on models.
    pub(crate) fn send_events(&self, events: Vec<(ModelName, EventContent)>, resolved: &Resolved) {
        for (model, event) in events {
            let Some(object) = resolved.objects.get(&model) else { continue };
            // Rouse neither starts nor stops an external backend.
            let is_hosted = |served: &&ServedModel| !served.is_external();
            let Some(served) = resolved.served.get(object).filter(is_hosted) else { continue };
            self.send_event(object, served.uid.as_ref(), event);
        }
    }

    /// Forgets a deleted model's object.
    pub(crate) fn model_deleted(&mut self, object: &ObjectName) {
        self.versions.remove(object);
        self.last_requests.forget(object);
        self.due.remove(&StatusTarget::Model(object.clone()));
    }

    /// Sends the Event for a deleted model, if this gateway leads.
    pub(crate) fn deleted(&self, object: &ObjectName, resolved: &Resolved) {
        let event =
            EventReason::Deleted.with_note("the model is no longer served, and its engines are stopped");
        self.send_event(object, resolved.uid(object), event);
    }

    fn send_event(&self, object: &ObjectName, uid: Option<&String>, event: EventContent) {
        let (object, uid) = (object.clone(), uid.cloned().unwrap_or_default());
        self.events.send(EventRequest { regarding: RegardingKind::Model, object, uid, content: event });
    }

    fn finish_write(&mut self, what: StatusTarget, outcome: Result<(), Error>, tasks: &mut StatusWriteTasks) {
        match outcome {
            // The watch delivers the written version, or the version that caused the conflict.
            Ok(()) | Err(Error::Conflict | Error::Gone) => {}
            // The renewal of the Lease may only be late. After the loss of the Lease, the pause ends with the term.
            Err(Error::NotLeading) => return tasks.after(RETRY_DELAY, WriteCompletion::Pause(what)),
            Err(error) => {
                // A retry may succeed later, since others may correct rights and admission policies.
                let pause =
                    if matches!(error, Error::Invalid(_)) { REFUSED_RETRY_DELAY } else { RETRY_DELAY };
                tracing::warn!(object = ?what, %error, ?pause, "status write failed, retrying");
                return tasks.after(pause, WriteCompletion::Pause(what));
            }
        }
        self.writing.remove(&what);
    }

    /// Returns when to call [`Self::write`] again without any other cause.
    pub(crate) const fn retry_at(&self) -> Option<Tick> {
        self.retry_at
    }

    /// Starts the writes that are due, if this gateway leads in the term of this epoch.
    pub(crate) fn write(
        &mut self,
        epoch: u64,
        index: &ClusterIndex,
        resolved: &Resolved,
        tasks: &mut StatusWriteTasks,
    ) {
        self.retry_at = None;
        if self.writer.leadership_in(epoch).is_err() {
            // A renewal does not wake the controller.
            let has_work = !self.due.is_empty() || self.last_requests.has_waiting();
            self.retry_at = has_work.then(|| self.clock.now() + LATE_RENEWAL_DELAY);
            return;
        }
        let now = self.clock.now();
        self.due.extend(self.last_requests.turn(now).cloned().map(StatusTarget::Model));
        self.begin_due_writes(epoch, index, resolved, tasks);
        self.retry_at = self.last_requests.next_turn(now);
    }

    fn begin_due_writes(
        &mut self,
        epoch: u64,
        index: &ClusterIndex,
        resolved: &Resolved,
        tasks: &mut StatusWriteTasks,
    ) {
        let mut rows = None;
        while self.writing.len() < MAX_CONCURRENT_WRITES {
            let Some(what) = self.due.iter().find(|what| !self.writing.contains(*what)).cloned() else {
                return;
            };
            self.due.remove(&what);
            match &what {
                StatusTarget::Model(object) => self.model(epoch, index, resolved, object, tasks),
                StatusTarget::Pool(pool) => self.pool(index, resolved, pool, tasks),
                StatusTarget::Node(node) => {
                    self.node(
                        resolved,
                        rows.get_or_insert_with(|| nodes::reservations_by_node(index, resolved)),
                        node,
                        tasks,
                    );
                }
            }
        }
    }

    /// Returns what the status says of the model's engines.
    ///
    /// A rejected model may still have engines, which finish their requests. Other gateways take an engine that no
    /// status lists for gone, and cut its requests.
    fn facts_for(
        &self,
        object: &ObjectName,
        model: ResolvedModel<'_>,
        resolved: &Resolved,
    ) -> Cow<'_, ModelFacts> {
        match model {
            ResolvedModel::Served(served) => {
                self.facts.get(&served.spec.name).map_or_else(Cow::default, Cow::Borrowed)
            }
            ResolvedModel::Rejected(rejected) => {
                let is_its = resolved.unserved.get(&rejected.model) == Some(object);
                let known = self.facts.get(&rejected.model).filter(|_| is_its);
                let engines = known.map(|facts| facts.engines.clone()).unwrap_or_default();
                Cow::Owned(ModelFacts { engines, ..ModelFacts::default() })
            }
        }
    }

    fn model(
        &mut self,
        epoch: u64,
        index: &ClusterIndex,
        resolved: &Resolved,
        object: &ObjectName,
        tasks: &mut StatusWriteTasks,
    ) {
        let served = resolved.served.get(object);
        let resolved_model = match (served, resolved.rejected.get(object)) {
            (Some(served), _) => ResolvedModel::Served(served),
            (None, Some(rejected)) => ResolvedModel::Rejected(rejected),
            (None, None) => return self.last_requests.forget(object),
        };
        let stored = index.model_status(object);
        let now = self.clock.now();
        let facts = self.facts_for(object, resolved_model, resolved);
        let desired = status::model_status(resolved_model, &facts, stored, now);
        drop(facts);
        let patience = served.map_or(Millis::ZERO, |served| status::max_last_request_lag(&served.spec.idle));
        match status::model_difference(stored, &desired, patience) {
            StatusDifference::LastRequest if !self.last_requests.begin(object, now) => return,
            StatusDifference::LastRequest => {}
            StatusDifference::Nothing => return self.last_requests.forget(object),
            StatusDifference::More => self.last_requests.forget(object),
        }
        let Some(version) = self.versions.get(object) else { return };
        let event = acceptance_event(stored, &desired).map(|content| EventRequest {
            regarding: RegardingKind::Model,
            object: object.clone(),
            uid: resolved.uid(object).cloned().unwrap_or_default(),
            content,
        });
        let patch = json!({
            "apiVersion": "rouse.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {"name": object.name, "namespace": object.namespace, "resourceVersion": version},
            "status": desired,
        });
        let api: Api<InferenceModel> = Api::namespaced(self.client.clone(), &object.namespace);
        let (writer, what) = (self.writer.clone(), StatusTarget::Model(object.clone()));
        self.writing.insert(what.clone());
        let name = object.name.clone();
        tasks.spawn(async move {
            // The status says what was decided in one term, and must not be written in the next.
            let outcome = match writer.leadership_in(epoch) {
                Ok(_) => writer.apply_status(&api, &name, &patch).await.map(drop),
                Err(error) => Err(error),
            };
            WriteCompletion::Write(what, outcome, event)
        });
    }

    fn pool(&mut self, index: &ClusterIndex, resolved: &Resolved, name: &str, tasks: &mut StatusWriteTasks) {
        let Some(pool) = resolved.pools.get(name).filter(|_| self.used_pools.contains(name)) else { return };
        let now = self.clock.now();
        let desired = status::pool_status(pool, index.pool_status(name), now);
        if !status::pool_differs(index.pool_status(name), &desired) {
            return;
        }
        let (pool_ledger, pool) = (self.pool_ledger.clone(), pool.clone());
        let what = StatusTarget::Pool(name.to_owned());
        self.writing.insert(what.clone());
        let name = name.to_owned();
        tasks.spawn(async move {
            let outcome = pool_ledger
                .update_status(&name, |stored| status::pool_status(&pool, Some(stored), now))
                .await;
            WriteCompletion::Write(what, outcome.map_err(Error::from), None)
        });
    }
}

/// Returns the Event for the first status of an object or of one of its generations.
fn acceptance_event(
    stored: Option<&InferenceModelStatus>,
    desired: &InferenceModelStatus,
) -> Option<EventContent> {
    let reason = match stored {
        None => EventReason::Created,
        Some(stored) if stored.observed_generation != desired.observed_generation => EventReason::Updated,
        Some(_) => return None,
    };
    let accepted = desired.conditions.iter().find(|condition| condition.type_ == ACCEPTED)?;
    let refused = accepted.status != "True";
    let message = &accepted.message;
    Some(reason.with_note(if refused {
        format!("the model is not served: {message}")
    } else {
        message.clone()
    }))
}
