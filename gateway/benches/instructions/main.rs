//! Counts the instructions of a request and of an event.
//!
//! ```text
//!   instructions                    count every case and hold it to what is recorded
//!   instructions --record           count, and record
//!   instructions --annotate CASE    where they go, function by function
//!   instructions --case CASE UNITS  what runs under valgrind
//! ```
//!
//! Times on shared machines mean little; counts are reproducible. Each case runs twice under callgrind, with N units
//! and with 2 N, so that everything outside a unit cancels out. Clients and the engine are scripts on the same thread,
//! at the other ends of in-memory pipes; their small cost is included. The kernel's share and time are not counted.

use std::process::ExitCode;

use anyhow::{Context as _, bail};

mod count;
mod http2;
mod record;
mod script;
mod world;

use script::{CASES, Case};

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::FAILURE
    })
}

fn run() -> anyhow::Result<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => record::check(),
        ["--record"] => record::write(),
        ["--annotate", case] => count::annotate(named(case)?).map(|()| ExitCode::SUCCESS),
        ["--case", case, units] => {
            // As in a gateway: without a subscriber, libraries look for another log each time.
            let filter = tracing_subscriber::EnvFilter::new("info");
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::sink).init();
            let options = tokio::runtime::LocalOptions::default();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build_local(options)?;
            runtime.block_on(named(case)?.run(units.parse()?))?;
            Ok(ExitCode::SUCCESS)
        }
        _ => bail!("usage: instructions [--record | --annotate CASE | --case CASE UNITS]"),
    }
}

fn named(name: &str) -> anyhow::Result<&'static Case> {
    let names = || CASES.iter().map(|case| case.name).collect::<Vec<_>>().join(", ");
    CASES.iter().find(|case| case.name == name).with_context(|| format!("the cases are {}", names()))
}
