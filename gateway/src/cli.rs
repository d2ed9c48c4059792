//! The command line: serve, or query a running gateway.

mod client;
mod commands;
mod completions;
mod config_file;
mod crds;
mod detect;
mod doctor;
mod import;
mod init;
mod key;
mod local_machine;
mod measure;
mod node;
mod orders;
mod progress;
mod screen;
mod serve;
mod show;
mod simulate;
mod warmups;
mod watch;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, CommandFactory as _, Parser, ValueEnum};
use rouse::error_chain;

use commands::CliCommand;
use orders::ModelOrder;

/// Exit code for an invalid file or command line (`EX_USAGE`).
pub const EXIT_USAGE: u8 = 64;
/// Exit code if no gateway answers (`EX_UNAVAILABLE`).
pub const EXIT_UNAVAILABLE: u8 = 69;

/// Shown below the help, and so by a start without a configuration.
const NEXT_STEPS_HELP: &str = "\
Next steps:
  rouse-gateway demo                 Try Rouse with simulated models and accelerators, no GPU needed
  rouse-gateway init                 Write a configuration for this machine into rouse.yaml
  rouse-gateway check rouse.yaml     Check a configuration before you use it
  rouse-gateway --config rouse.yaml  Serve its models";

/// An OpenAI-compatible gateway that wakes models.
#[derive(Debug, Parser)]
#[command(name = "rouse-gateway", version, args_conflicts_with_subcommands = true, after_help = NEXT_STEPS_HELP)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<CliCommand>,
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Args, Debug)]
struct ServeArgs {
    /// Configuration file of the gateway.
    #[arg(long, value_name = "FILE", env = "ROUSE_CONFIG")]
    config: Option<PathBuf>,
    /// Where engines run. Overrides `platform` of the configuration file.
    #[arg(long, value_enum, requires = "config")]
    platform: Option<rouse_config::PlatformKind>,
    #[command(flatten)]
    options: RuntimeArgs,
}

#[derive(Args, Debug)]
struct RuntimeArgs {
    /// Address of the inference API. Overrides `listen.api`.
    #[arg(long, value_name = "ADDR", value_parser = rouse_config::parse_address)]
    api: Option<SocketAddr>,
    /// Address of metrics and the admin API. Overrides `listen.admin`.
    #[arg(long, value_name = "ADDR", value_parser = rouse_config::parse_address)]
    admin: Option<SocketAddr>,
    /// Record everything that the gateway observes in this file, for `replay`.
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
    /// Format of the log lines.
    ///
    /// The environment variable ROUSE_LOG sets the log filter, such as `info` (the default) or `rouse=debug`.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Selects the gateway to query.
#[derive(Args, Debug)]
struct AdminArgs {
    /// Address of the gateway's admin API.
    #[arg(long, value_name = "URL", env = "ROUSE_ADMIN", default_value_t)]
    admin: client::AdminEndpoint,
    /// Bearer token for the admin API.
    #[arg(long, value_name = "TOKEN", env = "ROUSE_ADMIN_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

/// Runs the command and prints errors. Must be called before any thread starts.
#[must_use]
pub fn run(cli: Cli) -> ExitCode {
    let result = match cli.command {
        None => match cli.serve.config {
            Some(file) => serve::serve(Some(file), cli.serve.platform, cli.serve.options),
            None => Ok(report_missing_config()),
        },
        Some(CliCommand::Demo(options)) => serve::serve(None, None, options),
        Some(CliCommand::Check { file, config, json }) => {
            serve::check(&file.or(config).unwrap_or_default(), json)
        }
        Some(CliCommand::Import(source)) => import::run(&source),
        Some(CliCommand::Node(args)) => node::run(args),
        Some(CliCommand::Replay { file, json }) => replay(&file, json),
        Some(CliCommand::Simulate(args)) => simulate::run(&args, &mut std::io::stdout().lock()),
        Some(CliCommand::Key { name, stdin, json }) => key::run(&name, stdin, json),
        Some(CliCommand::Crds { dir, fma, json }) => crds::run(dir.as_deref(), fma, json),
        Some(CliCommand::Completions { shell }) => completions::run(shell, &mut std::io::stdout().lock()),
        Some(other) => run_admin_command(other),
    };
    result.unwrap_or_else(|error| {
        if let Some(errors) = error.downcast_ref::<rouse_config::ConfigErrors>() {
            eprintln!("{errors}");
            return EXIT_USAGE.into();
        }
        // A closed pipe, as in `events | head`, is no failure.
        if error.downcast_ref::<std::io::Error>().map(std::io::Error::kind)
            == Some(std::io::ErrorKind::BrokenPipe)
        {
            return ExitCode::SUCCESS;
        }
        eprintln!("rouse-gateway: {}", error_chain::one_line(error.as_ref()));
        match error.downcast_ref::<client::Error>() {
            Some(client::Error::NotRunning { .. }) => EXIT_UNAVAILABLE.into(),
            _ => ExitCode::FAILURE,
        }
    })
}

/// A service without its configuration must fail instead of serving something else.
fn report_missing_config() -> ExitCode {
    eprintln!("rouse-gateway: no configuration given: pass --config FILE or set ROUSE_CONFIG\n");
    eprint!("{}", Cli::command().render_help());
    EXIT_USAGE.into()
}

fn replay(file: &std::path::Path, json: bool) -> anyhow::Result<ExitCode> {
    crate::driver::replay(file, json, &mut std::io::stdout().lock())?;
    Ok(ExitCode::SUCCESS)
}

fn run_admin_command(command: CliCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let done = |()| ExitCode::SUCCESS;
    runtime.block_on(async {
        match command {
            CliCommand::Ps { gateway, watch: true, .. } => watch::run(&gateway.client()).await.map(done),
            CliCommand::Ps { gateway, json, .. } => show::ps(&gateway.client(), json).await.map(done),
            CliCommand::Wake(args) => orders::run(ModelOrder::Wake, &args).await,
            CliCommand::Sleep(args) => orders::sleep(&args).await,
            CliCommand::Stop(args) => orders::run(ModelOrder::Stop, &args).await,
            CliCommand::Pin(args) => orders::run(ModelOrder::Pin, &args).await,
            CliCommand::Unpin(args) => orders::run(ModelOrder::Unpin, &args).await,
            CliCommand::Init(args) => Box::pin(init::run(&args)).await,
            CliCommand::Doctor(args) => Box::pin(doctor::run(&args)).await,
            CliCommand::Measure(args) => Box::pin(measure::run(&args)).await,
            CliCommand::Explain { model, gateway, json } => {
                show::explain(&gateway.client(), &model, json).await.map(done)
            }
            CliCommand::Events { gateway, json } => show::events(&gateway.client(), json).await.map(done),
            CliCommand::Logs { model, replica, gateway, follow } => {
                show::logs(&gateway.client(), &model, replica, follow).await.map(done)
            }
            CliCommand::Warmups(args) => warmups::run(&args).await,
            CliCommand::DemoEngine(args) => Box::pin(engine_sim::run(*args)).await,
            CliCommand::Demo(_)
            | CliCommand::Check { .. }
            | CliCommand::Import(_)
            | CliCommand::Node(_)
            | CliCommand::Replay { .. }
            | CliCommand::Simulate(_)
            | CliCommand::Key { .. }
            | CliCommand::Crds { .. }
            | CliCommand::Completions { .. } => Ok(ExitCode::SUCCESS),
        }
    })
}

impl AdminArgs {
    fn client(&self) -> client::AdminClient {
        client::AdminClient::new(self.admin.clone(), self.token.clone())
    }
}
