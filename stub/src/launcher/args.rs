//! The launcher's flags, and what they mean.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, ensure};
use rouse::{
    shell_words,
    units::{Bytes, Millis},
};
use tracing::level_filters::LevelFilter;

use super::accelerators::{AcceleratorListSource, NodeAccelerators};
use crate::token::{BearerToken, TokenHash};

/// Flags of the launcher.
#[derive(Clone, Debug, clap::Args)]
pub struct LauncherArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0")]
    host: String,
    /// Port to listen on; 0 is any free port, and is written to stderr
    #[arg(long, default_value_t = 8001)]
    port: u16,
    /// Lowest level of messages to write to stderr
    #[arg(long, value_name = "LEVEL", default_value = "info", value_enum)]
    log_level: LauncherLogLevel,
    /// Simulate accelerators, with the UUIDs GPU-0, GPU-1 and so on
    #[arg(long)]
    mock_gpus: bool,
    /// Number of simulated accelerators
    #[arg(long, value_name = "N", default_value_t = 8)]
    mock_gpu_count: u32,
    /// File with the accelerators' UUIDs, used instead of the driver
    ///
    /// One UUID a line or a JSON array in the order of their indices, or a JSON object of UUIDs and indices.
    #[arg(long, value_name = "FILE", conflicts_with = "mock_gpus")]
    accelerators_file: Option<PathBuf>,
    /// Command that an instance's options are appended to, in shell words
    #[arg(long, value_name = "COMMAND", default_value = "vllm serve")]
    command: String,
    /// Folder for the engines' output [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    log_dir: Option<PathBuf>,
    /// How much of each log to keep, from its end; at least 256 KiB
    #[arg(long, value_name = "SIZE", default_value = "64Mi")]
    log_cap: Bytes,
    /// Time between SIGTERM and SIGKILL of an engine
    #[arg(long, value_name = "TIME", default_value = "10s")]
    grace: Millis,
    /// Require the bearer token in this file, on all paths but / and /health; a new token counts at once
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Require the bearer token with this SHA-256, in hexadecimal digits, on the same paths
    ///
    /// With --token-file as well, either token is accepted.
    #[arg(long, env = "ROUSE_TOKEN_SHA256", value_name = "HASH")]
    token_sha256: Option<TokenHash>,
    /// Require no token, for controllers that send none
    ///
    /// Any client that reaches the port may then start any program here, with all accelerators.
    #[arg(long)]
    no_token: bool,
    /// Maximum number of instances at a time, including stopped ones
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_instances: usize,
    /// Answer an unknown accelerator as the public launcher does: 409 to PUT and 500 to POST, instead of 422
    #[arg(long)]
    public_conflicts: bool,
    /// Split options at white space only, as the public launcher does: quotes and backslashes stay
    #[arg(long)]
    plain_options: bool,
    /// Replace $(NAME) in options by the variable's value, as a kubelet does in a container's command
    ///
    /// The variables are those of the instance and of this process.
    #[arg(long, conflicts_with = "plain_options")]
    expand_variables: bool,
}

/// As the public launcher names them.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum LauncherLogLevel {
    Critical,
    Error,
    Warning,
    Info,
    Debug,
}

/// The launcher's settings, resolved from its flags.
#[derive(Debug)]
pub(crate) struct LauncherSettings {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) accelerators: NodeAccelerators,
    pub(crate) command: Vec<String>,
    pub(crate) log_dir: PathBuf,
    pub(crate) log_cap: u64,
    pub(crate) grace: Duration,
    /// Accepted tokens. Empty if no token is required.
    pub(crate) tokens: Arc<[BearerToken]>,
    pub(crate) max_instances: usize,
    pub(crate) public_conflicts: bool,
    pub(crate) plain_options: bool,
    pub(crate) expand_variables: bool,
}

impl LauncherArgs {
    pub(crate) const fn level(&self) -> LevelFilter {
        match self.log_level {
            LauncherLogLevel::Critical | LauncherLogLevel::Error => LevelFilter::ERROR,
            LauncherLogLevel::Warning => LevelFilter::WARN,
            LauncherLogLevel::Info => LevelFilter::INFO,
            LauncherLogLevel::Debug => LevelFilter::DEBUG,
        }
    }

    /// Resolves the flags into settings.
    ///
    /// # Errors
    /// A setting that cannot work, before any engine starts.
    pub(crate) fn settings(self) -> anyhow::Result<LauncherSettings> {
        let command = shell_words::split(&self.command).context("--command")?;
        ensure!(
            !command.is_empty(),
            "--command is empty: name the program that runs an engine, such as 'vllm serve'"
        );
        let tokens = self.tokens()?;
        let source = match self.accelerators_file {
            Some(path) => AcceleratorListSource::File(path),
            None if self.mock_gpus => AcceleratorListSource::Mock(self.mock_gpu_count),
            None => AcceleratorListSource::Driver,
        };
        let accelerators = source.load().context("--accelerators-file")?;
        let log_dir = self.log_dir.unwrap_or_else(std::env::temp_dir);
        fs::create_dir_all(&log_dir).with_context(|| format!("--log-dir {}", log_dir.display()))?;
        Ok(LauncherSettings {
            host: self.host,
            port: self.port,
            accelerators,
            command,
            log_dir,
            log_cap: self.log_cap.0,
            grace: self.grace.duration(),
            tokens,
            max_instances: self.max_instances,
            public_conflicts: self.public_conflicts,
            plain_options: self.plain_options,
            expand_variables: self.expand_variables,
        })
    }

    fn tokens(&self) -> anyhow::Result<Arc<[BearerToken]>> {
        if self.no_token {
            return Ok(Arc::default());
        }
        let file = self.token_file.clone().map(|path| {
            let named = format!("--token-file {}", path.display());
            BearerToken::from_file(path).context(named)
        });
        let tokens: Arc<[BearerToken]> =
            file.transpose()?.into_iter().chain(self.token_sha256.map(BearerToken::Hashed)).collect();
        ensure!(
            !tokens.is_empty(),
            "no token is configured, so any client that reaches the port could start any program here: set a token with \
             --token-file, --token-sha256 or ROUSE_TOKEN_SHA256 (gateways set it in the Pods that they make), or pass \
             --no-token to allow that"
        );
        Ok(tokens)
    }
}
