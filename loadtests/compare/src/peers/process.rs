//! A process that is ours: pinned, silent, and gone when we are.

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

/// After a polite request to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

/// What each [`BenchProcess`] that there is was started as.
static STARTED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// What to run.
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

/// Ends, with all it started, when dropped.
pub(crate) struct BenchProcess {
    name: &'static str,
    pid: u32,
    child: Child,
    log: PathBuf,
}

impl BenchProcess {
    /// Starts `command` on `cores` (as `taskset` takes them). What it prints goes to a file in `folder`.
    ///
    /// The kernel ends it should this process be killed without a chance to do so.
    pub(crate) fn spawn(
        name: &'static str,
        command: BenchCommand,
        cores: &str,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let output = fs::File::create(&log).context("cannot make a log file")?;
        // Held until its number is in it.
        let mut started = started();
        let child = tokio::process::Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "taskset", "-c", cores])
            .arg(&command.program)
            .args(&command.args)
            .envs(command.env)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // A group of its own: an interrupt at the terminal reaches us, and we end it.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", command.program.display()))?;
        let pid = child.id().context("it ended at once")?;
        started.insert(pid);
        Ok(Self { name, pid, child, log })
    }

    pub(crate) const fn pid(&self) -> u32 {
        self.pid
    }

    /// Errors: it ended, with the last it said.
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

    /// Waits for its end.
    ///
    /// Errors: it did not do what it was started for.
    pub(crate) async fn wait_success(mut self) -> anyhow::Result<()> {
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("{} failed: {}", self.name, self.log_tail());
        }
        Ok(())
    }

    pub(crate) async fn stop(mut self) {
        if self.child.id().is_some() {
            // Why a signal did not arrive shows in the wait.
            signal(self.pid, Signal::SIGTERM);
            timeout(STOP_TIMEOUT, self.child.wait()).await.ok();
        }
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        started().remove(&self.pid);
        // Already waited for: the number may be another's by now.
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

/// Processes that fell to us because the one that started them crashed, such as a gateway's engines: this process is where
/// orphans go (`PR_SET_CHILD_SUBREAPER`).
pub(crate) fn orphans() -> Vec<u32> {
    // Before the look at what there is: what is started meanwhile must not be taken for a stray.
    let ours = started();
    let mut strays = children(process::id()).unwrap_or_default();
    strays.retain(|pid| !ours.contains(pid));
    strays
}

/// Ends them: they would share the load's core with all that comes later.
pub(crate) fn kill_orphans() {
    for stray in orphans() {
        for pid in tree(stray).unwrap_or_default() {
            signal(pid, Signal::SIGKILL);
        }
        if let Ok(stray) = i32::try_from(stray) {
            waitpid(Pid::from_raw(stray), None).ok();
        }
    }
}

/// What is gone already needs none.
fn signal(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        kill(Pid::from_raw(pid), signal).ok();
    }
}
