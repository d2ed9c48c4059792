//! `serve` and `check`: the two that read a configuration.

use std::{
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use rouse::{limits, units::count};
use tracing_subscriber::EnvFilter;

use super::{LogFormat, Options, USAGE};
use crate::{app, config, metrics::Lost, telemetry::Log};

/// Serves this file, or the demonstration where there is none.
pub(super) fn serve(
    file: Option<PathBuf>,
    platform: Option<config::PlatformKind>,
    options: Options,
) -> anyhow::Result<ExitCode> {
    // The log has a thread, and the table of descriptors is grown before there are any.
    let descriptors = limits::raise().context("cannot read the limit of open files")?;
    let lost = Lost::new();
    let log = log(options.log_format, &lost)?;
    tracing::debug!(descriptors, "limit of open files");
    let source = config::Source { file, api: options.api, admin: options.admin, platform };
    let ended = start(source, options, lost);
    // Before the reason is said, where it is one of failure.
    log.close();
    ended
}

fn start(source: config::Source, options: Options, lost: Lost) -> anyhow::Result<ExitCode> {
    let config = source.load()?;
    let findings = config::check(&config);
    for problem in findings.errors.iter().chain(&findings.warnings) {
        tracing::warn!("{}", problem.display(&config.origin));
    }
    app::run(app::Start { config, source, journal: options.journal, lost })
}

/// Prints what is wrong or doubtful. Exit code 64 when anything is wrong.
pub(super) fn check(file: &Path) -> ExitCode {
    let config = match config::load(file) {
        Ok(config) => config,
        Err(errors) => {
            eprintln!("{errors}");
            return USAGE.into();
        }
    };
    let findings = config::check(&config);
    for problem in &findings.errors {
        eprintln!("{}", problem.display(&config.origin));
    }
    for problem in findings.warnings.iter().chain(&config::check_here(&config)) {
        eprintln!("warning: {}", problem.display(&config.origin));
    }
    if !findings.errors.is_empty() {
        return USAGE.into();
    }
    let memory = if config.accelerators_auto {
        "accelerators are asked for at the start, so memory was not checked".to_owned()
    } else {
        count(config.core.accelerators.len(), "accelerator")
    };
    println!("{}: valid; {}; {memory}", config.origin, count(config.core.models.len(), "model"));
    ExitCode::SUCCESS
}

fn log(format: LogFormat, lost: &Lost) -> anyhow::Result<Log> {
    let filter = match std::env::var("ROUSE_LOG") {
        Ok(text) => EnvFilter::try_new(text).context("ROUSE_LOG")?,
        Err(_) => EnvFilter::new("info"),
    };
    let log = Log::start(lost).context("cannot start the log's thread")?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(log.clone());
    match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    }
    .map_err(|error| anyhow::anyhow!("cannot log: {error}"))?;
    Ok(log)
}
