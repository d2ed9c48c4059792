//! Whose child is whose: engines' first processes, which their keepers wait for, and orphans, which nobody does.
//!
//! An engine's worker whose parent died becomes the launcher's child (it is the first process of its container, or asks
//! the kernel for it), so that none of them can slip away; and dead ones must be reaped, or they stay in the table for ever.

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
    /// Children that were there before any engine: not ours to end.
    preexisting: BTreeSet<i32>,
}

impl ChildProcesses {
    pub(crate) fn new() -> Self {
        Self { engines: Mutex::default(), preexisting: table::children().into_iter().collect() }
    }

    /// Kills and reaps what engines left behind, and what that leaves behind. To be called when no engine is left. Blocks
    /// for as long as processes take to die.
    pub(crate) fn kill_leftovers(&self) {
        loop {
            let mut left = table::children();
            left.retain(|pid| !self.preexisting.contains(pid));
            if left.is_empty() {
                return;
            }
            for pid in left.into_iter().map(Pid::from_raw) {
                let ended = kill(pid, Number::SIGKILL).and_then(|()| waitpid(pid, None));
                tracing::warn!(%pid, ?ended, "left behind by an engine: killed");
            }
        }
    }

    /// Makes a process that is an engine's first; `start` tells its id. Nobody is reaped meanwhile: before its id is
    /// known, it would pass for an orphan.
    pub(crate) fn register<T>(&self, start: impl FnOnce() -> io::Result<(T, i32)>) -> io::Result<T> {
        let mut engines = self.engines();
        let (process, pid) = start()?;
        engines.insert(pid);
        Ok(process)
    }

    /// It was reaped.
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
                Ok(status) => tracing::debug!(pid, ?status, "an orphan has ended"),
                // Somebody was quicker: an engine's end looks after what is left of its group.
                Err(error) => tracing::debug!(pid, %error, "not reaped"),
            }
        }
    }
}

/// Reaps orphans, as they come, for ever.
///
/// # Errors
/// No signals can be had.
pub(crate) fn reaper(family: Arc<ChildProcesses>) -> io::Result<impl Future<Output = ()>> {
    if let Err(error) = set_child_subreaper(true) {
        tracing::warn!(%error, "orphans of engines may end up with the first process of this container");
    }
    let ends = signal(SignalKind::child())?;
    Ok(reap_on_signal(family, ends))
}

async fn reap_on_signal(family: Arc<ChildProcesses>, mut ends: Signal) {
    while ends.recv().await.is_some() {
        let family = Arc::clone(&family);
        if let Err(error) = task::spawn_blocking(move || family.reap_orphans()).await {
            tracing::error!(%error, "orphans are not reaped");
        }
    }
}
