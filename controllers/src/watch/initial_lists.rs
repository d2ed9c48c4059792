//! The first list of each watch: which lists are still missing, and which are skipped.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The lists that have not arrived yet, with the last error of each.
///
/// A list of one namespace that the API server refuses is *skipped* once the same list of another namespace has
/// arrived: a right that is missing in one namespace must not block the models of others. The watch goes on, and the
/// list counts as soon as it arrives. If no list of a kind arrives, a right may be missing only briefly, or all rights
/// may be missing, so the gateway waits.
#[derive(Clone, Debug, Default)]
pub(crate) struct InitialLists(Arc<Mutex<InitialListStates>>);

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
    pub(crate) fn skipped_message(&self) -> Option<String> {
        let lists = self.lock();
        let each = lists.skipped.iter().map(|(what, (_, error))| format!("{what} ({error})"));
        let each: Vec<String> = each.collect();
        (!each.is_empty()).then(|| each.join(", "))
    }

    /// Describes the lists that failed, whether they are skipped or awaited still.
    #[must_use]
    pub(crate) fn failed_message(&self) -> Option<String> {
        let lists = self.lock();
        let skipped = lists.skipped.iter().map(|(what, (_, error))| format!("{what} ({error})"));
        let pending = lists.pending.iter();
        let pending = pending.filter_map(|(what, error)| Some(format!("{what} ({})", error.as_ref()?)));
        let each: Vec<String> = skipped.chain(pending).collect();
        (!each.is_empty()).then(|| each.join(", "))
    }

    /// Records why a kind cannot be listed at all; `None` once it can.
    pub(crate) fn record_kind(&self, kind: &str, problem: Option<&str>) {
        let mut lists = self.lock();
        match problem {
            Some(problem) => drop(lists.pending.insert(kind.to_owned(), Some(problem.to_owned()))),
            None => drop(lists.pending.remove(kind)),
        }
    }

    /// Whether a list of this namespace is skipped.
    #[must_use]
    pub(crate) fn is_skipped(&self, namespace: &str) -> bool {
        self.lock().skipped.values().any(|(left_out, _)| left_out == namespace)
    }

    /// Whether this list is skipped.
    pub(super) fn has_skipped(&self, what: &str) -> bool {
        self.lock().skipped.contains_key(what)
    }

    fn lock(&self) -> MutexGuard<'_, InitialListStates> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Awaits this list. Without an error, an earlier one remains: a second watch may await the same list.
    pub(super) fn record_pending(&self, what: &str, error: Option<String>) {
        let mut lists = self.lock();
        match lists.skipped.get_mut(what) {
            Some((_, last)) => *last = error.unwrap_or_else(|| std::mem::take(last)),
            None => {
                let last = lists.pending.entry(what.to_owned()).or_default();
                *last = error.or_else(|| last.take());
            }
        }
    }

    pub(super) fn record_listed(&self, what: &str, kind: &str) {
        let mut lists = self.lock();
        lists.pending.remove(what);
        lists.listed_kinds.insert(kind.to_owned());
        if lists.skipped.remove(what).is_some() {
            tracing::info!(what, "list became readable, no longer skipped");
        }
    }

    /// Skips the list if possible, and returns whether it is skipped now.
    pub(super) fn skip(&self, what: &str, kind: &str, namespace: &str, error: &str) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_failed_while_it_has_an_error() {
        let lists = InitialLists::default();
        lists.record_pending("warmups in one", None);
        assert_eq!(lists.failed_message(), None);
        lists.record_pending("warmups in one", Some("forbidden".to_owned()));
        lists.record_kind("warmups", Some("no such kind"));
        assert_eq!(
            lists.failed_message().as_deref(),
            Some("warmups (no such kind), warmups in one (forbidden)")
        );
        lists.record_kind("warmups", None);
        lists.record_listed("warmups in one", "warmups");
        assert_eq!(lists.failed_message(), None);
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
        // Another watch begins to await it.
        awaited.record_pending(TWO, None);
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
