//! Supervises one engine from its start until all its processes are gone.

use std::{convert::Infallible, sync::Arc, time::Duration};

use nix::{
    sys::{
        signal::Signal,
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use rouse_net::process::ProcessGroup;
use tokio::{
    sync::{Notify, watch},
    task,
    time::{self, MissedTickBehavior, timeout},
};

use super::{
    children::ChildProcesses,
    log::InstanceLog,
    readiness::ReadinessProbe,
    registry::{InstanceRegistry, StopHandle, StopResult},
};

/// How often the log's length is checked. A check is one system call. inotify would report each write, but all
/// processes of a node share its few instances.
const LOG_TRIM_INTERVAL: Duration = Duration::from_secs(1);
/// A driver frees memory before a killed process goes, which takes seconds. A longer delay is a fault.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// Supervises one engine.
pub(crate) struct EngineSupervisor {
    pub(crate) id: String,
    pub(crate) process: ProcessGroup,
    pub(crate) probe: ReadinessProbe,
    pub(crate) log: Arc<InstanceLog>,
    pub(crate) log_cap: u64,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    pub(crate) registry: Arc<InstanceRegistry>,
    pub(crate) children: Arc<ChildProcesses>,
    pub(crate) stop_receiver: StopReceiver,
}

/// The supervisor's end of the stop channel.
#[derive(Debug)]
pub(crate) struct StopReceiver {
    stop: Arc<Notify>,
    outcome: watch::Sender<Option<StopResult>>,
}

/// Creates both ends of a stop channel.
pub(crate) fn stop_channel() -> (StopHandle, StopReceiver) {
    let stop = Arc::new(Notify::new());
    let (outcome, outcome_rx) = watch::channel(None);
    (StopHandle { stop: Arc::clone(&stop), outcome: outcome_rx }, StopReceiver { stop, outcome })
}

impl StopHandle {
    /// Orders the stop and waits until it is done. The stop continues if the caller drops this future.
    pub(crate) async fn stop(mut self) -> StopResult {
        self.stop.notify_one();
        match self.outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or_else(|| Ok(String::new())),
            Err(_) => Err("the engine's supervisor failed".to_owned()),
        }
    }
}

impl EngineSupervisor {
    /// Supervises the engine until a stop order has removed the instance. The engine ends by itself or by that order.
    pub(crate) async fn run(self) {
        let by_itself = tokio::select! {
            biased;
            () = self.process.leader_exited() => true,
            () = self.stop_receiver.stop.notified() => false,
            never = self.watch_engine() => match never {},
        };
        let Self { id, process, log, grace, registry, children, stop_receiver, .. } = self;
        if by_itself {
            let code = exit_code(process.pid());
            tracing::warn!(instance = id, code, "engine exited without a stop order");
            registry.mark_stopped(&id, code);
        } else {
            tracing::info!(instance = id, pid = process.pid(), "stopping engine");
            registry.set_ready(&id, false);
            process.signal(Signal::SIGTERM);
            if timeout(grace, process.leader_exited()).await.is_err() {
                tracing::warn!(instance = id, ?grace, "engine did not exit after SIGTERM, sending SIGKILL");
            }
        }
        // Also kills the remaining processes of the group, such as workers.
        let mut end = task::spawn(reap(process, children));
        if by_itself {
            stop_receiver.stop.notified().await;
        }
        if timeout(KILL_TIMEOUT, &mut end).await.is_err() {
            let problem =
                format!("instance {id} still has processes {KILL_TIMEOUT:?} after SIGKILL, and stays listed");
            tracing::error!("{problem}");
            stop_receiver.outcome.send_replace(Some(Err(problem)));
            if let Err(error) = end.await {
                tracing::error!(instance = id, %error, "reaping the engine failed");
            }
        }
        // Before the id is released, because the next instance of this id has a log file of the same name.
        log.remove();
        let last = registry.remove(&id);
        tracing::info!(instance = id, "instance removed");
        stop_receiver.outcome.send_replace(Some(Ok(last)));
    }

    /// Probes readiness and trims the log.
    async fn watch_engine(&self) -> Infallible {
        let on_change = |ready| {
            tracing::info!(instance = self.id, ready, "readiness changed");
            self.registry.set_ready(&self.id, ready);
        };
        tokio::select! {
            never = self.probe.watch(on_change) => never,
            never = trim_log(Arc::clone(&self.log), self.log_cap) => never,
        }
    }
}

async fn trim_log(log: Arc<InstanceLog>, cap: u64) -> Infallible {
    let mut ticks = time::interval(LOG_TRIM_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        ticks.tick().await;
        let log = Arc::clone(&log);
        let result = task::spawn_blocking(move || log.trim(cap)).await.unwrap_or(Ok(()));
        if let Err(error) = &result
            && !failing
        {
            tracing::error!(%error, "trimming the log failed, so the log may exceed its cap");
        }
        failing = result.is_err();
    }
}

async fn reap(process: ProcessGroup, family: Arc<ChildProcesses>) {
    let pid = process.pid();
    process.kill_and_reap().await;
    family.forget(pid);
}

/// The exit code like Python's: the process's exit status, or the negative signal number. The process remains to be
/// reaped.
fn exit_code(pid: i32) -> Option<i32> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    match waitid(Id::Pid(Pid::from_raw(pid)), flags) {
        Ok(WaitStatus::Exited(_, code)) => Some(code),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(-(signal as i32)),
        other => {
            tracing::error!(pid, status = ?other, "exit status of the engine is unknown");
            None
        }
    }
}
