//! Watches the API server's objects and emits their changes.
//!
//! A list is one change, so that its reader never sees half of it; after that, each change is one of an object. An
//! unreadable object is reported by name and does not block others. While the API server is unreachable the last view
//! stands: a broken watch restarts with pauses, and only the log reports that.

mod guarded;
mod initial_lists;
mod list_reader;
mod outage;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    slice,
    sync::Arc,
};

use futures_util::{Stream, StreamExt as _, pin_mut};
use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::sleep;

pub(crate) use self::initial_lists::InitialLists;
use self::{
    guarded::{Guarded, InvalidObject},
    list_reader::ListReader,
    outage::{WatchBackoff, WatchOutage},
};
use super::crd::ledger::ObjectName;

/// A change of the objects of one kind.
#[derive(Debug)]
pub(crate) enum Delta<K> {
    /// All objects in this namespace, or in the cluster without a namespace.
    All {
        namespace: Option<String>,
        objects: Vec<WatchedObject<K>>,
    },
    Applied(WatchedObject<K>),
    Deleted(ObjectName),
}

/// An object, or why it is unreadable. Several readers of a watch share the object.
#[derive(Debug)]
pub(crate) enum WatchedObject<K> {
    Readable(Arc<K>),
    Unreadable { metadata: Box<ObjectMeta>, error: String },
}

impl<K> Clone for Delta<K> {
    fn clone(&self) -> Self {
        match self {
            Self::All { namespace, objects } => {
                Self::All { namespace: namespace.clone(), objects: objects.clone() }
            }
            Self::Applied(found) => Self::Applied(found.clone()),
            Self::Deleted(name) => Self::Deleted(name.clone()),
        }
    }
}

impl<K> Clone for WatchedObject<K> {
    fn clone(&self) -> Self {
        match self {
            Self::Readable(object) => Self::Readable(Arc::clone(object)),
            Self::Unreadable { metadata, error } => {
                Self::Unreadable { metadata: metadata.clone(), error: error.clone() }
            }
        }
    }
}

impl<K: Resource> Delta<K> {
    /// Returns which known objects of a kind without namespaces are gone, and the objects that were observed.
    pub(crate) fn diff<'a, N>(&self, known: impl Iterator<Item = &'a N>) -> (Vec<N>, &[WatchedObject<K>])
    where
        N: Ord + Clone + From<String> + 'a,
    {
        match self {
            Self::All { objects, .. } => {
                let listed: BTreeSet<N> = objects.iter().map(|found| N::from(found.name().name)).collect();
                (known.filter(|name| !listed.contains(*name)).cloned().collect(), objects.as_slice())
            }
            Self::Applied(found) => (Vec::new(), slice::from_ref(found)),
            Self::Deleted(name) => (vec![N::from(name.name.clone())], &[]),
        }
    }

    /// Whether this is the list of all objects.
    pub(crate) const fn is_list(&self) -> bool {
        matches!(self, Self::All { .. })
    }
}

impl<K: Resource> WatchedObject<K> {
    #[must_use]
    pub(crate) fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Readable(object) => object.meta(),
            Self::Unreadable { metadata, .. } => metadata,
        }
    }

    /// Returns the object's namespace, if it has one, and its name.
    #[must_use]
    pub(crate) fn name(&self) -> ObjectName {
        name(self.metadata())
    }
}

impl<K> WatchedObject<K> {
    #[must_use]
    pub(crate) fn readable(self) -> Option<Arc<K>> {
        match self {
            Self::Readable(object) => Some(object),
            Self::Unreadable { .. } => None,
        }
    }
}

impl<K> From<K> for WatchedObject<K> {
    fn from(object: K) -> Self {
        Self::Readable(Arc::new(object))
    }
}

/// Returns known objects of this namespace that a list of it does not have.
pub(crate) fn missing<K: Resource, V>(
    known: &BTreeMap<ObjectName, V>,
    namespace: Option<&str>,
    objects: &[WatchedObject<K>],
) -> Vec<ObjectName> {
    let listed: BTreeSet<ObjectName> = objects.iter().map(WatchedObject::name).collect();
    let is_gone = |name: &&ObjectName| {
        namespace.is_none_or(|namespace| name.namespace == namespace) && !listed.contains(*name)
    };
    known.keys().filter(is_gone).cloned().collect()
}

fn name(metadata: &ObjectMeta) -> ObjectName {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    ObjectName::new(text(&metadata.namespace), text(&metadata.name))
}

/// Number of objects per list request. An object may be many times the size of what is kept of it.
///
/// On a busy machine each page adds a fixed time, in which both programs wait for a core. Pages are large because a new
/// leader lists 5,000 Pods before it decides.
///
/// A watch that begins with all objects (`sendInitialEvents`) would need no pages, but takes the API server longer. The
/// client library also starts it at version 0, which allows objects of any age, where a new leader must see the last
/// writes of the former one.
const LIST_PAGE_SIZE: u16 = 500;

/// The objects to watch.
#[derive(Clone)]
pub(crate) struct WatchTarget<K: Clone> {
    api: Api<Guarded<K>>,
    /// The namespace that `api` covers.
    pub namespace: Option<String>,
    labels: Option<String>,
    fields: Option<String>,
    /// Removes unused fields from an object as soon as it is read.
    slim: fn(&mut K),
}

impl<K> WatchTarget<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned,
{
    /// The objects of one namespace, or of all.
    pub(crate) fn namespaced(client: &Client, namespace: Option<&str>, slim: fn(&mut K)) -> Self
    where
        K: Resource<Scope = NamespaceResourceScope>,
    {
        let api = match namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        };
        Self { api, namespace: namespace.map(str::to_owned), labels: None, fields: None, slim }
    }

    /// The objects of a kind that has no namespaces.
    pub(crate) fn cluster_wide(client: &Client, slim: fn(&mut K)) -> Self
    where
        K: Resource<Scope = ClusterResourceScope>,
    {
        Self { api: Api::all(client.clone()), namespace: None, labels: None, fields: None, slim }
    }

    /// Only the objects that this label selector matches.
    #[must_use]
    pub(crate) fn labels(self, selector: Option<String>) -> Self {
        Self { labels: selector, ..self }
    }

    /// Only the objects that this field selector matches.
    #[must_use]
    pub(crate) fn fields(self, selector: String) -> Self {
        Self { fields: Some(selector), ..self }
    }

    /// Returns the kind's plural name, with the namespace if the target has one.
    fn description(&self) -> String {
        let kind = K::plural(&());
        self.namespace.as_ref().map_or_else(|| kind.to_string(), |namespace| format!("{kind} in {namespace}"))
    }
}

/// Drops managed fields, which are as large as the fields they describe.
pub(crate) fn drop_managed_fields<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// Watches all objects of a kind and emits their changes until it is dropped.
///
/// The first list is among `awaited` until it arrives; a skipped list is emitted as an empty one.
pub(crate) async fn watch<K>(target: WatchTarget<K>, awaited: InitialLists, emit: impl FnMut(Delta<K>))
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let what = target.description();
    let WatchTarget { api, namespace, labels, fields, slim } = target;
    let config = watcher::Config {
        label_selector: labels,
        field_selector: fields,
        ..watcher::Config::default().page_size(LIST_PAGE_SIZE.into())
    };
    let events = watcher::watcher(api, config).backoff(WatchBackoff::default());
    WatchEvents { what, namespace, slim, awaited, emit }.forward(events).await;
}

/// Waits until the API server lists these objects, or until the list is skipped.
///
/// Checks the right to a list that is needed only later.
pub(crate) async fn wait_until_listable<K>(target: WatchTarget<K>, awaited: InitialLists)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let (what, kind) = (target.description(), K::plural(&()));
    awaited.record_pending(&what, None);
    let mut outage = WatchOutage::new(&what);
    let mut pauses = WatchBackoff::default();
    loop {
        let mut one = ListParams::default().limit(1);
        one.label_selector.clone_from(&target.labels);
        let error = match target.api.list(&one).await {
            Ok(_) => {
                outage.recovered();
                return awaited.record_listed(&what, &kind);
            }
            Err(error) => watcher::Error::InitialListFailed(error),
        };
        awaited.record_pending(&what, Some(error.to_string()));
        let refused = outage.failed(&error);
        if let Some(namespace) = target.namespace.as_ref().filter(|_| outage.lasts(refused)) {
            awaited.skip(&what, &kind, namespace, &error.to_string());
        }
        sleep(refused.or_else(|| pauses.next()).unwrap_or_default()).await;
    }
}

/// Turns the events of one watch into changes.
struct WatchEvents<K, E> {
    what: String,
    namespace: Option<String>,
    slim: fn(&mut K),
    awaited: InitialLists,
    emit: E,
}

impl<K, E> WatchEvents<K, E>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
    E: FnMut(Delta<K>),
{
    async fn forward(self, events: impl Stream<Item = watcher::Result<Event<Guarded<K>>>>) {
        let Self { what, namespace, slim, awaited, mut emit } = self;
        let found = |object| watched_object(object, slim);
        let kind = K::plural(&());
        let (mut came, mut left_out) = (false, false);
        awaited.record_pending(&what, None);
        let mut outage = WatchOutage::new(&what);
        let mut list = ListReader::new(slim);
        pin_mut!(events);
        while let Some(event) = events.next().await {
            let change = match event {
                Ok(Event::Init) => {
                    list.clear();
                    continue;
                }
                Ok(Event::InitApply(object)) => {
                    list.push(object).await;
                    outage.recovered();
                    continue;
                }
                Ok(Event::InitDone) => {
                    let objects = list.finish().await;
                    came = true;
                    awaited.record_listed(&what, &kind);
                    Delta::All { namespace: namespace.clone(), objects }
                }
                Ok(Event::Apply(object)) => Delta::Applied(found(object)),
                Ok(Event::Delete(object)) => Delta::Deleted(name(object.meta())),
                Err(error) => {
                    if !came {
                        awaited.record_pending(&what, Some(error.to_string()));
                    }
                    let refused = outage.failed(&error);
                    let lasts = outage.lasts(refused) || refused.is_some() && awaited.has_skipped(&what);
                    if let Some(refused_namespace) =
                        namespace.as_ref().filter(|_| lasts && !came && !left_out)
                        && awaited.skip(&what, &kind, refused_namespace, &error.to_string())
                    {
                        left_out = true;
                        emit(Delta::All { namespace: namespace.clone(), objects: Vec::new() });
                    }
                    if let Some(pause) = refused {
                        sleep(pause).await;
                    }
                    continue;
                }
            };
            outage.recovered();
            emit(change);
        }
    }
}

fn watched_object<K: Resource + DeserializeOwned>(object: Guarded<K>, slim: fn(&mut K)) -> WatchedObject<K> {
    match object.read() {
        Ok(mut object) => {
            slim(&mut object);
            WatchedObject::Readable(Arc::new(object))
        }
        Err(InvalidObject { metadata, error }) => WatchedObject::Unreadable { metadata, error },
    }
}
