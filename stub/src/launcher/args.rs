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
    /// Listen on this address
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0")]
    host: String,
    /// Listen on this port; 0 is any that is free, and is written to stderr
    #[arg(long, default_value_t = 8001)]
    port: u16,
    /// What is written to stderr
    #[arg(long, value_name = "LEVEL", default_value = "info", value_enum)]
    log_level: LauncherLogLevel,
    /// Pretend to have accelerators, with the UUIDs GPU-0, GPU-1 and so on
    #[arg(long)]
    mock_gpus: bool,
    /// How many of them
    #[arg(long, value_name = "N", default_value_t = 8)]
    mock_gpu_count: u32,
    /// Take the accelerators' UUIDs from this file instead of the driver: one a line or a JSON array in the order of
    /// their indices, or a JSON object of UUIDs and indices
    #[arg(long, value_name = "FILE", conflicts_with = "mock_gpus")]
    accelerators_file: Option<PathBuf>,
    /// What an instance's options are appended to; split like them
    #[arg(long, value_name = "COMMAND", default_value = "vllm serve")]
    command: String,
    /// Where engines' output goes [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    log_dir: Option<PathBuf>,
    /// How much of each log is kept, from its end; at least 256 KiB
    #[arg(long, value_name = "SIZE", default_value = "64Mi")]
    log_cap: Bytes,
    /// Between SIGTERM and SIGKILL of an engine
    #[arg(long, value_name = "TIME", default_value = "10s")]
    grace: Millis,
    /// Demand the bearer token that this file holds, on all paths but / and /health; a new one counts at once
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Demand there the bearer token that has this SHA-256, as hexadecimal digits; with both, either is obeyed
    #[arg(long, env = "ROUSE_TOKEN_SHA256", value_name = "HASH")]
    token_sha256: Option<TokenHash>,
    /// Demand none: whoever reaches the port may start any program here, with all accelerators. For controllers that
    /// show none
    #[arg(long)]
    no_token: bool,
    /// Instances at a time, stopped ones too
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_instances: usize,
    /// Answer an unknown accelerator as the public launcher does: 409 to PUT and 500 to POST, instead of 422
    #[arg(long)]
    public_conflicts: bool,
    /// Split options at white space only, as the public launcher does: quotes and backslashes stay
    #[arg(long)]
    plain_options: bool,
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
