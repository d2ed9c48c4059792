//! Prepares a comparison: its programs, cores and limits, and its end at a signal.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use nix::{
    sched::sched_getaffinity,
    sys::{
        prctl::set_child_subreaper,
        resource::{Resource, getrlimit, setrlimit},
    },
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    measure,
    peers::{BenchCores, BenchEnvironment, InstalledPrograms, process::kill_orphans},
    report::MachineInfo,
};

/// Where Rouse's programs are.
#[derive(Args, Clone, Debug)]
pub(crate) struct ProgramArgs {
    /// Binary of the gateway [default: the one beside this program]
    #[arg(long)]
    gateway: Option<PathBuf>,
    /// Binary of the stub [default: the one beside this program, if it is built]
    #[arg(long)]
    stub: Option<PathBuf>,
    /// Binary of the simulated engine [default: the one beside this program]
    #[arg(long)]
    engine: Option<PathBuf>,
}

impl ProgramArgs {
    /// Locates all programs, and pins this process to the load's core. `folder` is for the files of the processes.
    ///
    /// Errors: a program is not built, or this process may use only one core.
    pub(crate) fn environment(&self, folder: &Path) -> anyhow::Result<BenchEnvironment> {
        // Adopt a crashed gateway's engines, so that they can be ended.
        set_child_subreaper(true)?;
        // Each of 5,000 streams needs a client's and an engine's socket. Child processes inherit the limit.
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        let installed = InstalledPrograms::new(self.gateway.clone(), self.engine.clone(), self.stub.clone())?;
        let environment = BenchEnvironment { installed, cores: cores()?, folder: folder.to_owned() };
        measure::pin(environment.cores.load)?;
        Ok(environment)
    }
}

/// Creates the folder for the files of the processes, which is deleted on drop.
pub(crate) fn temporary_folder() -> anyhow::Result<TempDir> {
    tempfile::Builder::new().prefix("rouse-compare-").tempdir().context("cannot create a temporary folder")
}

/// Measures until the end, or until SIGINT or SIGTERM.
///
/// Errors: the measurement's own, or one that names the signal. No process that the measurement started is left.
pub(crate) async fn until_interrupted<T>(
    measuring: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let measured = tokio::select! {
        measured = measuring => measured,
        _ = interrupt.recv() => Err(anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow!("terminated")),
    };
    kill_orphans();
    measured
}

/// Returns the first two cores that this process may use.
fn cores() -> anyhow::Result<BenchCores> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let is_allowed = |&processor: &usize| allowed.is_set(processor).unwrap_or(false);
    let mut both = (0..nix::sched::CpuSet::count()).filter(is_allowed);
    match (both.next(), both.next()) {
        (Some(proxy), Some(load)) => Ok(BenchCores { proxy, load }),
        _ => bail!("a comparison needs two processors: one for the proxy, one for load and engine"),
    }
}

/// Describes this machine.
///
/// Errors: the kernel's description cannot be read.
pub(crate) fn machine() -> anyhow::Result<MachineInfo> {
    let processors = fs::read_to_string("/proc/cpuinfo")?;
    let field = |name: &str| {
        let line = processors.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_once(": ")).map_or("unknown processor", |(_, value)| value.trim())
    };
    let memory = fs::read_to_string("/proc/meminfo")?;
    let kib: u64 = memory.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    // Drop the suffix that names the builder.
    let kernel = kernel.trim().split('-').next().unwrap_or_default().to_owned();
    Ok(MachineInfo {
        kernel,
        processor: field("model name").to_owned(),
        processors: processors.lines().filter(|line| line.starts_with("processor")).count(),
        memory_gib: (kib + (1 << 19)) >> 20,
    })
}
