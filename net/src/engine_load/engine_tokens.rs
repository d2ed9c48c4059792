//! An engine's size and the lengths of its requests, in tokens, as the engine reports them.

use super::{
    LoadGauge,
    prometheus_text::{MetricSample, samples},
};

/// What one page of metrics says in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineTokens {
    /// Size of the KV cache over all ranks; `None` if the engine does not report it.
    pub kv_cache: Option<f64>,
    pub prompts: LengthCounter,
    pub outputs: LengthCounter,
}

/// The lengths of the requests that have ended since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LengthCounter {
    /// Tokens of all these requests.
    pub tokens: f64,
    pub requests: f64,
}

impl LengthCounter {
    /// Adds those of another engine.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self { tokens: self.tokens + other.tokens, requests: self.requests + other.requests }
    }

    /// Mean length of a request, in tokens; `None` before the first one has ended.
    #[must_use]
    pub fn mean(self) -> Option<f64> {
        let mean = self.tokens / self.requests;
        (self.requests > 0.0 && mean.is_finite()).then_some(mean)
    }
}

impl EngineTokens {
    /// Reads a page in Prometheus' text format, under the names of vLLM or SGLang.
    #[must_use]
    pub fn from_page(page: &[u8]) -> Self {
        let (mut kv_cache, mut tokens) = (LoadGauge::default(), Self::default());
        let value = |sample: &MetricSample<'_>| sample.value().filter(|value| value.is_finite());
        for sample in samples(page) {
            let counter = match sample.name {
                b"vllm:cache_config_info" => {
                    kv_cache.add(blocks(&sample), |sum, rank| sum + rank);
                    continue;
                }
                b"sglang:max_total_num_tokens" => {
                    kv_cache.add(sample.value(), |sum, rank| sum + rank);
                    continue;
                }
                b"vllm:request_prompt_tokens_sum" | b"sglang:prompt_tokens_histogram_sum" => {
                    &mut tokens.prompts.tokens
                }
                b"vllm:request_prompt_tokens_count" | b"sglang:prompt_tokens_histogram_count" => {
                    &mut tokens.prompts.requests
                }
                b"vllm:request_generation_tokens_sum" | b"sglang:generation_tokens_histogram_sum" => {
                    &mut tokens.outputs.tokens
                }
                b"vllm:request_generation_tokens_count" | b"sglang:generation_tokens_histogram_count" => {
                    &mut tokens.outputs.requests
                }
                _ => continue,
            };
            *counter += value(&sample).unwrap_or(0.0);
        }
        Self { kv_cache: kv_cache.value().filter(|size| *size > 0.0), ..tokens }
    }
}

/// The size of a KV cache whose blocks are labels.
fn blocks(sample: &MetricSample<'_>) -> Option<f64> {
    let number = |label: &str| sample.label(label)?.parse::<f64>().ok();
    Some(number("num_gpu_blocks")? * number("block_size")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_that_of_all_ranks_and_the_lengths_are_means() {
        let page = b"# TYPE vllm:cache_config_info gauge\n\
            vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",num_gpu_blocks=\"1000\"} 1.0\n\
            vllm:cache_config_info{engine=\"1\",block_size=\"16\",num_gpu_blocks=\"500\"} 1.0\n\
            vllm:request_prompt_tokens_sum{engine=\"0\"} 900\n\
            vllm:request_prompt_tokens_sum{engine=\"1\"} 100\n\
            vllm:request_prompt_tokens_count 4\n\
            vllm:request_generation_tokens_sum 50\n\
            vllm:request_generation_tokens_count 0\n";
        let tokens = EngineTokens::from_page(page);
        assert_eq!(tokens.kv_cache, Some(24_000.0));
        assert_eq!((tokens.prompts.mean(), tokens.outputs.mean()), (Some(250.0), None));
        let sglang = b"sglang:max_total_num_tokens 4096\nsglang:prompt_tokens_histogram_sum 10\n\
            sglang:prompt_tokens_histogram_count 2\n";
        let tokens = EngineTokens::from_page(sglang);
        assert_eq!((tokens.kv_cache, tokens.prompts.mean()), (Some(4096.0), Some(5.0)));
    }

    #[test]
    fn a_size_that_is_missing_or_no_number_is_unknown() {
        for page in [
            "vllm:num_requests_waiting 1",
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1",
            "vllm:cache_config_info{block_size=\"16\"} 1",
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"0\"} 1",
            "sglang:max_total_num_tokens NaN",
        ] {
            assert_eq!(EngineTokens::from_page(page.as_bytes()), EngineTokens::default(), "{page}");
        }
    }

    #[test]
    fn the_counters_of_two_engines_add_up() {
        let (one, other) = (LengthCounter { tokens: 90.0, requests: 1.0 }, LengthCounter::default());
        let third = LengthCounter { tokens: 10.0, requests: 1.0 };
        assert_eq!(one.plus(other).plus(third).mean(), Some(50.0));
    }
}
