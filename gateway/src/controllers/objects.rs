//! The objects of the cluster, as they come: watched, put into the index, and what follows from them told.

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
    election::Claim,
    index::{Index, Key, Kind, Object, Settled},
    published::Published,
    registry::Registry,
    told::Told as Facts,
    watch::{Awaited, Change, Found, Watched, watch as follow},
};

/// Changes that may wait for the index; more of them wait at the API server.
const WAITING: usize = 1024;
/// So many changes are taken in before it is asked what follows.
const TOGETHER: usize = 512;

/// What was seen.
#[derive(Debug)]
pub enum Told {
    Model(Change<InferenceModel>),
    Pool(Change<AcceleratorPool>),
    AcceleratorNode(Change<AcceleratorNode>),
    Node(Change<Node>),
}

/// Watches everything that the index needs. `namespaces`: whose models; `None` is the whole cluster. `awaited`: what of it has
/// not come yet.
pub fn watch_all(
    client: &Client,
    namespaces: &[Option<String>],
    nodes: bool,
    awaited: &Awaited,
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<Told> {
    let (told, received) = mpsc::channel(WAITING);
    for namespace in namespaces {
        let api = namespaced(client, namespace.as_deref());
        let models = Watched { api, namespace: namespace.clone(), labels: None, fields: None, slim };
        tasks.spawn(follow(models, told.clone(), awaited.clone(), Told::Model));
    }
    tasks.spawn(follow(everywhere(client, slim), told.clone(), awaited.clone(), Told::Pool));
    if nodes {
        tasks.spawn(follow(everywhere(client, slim), told.clone(), awaited.clone(), Told::AcceleratorNode));
        tasks.spawn(follow(everywhere(client, slim_node), told, awaited.clone(), Told::Node));
    }
    received
}

fn everywhere<K>(client: &Client, slim: fn(&mut K)) -> Watched<K>
where
    K: Resource<Scope = ClusterResourceScope, DynamicType = ()> + Clone + DeserializeOwned,
{
    Watched { api: Api::all(client.clone()), namespace: None, labels: None, fields: None, slim }
}

/// Who wrote which field takes as much room as the fields.
fn slim<K: Resource>(object: &mut K) {
    let metadata = object.meta_mut();
    (metadata.managed_fields, metadata.annotations) = (None, None);
}

/// Most of a Node says what is on its disk.
fn slim_node(node: &mut Node) {
    slim(node);
    node.spec = None;
    if let Some(status) = node.status.take() {
        node.status = Some(NodeStatus { allocatable: status.allocatable, ..NodeStatus::default() });
    }
}

/// Objects of one namespace, or of all.
pub fn namespaced<K>(client: &Client, namespace: Option<&str>) -> Api<DeserializeGuard<K>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + DeserializeOwned,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// What the one task that keeps the index works with.
pub struct Keeper {
    pub index: Index,
    pub told: mpsc::Receiver<Told>,
    /// What the decisions say.
    pub facts: Arc<Facts>,
    pub claim: watch::Receiver<Option<Claim>>,
    pub registry: Registry,
    /// What statuses say is passed on here.
    pub published: mpsc::UnboundedSender<Published>,
    /// The last of it.
    pub known: BTreeMap<ObjectName, Published>,
    /// What follows from the objects, as soon as everything was seen once.
    pub settled: watch::Sender<Option<Arc<Settled>>>,
}

impl Keeper {
    /// Until nobody watches any more.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        let mut epoch = None;
        loop {
            tokio::select! {
                taken = self.told.recv_many(&mut batch, TOGETHER) => {
                    if taken == 0 {
                        return;
                    }
                    batch.drain(..).for_each(|told| self.take(told));
                }
                () = self.facts.changed() => {}
                () = self.registry.written() => {}
                changed = self.claim.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
            }
            if !self.index.complete() {
                continue;
            }
            let settled = self.index.settled();
            self.tell(&settled);
            let leads = self.claim.borrow_and_update().filter(Claim::holds).map(|claim| claim.epoch);
            // Before it knows what runs, a new leader would write that nothing does.
            let decides = leads.filter(|_| self.facts.decides());
            if decides != epoch {
                epoch = decides;
                self.registry.all(&settled);
            }
            self.registry.told(self.facts.take(), &settled);
            self.registry.happened(self.facts.happened(), &settled);
            if decides.is_some() {
                self.registry.write(&self.index, &settled);
            }
        }
    }

    /// Tells it on where it is news.
    fn tell(&mut self, now: &Arc<Settled>) {
        let before = self.settled.borrow().clone();
        if before.as_ref().is_some_and(|before| Arc::ptr_eq(before, now)) {
            return;
        }
        if before.as_ref() == Some(now) {
            // No news, and not to be compared again.
            self.settled.send_if_modified(|held| {
                *held = Some(Arc::clone(now));
                false
            });
            return;
        }
        let before = before.unwrap_or_default();
        self.registry.changed(&before, now);
        self.facts.again(now.objects.keys().filter(|model| !before.objects.contains_key(*model)));
        self.settled.send_replace(Some(Arc::clone(now)));
    }

    fn take(&mut self, told: Told) {
        match told {
            Told::Model(change) => {
                match &change {
                    Change::All { namespace, objects } => {
                        let there: BTreeSet<ObjectName> = objects.iter().map(Found::name).collect();
                        let within =
                            |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                        let gone = self.known.keys().filter(|name| within(name) && !there.contains(name));
                        let gone: Vec<ObjectName> = gone.cloned().collect();
                        gone.iter().for_each(|name| self.lost(name));
                        objects.iter().for_each(|found| self.saw(found));
                    }
                    Change::Applied(found) => self.saw(found),
                    Change::Deleted(name) => self.lost(name),
                }
                enter(&mut self.index, Kind::Model, change);
            }
            Told::Pool(change) => {
                if let Change::Applied(found) = &change
                    && let Found::Good(pool) = &**found
                {
                    let name = pool.name_any();
                    let before = self.index.pool_status(&name).map(|status| &status.ledger);
                    self.registry.saw_pool(&name, before, pool.status.as_ref().map(|status| &status.ledger));
                }
                enter(&mut self.index, Kind::Pool, change);
            }
            Told::AcceleratorNode(change) => {
                self.take_node(&change);
                enter(&mut self.index, Kind::AcceleratorNode, change);
            }
            Told::Node(change) => enter(&mut self.index, Kind::Node, change),
        }
    }

    fn take_node(&mut self, change: &Change<AcceleratorNode>) {
        match change {
            Change::All { objects, .. } => {
                let there: BTreeSet<String> = objects.iter().map(|found| found.name().name).collect();
                let gone = self.registry.known_nodes().filter(|name| !there.contains(*name));
                let gone: Vec<String> = gone.cloned().collect();
                gone.iter().for_each(|name| self.registry.lost_node(name));
                objects.iter().for_each(|found| self.saw_node(found));
            }
            Change::Applied(found) => self.saw_node(found),
            Change::Deleted(name) => self.registry.lost_node(&name.name),
        }
    }

    fn saw_node(&mut self, found: &Found<AcceleratorNode>) {
        if let Found::Good(node) = found {
            self.registry.saw_node(node);
        }
    }

    fn saw(&mut self, found: &Found<InferenceModel>) {
        let Found::Good(model) = found else { return };
        self.registry.saw(model);
        let published = Published::of(model);
        if self.known.get(&published.object) != Some(&published) {
            self.known.insert(published.object.clone(), published.clone());
            // Whoever listens ends with this gateway.
            self.published.send(published).unwrap_or_default();
        }
    }

    fn lost(&mut self, name: &ObjectName) {
        self.registry.lost(name);
        if let Some(known) = self.known.remove(name) {
            self.published.send(known.gone()).unwrap_or_default();
            if self.facts.decides()
                && let Some(settled) = &*self.settled.borrow()
            {
                self.registry.deleted(name, settled);
            }
        }
    }
}

fn enter<K: Resource + Into<Object>>(index: &mut Index, kind: Kind, change: Change<K>) {
    match change {
        Change::All { namespace, objects } => {
            let there: BTreeSet<Key> = objects.iter().map(|found| Key::of(kind, found.metadata())).collect();
            objects.into_iter().for_each(|found| put(index, kind, found));
            index.listed(kind, namespace.as_deref(), &there);
        }
        Change::Applied(found) => put(index, kind, *found),
        Change::Deleted(name) => {
            let metadata = kube::api::ObjectMeta {
                namespace: Some(name.namespace),
                name: Some(name.name),
                ..kube::api::ObjectMeta::default()
            };
            index.delete(&Key::of(kind, &metadata));
        }
    }
}

fn put<K: Resource + Into<Object>>(index: &mut Index, kind: Kind, found: Found<K>) {
    match found {
        Found::Good(object) => index.apply(object),
        Found::Bad { metadata, error } => index.unreadable(kind, &metadata, &error),
    }
}
