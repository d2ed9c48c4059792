//! The command line. A program named `proxy` runs as `rouse-stub proxy`, because the images of an earlier design start
//! it as `/proxy`.

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::{launcher, proxy};

#[derive(Debug, Parser)]
#[command(name = "rouse-stub", version, about = "Rouse's second binary, for Pods")]
pub struct StubArgs {
    #[command(subcommand)]
    role: StubCommand,
}

#[derive(Debug, Subcommand)]
enum StubCommand {
    /// Relay requests to an engine, gate them, and report readiness, in a requester Pod or beside the engine
    Proxy(Box<proxy::ProxyArgs>),
    /// Start and stop engines inside a provider Pod
    Launcher(Box<launcher::LauncherArgs>),
}

/// Runs the role that the command line names until it ends.
#[must_use]
pub fn run() -> ExitCode {
    run_from(std::env::args_os())
}

/// Like [`run`], with these arguments as the command line. The first is the program.
#[must_use]
pub fn run_from(given: impl Iterator<Item = OsString>) -> ExitCode {
    match StubArgs::parse_from(with_role_subcommand(given)).role {
        StubCommand::Proxy(args) => proxy::run(*args),
        StubCommand::Launcher(args) => launcher::run(*args),
    }
}

/// Adds the role to the command line when the program's name implies it.
fn with_role_subcommand(mut given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let program = given.next().unwrap_or_default();
    let as_proxy = Path::new(&program).file_name().is_some_and(|name| name == "proxy");
    let role = as_proxy.then(|| OsString::from("proxy"));
    std::iter::once(program).chain(role).chain(given.map(strip_relay_number)).collect()
}

/// Turns `--relay-port-3` into `--relay-port`, which may be repeated. The number carries no meaning.
fn strip_relay_number(word: OsString) -> OsString {
    let plain = || {
        let rest = word.to_str()?.strip_prefix("--relay-port-")?;
        let (number, value) =
            rest.split_once('=').map_or((rest, None), |(number, value)| (number, Some(value)));
        number.parse::<u16>().ok()?;
        Some(value.map_or_else(|| "--relay-port".into(), |value| format!("--relay-port={value}").into()))
    };
    plain().unwrap_or(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_called_proxy_is_one() {
        let words = |given: &[&str]| {
            let words = with_role_subcommand(given.iter().map(OsString::from));
            words.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(words(&["/proxy", "--admin-port=8001"]), ["/proxy", "proxy", "--admin-port=8001"]);
        let relays = ["x", "proxy", "--relay-port-1=8000", "--relay-port-12", "9", "--relay-port-x=1"];
        let plain = ["x", "proxy", "--relay-port=8000", "--relay-port", "9", "--relay-port-x=1"];
        assert_eq!(words(&relays), plain);
        assert_eq!(words(&["/usr/bin/rouse-stub", "launcher"]), ["/usr/bin/rouse-stub", "launcher"]);
    }
}
