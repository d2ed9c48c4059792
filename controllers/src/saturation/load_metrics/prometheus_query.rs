//! Builds the query for the load of engines, and reads its answer.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    saturation::PeakLoad,
    units::{Millis, Tick},
};

use crate::{
    crd::ledger::ObjectName,
    prometheus_api::{self, PrometheusSeries},
};

/// The used share of the KV cache, under vLLM's present and former name, and of SGLang and llama.cpp.
const KV_USE: [&str; 4] = [
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
];
/// Requests in the engine's own queue.
const WAITING: [&str; 3] =
    ["vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"];
/// Label for what a series shows: a peak, or when the newest sample was taken.
const KIND: &str = "rouse";
/// Above this number of namespaces the query asks for all: an address is limited to some kilobytes.
const MAX_NAMED_NAMESPACES: usize = 16;

/// Returns one query for the engines in all these namespaces, with their peaks over the window.
///
/// The ranks of an engine with data parallelism stay apart, and an engine that is scraped twice is one.
pub(crate) fn load_query(namespaces: &BTreeSet<&str>, window: Millis) -> String {
    let namespace = if namespaces.len() <= MAX_NAMED_NAMESPACES {
        let named = prometheus_api::any_of(namespaces.iter().copied());
        format!("namespace=~{},", prometheus_api::quoted(&named))
    } else {
        String::new()
    };
    let selected = |metric: &str| format!("{metric}{{{namespace}pod!=\"\"}}");
    let peaks = |metrics: &[&str]| {
        let peak = |metric: &&str| {
            let selected = selected(metric);
            format!("max by (namespace, pod, engine, dp_rank) (max_over_time({selected}[{}ms]))", window.0)
        };
        metrics.iter().map(peak).collect::<Vec<_>>().join(" or ")
    };
    let newest = |metric: &&str| format!("max by (namespace, pod) (timestamp({}))", selected(metric));
    let newest = WAITING.iter().map(newest).collect::<Vec<_>>().join(" or ");
    let kinds = [("kv", peaks(&KV_USE)), ("waiting", peaks(&WAITING)), ("at", newest)];
    let labelled = |(kind, vector): (&str, String)| {
        format!("label_replace({vector}, \"{KIND}\", \"{kind}\", \"\", \"\")")
    };
    kinds.map(labelled).join(" or ")
}

/// One figure over the ranks of an engine so far.
#[derive(Clone, Copy, Debug, Default)]
enum RankFigure {
    #[default]
    Missing,
    /// A rank reports no number. The others alone would understate the load.
    Unreadable,
    Value(f64),
}

impl RankFigure {
    fn add(&mut self, number: Option<f64>, combine: fn(f64, f64) -> f64) {
        let number = number.filter(|number| number.is_finite() && *number >= 0.0);
        *self = match (*self, number) {
            (Self::Unreadable, _) | (_, None) => Self::Unreadable,
            (Self::Missing, Some(number)) => Self::Value(number),
            (Self::Value(others), Some(number)) => Self::Value(combine(others, number)),
        };
    }

    const fn value(self) -> Option<f64> {
        match self {
            Self::Value(value) => Some(value),
            Self::Missing | Self::Unreadable => None,
        }
    }
}

/// The series of one Pod.
#[derive(Debug, Default)]
struct PodSeries {
    kv_use: RankFigure,
    waiting: RankFigure,
    /// Age of the newest sample.
    age: Option<Millis>,
}

/// Reads the answer to [`load_query`] that was sent at `asked_at`, by our clock: the load of each Pod.
///
/// A Pod whose newest sample is older than the window has no peaks, and shows how old it is. Where only the peaks are
/// left, the last scrape has failed, and the sample may be as old as the window.
pub(crate) fn engine_loads(
    series: Vec<PrometheusSeries>,
    window: Millis,
    asked_at: Tick,
) -> BTreeMap<ObjectName, PeakLoad> {
    let mut pods: BTreeMap<ObjectName, PodSeries> = BTreeMap::new();
    for one in series {
        let label = |name: &str| one.labels.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let (Some(namespace), Some(pod), Some(kind)) = (label("namespace"), label("pod"), label(KIND)) else {
            continue;
        };
        let found = pods.entry(ObjectName::new(namespace, pod)).or_default();
        match kind {
            "kv" => found.kv_use.add(one.number(), f64::max),
            "waiting" => found.waiting.add(one.number(), |sum, rank| sum + rank),
            "at" => {
                let at = one.number().filter(|at| at.is_finite());
                found.age = at.map(|at| Millis(((one.evaluated() - at).max(0.0) * 1e3) as u64));
            }
            _ => {}
        }
    }
    let load = |series: &PodSeries| PeakLoad {
        kv_use: series.kv_use.value(),
        waiting: series.waiting.value(),
        newest: asked_at - series.age.unwrap_or(window),
    };
    pods.iter().map(|(pod, series)| (pod.clone(), load(series))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: Tick = Tick(1_780_000_000_000);
    const EVALUATED: f64 = 1_780_003_600.0;
    const WINDOW: Millis = Millis::secs(60);

    fn one(kind: &str, pod: &str, engine: &str, value: &str) -> Value {
        let labels = json!({"namespace": "chat", "pod": pod, "engine": engine, "rouse": kind});
        json!({"metric": labels, "value": [EVALUATED, value]})
    }

    fn loads(series: &[Value]) -> BTreeMap<String, (Option<f64>, Option<f64>, u64)> {
        let answer = json!({"status": "success", "data": {"resultType": "vector", "result": series}});
        let series = prometheus_api::parse(answer.to_string().as_bytes()).unwrap();
        let loads = engine_loads(series, WINDOW, NOW).into_iter();
        loads.map(|(pod, load)| (pod.name, (load.kv_use, load.waiting, NOW.since(load.newest).0))).collect()
    }

    #[test]
    fn the_query_asks_for_peaks_under_every_name_and_for_the_age_of_samples() {
        let query = load_query(&BTreeSet::from(["chat", "team.b"]), WINDOW);
        let kv = "max by (namespace, pod, engine, dp_rank) \
                  (max_over_time(vllm:kv_cache_usage_perc{namespace=~\"chat|team\\\\.b\",pod!=\"\"}[60000ms]))";
        assert!(query.starts_with(&format!("label_replace({kv} or ")), "{query}");
        for name in KV_USE.iter().chain(&WAITING) {
            assert!(query.contains(&format!("max_over_time({name}{{")), "{name}: {query}");
        }
        assert!(query.contains("max by (namespace, pod) (timestamp(vllm:num_requests_waiting{"), "{query}");
        let many: Vec<String> = (0..17).map(|n| format!("team-{n}")).collect();
        let query = load_query(&many.iter().map(String::as_str).collect(), WINDOW);
        assert!(query.contains("vllm:kv_cache_usage_perc{pod!=\"\"}"), "{query}");
    }

    #[test]
    fn the_fullest_rank_counts_and_the_queues_of_all_ranks_together() {
        let found = loads(&[
            one("kv", "a", "0", "0.4"),
            one("kv", "a", "1", "0.7"),
            one("waiting", "a", "0", "2"),
            one("waiting", "a", "1", "3"),
            one("at", "a", "", "1780003587.5"),
        ]);
        assert_eq!(found["a"], (Some(0.7), Some(5.0), 12_500));
    }

    #[test]
    fn what_is_missing_old_or_no_number_is_unknown() {
        let found = loads(&[
            one("kv", "nan", "0", "NaN"),
            one("kv", "nan", "1", "0.7"),
            one("waiting", "nan", "0", "0"),
            one("at", "old", "", "1780003500"),
            one("kv", "unscraped", "0", "0.2"),
            one("waiting", "unscraped", "0", "0"),
            json!({"metric": {"rouse": "kv", "namespace": "chat"}, "value": [EVALUATED, "1"]}),
        ]);
        assert_eq!(found["nan"], (None, Some(0.0), 60_000));
        assert_eq!(found["old"], (None, None, 100_000));
        assert_eq!(found["unscraped"], (Some(0.2), Some(0.0), 60_000));
        assert_eq!(found.len(), 3);
    }
}
