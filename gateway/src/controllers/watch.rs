//! What is in the cluster, from the API server to one channel.
//!
//! A list is one message, so that whoever reads never sees half of it; then each change is one. An object that cannot be read
//! is told by its name, and holds up no other. When the API server is away the last view stands: a watch that breaks is
//! begun again, with pauses, and nothing is told of that but in the log.

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

/// What was seen of one kind.
#[derive(Clone, Debug)]
pub enum Delta<K> {
    /// These are all that there are in this namespace; in the cluster, where none is said.
    All {
        namespace: Option<String>,
        objects: Vec<WatchedObject<K>>,
    },
    Applied(Box<WatchedObject<K>>),
    Deleted(ObjectName),
}

/// An object, or why it cannot be read.
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

    /// Its namespace, if it has one, and its name.
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

/// Which of two states of one object is the later one: versions are numbers that grow. 0: it does not say.
#[must_use]
pub fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
}

fn name(metadata: &ObjectMeta) -> ObjectName {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    ObjectName::new(text(&metadata.namespace), text(&metadata.name))
}

/// The lists that have not come yet, and what was heard of each instead.
///
/// A list of one namespace that the API server refuses is *left out* once the same list of another has come: a right that is
/// missing in one namespace keeps nobody else's models from being served. It is asked for all the same, and counts as soon as it
/// comes. Where no list of a kind comes, a right may be missing for a moment only, or all are: that is waited for.
#[derive(Clone, Debug, Default)]
pub struct InitialLists(Arc<Mutex<InitialListStates>>);

#[derive(Debug, Default)]
struct InitialListStates {
    /// By what was asked for; what was answered, once it was something else than the list.
    pending: BTreeMap<String, Option<String>>,
    /// The same, with the namespace.
    skipped: BTreeMap<String, (String, String)>,
    /// Kinds of which a list has come.
    listed_kinds: BTreeSet<String>,
}

impl InitialLists {
    /// What is left out, and why.
    #[must_use]
    pub fn skipped_message(&self) -> Option<String> {
        let lists = self.lock();
        let each = lists.skipped.iter().map(|(what, (_, error))| format!("{what} ({error})"));
        let each: Vec<String> = each.collect();
        (!each.is_empty()).then(|| each.join(", "))
    }

    /// Something of this namespace is.
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
            tracing::info!(what, "may be seen now, and is left out no more");
        }
    }

    /// Whether it is left out from here on.
    fn skip(&self, what: &str, kind: &str, namespace: &str, error: &str) -> bool {
        let mut lists = self.lock();
        if !lists.listed_kinds.contains(kind) || lists.skipped.contains_key(what) {
            return lists.skipped.contains_key(what);
        }
        tracing::warn!(what, error, "left out: this gateway may not see it, and serves the other namespaces");
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

/// Objects of a list that are read at once. Each may be many times what is kept of it.
const LIST_PAGE_SIZE: u32 = 250;

/// What is watched.
pub struct WatchTarget<K: Clone> {
    pub api: Api<DeserializeGuard<K>>,
    /// Where that looks.
    pub namespace: Option<String>,
    pub labels: Option<String>,
    pub fields: Option<String>,
    /// Takes out of an object what nobody here reads, before others of its list come.
    pub slim: fn(&mut K),
}

/// Tells of all objects of a kind, from the first list on, until nobody listens. `wrap` makes a message of the channel. Until the
/// first list has come it is among `awaited`; one that is left out is told as if nothing were there.
pub async fn watch<K, M>(
    watched: WatchTarget<K>,
    told: mpsc::Sender<M>,
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
    forward_events(events, namespace, slim, told, awaited, wrap).await;
}

/// All of them as they are at this moment, whatever their watch has seen.
///
/// # Errors
/// The API server's.
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

/// Between a watch that broke and the next one. An API server that is back after a minute is to be heard soon: who gets the
/// lease then decides by what its watches saw.
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

/// A right that is missing so many times in a row is not just about to be granted.
const REFUSALS_BEFORE_SKIP: u32 = 3;
/// What a refused watch waits between tries, on top of its pauses: whoever grants the right waits no longer than this.
const MAX_REFUSED_BACKOFF: Duration = Duration::from_secs(15);

/// The failures of one watch since it last worked. The log has their beginning, each other cause and their end, not every try.
struct WatchOutage<'a> {
    what: &'a str,
    failures: u32,
    cause: String,
}

impl<'a> WatchOutage<'a> {
    fn new(what: &'a str) -> Self {
        Self { what, failures: 0, cause: String::new() }
    }

    /// Counts a failed try. A watch that the API server refuses waits the returned time too: asking at once changes nothing.
    fn failed(&mut self, error: &watcher::Error) -> Option<Duration> {
        let cause = error.to_string();
        if cause == self.cause {
            tracing::debug!(what = self.what, cause, failures = self.failures, "watch failed again");
        } else {
            tracing::warn!(what = self.what, cause, "watch failed; it is retried until it works");
            self.cause = cause;
        }
        self.failures += 1;
        let doubled = 1_u64.checked_shl(self.failures.saturating_sub(2)).unwrap_or(u64::MAX);
        is_refusal(error).then(|| Duration::from_secs(doubled).min(MAX_REFUSED_BACKOFF))
    }

    fn recovered(&mut self) {
        if self.failures > 0 {
            tracing::info!(what = self.what, failures = self.failures, "watch works again");
            (self.failures, self.cause) = (0, String::new());
        }
    }
}

/// Whether the API server answered that this account may not.
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
    told: mpsc::Sender<M>,
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
                if let Some(within) = namespace.as_ref().filter(|_| lasts && !came && !left_out)
                    && awaited.skip(&what, &kind, within, &error.to_string())
                {
                    left_out = true;
                    let nothing = Delta::All { namespace: namespace.clone(), objects: Vec::new() };
                    if told.send(wrap(nothing)).await.is_err() {
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
        if told.send(wrap(change)).await.is_err() {
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
        // Two watches may ask for one list.
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
