//! The objects of the cluster, as they come: watched, put into the index, and what follows from them told.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::{NamespaceResourceScope, api::core::v1::Node};
use kube::{Api, Client, Resource, core::DeserializeGuard};
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
    watch::{Change, Found, watch as follow},
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

/// Watches everything that the index needs. `namespaces`: whose models; `None` is the whole cluster.
pub fn watch_all(
    client: &Client,
    namespaces: &[Option<String>],
    nodes: bool,
    tasks: &mut JoinSet<()>,
) -> mpsc::Receiver<Told> {
    let (told, received) = mpsc::channel(WAITING);
    for namespace in namespaces {
        let api = namespaced(client, namespace.as_deref());
        tasks.spawn(follow(api, namespace.clone(), None, told.clone(), Told::Model));
    }
    tasks.spawn(follow(Api::all(client.clone()), None, None, told.clone(), Told::Pool));
    if nodes {
        let api = Api::all(client.clone());
        tasks.spawn(follow(api, None, None, told.clone(), Told::AcceleratorNode));
        tasks.spawn(follow(Api::all(client.clone()), None, None, told, Told::Node));
    }
    received
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
            if self.tell(&settled) {
                self.registry.all(&settled);
            }
            let leads = self.claim.borrow_and_update().filter(Claim::holds).map(|claim| claim.epoch);
            // Before it knows what runs, a new leader would write that nothing does.
            let decides = leads.filter(|_| self.facts.decides());
            if decides != epoch {
                epoch = decides;
                self.registry.all(&settled);
            }
            self.registry.told(self.facts.take(), &settled);
            if decides.is_some() {
                self.registry.write(&self.index, &settled);
            }
        }
    }

    /// Whether that is news.
    fn tell(&self, now: &Arc<Settled>) -> bool {
        self.settled.send_if_modified(|before| {
            let same = before.as_ref().is_some_and(|before| Arc::ptr_eq(before, now) || before == now);
            *before = Some(Arc::clone(now));
            !same
        })
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
            Told::Pool(change) => enter(&mut self.index, Kind::Pool, change),
            Told::AcceleratorNode(change) => enter(&mut self.index, Kind::AcceleratorNode, change),
            Told::Node(change) => enter(&mut self.index, Kind::Node, change),
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
        if let Some(known) = self.known.remove(name) {
            self.published.send(known.gone()).unwrap_or_default();
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
