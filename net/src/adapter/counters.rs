//! Extracts an engine's own counters from its Prometheus text.

use super::EngineKind;

/// An engine's counters, summed over all label sets: an engine with data parallelism reports several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    pub running: u64,
    pub waiting: u64,
    /// Prompt and generated tokens since the engine started. Any progress raises this number.
    pub tokens: u64,
}

struct CounterNames {
    running: &'static str,
    waiting: &'static str,
    tokens: [&'static str; 2],
}

const fn names(kind: EngineKind) -> CounterNames {
    match kind {
        EngineKind::Vllm | EngineKind::Custom => CounterNames {
            running: "vllm:num_requests_running",
            waiting: "vllm:num_requests_waiting",
            tokens: ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"],
        },
        EngineKind::Sglang => CounterNames {
            running: "sglang:num_running_reqs",
            waiting: "sglang:num_queue_reqs",
            tokens: ["sglang:generation_tokens_total", "sglang:prompt_tokens_total"],
        },
        EngineKind::LlamaCpp => CounterNames {
            running: "llamacpp:requests_processing",
            waiting: "llamacpp:requests_deferred",
            tokens: ["llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"],
        },
    }
}

/// Parses Prometheus text; `None` when this kind's counter of running requests is missing.
pub(super) fn parse(text: &[u8], kind: EngineKind) -> Option<EngineCounters> {
    let names = names(kind);
    let mut counters = EngineCounters::default();
    let mut is_known = false;
    for line in String::from_utf8_lossy(text).lines() {
        let Some((name, value)) = sample(line) else {
            continue;
        };
        if name == names.running {
            is_known = true;
            counters.running += value;
        } else if name == names.waiting {
            counters.waiting += value;
        } else if names.tokens.contains(&name) {
            counters.tokens = counters.tokens.saturating_add(value);
        }
    }
    is_known.then_some(counters)
}

/// Parses `name{labels} value [timestamp]`. Label values may contain spaces, so the value is searched behind the last
/// brace.
fn sample(line: &str) -> Option<(&str, u64)> {
    if line.starts_with('#') {
        return None;
    }
    let (name, rest) = match line.split_once('{') {
        Some((name, labelled)) => (name, labelled.rsplit_once('}')?.1),
        None => line.split_once(' ')?,
    };
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, value as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_labels_and_names_that_only_begin_alike_are_left_out() {
        let text = b"# HELP vllm:num_requests_running x\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a b}c\"} 2.0\n\
            vllm:num_requests_running{engine=\"1\"} 1.0 1700000000\n\
            vllm:num_requests_waiting{engine=\"0\"} 4.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\"} 9.0\n\
            vllm:generation_tokens_total{engine=\"0\"} 1.5e+03\n\
            vllm:prompt_tokens_total 7\n";
        let counters = parse(text, EngineKind::Vllm).unwrap();
        assert_eq!((counters.running, counters.waiting, counters.tokens), (3, 4, 1507));
        assert_eq!(parse(text, EngineKind::Sglang), None);
    }
}
