//! Runs a command with a test cluster that all its processes share: `with-cluster cargo nextest run …`.
//!
//! A test runner with one process per test would otherwise start a control plane for each test.

use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use rouse_cluster::{SHARED_CLUSTER_ENV, TestCluster};

fn main() -> Result<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let program = words.next().context("usage: with-cluster COMMAND [ARGUMENT …]")?;
    let cluster = TestCluster::start()?;
    let status = Command::new(&program)
        .args(words)
        .env(SHARED_CLUSTER_ENV, cluster.key())
        .status()
        .with_context(|| program.display().to_string())?;
    drop(cluster);
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}
