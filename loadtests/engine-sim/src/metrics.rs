//! `/metrics` under vLLM's names, as far as a gateway or an autoscaler reads them. Histograms have only the one bucket
//! that makes them valid, because readers use their sums and counts.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use serde_json::Value;

use crate::{engine::SimEngine, faults::SimFault};

/// KV cache bytes per token, so that the usage gauge moves in proportion.
const TOKEN_BYTES: u64 = 128 << 10;
/// Tokens per KV cache block.
const BLOCK_TOKENS: u64 = 16;

pub(crate) fn text(engine: &SimEngine) -> String {
    let counters = &engine.counters;
    let room = (engine.view().cache_bytes / TOKEN_BYTES).max(1);
    let full = (read(&counters.cached_tokens) / room as f64).min(1.0);
    let full = engine.faults.share(SimFault::KvUse).unwrap_or(full);
    let waiting =
        engine.faults.count(SimFault::QueueLength).map_or_else(|| read(&counters.waiting), |n| n as f64);
    let mut page = MetricsPage::new(&engine.names());
    page.value("gauge", "num_requests_running", read(&counters.running));
    page.value("gauge", "num_requests_waiting", waiting);
    page.value("gauge", "kv_cache_usage_perc", full);
    // The name before vLLM 0.11; both are exported for either kind of reader.
    page.value("gauge", "gpu_cache_usage_perc", full);
    page.value("counter", "prompt_tokens_total", read(&counters.prompt_tokens));
    page.value("counter", "generation_tokens_total", read(&counters.generation_tokens));
    page.value("counter", "num_preemptions_total", 0.0);
    page.value("counter", "prefix_cache_queries_total", read(&counters.prompt_tokens));
    page.value("counter", "prefix_cache_hits_total", 0.0);
    let aborted = read(&counters.aborts) + read(&counters.aborted_by_sleep);
    page.family("counter", "request_success_total");
    page.line("request_success_total", ",finished_reason=\"stop\"", read(&counters.finished));
    page.line("request_success_total", ",finished_reason=\"abort\"", aborted);
    page.family("gauge", "engine_sleep_state");
    let awake = f64::from(u8::from(!engine.view().sleeping));
    page.line("engine_sleep_state", ",sleep_state=\"awake\"", awake);
    page.family("gauge", "cache_config_info");
    let blocks = format!(",block_size=\"{BLOCK_TOKENS}\",num_gpu_blocks=\"{}\"", room / BLOCK_TOKENS);
    page.line("cache_config_info", &blocks, 1.0);

    let latency = &counters.latency;
    let micros = |sum| read(sum) / 1e6;
    let (first, later) = (read(&latency.first_tokens), read(&latency.later_tokens));
    page.histogram("time_to_first_token_seconds", first, micros(&latency.to_first_token));
    page.histogram("inter_token_latency_seconds", later, micros(&latency.between_tokens));
    page.histogram("time_per_output_token_seconds", later, micros(&latency.between_tokens));
    page.histogram("request_prompt_tokens", first, read(&counters.prompt_tokens));
    page.histogram("request_generation_tokens", first, read(&counters.generation_tokens));
    page.out
}

fn read(counter: &AtomicU64) -> f64 {
    counter.load(Relaxed) as f64
}

struct MetricsPage {
    labels: String,
    out: String,
}

impl MetricsPage {
    fn new(names: &[String]) -> Self {
        let name = Value::from(names.first().map_or("", String::as_str));
        Self { labels: format!("engine=\"0\",model_name={name}"), out: String::with_capacity(4096) }
    }

    fn family(&mut self, kind: &str, name: &str) {
        // Writing to a String cannot fail, here and in the next function.
        writeln!(self.out, "# HELP vllm:{name} See vLLM.\n# TYPE vllm:{name} {kind}").ok();
    }

    fn line(&mut self, name: &str, label: &str, value: f64) {
        writeln!(self.out, "vllm:{name}{{{}{label}}} {value:?}", self.labels).ok();
    }

    fn value(&mut self, kind: &str, name: &str, value: f64) {
        self.family(kind, name);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, count: f64, sum: f64) {
        self.family("histogram", name);
        self.line(&format!("{name}_bucket"), ",le=\"+Inf\"", count);
        self.line(&format!("{name}_count"), "", count);
        self.line(&format!("{name}_sum"), "", sum);
    }
}
