//! What is counted for each key. A key's series are there from the start, or from the first request after the reload that
//! brought it, until its name is configured no more and the last request that was made with it is over.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use rouse::openai::sse::Usage;

use super::{register, valid};

/// What became of a request of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    Admitted,
    /// Refused: it has used its requests of this minute.
    OverRequests,
    OverTokens,
    /// Refused: it may not use the model.
    Forbidden,
}

const OUTCOMES: [&str; 4] = ["admitted", "over_requests", "over_tokens", "forbidden"];
const KINDS: [&str; 2] = ["prompt", "completion"];
const COUNTED: [&str; 2] = ["engine", "estimated"];

/// The counters of one key.
pub struct KeyMetrics {
    families: Arc<Families>,
    name: String,
    requests: [IntCounter; 4],
    /// By [`COUNTED`], then by [`KINDS`].
    tokens: [[IntCounter; 2]; 2],
}

pub(super) struct Families {
    requests: IntCounterVec,
    tokens: IntCounterVec,
    /// So that a key that comes back while an old request of its name still runs goes on with the same series.
    known: Mutex<BTreeMap<String, Weak<KeyMetrics>>>,
}

impl Families {
    pub(super) fn new(registry: &Registry) -> Arc<Self> {
        let counters = |name: &str, help: &str, labels: &[&str]| {
            register(registry, valid(IntCounterVec::new(Opts::new(name, help), labels)))
        };
        Arc::new(Self {
            requests: counters(
                "rouse_key_requests_total",
                "Requests of each key that named a model, by what became of them",
                &["key", "outcome"],
            ),
            tokens: counters(
                "rouse_key_tokens_total",
                "Tokens that each key used, by kind and by who counted them",
                &["key", "kind", "counted"],
            ),
            known: Mutex::default(),
        })
    }

    pub(super) fn of(self: &Arc<Self>, name: &str) -> Arc<KeyMetrics> {
        let mut known = self.known();
        if let Some(metrics) = known.get(name).and_then(Weak::upgrade) {
            return metrics;
        }
        let metrics = Arc::new(KeyMetrics {
            families: Arc::clone(self),
            name: name.to_owned(),
            requests: OUTCOMES.map(|outcome| self.requests.with_label_values(&[name, outcome])),
            tokens: COUNTED
                .map(|counted| KINDS.map(|kind| self.tokens.with_label_values(&[name, kind, counted]))),
        });
        known.insert(name.to_owned(), Arc::downgrade(&metrics));
        metrics
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Weak<KeyMetrics>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyMetrics {
    pub fn request(&self, outcome: KeyOutcome) {
        self.requests[outcome as usize].inc();
    }

    /// `counted`: by the engine; otherwise it is an estimate.
    pub fn tokens(&self, used: Usage, counted: bool) {
        let [prompt, completion] = &self.tokens[usize::from(!counted)];
        prompt.inc_by(used.prompt);
        completion.inc_by(used.completion);
    }
}

impl Drop for KeyMetrics {
    fn drop(&mut self) {
        let mut known = self.families.known();
        if known.get(&self.name).is_some_and(|metrics| metrics.strong_count() > 0) {
            return;
        }
        known.remove(&self.name);
        // A series that is not there cannot be removed, and need not.
        for outcome in OUTCOMES {
            drop(self.families.requests.remove_label_values(&[&self.name, outcome]));
        }
        for counted in COUNTED {
            for kind in KINDS {
                drop(self.families.tokens.remove_label_values(&[&self.name, kind, counted]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keys_series_go_with_the_last_that_counts_for_it() {
        let registry = Registry::new();
        let families = Families::new(&registry);
        let series = || registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        let first = families.of("a");
        let again = families.of("a");
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(series(), 8);
        drop(first);
        assert_eq!(series(), 8);
        drop(again);
        assert_eq!(series(), 0);
    }
}
