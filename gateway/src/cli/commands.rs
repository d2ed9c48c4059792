//! The subcommands.

use std::path::PathBuf;

use clap::Subcommand;

use super::{AdminArgs, RuntimeArgs, doctor, import, init, measure, node, orders, simulate, warmups};

#[derive(Debug, Subcommand)]
pub(super) enum CliCommand {
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
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write a configuration for this machine.
    ///
    /// Finds its accelerators, engines and models. The file says why each value was chosen.
    Init(init::InitArgs),
    /// Find what will make trouble on this machine, and what to do about it.
    Doctor(doctor::DoctorArgs),
    /// Measure the memory and the times of a model.
    ///
    /// Starts the model alone, sends it a request, and puts it to sleep and wakes it at each level. Beside a running
    /// gateway it does so by orders to the gateway. A model that is in use is not measured.
    Measure(measure::MeasureArgs),
    /// Convert the configuration of another program.
    #[command(subcommand)]
    Import(import::ImportSource),
    /// Create a key for a client, and print the configuration line that admits it.
    Key {
        /// Name of the key's owner, for logs and metrics.
        name: String,
        /// Read an existing key from standard input instead of creating one.
        #[arg(long)]
        stdin: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show models, engines and accelerators. Times are UTC.
    Ps {
        #[command(flatten)]
        gateway: AdminArgs,
        /// Print the gateway's JSON answer unchanged.
        #[arg(long)]
        json: bool,
        /// Show changes as they happen, until interrupted.
        #[arg(long, short, conflicts_with = "json")]
        watch: bool,
    },
    /// Wake a model, or start it.
    Wake(orders::OrderArgs),
    /// Put a model to sleep, once its requests have ended.
    Sleep(orders::SleepArgs),
    /// Stop a model's engines, and end its requests.
    Stop(orders::OrderArgs),
    /// Keep a model awake, whatever other models need.
    Pin(orders::OrderArgs),
    /// End a pin.
    Unpin(orders::OrderArgs),
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
    /// Print the CustomResourceDefinitions of Rouse, as YAML or JSON.
    Crds {
        /// Write one file for each kind into this directory instead of printing.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Add the definitions of Fast Model Actuation (fma.llm-d.ai).
        ///
        /// Only for a cluster without them: an existing installation owns its own.
        #[arg(long)]
        fma: bool,
        /// Print JSON: one List of all definitions.
        #[arg(long, conflicts_with = "dir")]
        json: bool,
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
        /// Print JSON: each line of the journal, with the decisions and the reports that follow from it.
        #[arg(long)]
        json: bool,
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
