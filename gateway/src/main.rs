//! The binary: a command line over the library.

use std::process::ExitCode;

use clap::Parser as _;
use rouse_gateway::cli::{Cli, EXIT_USAGE, run};

fn main() -> ExitCode {
    // Crates with their own TLS use the process's provider, so it is installed before any of them needs it.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    match Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(error) => {
            let code = if error.use_stderr() { EXIT_USAGE } else { 0 };
            // If printing fails, no other output is left to report that.
            error.print().unwrap_or_default();
            code.into()
        }
    }
}
