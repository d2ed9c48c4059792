//! A process group that is ours to end: the engine's first process and whatever it started.
//!
//! Engines fork workers, and it is the workers that hold the accelerator's memory; a process is therefore "gone" only
//! when its whole group is. Watching goes by pidfd, for our own children and for those of an earlier gateway alike:
//! exit is an event, not a poll. The first process is reaped *last*: until then its pid, which is the group's number
//! too, cannot be given to a stranger that we would then kill.

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
    /// Takes charge of a child that leads its own group. `mark`: see [`table::members`].
    pub fn from_child(child: Child, mark: String) -> io::Result<Self> {
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        let pid = pid.ok_or_else(|| io::Error::from(Errno::ESRCH))?;
        // What cannot be watched may not run.
        let fd = open_pidfd(pid).inspect_err(|_| kill_group(pid, Signal::SIGKILL))?;
        Ok(Self { pid, env_marker: mark, fd, child: Some(child) })
    }

    /// Takes charge of a group leader that somebody else started.
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

    /// Kills what is left of the group, waits until none of it is, and reaps. The status is known of our own children.
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

/// Reaps a child that has ended. One that a debugger holds can be reaped only when the debugger lets it go, of which the
/// kernel tells as of an end; [`Child::wait`] would ask again and again meanwhile, as fast as it can.
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

/// Kills every process of the group and every marked one, until there is none.
pub async fn kill_all(group: Option<i32>, mark: String) {
    loop {
        let mark = mark.clone();
        let Ok(left) = task::spawn_blocking(move || table::members(group, &mark)).await else {
            return;
        };
        if left.is_empty() {
            return;
        }
        let mut watched = Vec::new();
        for pid in left {
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
    // The only error is a runtime that ends, and then nobody asks any more.
    drop(fd.readable().await);
}

/// Orphans are given to the first process, which in a container may be the gateway. Elsewhere there is nothing to do.
fn reap(pid: i32) {
    match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
        Ok(_) | Err(Errno::ECHILD) => {}
        Err(error) => tracing::debug!(pid, %error, "cannot reap"),
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
        Err(error) => tracing::error!(pid, %error, "cannot signal"),
    }
}
