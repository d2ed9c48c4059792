//! Placeholder: the application is put together here.

use std::{path::PathBuf, process::ExitCode};

use crate::config::{Config, Source};

/// What the command line asks for.
pub struct Start {
    pub config: Config,
    /// Loaded again at a reload.
    pub source: Source,
    pub journal: Option<PathBuf>,
}

/// Serves until told to stop. Called before any thread was started.
pub fn run(start: Start) -> anyhow::Result<ExitCode> {
    let _ = start;
    anyhow::bail!("the application is not put together yet")
}
