//! Tracks child processes: engines' first processes and orphans.
//!
//! Each engine's supervisor waits for its first process; orphans are reaped here. A worker whose parent died becomes
//! the launcher's child, because the launcher is the container's first process or a child subreaper. So no worker
//! escapes, and dead workers are reaped; otherwise they stay in the process table forever.

use std::{
    collections::BTreeSet,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{
    sys::{
        prctl::set_child_subreaper,
        signal::{Signal as Number, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use rouse_net::process::table;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task,
};

/// First processes of engines that are not reaped yet.
#[derive(Debug)]
pub(crate) struct ChildProcesses {
    engines: Mutex<BTreeSet<i32>>,
    /// Children that existed before any engine; the launcher does not kill them.
    preexisting: BTreeSet<i32>,
}

impl ChildProcesses {
    pub(crate) fn new() -> Self {
        Self { engines: Mutex::default(), preexisting: table::children().into_iter().collect() }
    }

    /// Kills and reaps the processes that engines left behind, and their descendants. Call it when no engine is left.
    /// Blocks until the processes have died.
    pub(crate) fn kill_leftovers(&self) {
        loop {
            let mut leftovers = table::children();
            leftovers.retain(|pid| !self.preexisting.contains(pid));
            if leftovers.is_empty() {
                return;
            }
            for pid in leftovers.into_iter().map(Pid::from_raw) {
                let killed = kill(pid, Number::SIGKILL).and_then(|()| waitpid(pid, None));
                tracing::warn!(%pid, result = ?killed, "sent SIGKILL to a process that an engine left behind");
            }
        }
    }

    /// Starts an engine's first process; `start` returns its pid. Reaping waits meanwhile: the new process would pass
    /// for an orphan until its pid is registered.
    pub(crate) fn register<T>(&self, start: impl FnOnce() -> io::Result<(T, i32)>) -> io::Result<T> {
        let mut engines = self.engines();
        let (process, pid) = start()?;
        engines.insert(pid);
        Ok(process)
    }

    /// Forgets a reaped first process.
    pub(crate) fn forget(&self, pid: i32) {
        self.engines().remove(&pid);
    }

    fn engines(&self) -> MutexGuard<'_, BTreeSet<i32>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap_orphans(&self) {
        let engines = self.engines();
        for pid in table::children().into_iter().filter(|pid| !engines.contains(pid)) {
            match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
                Ok(status) => tracing::debug!(pid, ?status, "orphan process polled"),
                // The engine's supervisor, which cleans up its process group, reaped it first.
                Err(error) => tracing::debug!(pid, %error, "orphan process not reaped"),
            }
        }
    }
}

/// Reaps orphans forever.
///
/// # Errors
/// The SIGCHLD handler cannot be installed.
pub(crate) fn reaper(family: Arc<ChildProcesses>) -> io::Result<impl Future<Output = ()>> {
    if let Err(error) = set_child_subreaper(true) {
        tracing::warn!(
            %error,
            "cannot become the child subreaper, so the container's first process may adopt orphans of engines"
        );
    }
    let ends = signal(SignalKind::child())?;
    Ok(reap_on_signal(family, ends))
}

async fn reap_on_signal(family: Arc<ChildProcesses>, mut ends: Signal) {
    while ends.recv().await.is_some() {
        let family = Arc::clone(&family);
        if let Err(error) = task::spawn_blocking(move || family.reap_orphans()).await {
            tracing::error!(%error, "reaping orphan processes failed");
        }
    }
}
