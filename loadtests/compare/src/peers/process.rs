//! A child process: pinned, silent, and ended with this process.

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
    process::{self, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::{
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::Pid,
};
use tokio::{process::Child, time::timeout};

use crate::measure::{children, tree};

/// How long a process may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

/// The pids of all existing [`BenchProcess`] values.
static STARTED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The command to run.
pub(crate) struct BenchCommand {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl BenchCommand {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        Self { program: program.as_ref().to_owned(), args: Vec::new(), env: Vec::new() }
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }
}

/// A process that ends with all its descendants on drop.
pub(crate) struct BenchProcess {
    name: &'static str,
    pid: u32,
    child: Child,
    log: PathBuf,
}

impl BenchProcess {
    /// Starts `command` on `cores` (in `taskset` syntax). Its output goes to a file in `folder`.
    ///
    /// The kernel kills it if this process is killed.
    pub(crate) fn spawn(
        name: &'static str,
        command: BenchCommand,
        cores: &str,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let output = fs::File::create(&log).context("cannot create a log file")?;
        // Hold the lock until the pid is recorded.
        let mut started = started();
        let child = tokio::process::Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "taskset", "-c", cores])
            .arg(&command.program)
            .args(&command.args)
            .envs(command.env)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // In its own process group: an interrupt at the terminal reaches only this process, which then ends the
            // child.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", command.program.display()))?;
        let pid = child.id().context("the process ended at once")?;
        started.insert(pid);
        Ok(Self { name, pid, child, log })
    }

    pub(crate) const fn pid(&self) -> u32 {
        self.pid
    }

    /// Checks that the process still runs.
    ///
    /// Errors: it ended; the error holds the end of its log.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        bail!("{} ended ({status}): {}", self.name, self.log_tail())
    }

    pub(crate) fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines.get(lines.len().saturating_sub(8)..).unwrap_or_default().join("\n")
    }

    /// Waits until it ends.
    ///
    /// Errors: it failed.
    pub(crate) async fn wait_success(self) -> anyhow::Result<()> {
        self.output().await.map(drop)
    }

    /// Waits until it ends, and returns its output.
    ///
    /// Errors: it failed, or its log cannot be read.
    pub(crate) async fn output(mut self) -> anyhow::Result<String> {
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("{} failed: {}", self.name, self.log_tail());
        }
        let output = fs::read(&self.log).with_context(|| format!("cannot read the log of {}", self.name))?;
        Ok(String::from_utf8_lossy(&output).into_owned())
    }

    pub(crate) async fn stop(mut self) {
        if self.child.id().is_some() {
            // The wait reveals an undelivered signal.
            signal(self.pid, Signal::SIGTERM);
            timeout(STOP_TIMEOUT, self.child.wait()).await.ok();
        }
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        started().remove(&self.pid);
        // Already reaped, so the pid may belong to another process.
        if self.child.id().is_none() {
            return;
        }
        // A gateway's engines are in groups of their own.
        for pid in tree(self.pid).unwrap_or_default() {
            signal(pid, Signal::SIGKILL);
        }
    }
}

fn started() -> MutexGuard<'static, BTreeSet<u32>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the orphans that this process adopted (`PR_SET_CHILD_SUBREAPER`). Their parent crashed; a gateway's engines
/// are an example.
pub(crate) fn orphans() -> Vec<u32> {
    // Lock before listing, so that a process started meanwhile does not pass for an orphan.
    let own_processes = started();
    let mut orphaned = children(process::id()).unwrap_or_default();
    orphaned.retain(|pid| !own_processes.contains(pid));
    orphaned
}

/// Kills the orphans, which would share the load's core with later measurements.
pub(crate) fn kill_orphans() {
    for orphan in orphans() {
        for pid in tree(orphan).unwrap_or_default() {
            signal(pid, Signal::SIGKILL);
        }
        if let Ok(orphan) = i32::try_from(orphan) {
            waitpid(Pid::from_raw(orphan), None).ok();
        }
    }
}

/// Sends a signal. A process that has ended needs none.
fn signal(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        kill(Pid::from_raw(pid), signal).ok();
    }
}
