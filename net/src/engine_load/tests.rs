use proptest::prelude::*;

use super::*;

const fn load(kv_use: Option<f64>, waiting: Option<f64>, running: Option<f64>) -> EngineLoad {
    EngineLoad { kv_use, waiting, running }
}

#[test]
fn the_load_is_read_under_each_engines_names() {
    for (page, expected) in [
        (
            "# HELP vllm:kv_cache_usage_perc x\n# TYPE vllm:kv_cache_usage_perc gauge\n\
             vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5\n\
             vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 3.0\n\
             vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n\
             vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 7.0\n",
            load(Some(0.5), Some(3.0), Some(7.0)),
        ),
        (
            "vllm:gpu_cache_usage_perc 0.25\r\nvllm:num_requests_running 0\r\n",
            load(Some(0.25), None, Some(0.0)),
        ),
        (
            "sglang:token_usage{model_name=\"m\"} 0.28\nsglang:num_queue_reqs{model_name=\"m\"} 2.0\n\
             sglang:num_running_reqs{model_name=\"m\"} 162.0\n",
            load(Some(0.28), Some(2.0), Some(162.0)),
        ),
        (
            "llamacpp:kv_cache_usage_ratio 0.125\nllamacpp:requests_deferred 1\n\
             llamacpp:requests_processing 4\n",
            load(Some(0.125), Some(1.0), Some(4.0)),
        ),
        // Newer builds of llama.cpp lack the ratio.
        ("llamacpp:requests_deferred 0\nllamacpp:requests_processing 1\n", load(None, Some(0.0), Some(1.0))),
        ("", load(None, None, None)),
        ("<html><body>404 Not Found</body></html>", load(None, None, None)),
    ] {
        assert_eq!(parse(page.as_bytes()), expected, "{page}");
    }
}

#[test]
fn the_fullest_rank_counts_and_the_requests_of_all() {
    let page = "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.75\n\
        vllm:kv_cache_usage_perc{engine=\"2\"} 0.25\nvllm:num_requests_waiting{engine=\"0\"} 2\n\
        vllm:num_requests_waiting{engine=\"1\"} 3\nvllm:num_requests_running{engine=\"0\"} 8\n\
        vllm:num_requests_running{engine=\"1\"} 9\n";
    assert_eq!(parse(page.as_bytes()), load(Some(0.75), Some(5.0), Some(17.0)));
    // A version that has both names reports one number under both.
    let both = "vllm:kv_cache_usage_perc 0.5\nvllm:gpu_cache_usage_perc 0.5\n";
    assert_eq!(parse(both.as_bytes()).kv_use, Some(0.5));
}

#[test]
fn what_is_no_load_is_unknown_and_never_zero() {
    for bad in ["NaN", "+Inf", "-Inf", "-1", "-0.5", "x", "1e999"] {
        let page = format!("vllm:kv_cache_usage_perc {bad}\nvllm:num_requests_waiting 1\n");
        assert_eq!(parse(page.as_bytes()), load(None, Some(1.0), None), "{bad}");
        // A rank that is not readable may be the one that is full.
        let ranks = ["0", "1"].map(|rank| {
            let value = if rank == "0" { "1" } else { bad };
            format!("vllm:num_requests_waiting{{engine=\"{rank}\"}} {value}\n")
        });
        assert_eq!(parse(ranks.concat().as_bytes()).waiting, None, "{bad}");
    }
    let huge = "vllm:num_requests_waiting{e=\"0\"} 1.7e308\nvllm:num_requests_waiting{e=\"1\"} 1.7e308\n";
    assert_eq!(parse(huge.as_bytes()).waiting, None, "the sum is infinite");
}

#[test]
fn an_engine_is_idle_only_without_running_and_waiting_requests() {
    assert!(load(Some(0.5), Some(0.0), Some(0.0)).is_idle() && load(None, None, Some(0.0)).is_idle());
    assert!(!load(Some(0.0), Some(0.0), Some(1.0)).is_idle());
    assert!(!load(Some(0.0), Some(2.0), Some(0.0)).is_idle());
}

/// Pieces of pages, so that random pages come close to real ones.
const PIECES: [&[u8]; 16] = [
    b"vllm:num_requests_waiting",
    b"vllm:kv_cache_usage_perc",
    b"sglang:num_running_reqs",
    b"# TYPE ",
    b"{",
    b"}",
    b"\"",
    b"\\",
    b" ",
    b"\n",
    b"\r\n",
    b"1.5",
    b"-2",
    b"e9",
    b"NaN",
    b"\xff",
];

proptest! {
    #[test]
    fn any_page_yields_figures_that_can_be_loads_or_none(
        pieces in prop::collection::vec(prop::sample::select(PIECES.to_vec()), 0..60),
    ) {
        let load = parse(&pieces.concat());
        for figure in [load.kv_use, load.waiting, load.running].into_iter().flatten() {
            prop_assert!(figure.is_finite() && figure >= 0.0);
        }
    }
}
