//! Measures the gateway beside its peers.

mod cases;
mod load;
mod measure;
mod peers;
mod report;
mod run;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Report(run::Report),
    Load(load::AdHoc),
    #[command(hide = true)]
    SendBody(cases::stall::SendBody),
    Soak(load::Soak),
}

// One thread, which the load has to itself: where it runs is a part of what is measured.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Run(run) => return run.run().await,
        Command::Report(report) => return report.run(),
        Command::Load(load) => println!("{}", load.run().await?),
        Command::SendBody(body) => body.run()?,
        Command::Soak(soak) => println!("{}", soak.run().await?),
    }
    Ok(ExitCode::SUCCESS)
}
