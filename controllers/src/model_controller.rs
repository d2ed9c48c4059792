//! Watches the cluster's objects, maintains the index, and publishes what follows from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope,
    api::core::v1::{Node, NodeStatus},
};
use kube::{Api, Client, Resource, ResourceExt as _, core::DeserializeGuard};
use serde::de::DeserializeOwned;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    crd::{AcceleratorNode, AcceleratorPool, InferenceModel, ledger::ObjectName},
    election::Leadership,
    index::{ClusterIndex, IndexedObject, ObjectKey, ObjectKind, Resolved},
    published::PublishedModel,
    status_inputs::StatusInputs as Facts,
    status_writer::StatusWriter,
    watch::{Delta, InitialLists, WatchTarget, WatchedObject, watch as follow},
};

/// Capacity of the channel to the index; further changes wait at the API server.
const CHANNEL_CAPACITY: usize = 1024;
/// Maximum number of changes applied between two resolutions of the index.
const MAX_BATCH: usize = 512;

/// A change of one watched object or list.
#[derive(Debug)]
pub enum ObjectDelta {
    Model(Delta<InferenceModel>),
    Pool(Delta<AcceleratorPool>),
    AcceleratorNode(Delta<AcceleratorNode>),
    Node(Delta<Node>),
}

/// Watches everything that the index needs.
///
/// `namespaces`: the namespaces of the models; `None` stands for the whole cluster. `awaited`: the lists that have not
/// arrived yet.
pub fn watch_all(
    client: &Client,
    namespaces: &[Option<String>],
    nodes: bool,
    awaited: &InitialLists,
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<ObjectDelta> {
    let (tx, rx) = mpsc::channel(CHANNEL_CAPACITY);
    for namespace in namespaces {
        let api = namespaced(client, namespace.as_deref());
        let models = WatchTarget { api, namespace: namespace.clone(), labels: None, fields: None, slim };
        tasks.spawn(follow(models, tx.clone(), awaited.clone(), ObjectDelta::Model));
    }
    tasks.spawn(follow(cluster_wide(client, slim), tx.clone(), awaited.clone(), ObjectDelta::Pool));
    if nodes {
        tasks.spawn(follow(
            cluster_wide(client, slim),
            tx.clone(),
            awaited.clone(),
            ObjectDelta::AcceleratorNode,
        ));
        tasks.spawn(follow(cluster_wide(client, slim_node), tx, awaited.clone(), ObjectDelta::Node));
    }
    rx
}

fn cluster_wide<K>(client: &Client, slim: fn(&mut K)) -> WatchTarget<K>
where
    K: Resource<Scope = ClusterResourceScope, DynamicType = ()> + Clone + DeserializeOwned,
{
    WatchTarget { api: Api::all(client.clone()), namespace: None, labels: None, fields: None, slim }
}

/// Drops managed fields, which are as large as the fields they describe, and annotations.
fn slim<K: Resource>(object: &mut K) {
    let metadata = object.meta_mut();
    (metadata.managed_fields, metadata.annotations) = (None, None);
}

/// Keeps only metadata and allocatable resources of a Node, most of which describes its disk.
fn slim_node(node: &mut Node) {
    slim(node);
    node.spec = None;
    if let Some(status) = node.status.take() {
        node.status = Some(NodeStatus { allocatable: status.allocatable, ..NodeStatus::default() });
    }
}

/// Returns the API for one namespace or for all.
pub fn namespaced<K>(client: &Client, namespace: Option<&str>) -> Api<DeserializeGuard<K>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + DeserializeOwned,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// The task that maintains the index.
pub struct ModelController {
    pub index: ClusterIndex,
    pub deltas: mpsc::Receiver<ObjectDelta>,
    /// Facts from the decisions.
    pub status_inputs: Arc<Facts>,
    pub leadership: watch::Receiver<Option<Leadership>>,
    pub status_writer: StatusWriter,
    /// Sends the content of model statuses.
    pub published: mpsc::UnboundedSender<PublishedModel>,
    /// The last value sent for each object.
    pub last_published: BTreeMap<ObjectName, PublishedModel>,
    /// The resolved objects, from when every kind was listed once.
    pub resolved: watch::Sender<Option<Arc<Resolved>>>,
}

impl ModelController {
    /// Runs until the watches or the election end.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        let mut epoch = None;
        loop {
            tokio::select! {
                taken = self.deltas.recv_many(&mut batch, MAX_BATCH) => {
                    if taken == 0 {
                        return;
                    }
                    batch.drain(..).for_each(|told| self.apply(told));
                }
                () = self.status_inputs.changed() => {}
                () = self.status_writer.next_completion() => {}
                changed = self.leadership.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
            }
            if !self.index.is_complete() {
                continue;
            }
            let resolved = self.index.resolved();
            self.publish_resolved(&resolved);
            let leads =
                self.leadership.borrow_and_update().filter(Leadership::is_valid).map(|claim| claim.epoch);
            // A new leader that does not know yet what runs would report that nothing does.
            let decides = leads.filter(|_| self.status_inputs.decides());
            if decides != epoch {
                epoch = decides;
                self.status_writer.mark_all_due(&resolved);
            }
            self.status_writer.update_facts(self.status_inputs.take_facts(), &resolved);
            self.status_writer.send_events(self.status_inputs.take_events(), &resolved);
            if decides.is_some() {
                self.status_writer.write(&self.index, &resolved);
            }
        }
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

    fn apply(&mut self, delta: ObjectDelta) {
        match delta {
            ObjectDelta::Model(change) => {
                match &change {
                    Delta::All { namespace, objects } => {
                        let listed: BTreeSet<ObjectName> = objects.iter().map(WatchedObject::name).collect();
                        let in_scope =
                            |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                        let removed = self
                            .last_published
                            .keys()
                            .filter(|name| in_scope(name) && !listed.contains(name));
                        let removed: Vec<ObjectName> = removed.cloned().collect();
                        removed.iter().for_each(|name| self.model_deleted(name));
                        objects.iter().for_each(|found| self.model_applied(found));
                    }
                    Delta::Applied(found) => self.model_applied(found),
                    Delta::Deleted(name) => self.model_deleted(name),
                }
                update_index(&mut self.index, ObjectKind::Model, change);
            }
            ObjectDelta::Pool(change) => {
                if let Delta::Applied(found) = &change
                    && let WatchedObject::Readable(pool) = &**found
                {
                    let name = pool.name_any();
                    let before = self.index.pool_status(&name).map(|status| &status.ledger);
                    self.status_writer.pool_applied(
                        &name,
                        before,
                        pool.status.as_ref().map(|status| &status.ledger),
                    );
                }
                update_index(&mut self.index, ObjectKind::Pool, change);
            }
            ObjectDelta::AcceleratorNode(change) => {
                self.apply_nodes(&change);
                update_index(&mut self.index, ObjectKind::AcceleratorNode, change);
            }
            ObjectDelta::Node(change) => update_index(&mut self.index, ObjectKind::Node, change),
        }
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
        let published = PublishedModel::of(model);
        if self.last_published.get(&published.object) != Some(&published) {
            self.last_published.insert(published.object.clone(), published.clone());
            // The receiver ends only with this gateway.
            self.published.send(published).unwrap_or_default();
        }
    }

    fn model_deleted(&mut self, name: &ObjectName) {
        self.status_writer.model_deleted(name);
        if let Some(known) = self.last_published.remove(name) {
            self.published.send(known.without_engines()).unwrap_or_default();
            if self.status_inputs.decides()
                && let Some(resolved) = &*self.resolved.borrow()
            {
                self.status_writer.deleted(name, resolved);
            }
        }
    }
}

fn update_index<K: Resource + Into<IndexedObject>>(
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
        Delta::Applied(found) => put(index, kind, *found),
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

fn put<K: Resource + Into<IndexedObject>>(
    index: &mut ClusterIndex,
    kind: ObjectKind,
    found: WatchedObject<K>,
) {
    match found {
        WatchedObject::Readable(object) => index.apply(object),
        WatchedObject::Unreadable { metadata, error } => index.unreadable(kind, &metadata, &error),
    }
}
