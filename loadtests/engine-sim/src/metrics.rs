//! `/metrics` under vLLM's names, as far as a gateway reads them.

use std::{fmt::Write as _, sync::atomic::Ordering::Relaxed};

use serde_json::Value;

use crate::engine::Engine;

/// KV cache bytes of a token: what makes the usage gauge move in proportion.
const TOKEN_BYTES: u64 = 128 << 10;

pub(crate) fn text(engine: &Engine) -> String {
    let counters = &engine.counters;
    let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed) as f64;
    let room = (engine.view().cache_bytes / TOKEN_BYTES).max(1) as f64;
    let full = (read(&counters.cached_tokens) / room).min(1.0);
    let name = engine
        .names()
        .into_iter()
        .next()
        .map_or_else(|| "\"\"".to_owned(), |n| Value::from(n).to_string());
    let labels = format!("engine=\"0\",model_name={name}");
    let mut out = String::with_capacity(4096);
    let mut family = |kind: &str, name: &str, help: &str, more: &[(&str, f64)]| {
        // Writing to a String cannot fail.
        write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n").ok();
        for (label, value) in more {
            writeln!(out, "{name}{{{labels}{label}}} {value:?}").ok();
        }
    };
    family(
        "gauge",
        "vllm:num_requests_running",
        "Requests in model execution batches.",
        &[("", read(&counters.running))],
    );
    family(
        "gauge",
        "vllm:num_requests_waiting",
        "Requests waiting to be processed.",
        &[("", read(&counters.waiting))],
    );
    family(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "KV-cache usage, 1 is full.",
        &[("", full)],
    );
    family(
        "gauge",
        "vllm:gpu_cache_usage_perc",
        "KV-cache usage, 1 is full; the old name.",
        &[("", full)],
    );
    family(
        "counter",
        "vllm:prompt_tokens_total",
        "Prefill tokens processed.",
        &[("", read(&counters.prompt_tokens))],
    );
    family(
        "counter",
        "vllm:generation_tokens_total",
        "Tokens generated.",
        &[("", read(&counters.generation_tokens))],
    );
    let aborted = read(&counters.aborts) + read(&counters.aborted_by_sleep);
    family(
        "counter",
        "vllm:request_success_total",
        "Requests that ended, by reason.",
        &[
            (",finished_reason=\"stop\"", read(&counters.finished)),
            (",finished_reason=\"abort\"", aborted),
        ],
    );
    family(
        "gauge",
        "vllm:engine_sleep_state",
        "Sleep state of the engine.",
        &[(
            ",sleep_state=\"awake\"",
            f64::from(u8::from(!engine.view().sleeping)),
        )],
    );
    out
}
