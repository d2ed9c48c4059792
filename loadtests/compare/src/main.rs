//! Measures the gateway beside its peers.

mod load;
mod measure;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Load(load::AdHoc),
    Soak(load::Soak),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Load(load) => println!("{}", load.run().await?),
        Command::Soak(soak) => println!("{}", soak.run().await?),
    }
    Ok(())
}
