//! `serve` and `check`: the two commands that read a configuration.

use std::{
    io::{IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use rouse::units::pluralize;
use rouse_config::{Config, ConfigProblem};
use rouse_net::fd_limit;
use serde_json::{Value, json};
use tracing_subscriber::EnvFilter;

use super::{EXIT_USAGE, LogFormat, RuntimeArgs};
use crate::{app, metrics::TelemetryDropCounters, telemetry::GatewayLog};

/// Serves this file, or the demonstration without one.
pub(super) fn serve(
    file: Option<PathBuf>,
    platform: Option<rouse_config::PlatformKind>,
    options: RuntimeArgs,
) -> anyhow::Result<ExitCode> {
    // The log starts a thread, and the descriptor table must grow before any thread exists.
    let descriptors = fd_limit::raise().context("cannot read the open file limit")?;
    let lost = TelemetryDropCounters::new();
    let log = start_log(options.log_format, &lost)?;
    tracing::debug!(descriptors, "open file limit");
    let source = app::ConfigSource { file, api: options.api, admin: options.admin, platform };
    let ended = start(source, options, lost);
    // Flushes the log before the caller prints an error.
    log.close();
    ended
}

fn start(
    source: app::ConfigSource,
    options: RuntimeArgs,
    drop_counters: TelemetryDropCounters,
) -> anyhow::Result<ExitCode> {
    let config = source.load()?;
    let findings = rouse_config::check(&config);
    for problem in findings.errors.iter().chain(&findings.warnings) {
        tracing::warn!("{}", problem.display(&config.origin));
    }
    app::run(app::AppOptions { config, source, journal: options.journal, drop_counters })
}

/// Prints errors and warnings. The exit code is 64 if there are errors.
pub(super) fn check(file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let config = match rouse_config::load(file) {
        Ok(config) => config,
        Err(errors) if json => return report_as_json(None, &errors.problems, &[]),
        Err(errors) => {
            eprintln!("{errors}");
            return Ok(EXIT_USAGE.into());
        }
    };
    let findings = rouse_config::check(&config);
    let warnings = [findings.warnings, super::local_machine::check_local_machine(&config)].concat();
    if json {
        return report_as_json(Some(&config), &findings.errors, &warnings);
    }
    for problem in &findings.errors {
        eprintln!("{}", problem.display(&config.origin));
    }
    for problem in &warnings {
        eprintln!("warning: {}", problem.display(&config.origin));
    }
    if !findings.errors.is_empty() {
        return Ok(EXIT_USAGE.into());
    }
    let memory = if config.accelerators_auto {
        "memory not checked, because accelerators are detected at startup".to_owned()
    } else {
        pluralize(config.core.accelerators.len(), "accelerator")
    };
    println!("{}: valid; {}; {memory}", config.origin, pluralize(config.core.models.len(), "model"));
    Ok(ExitCode::SUCCESS)
}

/// Prints the result of a check as one object.
///
/// `models` and `accelerators` are null if the file cannot be read, and `accelerators` also if they are detected at
/// startup.
fn report_as_json(
    config: Option<&Config>,
    errors: &[ConfigProblem],
    warnings: &[ConfigProblem],
) -> anyhow::Result<ExitCode> {
    let list = |problems: &[ConfigProblem]| -> Vec<Value> {
        let shown = problems.iter().map(
            |problem| json!({"line": problem.at.line, "column": problem.at.column, "text": problem.text}),
        );
        shown.collect()
    };
    let declared = config.filter(|config| !config.accelerators_auto);
    let report = json!({
        "valid": errors.is_empty(),
        "models": config.map(|config| config.core.models.len()),
        "accelerators": declared.map(|config| config.core.accelerators.len()),
        "errors": list(errors),
        "warnings": list(warnings),
    });
    writeln!(std::io::stdout(), "{report}")?;
    Ok(if errors.is_empty() { ExitCode::SUCCESS } else { EXIT_USAGE.into() })
}

/// Starts the log to standard error. Must be called before any other thread starts.
pub(super) fn start_log(
    format: LogFormat,
    drop_counters: &TelemetryDropCounters,
) -> anyhow::Result<GatewayLog> {
    let filter = match std::env::var("ROUSE_LOG") {
        Ok(text) => EnvFilter::try_new(text).context("ROUSE_LOG is not a valid log filter")?,
        Err(_) => EnvFilter::new("info"),
    };
    let log = GatewayLog::start(drop_counters).context("cannot start the log thread")?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(log.clone());
    match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    }
    .map_err(|error| anyhow::anyhow!("cannot set up logging: {error}"))?;
    Ok(log)
}
