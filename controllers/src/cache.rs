//! One watch of each kind for all its readers in this process.
//!
//! A [`Cache`] gives each change to every [`Subscription`]. A subscription never makes the watch wait: it keeps, for
//! each object, only what its reader still has to see ([`queue`]). So its size is bounded by the number of objects, and
//! a reader that is busy for seconds delays no other reader. The client library's shared reflector instead blocks the
//! watch for all its readers while one of them is behind.
//!
//! Nothing here keeps the objects themselves. Each reader keeps an index of the few fields that it uses.

mod queue;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use futures_util::{Stream, StreamExt as _, future::join_all};
use kube::Resource;
use serde::de::DeserializeOwned;

use self::queue::ChangeQueue;
use crate::{
    crd::ledger::ObjectName,
    kit::Terms,
    watch::{Delta, InitialLists, WatchTarget, WatchedObject, watch},
};

/// A change, with the term of leadership in which it was seen; term 0 is that of watches that run at any time.
#[derive(Debug)]
pub(crate) struct TermDelta<K> {
    pub epoch: u64,
    pub delta: Delta<K>,
}

/// Passes the changes of one kind to its subscriptions.
#[derive(Debug)]
pub(crate) struct Cache<K> {
    subscribers: Vec<Subscriber<K>>,
}

#[derive(Debug)]
struct Subscriber<K> {
    queue: Arc<SharedQueue<K>>,
    /// Whether the reader wants this object; `None` if it wants all.
    filter: Option<fn(&K) -> bool>,
}

/// One reader's changes of a kind, in order. Never ends.
#[derive(Debug)]
pub(crate) struct Subscription<K>(Arc<SharedQueue<K>>);

#[derive(Debug)]
struct SharedQueue<K>(Mutex<QueueState<K>>);

#[derive(Debug)]
struct QueueState<K> {
    epoch: u64,
    changes: ChangeQueue<K>,
    /// Objects that have passed the reader's filter. Empty without a filter.
    passed: BTreeSet<ObjectName>,
    reader: Option<Waker>,
}

impl<K> Default for Cache<K> {
    fn default() -> Self {
        Self { subscribers: Vec::new() }
    }
}

impl<K> SharedQueue<K> {
    fn lock(&self) -> MutexGuard<'_, QueueState<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Resource<DynamicType = ()>> Cache<K> {
    /// Adds a reader of all objects.
    pub(crate) fn subscribe(&mut self) -> Subscription<K> {
        self.add_reader(None)
    }

    /// Adds a reader of the objects that pass the filter. It also sees the deletions of others.
    ///
    /// An object that no longer passes counts as deleted for this reader, as with a label selector of the API server.
    pub(crate) fn subscribe_to(&mut self, filter: fn(&K) -> bool) -> Subscription<K> {
        self.add_reader(Some(filter))
    }

    fn add_reader(&mut self, filter: Option<fn(&K) -> bool>) -> Subscription<K> {
        let (changes, passed) = (ChangeQueue::default(), BTreeSet::new());
        let state = QueueState { epoch: 0, changes, passed, reader: None };
        let queue = Arc::new(SharedQueue(Mutex::new(state)));
        self.subscribers.push(Subscriber { queue: Arc::clone(&queue), filter });
        Subscription(queue)
    }

    /// Watches these objects until it is dropped.
    pub(crate) async fn run(self, targets: Vec<WatchTarget<K>>, awaited: InitialLists)
    where
        K: Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    {
        self.watch_all(&targets, &awaited).await;
    }

    /// Watches these objects while this gateway leads, until the election ends.
    ///
    /// The first lists of a term are requested after the term has begun, so they show the last writes of all former
    /// leaders.
    pub(crate) async fn run_while_leading(
        self,
        targets: Vec<WatchTarget<K>>,
        awaited: InitialLists,
        mut terms: Terms,
    ) where
        K: Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    {
        loop {
            let term = terms.current();
            self.begin_term(term.unwrap_or_default());
            let watches = async {
                match term {
                    Some(_) => self.watch_all(&targets, &awaited).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = terms.changed() => if changed.is_err() { return },
                () = watches => return,
            }
        }
    }

    async fn watch_all(&self, targets: &[WatchTarget<K>], awaited: &InitialLists)
    where
        K: Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    {
        let watches =
            targets.iter().map(|target| watch(target.clone(), awaited.clone(), |delta| self.push(delta)));
        join_all(watches).await;
    }

    /// Drops all changes of an earlier term.
    fn begin_term(&self, epoch: u64) {
        for subscriber in &self.subscribers {
            let mut state = subscriber.queue.lock();
            (state.epoch, state.changes) = (epoch, ChangeQueue::default());
            state.passed.clear();
        }
    }

    fn push(&self, delta: Delta<K>) {
        let Some((last, others)) = self.subscribers.split_last() else { return };
        others.iter().for_each(|subscriber| subscriber.push(delta.clone()));
        // The last reader gets the objects themselves, and a sole reader can take them out without a copy.
        last.push(delta);
    }
}

impl<K: Resource<DynamicType = ()>> Subscriber<K> {
    fn push(&self, delta: Delta<K>) {
        let mut state = self.queue.lock();
        let delta = match self.filter {
            Some(filter) => state.filtered(delta, filter),
            None => Some(delta),
        };
        match delta {
            Some(Delta::All { namespace, objects }) => state.changes.push_list(namespace, objects),
            Some(Delta::Applied(found)) => state.changes.push_applied(found),
            Some(Delta::Deleted(name)) => state.changes.push_deleted(name),
            None => return,
        }
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
    }
}

impl<K: Resource<DynamicType = ()>> QueueState<K> {
    /// Returns what a change is for a reader with this filter.
    fn filtered(&mut self, delta: Delta<K>, filter: fn(&K) -> bool) -> Option<Delta<K>> {
        let passes = |found: &WatchedObject<K>| match found {
            WatchedObject::Readable(object) => filter(object),
            WatchedObject::Unreadable { .. } => true,
        };
        match delta {
            Delta::All { namespace, mut objects } => {
                objects.retain(passes);
                self.passed.retain(|name| namespace.as_ref().is_some_and(|listed| *listed != name.namespace));
                self.passed.extend(objects.iter().map(WatchedObject::name));
                Some(Delta::All { namespace, objects })
            }
            Delta::Applied(found) if passes(&found) => {
                self.passed.insert(found.name());
                Some(Delta::Applied(found))
            }
            Delta::Applied(found) => self.passed.take(&found.name()).map(Delta::Deleted),
            Delta::Deleted(name) => {
                self.passed.remove(&name);
                Some(Delta::Deleted(name))
            }
        }
    }
}

impl<K: Resource<DynamicType = ()>> Stream for Subscription<K> {
    type Item = TermDelta<K>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<TermDelta<K>>> {
        let mut state = self.0.lock();
        let epoch = state.epoch;
        match state.changes.pop() {
            Some(delta) => Poll::Ready(Some(TermDelta { epoch, delta })),
            None => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<K: Resource<DynamicType = ()>> Subscription<K> {
    /// Returns the next change.
    pub(crate) async fn recv(&mut self) -> TermDelta<K> {
        match self.next().await {
            Some(change) => change,
            None => std::future::pending().await,
        }
    }
}
