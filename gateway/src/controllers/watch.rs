//! What is in the cluster, from the API server to one channel.
//!
//! A list is one message, so that whoever reads never sees half of it; then each change is one. An object that cannot be read
//! is told by its name, and holds up no other. When the API server is away the last view stands: a watch that breaks is
//! begun again, with pauses, and nothing is told of that but in the log.

use std::{fmt::Debug, hash::Hash};

use futures_util::{Stream, StreamExt as _, pin_mut};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Resource,
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::crd::ledger::ObjectName;

/// What was seen of one kind.
#[derive(Clone, Debug)]
pub enum Change<K> {
    /// These are all that there are in this namespace; in the cluster, where none is said.
    All {
        namespace: Option<String>,
        objects: Vec<Found<K>>,
    },
    Applied(Box<Found<K>>),
    Deleted(ObjectName),
}

/// An object, or why it cannot be read.
#[derive(Clone, Debug)]
pub enum Found<K> {
    Good(K),
    Bad { metadata: Box<ObjectMeta>, error: String },
}

impl<K: Resource> Found<K> {
    #[must_use]
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Good(object) => object.meta(),
            Self::Bad { metadata, .. } => metadata,
        }
    }

    /// Its namespace, if it has one, and its name.
    #[must_use]
    pub fn name(&self) -> ObjectName {
        name(self.metadata())
    }

    #[must_use]
    pub fn good(self) -> Option<K> {
        match self {
            Self::Good(object) => Some(object),
            Self::Bad { .. } => None,
        }
    }
}

fn name(metadata: &ObjectMeta) -> ObjectName {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    ObjectName::new(text(&metadata.namespace), text(&metadata.name))
}

/// Tells of all objects of a kind, from the first list on, until nobody listens. `namespace`: where `api` looks; `wrap` makes
/// a message of the channel.
pub async fn watch<K, M>(
    api: Api<DeserializeGuard<K>>,
    namespace: Option<String>,
    labels: Option<String>,
    told: mpsc::Sender<M>,
    wrap: impl Fn(Change<K>) -> M,
) where
    K: Resource<DynamicType: Default + Eq + Hash + Clone> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config =
        labels.map_or_else(watcher::Config::default, |labels| watcher::Config::default().labels(&labels));
    let events = watcher::watcher(api, config).default_backoff();
    follow(events, namespace, told, wrap).await;
}

async fn follow<K, M>(
    events: impl Stream<Item = watcher::Result<Event<DeserializeGuard<K>>>>,
    namespace: Option<String>,
    told: mpsc::Sender<M>,
    wrap: impl Fn(Change<K>) -> M,
) where
    K: Resource<DynamicType: Default>,
{
    pin_mut!(events);
    let mut listed = Vec::new();
    while let Some(event) = events.next().await {
        let change = match event {
            Ok(Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(Event::InitApply(object)) => {
                listed.push(found(object));
                continue;
            }
            Ok(Event::InitDone) => {
                Change::All { namespace: namespace.clone(), objects: std::mem::take(&mut listed) }
            }
            Ok(Event::Apply(object)) => Change::Applied(Box::new(found(object))),
            Ok(Event::Delete(object)) => Change::Deleted(name(object.meta())),
            Err(error) => {
                let kind = K::kind(&K::DynamicType::default()).into_owned();
                tracing::warn!(kind, %error, "a watch broke; it is begun again");
                continue;
            }
        };
        if told.send(wrap(change)).await.is_err() {
            return;
        }
    }
}

fn found<K>(DeserializeGuard(object): DeserializeGuard<K>) -> Found<K> {
    match object {
        Ok(object) => Found::Good(object),
        Err(bad) => Found::Bad { metadata: Box::new(bad.metadata), error: bad.error },
    }
}
