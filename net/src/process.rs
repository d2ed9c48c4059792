//! A process group that this program may kill: an engine's first process and all its descendants.
//!
//! Engines fork workers, and the workers hold the accelerator's memory. So a process is "gone" only when its whole
//! group is. Watching uses pidfds, for our own children and for those of an earlier gateway alike: an exit is an event,
//! not a poll. The first process is reaped *last*: until then its pid, which is also the group's number, cannot be
//! reused by an unrelated process that we would then kill.

use std::{io, os::fd::OwnedFd, process::ExitStatus};

use nix::{
    errno::Errno,
    sys::{
        signal::{self, Signal},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::{
    io::{Interest, unix::AsyncFd},
    process::Child,
    signal::unix::{SignalKind, signal as signals},
    task,
};

pub mod memory;
mod sock_diag;
pub mod table;

#[derive(Debug)]
pub struct ProcessGroup {
    pid: i32,
    env_marker: String,
    child: Option<Child>,
    fd: AsyncFd<OwnedFd>,
}

impl ProcessGroup {
    /// Takes over a child that leads its own group. `mark`: see [`table::members`].
    pub fn from_child(child: Child, mark: String) -> io::Result<Self> {
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        let pid = pid.ok_or_else(|| io::Error::from(Errno::ESRCH))?;
        // A process that cannot be watched must not run.
        let fd = open_pidfd(pid).inspect_err(|_| kill_group(pid, Signal::SIGKILL))?;
        Ok(Self { pid, env_marker: mark, fd, child: Some(child) })
    }

    /// Takes over a group leader that another process started.
    pub fn adopt(pid: i32, mark: String) -> io::Result<Self> {
        let fd = open_pidfd(pid)?;
        Ok(Self { pid, env_marker: mark, child: None, fd })
    }

    pub const fn pid(&self) -> i32 {
        self.pid
    }

    /// Completes when the first process has ended.
    pub async fn leader_exited(&self) {
        wait_for_exit(&self.fd).await;
    }

    pub fn signal(&self, signal: Signal) {
        kill_group(self.pid, signal);
    }

    /// Kills the rest of the group, waits until it is gone, and reaps. Returns the exit status of our own child; `None`
    /// for an adopted group.
    pub async fn kill_and_reap(mut self) -> Option<ExitStatus> {
        kill_group(self.pid, Signal::SIGKILL);
        self.leader_exited().await;
        kill_all(Some(self.pid), self.env_marker).await;
        match &mut self.child {
            Some(child) => reap_child(child).await,
            None => {
                reap(self.pid);
                None
            }
        }
    }
}

/// Reaps a child that has ended. A child under a debugger can be reaped only once the debugger detaches, which the
/// kernel signals like an exit. [`Child::wait`] would busy-loop until then.
async fn reap_child(child: &mut Child) -> Option<ExitStatus> {
    let mut ends = signals(SignalKind::child()).ok()?;
    loop {
        match child.try_wait() {
            Ok(None) => ends.recv().await?,
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}

/// Kills every process of the group and every marked process, until none is left.
pub async fn kill_all(group: Option<i32>, mark: String) {
    loop {
        let mark = mark.clone();
        let Ok(members) = task::spawn_blocking(move || table::members(group, &mark)).await else {
            return;
        };
        if members.is_empty() {
            return;
        }
        let mut watched = Vec::new();
        for pid in members {
            let fd = open_pidfd(pid);
            kill(pid, Signal::SIGKILL);
            watched.extend(fd.map(|fd| (pid, fd)));
        }
        for (pid, fd) in watched {
            wait_for_exit(&fd).await;
            reap(pid);
        }
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe, for types whose descriptor may change: an `OwnedFd` keeps its own"
)]
fn open_pidfd(pid: i32) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or_else(|| io::Error::from(Errno::ESRCH))?;
    AsyncFd::with_interest(pidfd_open(pid, PidfdFlags::empty())?, Interest::READABLE)
}

async fn wait_for_exit(fd: &AsyncFd<OwnedFd>) {
    // The only error is a runtime that shuts down, and then no caller remains.
    drop(fd.readable().await);
}

/// Reaps an orphan. The kernel reparents orphans to the first process, which in a container may be the gateway.
/// Otherwise this does nothing.
fn reap(pid: i32) {
    match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
        Ok(_) | Err(Errno::ECHILD) => {}
        Err(error) => tracing::debug!(pid, %error, "cannot reap the process"),
    }
}

fn kill_group(group: i32, signal: Signal) {
    log_signal_error(group, signal::killpg(Pid::from_raw(group), signal));
}

fn kill(pid: i32, signal: Signal) {
    log_signal_error(pid, signal::kill(Pid::from_raw(pid), signal));
}

fn log_signal_error(pid: i32, result: nix::Result<()>) {
    match result {
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(error) => tracing::error!(pid, %error, "cannot signal the process"),
    }
}
