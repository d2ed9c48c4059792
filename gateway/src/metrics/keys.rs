//! Counters of each key.
//!
//! A key's series exist from the start, or from the first request after the reload that added the key. They end when
//! its name is no longer configured and the last request with the key is over.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use prometheus::{
    Registry,
    core::{Collector, Desc},
    proto::{Counter, LabelPair, Metric, MetricFamily, MetricType},
};
use rouse_net::openai::sse::TokenUsage;

use rouse_platform::metric_builder::expect_valid;

/// What happened to a request of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    Admitted,
    /// Refused: the key has used up its requests of this minute.
    RequestLimited,
    TokenLimited,
    /// Refused: the key may not use the model.
    Forbidden,
}

const REQUEST_OUTCOMES: [&str; 4] = ["admitted", "over_requests", "over_tokens", "forbidden"];
const TOKEN_KINDS: [&str; 2] = ["prompt", "completion"];
const TOKEN_SOURCES: [&str; 2] = ["engine", "estimated"];

const REQUESTS_FAMILY: (&str, &str) =
    ("rouse_key_requests_total", "Requests of each key that named a model, by outcome");
const TOKENS_FAMILY: (&str, &str) =
    ("rouse_key_tokens_total", "Tokens that each key used, by kind and by the source of the count");

/// The counters of one key.
#[derive(Debug)]
pub struct KeyMetrics {
    families: Arc<KeyFamilies>,
    name: String,
    requests: [AtomicU64; 4],
    /// Indexed by [`TOKEN_SOURCES`], then by [`TOKEN_KINDS`].
    tokens: [[AtomicU64; 2]; 2],
}

/// Plain numbers that become series when they are collected.
///
/// As series, eight per key, the counters of a thousand keys took 12 MB and 12 ms to create.
#[derive(Debug, Default)]
pub(super) struct KeyFamilies {
    /// Counters by key name. A key that returns while an old request of its name still runs continues the same series.
    by_name: Mutex<BTreeMap<String, Weak<KeyMetrics>>>,
}

/// The collector that is registered.
struct KeyCollector {
    families: Arc<KeyFamilies>,
    descriptions: [Desc; 2],
}

impl KeyFamilies {
    pub(super) fn new(registry: &Registry) -> Arc<Self> {
        let families = Arc::<Self>::default();
        let described = |(name, help): (&str, &str), labels: &[&str]| {
            let labels = labels.iter().map(|&label| label.to_owned()).collect();
            expect_valid(Desc::new(
                name.to_owned(),
                help.to_owned(),
                labels,
                std::collections::HashMap::new(),
            ))
        };
        let descriptions = [
            described(REQUESTS_FAMILY, &["key", "outcome"]),
            described(TOKENS_FAMILY, &["counted", "key", "kind"]),
        ];
        let collected = KeyCollector { families: Arc::clone(&families), descriptions };
        expect_valid(registry.register(Box::new(collected)));
        families
    }

    pub(super) fn for_key(self: &Arc<Self>, name: &str) -> Arc<KeyMetrics> {
        let mut known = self.lock_by_name();
        if let Some(metrics) = known.get(name).and_then(Weak::upgrade) {
            return metrics;
        }
        let metrics = Arc::new(KeyMetrics {
            families: Arc::clone(self),
            name: name.to_owned(),
            requests: Default::default(),
            tokens: Default::default(),
        });
        known.insert(name.to_owned(), Arc::downgrade(&metrics));
        metrics
    }

    fn lock_by_name(&self) -> MutexGuard<'_, BTreeMap<String, Weak<KeyMetrics>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyMetrics {
    pub fn count_request(&self, outcome: KeyOutcome) {
        if let Some(counter) = self.requests.get(outcome as usize) {
            counter.fetch_add(1, Relaxed);
        }
    }

    /// Counts tokens. If they are not `counted` by the engine, they are an estimate.
    pub fn count_tokens(&self, used: TokenUsage, counted: bool) {
        let [by_engine, estimated] = &self.tokens;
        let [prompt, completion] = if counted { by_engine } else { estimated };
        prompt.fetch_add(used.prompt, Relaxed);
        completion.fetch_add(used.completion, Relaxed);
    }
}

impl Drop for KeyMetrics {
    fn drop(&mut self) {
        let mut known = self.families.lock_by_name();
        if known.get(&self.name).is_some_and(|metrics| metrics.strong_count() == 0) {
            known.remove(&self.name);
        }
    }
}

impl Collector for KeyCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // Kept until the lock is released, since dropping the last reference takes the lock.
        let keys: Vec<_> = self.families.lock_by_name().values().filter_map(Weak::upgrade).collect();
        let mut requests = Vec::with_capacity(keys.len() * REQUEST_OUTCOMES.len());
        let mut tokens = Vec::with_capacity(keys.len() * TOKEN_SOURCES.len() * TOKEN_KINDS.len());
        for key in &keys {
            for (outcome, count) in REQUEST_OUTCOMES.iter().zip(&key.requests) {
                requests.push(series(&[("key", &key.name), ("outcome", outcome)], count));
            }
            for (counted, by_kind) in TOKEN_SOURCES.iter().zip(&key.tokens) {
                for (kind, count) in TOKEN_KINDS.iter().zip(by_kind) {
                    tokens.push(series(&[("counted", counted), ("key", &key.name), ("kind", kind)], count));
                }
            }
        }
        [(REQUESTS_FAMILY, requests), (TOKENS_FAMILY, tokens)]
            .into_iter()
            .map(|(named, series)| family(named, series))
            .collect()
    }
}

/// Creates one series. `labels` must be sorted by name.
fn series(labels: &[(&str, &str)], count: &AtomicU64) -> Metric {
    let labels = labels.iter().map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    });
    let mut counter = Counter::default();
    counter.set_value(count.load(Relaxed) as f64);
    let mut metric = Metric::from_label(labels.collect());
    metric.set_counter(counter);
    metric
}

fn family((name, help): (&str, &str), series: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(MetricType::COUNTER);
    family.set_metric(series);
    family
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keys_series_go_with_the_last_that_counts_for_it() {
        let registry = Registry::new();
        let families = KeyFamilies::new(&registry);
        let series = || registry.gather().iter().map(|family| family.get_metric().len()).sum::<usize>();
        let first = families.for_key("a");
        let again = families.for_key("a");
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(series(), 8);
        drop(first);
        assert_eq!(series(), 8);
        drop(again);
        assert_eq!(series(), 0);
    }
}
