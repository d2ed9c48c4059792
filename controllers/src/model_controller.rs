//! Maintains the index of the cluster's objects, publishes what follows from it, and writes their statuses.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Resource, ResourceExt as _};
use rouse::units::Tick;
use tokio::sync::watch;

use super::{
    cache::{Subscription, TermDelta},
    crd::{AcceleratorNode, AcceleratorPool, InferenceModel, ledger::ObjectName},
    index::{ClusterIndex, IndexedObject, ObjectKey, ObjectKind, Resolved},
    kit::Component,
    published::{PublishedMailbox, PublishedModel},
    status_inputs::StatusInputs,
    status_writer::{StatusWriteTasks, StatusWriter, WriteCompletion},
    watch::{Delta, WatchedObject},
};

/// A change of what the controller observes.
#[derive(Debug)]
pub(crate) enum ModelInput {
    Model(Delta<InferenceModel>),
    Pool(Delta<AcceleratorPool>),
    AcceleratorNode(Delta<AcceleratorNode>),
    Node(Delta<Node>),
    /// There are new facts or Events from the decisions.
    Facts,
}

/// What feeds the controller.
pub(crate) struct ModelWatches {
    pub(crate) models: Subscription<InferenceModel>,
    pub(crate) pools: Subscription<AcceleratorPool>,
    pub(crate) accelerator_nodes: Subscription<AcceleratorNode>,
    pub(crate) nodes: Subscription<Node>,
}

impl ModelWatches {
    /// Returns everything that the controller observes as one stream.
    pub(crate) fn inputs(self, status_inputs: Arc<StatusInputs>) -> impl Stream<Item = ModelInput> {
        let Self { models, pools, accelerator_nodes, nodes } = self;
        let facts = stream::unfold(status_inputs, async |status_inputs| {
            status_inputs.changed().await;
            Some((ModelInput::Facts, status_inputs))
        });
        stream::select_all([
            models.map(|TermDelta { delta, .. }| ModelInput::Model(delta)).boxed(),
            pools.map(|TermDelta { delta, .. }| ModelInput::Pool(delta)).boxed(),
            accelerator_nodes.map(|TermDelta { delta, .. }| ModelInput::AcceleratorNode(delta)).boxed(),
            nodes.map(|TermDelta { delta, .. }| ModelInput::Node(delta)).boxed(),
            facts.boxed(),
        ])
    }
}

/// The controller of InferenceModels, pools and nodes.
pub(crate) struct ModelController {
    pub(crate) index: ClusterIndex,
    /// Facts from the decisions.
    pub(crate) status_inputs: Arc<StatusInputs>,
    pub(crate) status_writer: StatusWriter,
    /// Receives the content of model statuses.
    pub(crate) published: Arc<PublishedMailbox>,
    /// The last value sent for each object.
    pub(crate) last_published: BTreeMap<ObjectName, Arc<PublishedModel>>,
    /// The resolved objects, from when every kind was listed once.
    pub(crate) resolved: watch::Sender<Option<Arc<Resolved>>>,
    /// Epoch of the term, while this gateway leads.
    pub(crate) term: Option<u64>,
    /// The same, once this leader knows what runs.
    pub(crate) decides: Option<u64>,
}

impl Component for ModelController {
    type Input = ModelInput;
    type Outcome = WriteCompletion;

    fn apply(&mut self, input: ModelInput, _tasks: &mut StatusWriteTasks) {
        match input {
            ModelInput::Model(delta) => self.apply_models(delta),
            ModelInput::Pool(delta) => self.apply_pools(delta),
            ModelInput::AcceleratorNode(delta) => {
                self.apply_nodes(&delta);
                update_index(&mut self.index, ObjectKind::AcceleratorNode, delta);
            }
            ModelInput::Node(delta) => update_index(&mut self.index, ObjectKind::Node, delta),
            ModelInput::Facts => {}
        }
    }

    fn finished(&mut self, completion: WriteCompletion, tasks: &mut StatusWriteTasks) {
        self.status_writer.finished(completion, tasks);
    }

    fn term_changed(&mut self, epoch: Option<u64>, _tasks: &mut StatusWriteTasks) {
        self.term = epoch;
        self.status_writer.writes_dropped();
    }

    fn next_deadline(&self) -> Option<Tick> {
        self.decides.and_then(|_| self.status_writer.retry_at())
    }

    fn decide(&mut self, tasks: &mut StatusWriteTasks) {
        if !self.index.is_complete() {
            return;
        }
        let resolved = self.index.resolved();
        self.publish_resolved(&resolved);
        // A new leader that does not know yet what runs would report that nothing does.
        let decides = self.deciding_epoch();
        if decides != self.decides {
            self.decides = decides;
            self.status_writer.mark_all_due(&resolved);
        }
        self.status_writer.update_facts(self.status_inputs.take_facts(), &resolved);
        self.status_writer.send_events(self.status_inputs.take_events(), &resolved);
        if let Some(epoch) = decides {
            self.status_writer.write(epoch, &self.index, &resolved, tasks);
        }
    }
}

impl ModelController {
    /// Returns the epoch of the term, once this leader knows what runs.
    ///
    /// The decisions are made on another thread, which may still be in a former term.
    fn deciding_epoch(&self) -> Option<u64> {
        self.term.filter(|epoch| self.status_inputs.decides_in(*epoch))
    }

    /// Publishes the resolved objects if they have changed.
    fn publish_resolved(&mut self, now: &Arc<Resolved>) {
        let before = self.resolved.borrow().clone();
        if before.as_ref().is_some_and(|before| Arc::ptr_eq(before, now)) {
            return;
        }
        if before.as_ref() == Some(now) {
            // Equal content: keep the new `Arc` without a notification, to make the next comparison cheap.
            self.resolved.send_if_modified(|current| {
                *current = Some(Arc::clone(now));
                false
            });
            return;
        }
        let before = before.unwrap_or_default();
        self.status_writer.changed(&before, now);
        self.status_inputs
            .mark_changed(now.objects.keys().filter(|model| !before.objects.contains_key(*model)));
        self.resolved.send_replace(Some(Arc::clone(now)));
    }

    fn apply_models(&mut self, change: Delta<InferenceModel>) {
        match &change {
            Delta::All { namespace, objects } => {
                let listed: BTreeSet<ObjectName> = objects.iter().map(WatchedObject::name).collect();
                let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let removed =
                    self.last_published.keys().filter(|name| in_scope(name) && !listed.contains(name));
                let removed: Vec<ObjectName> = removed.cloned().collect();
                removed.iter().for_each(|name| self.model_deleted(name));
                objects.iter().for_each(|found| self.model_applied(found));
            }
            Delta::Applied(found) => self.model_applied(found),
            Delta::Deleted(name) => self.model_deleted(name),
        }
        update_index(&mut self.index, ObjectKind::Model, change);
    }

    fn apply_pools(&mut self, change: Delta<AcceleratorPool>) {
        if let Delta::Applied(WatchedObject::Readable(pool)) = &change {
            let name = pool.name_any();
            let before = self.index.pool_status(&name).map(|status| &status.ledger);
            let now = pool.status.as_ref().map(|status| &status.ledger);
            self.status_writer.pool_applied(&name, before, now);
        }
        update_index(&mut self.index, ObjectKind::Pool, change);
    }

    fn apply_nodes(&mut self, change: &Delta<AcceleratorNode>) {
        match change {
            Delta::All { objects, .. } => {
                let listed: BTreeSet<String> = objects.iter().map(|found| found.name().name).collect();
                let removed = self.status_writer.known_nodes().filter(|name| !listed.contains(*name));
                let removed: Vec<String> = removed.cloned().collect();
                removed.iter().for_each(|name| self.status_writer.node_deleted(name));
                objects.iter().for_each(|found| self.node_applied(found));
            }
            Delta::Applied(found) => self.node_applied(found),
            Delta::Deleted(name) => self.status_writer.node_deleted(&name.name),
        }
    }

    fn node_applied(&mut self, found: &WatchedObject<AcceleratorNode>) {
        if let WatchedObject::Readable(node) = found {
            self.status_writer.node_applied(node);
        }
    }

    fn model_applied(&mut self, found: &WatchedObject<InferenceModel>) {
        let WatchedObject::Readable(model) = found else { return };
        self.status_writer.model_applied(model);
        let published = Arc::new(PublishedModel::of(model));
        if self.last_published.get(&published.object) != Some(&published) {
            self.last_published.insert(published.object.clone(), Arc::clone(&published));
            self.published.post(published);
        }
    }

    fn model_deleted(&mut self, name: &ObjectName) {
        self.status_writer.model_deleted(name);
        if let Some(known) = self.last_published.remove(name) {
            self.published.post(Arc::new(Arc::unwrap_or_clone(known).after_deletion()));
            if self.deciding_epoch().is_some()
                && let Some(resolved) = &*self.resolved.borrow()
            {
                self.status_writer.deleted(name, resolved);
            }
        }
    }
}

fn update_index<K: Resource + Clone + Into<IndexedObject>>(
    index: &mut ClusterIndex,
    kind: ObjectKind,
    change: Delta<K>,
) {
    match change {
        Delta::All { namespace, objects } => {
            let listed: BTreeSet<ObjectKey> =
                objects.iter().map(|found| ObjectKey::of(kind, found.metadata())).collect();
            objects.into_iter().for_each(|found| put(index, kind, found));
            index.apply_list(kind, namespace.as_deref(), &listed);
        }
        Delta::Applied(found) => put(index, kind, found),
        Delta::Deleted(name) => {
            let metadata = kube::api::ObjectMeta {
                namespace: Some(name.namespace),
                name: Some(name.name),
                ..kube::api::ObjectMeta::default()
            };
            index.delete(&ObjectKey::of(kind, &metadata));
        }
    }
}

fn put<K: Resource + Clone + Into<IndexedObject>>(
    index: &mut ClusterIndex,
    kind: ObjectKind,
    found: WatchedObject<K>,
) {
    match found {
        // Another reader of the watch may still hold the object.
        WatchedObject::Readable(object) => index.apply(Arc::unwrap_or_clone(object)),
        WatchedObject::Unreadable { metadata, error } => index.unreadable(kind, &metadata, &error),
    }
}
