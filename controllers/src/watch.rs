//! Watches the API server's objects and sends their changes to a channel.
//!
//! A list is one message, so that the reader never sees half of it; after that, each change is one message. An
//! unreadable object is reported by name and does not block others. While the API server is unreachable the last view
//! stands: a broken watch restarts with pauses, and only the log reports that.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Debug},
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{Stream, StreamExt as _, pin_mut};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Resource,
    api::ListParams,
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt as _,
        utils::Backoff,
        watcher::{self, DefaultBackoff, Event},
    },
};
use serde::de::DeserializeOwned;
use tokio::{sync::mpsc, time::sleep};

use super::crd::ledger::ObjectName;

/// A change of the objects of one kind.
#[derive(Clone, Debug)]
pub enum Delta<K> {
    /// All objects in this namespace, or in the cluster without a namespace.
    All {
        namespace: Option<String>,
        objects: Vec<WatchedObject<K>>,
    },
    Applied(Box<WatchedObject<K>>),
    Deleted(ObjectName),
}

/// An object, or why it is unreadable.
#[derive(Clone, Debug)]
pub enum WatchedObject<K> {
    Readable(K),
    Unreadable { metadata: Box<ObjectMeta>, error: String },
}

impl<K: Resource> WatchedObject<K> {
    #[must_use]
    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Self::Readable(object) => object.meta(),
            Self::Unreadable { metadata, .. } => metadata,
        }
    }

    /// Returns the object's namespace, if it has one, and its name.
    #[must_use]
    pub fn name(&self) -> ObjectName {
        name(self.metadata())
    }

    #[must_use]
    pub fn readable(self) -> Option<K> {
        match self {
            Self::Readable(object) => Some(object),
            Self::Unreadable { .. } => None,
        }
    }
}

/// Returns the object's resource version, which grows with each change; 0 if it is missing or no number.
#[must_use]
pub fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
}

fn name(metadata: &ObjectMeta) -> ObjectName {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    ObjectName::new(text(&metadata.namespace), text(&metadata.name))
}

/// The lists that have not arrived yet, with the last error of each.
///
/// A list of one namespace that the API server refuses is *skipped* once the same list of another namespace has
/// arrived: a right that is missing in one namespace must not block the models of others. The watch goes on, and the
/// list counts as soon as it arrives. If no list of a kind arrives, a right may be missing only briefly, or all rights
/// may be missing, so the gateway waits.
#[derive(Clone, Debug, Default)]
pub struct InitialLists(Arc<Mutex<InitialListStates>>);

#[derive(Debug, Default)]
struct InitialListStates {
    /// Lists that are awaited, by their name, each with its last error.
    pending: BTreeMap<String, Option<String>>,
    /// Skipped lists, by their name, each with its namespace and last error.
    skipped: BTreeMap<String, (String, String)>,
    /// Kinds of which at least one list has arrived.
    listed_kinds: BTreeSet<String>,
}

impl InitialLists {
    /// Describes the skipped lists and why they are skipped.
    #[must_use]
    pub fn skipped_message(&self) -> Option<String> {
        let lists = self.lock();
        let each = lists.skipped.iter().map(|(what, (_, error))| format!("{what} ({error})"));
        let each: Vec<String> = each.collect();
        (!each.is_empty()).then(|| each.join(", "))
    }

    /// Whether a list of this namespace is skipped.
    #[must_use]
    pub fn is_skipped(&self, namespace: &str) -> bool {
        self.lock().skipped.values().any(|(left_out, _)| left_out == namespace)
    }

    fn lock(&self) -> MutexGuard<'_, InitialListStates> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_pending(&self, what: &str, error: Option<String>) {
        let mut lists = self.lock();
        match lists.skipped.get_mut(what) {
            Some((_, last)) => *last = error.unwrap_or_else(|| std::mem::take(last)),
            None => drop(lists.pending.insert(what.to_owned(), error)),
        }
    }

    fn record_listed(&self, what: &str, kind: &str) {
        let mut lists = self.lock();
        lists.pending.remove(what);
        lists.listed_kinds.insert(kind.to_owned());
        if lists.skipped.remove(what).is_some() {
            tracing::info!(what, "list became readable, no longer skipped");
        }
    }

    /// Skips the list if possible, and returns whether it is skipped now.
    fn skip(&self, what: &str, kind: &str, namespace: &str, error: &str) -> bool {
        let mut lists = self.lock();
        if !lists.listed_kinds.contains(kind) || lists.skipped.contains_key(what) {
            return lists.skipped.contains_key(what);
        }
        tracing::warn!(
            what,
            error,
            "list skipped: this gateway may not read it, and serves the other namespaces"
        );
        lists.pending.remove(what);
        lists.skipped.insert(what.to_owned(), (namespace.to_owned(), error.to_owned()));
        true
    }
}

impl fmt::Display for InitialLists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lists = self.lock();
        let each = lists.pending.iter().map(|(what, error)| match error {
            Some(error) => format!("{what} ({error})"),
            None => what.clone(),
        });
        f.write_str(&each.collect::<Vec<_>>().join(", "))
    }
}

/// Number of objects per list request. An object may be many times the size of what is kept of it.
const LIST_PAGE_SIZE: u32 = 250;

/// The objects to watch.
pub struct WatchTarget<K: Clone> {
    pub api: Api<DeserializeGuard<K>>,
    /// The namespace that `api` covers.
    pub namespace: Option<String>,
    pub labels: Option<String>,
    pub fields: Option<String>,
    /// Removes unused fields from an object, before the next objects of its list arrive.
    pub slim: fn(&mut K),
}

/// Watches all objects of a kind and sends their changes until the receiver is dropped.
///
/// `wrap` builds a channel message. The first list is among `awaited` until it arrives; a skipped list is sent as an
/// empty one.
pub async fn watch<K, M>(
    watched: WatchTarget<K>,
    tx: mpsc::Sender<M>,
    awaited: InitialLists,
    wrap: impl Fn(Delta<K>) -> M,
) where
    K: Resource<DynamicType: Default + Eq + Hash + Clone> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let WatchTarget { api, namespace, labels, fields, slim } = watched;
    let config = watcher::Config {
        label_selector: labels,
        field_selector: fields,
        ..watcher::Config::default().page_size(LIST_PAGE_SIZE)
    };
    let events = watcher::watcher(api, config).backoff(WatchBackoff::default());
    forward_events(events, namespace, slim, tx, awaited, wrap).await;
}

/// Lists all objects as they are now, regardless of any watch.
///
/// # Errors
/// Returns the API server's error.
pub async fn list<K>(watched: &WatchTarget<K>) -> kube::Result<Delta<K>>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let mut pages = ListParams::default().limit(LIST_PAGE_SIZE);
    pages.label_selector.clone_from(&watched.labels);
    pages.field_selector.clone_from(&watched.fields);
    let mut objects = Vec::new();
    loop {
        let page = watched.api.list(&pages).await?;
        objects.extend(page.items.into_iter().map(|object| watched_object(object, watched.slim)));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => pages = pages.continue_token(&token),
            None => return Ok(Delta::All { namespace: watched.namespace.clone(), objects }),
        }
    }
}

/// Backoff of a broken watch, with a low cap.
///
/// After an outage the watches must recover soon: the gateway that then gets the lease decides by what its watches saw.
#[derive(Default)]
struct WatchBackoff(DefaultBackoff);

const MAX_BACKOFF: Duration = Duration::from_secs(2);

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(MAX_BACKOFF))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.0.reset();
    }
}

/// Number of consecutive refusals after which a missing right counts as lasting.
const REFUSALS_BEFORE_SKIP: u32 = 3;
/// Maximum extra pause of a refused watch: bounds the delay before a new right takes effect.
const MAX_REFUSED_BACKOFF: Duration = Duration::from_secs(15);

/// The failures of one watch since it last worked.
///
/// The log has the first failure, each new cause and the recovery, rather than every try.
struct WatchOutage<'a> {
    what: &'a str,
    failures: u32,
    cause: String,
}

impl<'a> WatchOutage<'a> {
    fn new(what: &'a str) -> Self {
        Self { what, failures: 0, cause: String::new() }
    }

    /// Counts a failed try and returns the extra pause after a refusal.
    ///
    /// An immediate retry would meet the same refusal.
    fn failed(&mut self, error: &watcher::Error) -> Option<Duration> {
        let cause = error.to_string();
        if cause == self.cause {
            tracing::debug!(what = self.what, cause, failures = self.failures, "watch failed again");
        } else {
            tracing::warn!(what = self.what, cause, "watch failed, retrying");
            self.cause = cause;
        }
        self.failures += 1;
        let doubled = 1_u64.checked_shl(self.failures.saturating_sub(2)).unwrap_or(u64::MAX);
        is_refusal(error).then(|| Duration::from_secs(doubled).min(MAX_REFUSED_BACKOFF))
    }

    fn recovered(&mut self) {
        if self.failures > 0 {
            tracing::info!(what = self.what, failures = self.failures, "watch recovered");
            (self.failures, self.cause) = (0, String::new());
        }
    }
}

/// Whether the API server refused the request for lack of rights.
fn is_refusal(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        watcher::Error::WatchError(status) => status,
        _ => return false,
    };
    matches!(status.code, 401 | 403)
}

async fn forward_events<K, M>(
    events: impl Stream<Item = watcher::Result<Event<DeserializeGuard<K>>>>,
    namespace: Option<String>,
    slim: fn(&mut K),
    tx: mpsc::Sender<M>,
    awaited: InitialLists,
    wrap: impl Fn(Delta<K>) -> M,
) where
    K: Resource<DynamicType: Default>,
{
    let found = |object| watched_object(object, slim);
    pin_mut!(events);
    let kind = K::plural(&K::DynamicType::default()).into_owned();
    let what = namespace.as_ref().map_or_else(|| kind.clone(), |namespace| format!("{kind} in {namespace}"));
    let (mut came, mut left_out) = (false, false);
    awaited.record_pending(&what, None);
    let mut outage = WatchOutage::new(&what);
    let mut listed = Vec::new();
    while let Some(event) = events.next().await {
        let change = match event {
            Ok(Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(Event::InitApply(object)) => {
                listed.push(found(object));
                outage.recovered();
                continue;
            }
            Ok(Event::InitDone) => {
                came = true;
                awaited.record_listed(&what, &kind);
                Delta::All { namespace: namespace.clone(), objects: std::mem::take(&mut listed) }
            }
            Ok(Event::Apply(object)) => Delta::Applied(Box::new(found(object))),
            Ok(Event::Delete(object)) => Delta::Deleted(name(object.meta())),
            Err(error) => {
                if !came {
                    awaited.record_pending(&what, Some(error.to_string()));
                }
                let refused = outage.failed(&error);
                let lasts = refused.is_some() && outage.failures >= REFUSALS_BEFORE_SKIP;
                if let Some(refused_namespace) = namespace.as_ref().filter(|_| lasts && !came && !left_out)
                    && awaited.skip(&what, &kind, refused_namespace, &error.to_string())
                {
                    left_out = true;
                    let nothing = Delta::All { namespace: namespace.clone(), objects: Vec::new() };
                    if tx.send(wrap(nothing)).await.is_err() {
                        return;
                    }
                }
                if let Some(pause) = refused {
                    sleep(pause).await;
                }
                continue;
            }
        };
        outage.recovered();
        if tx.send(wrap(change)).await.is_err() {
            return;
        }
    }
}

fn watched_object<K>(DeserializeGuard(object): DeserializeGuard<K>, slim: fn(&mut K)) -> WatchedObject<K> {
    match object {
        Ok(mut object) => {
            slim(&mut object);
            WatchedObject::Readable(object)
        }
        Err(bad) => WatchedObject::Unreadable { metadata: Box::new(bad.metadata), error: bad.error },
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn refused(message: &str) -> watcher::Error {
        let status = Status { code: 403, message: message.to_owned(), ..Status::default() };
        watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_refused_watch_waits_longer_each_time_up_to_a_limit_and_begins_anew_once_it_worked() {
        let mut outage = WatchOutage::new("pods in here");
        let mut pauses = || outage.failed(&refused("forbidden")).unwrap().as_secs();
        assert_eq!([(); 7].map(|()| pauses()), [1, 1, 2, 4, 8, 15, 15]);
        for _ in 0..100 {
            assert_eq!(outage.failed(&refused("forbidden")), Some(MAX_REFUSED_BACKOFF));
        }
        outage.recovered();
        assert_eq!(outage.failed(&refused("forbidden")), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_watch_whose_connection_fails_is_retried_at_its_usual_pauses() {
        let mut outage = WatchOutage::new("pods");
        assert_eq!(outage.failed(&watcher::Error::NoResourceVersion), None);
        assert_eq!(outage.failures, 1);
    }

    #[test]
    fn a_list_that_is_refused_is_left_out_once_the_same_of_another_namespace_has_come() {
        const TWO: &str = "pods in two";
        let awaited = InitialLists::default();
        let refused = || awaited.skip(TWO, "pods", "two", "forbidden");
        awaited.record_pending(TWO, None);
        awaited.record_listed("nodes", "nodes");
        assert!(!refused(), "it may be a moment's, or all are refused");
        awaited.record_pending(TWO, Some("forbidden".to_owned()));
        assert_eq!(
            (awaited.to_string().as_str(), awaited.skipped_message()),
            ("pods in two (forbidden)", None)
        );

        awaited.record_listed("pods in one", "pods");
        // Two watches may await the same list.
        assert!(refused() && refused());
        awaited.record_pending(TWO, None);
        assert_eq!(awaited.to_string(), "");
        assert_eq!(awaited.skipped_message().as_deref(), Some("pods in two (forbidden)"));
        assert!(awaited.is_skipped("two") && !awaited.is_skipped("one"));
        awaited.record_pending(TWO, Some("still forbidden".to_owned()));
        assert_eq!(awaited.skipped_message().as_deref(), Some("pods in two (still forbidden)"));

        awaited.record_listed(TWO, "pods");
        assert!(awaited.skipped_message().is_none() && !awaited.is_skipped("two"));
    }
}
