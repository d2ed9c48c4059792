//! Stays with one engine from its start until nothing of it is left.

use std::{convert::Infallible, sync::Arc, time::Duration};

use nix::{
    sys::{
        signal::Signal,
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use rouse::process::Process;
use tokio::{
    sync::{Notify, watch},
    task,
    time::{self, MissedTickBehavior, timeout},
};

use super::{
    family::Family,
    log::Log,
    ready::Probe,
    registry::{Control, Outcome, Registry},
};

/// How often a log's length is looked at. inotify could tell of each write instead, but its instances are few on a node
/// and everybody's, while this is one question to the file system.
const LOOK: Duration = Duration::from_secs(1);
/// A driver gives memory back before it lets a killed process go, which takes seconds; more than this is a fault.
const PATIENCE: Duration = Duration::from_secs(30);

/// One engine's.
pub(crate) struct Keeper {
    pub(crate) id: String,
    pub(crate) process: Process,
    pub(crate) probe: Probe,
    pub(crate) log: Arc<Log>,
    pub(crate) log_cap: u64,
    /// Between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    pub(crate) registry: Arc<Registry>,
    pub(crate) family: Arc<Family>,
    pub(crate) orders: Orders,
}

/// The keeper's end of its line to clients.
#[derive(Debug)]
pub(crate) struct Orders {
    stop: Arc<Notify>,
    outcome: watch::Sender<Option<Outcome>>,
}

/// Both ends of such a line.
pub(crate) fn line() -> (Control, Orders) {
    let stop = Arc::new(Notify::new());
    let (outcome, heard) = watch::channel(None);
    (Control { stop: Arc::clone(&stop), outcome: heard }, Orders { stop, outcome })
}

impl Control {
    /// Orders the stop, and waits until it is done. It goes on when nobody waits any more.
    pub(crate) async fn stop(mut self) -> Outcome {
        self.stop.notify_one();
        match self.outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or_else(|| Ok(String::new())),
            Err(_) => Err("its keeper has failed".to_owned()),
        }
    }
}

impl Keeper {
    /// To the engine's end, by itself or by order, and to the order to forget it.
    pub(crate) async fn keep(self) {
        let by_itself = tokio::select! {
            biased;
            () = self.process.exited() => true,
            () = self.orders.stop.notified() => false,
            never = self.attend() => match never {},
        };
        let Self { id, process, log, grace, registry, family, orders, .. } = self;
        if by_itself {
            let code = exit_code(process.pid());
            tracing::warn!(instance = id, code, "the engine has ended by itself");
            registry.stopped(&id, code);
        } else {
            tracing::info!(instance = id, pid = process.pid(), "stopping");
            registry.ready(&id, false);
            process.signal(Signal::SIGTERM);
            if timeout(grace, process.exited()).await.is_err() {
                tracing::warn!(instance = id, ?grace, "it did not end after SIGTERM: killing it");
            }
        }
        // Kills what is left of the group, workers too.
        let mut end = task::spawn(bury(process, family));
        if by_itself {
            orders.stop.notified().await;
        }
        if timeout(PATIENCE, &mut end).await.is_err() {
            let problem =
                format!("instance {id} still has processes {PATIENCE:?} after SIGKILL, and stays listed");
            tracing::error!("{problem}");
            orders.outcome.send_replace(Some(Err(problem)));
            if let Err(error) = end.await {
                tracing::error!(instance = id, %error, "its end is not known");
            }
        }
        // Before the id is free: the next of this name has a log of this name.
        log.remove();
        let last = registry.deleted(&id);
        tracing::info!(instance = id, "gone");
        orders.outcome.send_replace(Some(Ok(last)));
    }

    /// Asks whether it is ready, and keeps its log small.
    async fn attend(&self) -> Infallible {
        let tell = |ready| {
            tracing::info!(instance = self.id, ready, "readiness");
            self.registry.ready(&self.id, ready);
        };
        tokio::select! {
            never = self.probe.watch(tell) => never,
            never = trim(Arc::clone(&self.log), self.log_cap) => never,
        }
    }
}

async fn trim(log: Arc<Log>, cap: u64) -> Infallible {
    let mut look = time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        look.tick().await;
        let log = Arc::clone(&log);
        let result = task::spawn_blocking(move || log.trim(cap)).await.unwrap_or(Ok(()));
        if let Err(error) = &result
            && !failing
        {
            tracing::error!(%error, "a log cannot be kept within its cap");
        }
        failing = result.is_err();
    }
}

async fn bury(process: Process, family: Arc<Family>) {
    let pid = process.pid();
    process.end().await;
    family.forget(pid);
}

/// As Python would say it: what the process returned, or the signal that ended it, negative. The process stays for
/// whoever reaps it.
fn exit_code(pid: i32) -> Option<i32> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    match waitid(Id::Pid(Pid::from_raw(pid)), flags) {
        Ok(WaitStatus::Exited(_, code)) => Some(code),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(-(signal as i32)),
        other => {
            tracing::error!(pid, ?other, "how it ended is not known");
            None
        }
    }
}
