//! The command line. A `clap::Args`, not a `Parser`, so that another binary can offer the same engine as a subcommand.

use std::{path::PathBuf, time::Duration};

use crate::{faults, units};

/// An inference server that behaves like vLLM, without a model or an accelerator.
// The last value wins, as in vLLM: a caller can override a default by appending.
#[derive(clap::Args, Clone, Debug)]
#[command(args_override_self = true)]
pub struct EngineSimArgs {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 picks a free one. The line `listening on ADDR` on stdout names it.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Name of the model. Repeat it for aliases; answers show the first name.
    #[arg(long, alias = "served-model-name", default_value = "sim", num_args = 1..)]
    pub model: Vec<String>,
    /// Time from the start of the process until it serves requests.
    #[arg(long, default_value = "100ms", value_parser = units::duration)]
    pub start_time: Duration,
    /// Last part of the start time, in which the port is open and /health answers 503. vLLM has no such time.
    #[arg(long, default_value = "0", value_parser = units::duration)]
    pub load_time: Duration,
    /// Duration of /wake_up, over all tags.
    #[arg(long, default_value = "50ms", value_parser = units::duration)]
    pub wake_time: Duration,
    /// Duration of /sleep.
    #[arg(long, default_value = "50ms", value_parser = units::duration)]
    pub sleep_time: Duration,
    /// Bytes per second at which the first level-1 sleep pins host memory, beside the sleep time; 0 pins at once.
    ///
    /// Each accelerator pins its own --memory-host, all at the same time. Later sleeps reuse the memory.
    #[arg(long, default_value = "0", value_parser = units::bytes)]
    pub pin_rate: u64,
    /// Time to the first token.
    #[arg(long, default_value = "5ms", value_parser = units::duration)]
    pub ttft: Duration,
    /// Time between two tokens.
    #[arg(long, default_value = "5ms", value_parser = units::duration)]
    pub itl: Duration,
    /// Number of completion tokens if the request sets none.
    #[arg(long, default_value_t = 16)]
    pub tokens: u64,
    /// Maximum number of requests that generate at once; further ones wait. 0 is no limit.
    #[arg(long, default_value_t = 0)]
    pub max_running: usize,
    /// Idle time after which a connection is closed, as uvicorn does; 0 is never.
    #[arg(long, default_value = "5s", value_parser = units::duration)]
    pub keep_alive: Duration,
    /// Accelerator memory while awake, per accelerator.
    #[arg(long, default_value = "1Gi", value_parser = units::bytes)]
    pub memory_awake: u64,
    /// Accelerator memory kept while asleep, per accelerator.
    #[arg(long, default_value = "64Mi", value_parser = units::bytes)]
    pub memory_asleep: u64,
    /// Host memory held in sleep level 1, per accelerator.
    #[arg(long, default_value = "512Mi", value_parser = units::bytes)]
    pub memory_host: u64,
    /// Part of the awake memory that the weights take; the rest is KV cache. Default: half of --memory-awake.
    #[arg(long, value_parser = units::bytes)]
    pub memory_weights: Option<u64>,
    /// File that simulates the machine's accelerators. Without it, no memory is accounted.
    #[arg(long)]
    pub accelerator_file: Option<PathBuf>,
    /// Accelerators to use, by id or by index. Default: the first one in the file.
    #[arg(long, env = "CUDA_VISIBLE_DEVICES", value_delimiter = ',')]
    pub accelerators: Vec<String>,
    /// Claim this share of each accelerator's total and size the KV cache by profiling, as vLLM does.
    #[arg(long)]
    pub gpu_memory_utilization: Option<f64>,
    /// Size of the KV cache beside the weights, without profiling.
    #[arg(long, value_parser = units::bytes)]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Last part of the start time, in which memory is profiled before the KV cache is allocated.
    #[arg(long, default_value = "50ms", value_parser = units::duration)]
    pub profile_time: Duration,
    /// Offer /sleep, /wake_up, /is_sleeping, /collective_rpc and /reset_prefix_cache. Without it, they answer 404.
    #[arg(long)]
    pub enable_sleep_mode: bool,
    /// API key that /v1 paths require.
    #[arg(long)]
    pub api_key: Option<String>,
    /// Derive ids and timestamps of answers from the request's body: the same request gets the same bytes.
    #[arg(long)]
    pub fixed_ids: bool,
    /// Inject a fault: NAME or NAME=VALUE, repeatable. The README lists the faults.
    #[arg(long = "fault", value_name = "NAME[=VALUE]")]
    pub faults: Vec<faults::FaultSetting>,
    /// Answer only chat requests, as cheaply as possible, as the backend of load tests.
    #[arg(long, conflicts_with_all = ARGS_EXCLUDED_BY_FAST)]
    pub fast: bool,
}

/// Options that conflict with `--fast`: all but the address, the names, and the accelerators, which a gateway sets in
/// every engine's environment.
const ARGS_EXCLUDED_BY_FAST: [&str; 22] = [
    "start_time",
    "load_time",
    "wake_time",
    "sleep_time",
    "pin_rate",
    "ttft",
    "itl",
    "tokens",
    "max_running",
    "keep_alive",
    "memory_awake",
    "memory_asleep",
    "memory_host",
    "memory_weights",
    "accelerator_file",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "profile_time",
    "enable_sleep_mode",
    "api_key",
    "fixed_ids",
    "faults",
];

impl EngineSimArgs {
    /// Size of the weights on each accelerator, in bytes.
    pub(crate) fn weights(&self) -> u64 {
        self.memory_weights.unwrap_or(self.memory_awake / 2).min(self.memory_awake)
    }

    /// How long it takes to pin the host memory of a level-1 sleep.
    pub(crate) fn pin_time(&self) -> Duration {
        let micros = u128::from(self.memory_host) * 1_000_000;
        let micros = micros.checked_div(u128::from(self.pin_rate)).unwrap_or(0);
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: EngineSimArgs,
    }

    fn pin_time(flags: &str) -> Duration {
        let words = ["engine-sim"].into_iter().chain(flags.split_whitespace());
        Line::try_parse_from(words).unwrap().args.pin_time()
    }

    #[test]
    fn pinning_takes_as_long_as_its_rate_says() {
        assert_eq!(pin_time("--memory-host 16Gi --pin-rate 8Gi"), Duration::from_secs(2));
        assert_eq!(pin_time("--memory-host 16Gi"), Duration::ZERO);
        let quarter = pin_time("--memory-host 1Mi --pin-rate 4Mi --accelerators a,b");
        assert_eq!(quarter, Duration::from_millis(250), "each accelerator pins its own");
    }
}
