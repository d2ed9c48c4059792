//! An engine's load as the engine itself reports it: KV cache use, waiting requests, running requests.
//!
//! ```text
//!   on one machine   GET /metrics of the engine ──▶ parse ──▶ LatestLoad ──▶ load balancer
//!   in a cluster     GET /metrics of the engine ──▶ parse ──▶ stub ──▶ ORCA report in a response's head ──▶ relay
//!                                                             relay of each gateway ──▶ LatestLoad ──▶ load balancer
//! ```
//!
//! Each figure may be unknown, which is never the same as zero: an engine whose KV cache use is unknown may be full.

mod engine_tokens;
mod latest_load;
pub mod orca;
pub(crate) mod prometheus_text;

pub use engine_tokens::{EngineTokens, LengthCounter};
pub use latest_load::{LatestLoad, MAX_LOAD_AGE, REPORT_INTERVAL};

use prometheus_text::MetricSample;

/// One reading of an engine's load. `None` means unknown: missing, not a number, infinite or negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// The used share of the KV cache, from 0 to 1.
    pub kv_use: Option<f64>,
    /// Requests in the engine's own queue.
    pub waiting: Option<f64>,
    /// Requests that the engine works on.
    pub running: Option<f64>,
}

impl EngineLoad {
    /// Whether no figure is known.
    #[must_use]
    pub const fn is_unknown(&self) -> bool {
        self.kv_use.is_none() && self.waiting.is_none() && self.running.is_none()
    }

    /// Whether no request is known to run or to wait.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.unwrap_or(0.0) < 1.0 && self.waiting.unwrap_or(0.0) < 1.0
    }
}

/// What an engine answers when it is asked for its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LoadAnswer {
    /// At least one figure is known.
    Known(EngineLoad),
    /// The engine has no such metrics, at least at present: some engines create them with their first request.
    NoMetrics,
    /// No answer in time, an error, or values that cannot be read. The next answer may be better.
    Failed,
}

impl LoadAnswer {
    /// The load, if it is known.
    #[must_use]
    pub const fn load(self) -> Option<EngineLoad> {
        match self {
            Self::Known(load) => Some(load),
            Self::NoMetrics | Self::Failed => None,
        }
    }

    /// Reads a page, as [`parse`] does.
    #[must_use]
    pub fn from_page(page: &[u8]) -> Self {
        let gauges = LoadGauges::of_page(page);
        let load = gauges.load();
        match (load.is_unknown(), gauges.are_missing()) {
            (false, _) => Self::Known(load),
            (true, true) => Self::NoMetrics,
            (true, false) => Self::Failed,
        }
    }
}

/// Reads the load from a page in Prometheus' text format, under the names of vLLM, SGLang or llama.cpp.
///
/// An engine with data parallelism has one series for each rank: the fullest KV cache counts, and the requests of all
/// ranks together. A single unreadable series makes its metric unknown, because the rest would understate the load.
/// Allocates nothing; the caller limits the page.
#[must_use]
pub fn parse(page: &[u8]) -> EngineLoad {
    LoadGauges::of_page(page).load()
}

/// The metrics of a page that make up the load, while the page is read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadGauges {
    kv_use: LoadGauge,
    waiting: LoadGauge,
    running: LoadGauge,
}

impl LoadGauges {
    fn of_page(page: &[u8]) -> Self {
        let mut gauges = Self::default();
        prometheus_text::samples(page).for_each(|sample| gauges.add(&sample));
        gauges
    }

    /// Whether the page has none of the metrics.
    const fn are_missing(&self) -> bool {
        let gauges = (&self.kv_use, &self.waiting, &self.running);
        matches!(gauges, (LoadGauge::Missing, LoadGauge::Missing, LoadGauge::Missing))
    }

    /// Adds a sample. Ignores samples of other metrics.
    pub(crate) fn add(&mut self, sample: &MetricSample<'_>) {
        match sample.name {
            // Shares from 0 to 1, whatever their names say. vLLM renamed its metric in 0.11, and had both for a time.
            b"vllm:kv_cache_usage_perc"
            | b"vllm:gpu_cache_usage_perc"
            | b"sglang:token_usage"
            | b"llamacpp:kv_cache_usage_ratio" => self.kv_use.add(sample.value(), f64::max),
            b"vllm:num_requests_waiting" | b"sglang:num_queue_reqs" | b"llamacpp:requests_deferred" => {
                self.waiting.add(sample.value(), |sum, value| sum + value);
            }
            b"vllm:num_requests_running" | b"sglang:num_running_reqs" | b"llamacpp:requests_processing" => {
                self.running.add(sample.value(), |sum, value| sum + value);
            }
            _ => {}
        }
    }

    pub(crate) fn load(&self) -> EngineLoad {
        EngineLoad {
            kv_use: self.kv_use.value(),
            waiting: self.waiting.value(),
            running: self.running.value(),
        }
    }
}

/// One metric over its series so far.
#[derive(Clone, Copy, Debug, Default)]
enum LoadGauge {
    #[default]
    Missing,
    Unreadable,
    Value(f64),
}

impl LoadGauge {
    fn add(&mut self, value: Option<f64>, combine: fn(f64, f64) -> f64) {
        *self = match (*self, value.and_then(known)) {
            (Self::Unreadable, _) | (_, None) => Self::Unreadable,
            (Self::Missing, Some(value)) => Self::Value(value),
            (Self::Value(others), Some(value)) => Self::Value(combine(others, value)),
        };
    }

    fn value(self) -> Option<f64> {
        match self {
            // The sum of two large numbers may be infinite.
            Self::Value(value) => known(value),
            Self::Missing | Self::Unreadable => None,
        }
    }
}

/// The value, if it can be a share or a number of requests.
fn known(value: f64) -> Option<f64> {
    (value.is_finite() && value >= 0.0).then_some(value)
}

#[cfg(test)]
mod tests;
