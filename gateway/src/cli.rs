//! The command line: serve, or query a running gateway.

mod client;
mod completions;
mod crds;
mod key;
mod local_machine;
mod node;
mod serve;
mod show;
mod simulate;
mod warmups;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use rouse::error_chain;

/// Exit code for an invalid file or command line (`EX_USAGE`).
pub const EXIT_USAGE: u8 = 64;
/// Exit code if no gateway answers (`EX_UNAVAILABLE`).
pub const EXIT_UNAVAILABLE: u8 = 69;

/// Shown below the help, and so by a start without a configuration.
const NEXT_STEPS_HELP: &str = "\
Next steps:
  rouse-gateway demo                 Try Rouse with simulated models and accelerators, no GPU needed
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

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run a demonstration without a GPU.
    ///
    /// It has three simulated models on two simulated accelerators. The models cannot all be awake at once.
    Demo(RuntimeArgs),
    /// Check a configuration, and print all errors and warnings.
    ///
    /// The exit code is 64 if there are errors. Warnings name settings that will not work as intended.
    Check {
        /// Configuration file to check.
        #[arg(required_unless_present = "config")]
        file: Option<PathBuf>,
        /// Configuration file to check, given as for a start. The argument FILE takes precedence.
        #[arg(long, value_name = "FILE", env = "ROUSE_CONFIG")]
        config: Option<PathBuf>,
    },
    /// Create a key for a client, and print the configuration line that admits it.
    Key {
        /// Name of the key's owner, for logs and metrics.
        name: String,
        /// Read an existing key from standard input instead of creating one.
        #[arg(long)]
        stdin: bool,
    },
    /// Show models, engines and accelerators. Times are UTC.
    Ps {
        #[command(flatten)]
        gateway: AdminArgs,
        /// Print the gateway's JSON answer unchanged.
        #[arg(long)]
        json: bool,
        /// Refresh every second until interrupted.
        #[arg(long, short, conflicts_with = "json")]
        watch: bool,
    },
    /// Explain a model's state and what the model waits for.
    Explain {
        /// Name of the model.
        model: String,
        #[command(flatten)]
        gateway: AdminArgs,
        /// Print the gateway's JSON answer unchanged.
        #[arg(long)]
        json: bool,
    },
    /// Stream what the gateway observes, as it happens.
    Events {
        #[command(flatten)]
        gateway: AdminArgs,
        /// Print the lines of the journal unchanged.
        #[arg(long)]
        json: bool,
    },
    /// Show an engine's output.
    Logs {
        /// Name of the model.
        model: String,
        /// Number of the engine, as in its name in `ps`.
        #[arg(long, value_name = "N", default_value_t = 0)]
        replica: u32,
        #[command(flatten)]
        gateway: AdminArgs,
        /// Keep printing new output as the engine writes it.
        #[arg(long, short)]
        follow: bool,
    },
    /// Show the Warmups of a cluster and their progress.
    ///
    /// Asks the gateway's admin API, as the commands above do.
    Warmups(warmups::WarmupsArgs),
    /// Print the CustomResourceDefinitions of Rouse as YAML.
    Crds {
        /// Write one file for each kind into this directory instead of printing.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Add the definitions of Fast Model Actuation (fma.llm-d.ai).
        ///
        /// Only for a cluster without them: an existing installation owns its own.
        #[arg(long)]
        fma: bool,
    },
    /// Print a script that completes this command line in a shell.
    ///
    /// The package for Debian has installed those for bash, fish and zsh.
    Completions {
        /// Shell that reads the script.
        shell: clap_complete::Shell,
    },
    /// Run the agent of one node: offer the slots of its devices to its kubelet.
    ///
    /// A DaemonSet runs it, with an account of its own. It needs no configuration file, and serves /healthz, /readyz and
    /// /metrics.
    Node(node::NodeArgs),
    /// Replay a journal through the decisions, and print events, decisions and reports.
    Replay {
        /// Journal that a gateway wrote with `--journal`.
        file: PathBuf,
    },
    /// Compare Rouse's autoscaler with an HPA and a KEDA scaler on a trace of requests, in simulated time.
    ///
    /// It prints for each how long the model was saturated, what its replicas cost, and how long clients waited for
    /// their first token.
    Simulate(Box<simulate::SimulateArgs>),
    /// The engine of the embedded demonstration.
    #[command(hide = true)]
    DemoEngine(Box<engine_sim::EngineSimArgs>),
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
        Some(CliCommand::Check { file, config }) => Ok(serve::check(&file.or(config).unwrap_or_default())),
        Some(CliCommand::Node(args)) => node::run(args),
        Some(CliCommand::Replay { file }) => replay(&file),
        Some(CliCommand::Simulate(args)) => simulate::run(&args, &mut std::io::stdout().lock()),
        Some(CliCommand::Key { name, stdin }) => key::run(&name, stdin),
        Some(CliCommand::Crds { dir, fma }) => crds::run(dir.as_deref(), fma),
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

fn replay(file: &std::path::Path) -> anyhow::Result<ExitCode> {
    crate::driver::replay(file, &mut std::io::stdout().lock())?;
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
            CliCommand::Ps { gateway, watch: true, .. } => show::watch(&gateway.client()).await.map(done),
            CliCommand::Ps { gateway, json, .. } => show::ps(&gateway.client(), json).await.map(done),
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
