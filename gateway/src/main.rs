//! The binary: a command line over the library.

use std::process::ExitCode;

use clap::Parser as _;
use rouse_gateway::cli::{Cli, EXIT_USAGE, run};

fn main() -> ExitCode {
    // Crates that speak TLS by themselves take the process's provider; it is there before anything could ask.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    match Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(error) => {
            let code = if error.use_stderr() { EXIT_USAGE } else { 0 };
            // Nobody is left to tell when this cannot be written.
            error.print().unwrap_or_default();
            code.into()
        }
    }
}
