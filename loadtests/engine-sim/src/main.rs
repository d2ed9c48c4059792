//! `engine-sim`: see the library.

use std::process::ExitCode;

use clap::Parser;

/// An inference server that behaves like vLLM as a gateway sees it.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    args: engine_sim::Args,
}

// One thread: many engines run on one machine, and a gateway measured against them needs the cores.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    engine_sim::run(Cli::parse().args).await
}
