//! `engine-sim`: see the library.

use std::process::ExitCode;

use clap::Parser;

/// An inference server that behaves like vLLM as a gateway sees it.
#[derive(Parser)]
#[command(version)]
struct EngineSimCli {
    #[command(flatten)]
    args: engine_sim::EngineSimArgs,
}

// One thread: many engines run on one machine, and a gateway measured against them needs the cores.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    engine_sim::run(EngineSimCli::parse().args).await
}
