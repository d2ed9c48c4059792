//! `completions`: prints the script by which a shell completes our command line.

use std::{io::Write, process::ExitCode};

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

use super::Cli;

/// The program's name, as a shell finds it.
const NAME: &str = "rouse-gateway";

/// Writes the script for this shell.
pub(super) fn run(shell: Shell, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let cli = Cli::command();
    // The generator has no notion of hidden subcommands.
    let shown = cli.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut command = Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .args(cli.get_arguments().cloned())
        .subcommands(shown);
    // The generator panics if it cannot write, so a pipe that may be closed must not be its output.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, NAME, &mut script);
    out.write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
