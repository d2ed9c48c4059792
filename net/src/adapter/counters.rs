//! Extracts an engine's own counters from its page of metrics.

use crate::engine_load::{EngineLoad, LoadGauges, prometheus_text::samples};

/// An engine's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineCounters {
    pub load: EngineLoad,
    /// Prompt and generated tokens since the engine started, over all ranks. Any progress raises this number.
    pub tokens: u64,
}

const TOKEN_COUNTERS: [&[u8]; 6] = [
    b"vllm:generation_tokens_total",
    b"vllm:prompt_tokens_total",
    b"sglang:generation_tokens_total",
    b"sglang:prompt_tokens_total",
    b"llamacpp:tokens_predicted_total",
    b"llamacpp:prompt_tokens_total",
];

/// Parses a page in Prometheus' text format; `None` when the number of running requests is unknown.
pub(super) fn parse(page: &[u8]) -> Option<EngineCounters> {
    let (mut gauges, mut tokens) = (LoadGauges::default(), 0_u64);
    for sample in samples(page) {
        if TOKEN_COUNTERS.contains(&sample.name) {
            tokens = tokens.saturating_add(sample.value().unwrap_or(0.0) as u64);
        } else {
            gauges.add(&sample);
        }
    }
    let load = gauges.load();
    load.running.is_some().then_some(EngineCounters { load, tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_summed_over_labels_and_kinds_and_names_that_only_begin_alike_are_left_out() {
        let page = b"# HELP vllm:num_requests_running x\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a b}c\"} 2.0\n\
            vllm:num_requests_running{engine=\"1\"} 1.0 1700000000\n\
            vllm:num_requests_waiting{engine=\"0\"} 4.0\n\
            vllm:generation_tokens_total{engine=\"0\"} 1.5e+03\n\
            vllm:generation_tokens_total_created{engine=\"0\"} 1.7e9\n\
            vllm:prompt_tokens_total 7\n";
        let counters = parse(page).unwrap();
        assert_eq!((counters.load.running, counters.load.waiting), (Some(3.0), Some(4.0)));
        assert_eq!(counters.tokens, 1507);
        assert_eq!(parse(b"vllm:generation_tokens_total 5\n"), None);
    }
}
