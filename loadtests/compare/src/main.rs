//! Measures the gateway beside its peers.

mod cases;
mod load;
mod measure;
mod peers;
mod report;
mod run;
mod setup;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about)]
struct CompareCli {
    #[command(subcommand)]
    command: CompareCommand,
}

#[derive(Subcommand)]
enum CompareCommand {
    Run(run::RunArgs),
    Report(run::ReportArgs),
    Load(load::AdHocLoad),
    #[command(hide = true)]
    SendBody(cases::stall::SendBody),
    Soak(load::SoakArgs),
    Wrk(cases::wrk::WrkArgs),
    Memory(cases::memory::MemoryArgs),
}

// One thread, which runs only the load: its placement is part of the measurement.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    match CompareCli::parse().command {
        CompareCommand::Run(run) => return run.run().await,
        CompareCommand::Report(report) => return report.run(),
        CompareCommand::Load(load) => println!("{}", load.run().await?),
        CompareCommand::SendBody(body) => body.run()?,
        CompareCommand::Soak(soak) => println!("{}", soak.run().await?),
        CompareCommand::Wrk(wrk) => print!("{}", wrk.run().await?),
        CompareCommand::Memory(memory) => print!("{}", memory.run().await?),
    }
    Ok(ExitCode::SUCCESS)
}
