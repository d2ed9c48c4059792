//! One container of a Pod: its spec, its past exits, and its current process.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{
        Container as Spec, ContainerState, ContainerStateRunning, ContainerStateTerminated,
        ContainerStateWaiting, ContainerStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use rouse_net::process::ProcessGroup;
use tokio::{sync::mpsc, task::JoinHandle, time::Instant};

use super::probe::ProbeKind;

/// Backoff resets after a run longer than this many longest pauses, as in a kubelet.
const BACKOFF_RESET_FACTOR: u32 = 2;
/// A Pod's containers get few signals; one that does not fit is redundant.
pub(super) const SIGNAL_QUEUE_LENGTH: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContainerRole {
    /// Runs to completion before the next container starts.
    Init,
    /// Starts in the order of the init containers, then runs beside the others.
    Sidecar,
    Main,
}

/// Pauses before container restarts.
#[derive(Clone, Copy, Debug)]
pub struct RestartBackoff {
    /// The pause before the second restart; the first restart is immediate. It doubles with each restart.
    pub first: Duration,
    pub longest: Duration,
}

impl Default for RestartBackoff {
    /// The kubelet's pauses.
    fn default() -> Self {
        Self { first: Duration::from_secs(10), longest: Duration::from_secs(300) }
    }
}

pub(super) struct PodContainer {
    pub(super) spec: Spec,
    pub(super) role: ContainerRole,
    pub(super) state: RunState,
    pub(super) last_exit: Option<ContainerExit>,
    /// How often its process was started, and the number of the current run.
    pub(super) runs: u32,
    /// Result of the readiness probe, if there is one.
    pub(super) readiness_passed: bool,
    /// The startup probe passed, or there is none.
    pub(super) started: bool,
    backoff_count: u32,
    /// Earliest time of the next start.
    pub(super) restart_at: Option<Instant>,
}

pub(super) enum RunState {
    Waiting { reason: &'static str, message: String },
    Running(ContainerRun),
    Exited(ContainerExit),
}

/// A running process, as its Pod sees it.
pub(super) struct ContainerRun {
    pub(super) started_at: Timestamp,
    pub(super) started_instant: Instant,
    pub(super) signals: mpsc::Sender<Signal>,
    pub(super) probes: Vec<AbortingTask>,
    /// When to kill the process; `None` unless it was asked to end.
    pub(super) kill_at: Option<Instant>,
    /// SIGKILL was sent.
    pub(super) kill_sent: bool,
}

/// Aborts its task on drop.
pub(super) struct AbortingTask(pub(super) JoinHandle<()>);

impl Drop for AbortingTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContainerExit {
    pub(super) code: i32,
    pub(super) signal: Option<i32>,
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) started_at: Option<Timestamp>,
    pub(super) finished_at: Timestamp,
}

impl ContainerExit {
    /// The exit of a container that never ran, or whose outcome is unknown.
    pub(super) fn unknown(code: i32, reason: &'static str, message: String) -> Self {
        Self { code, signal: None, reason, message, started_at: None, finished_at: Timestamp::now() }
    }
}

impl PodContainer {
    pub(super) fn new(spec: Spec, role: ContainerRole) -> Self {
        let reason = if role == ContainerRole::Main || role == ContainerRole::Sidecar {
            "PodInitializing"
        } else {
            "ContainerCreating"
        };
        let state = RunState::Waiting { reason, message: String::new() };
        Self {
            spec,
            role,
            state,
            last_exit: None,
            runs: 0,
            readiness_passed: false,
            started: false,
            backoff_count: 0,
            restart_at: None,
        }
    }

    pub(super) fn running(&self) -> Option<&ContainerRun> {
        match &self.state {
            RunState::Running(run) => Some(run),
            _ => None,
        }
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut ContainerRun> {
        match &mut self.state {
            RunState::Running(run) => Some(run),
            _ => None,
        }
    }

    /// How its last run ended; `None` while a run is active.
    pub(super) fn last_exit(&self) -> Option<&ContainerExit> {
        match &self.state {
            RunState::Exited(end) => Some(end),
            RunState::Waiting { .. } => self.last_exit.as_ref(),
            RunState::Running(_) => None,
        }
    }

    /// Whether an ended container restarts.
    pub(super) fn should_restart(&self, policy: &str) -> bool {
        let failed = self.last_exit().is_none_or(|end| end.code != 0);
        match self.role {
            ContainerRole::Sidecar => true,
            ContainerRole::Init => failed && policy != "Never",
            ContainerRole::Main => policy == "Always" || (failed && policy == "OnFailure"),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        match self.role {
            ContainerRole::Init => matches!(&self.state, RunState::Exited(end) if end.code == 0),
            _ if self.running().is_none() || !self.started => false,
            _ => self.readiness_passed || ProbeKind::Readiness.spec_of(&self.spec).is_none(),
        }
    }

    /// Records the start of a run.
    pub(super) fn begin(&mut self, run: ContainerRun) {
        if let RunState::Exited(end) = &self.state {
            self.last_exit = Some(end.clone());
        }
        self.state = RunState::Running(run);
        self.started = ProbeKind::Startup.spec_of(&self.spec).is_none();
        self.readiness_passed = false;
        self.restart_at = None;
    }

    /// Records the end of a run and computes the pause before the next.
    pub(super) fn record_exit(&mut self, end: ContainerExit, pauses: RestartBackoff, now: Instant) {
        let ran = self.running().map(|run| now - run.started_instant);
        if ran.is_some_and(|ran| ran > pauses.longest * BACKOFF_RESET_FACTOR) {
            self.backoff_count = 0;
        }
        let doubled = pauses.first.saturating_mul(1 << self.backoff_count.saturating_sub(1).min(16));
        let pause = if self.backoff_count == 0 { Duration::ZERO } else { doubled.min(pauses.longest) };
        self.backoff_count += 1;
        self.restart_at = Some(now + pause);
        self.state = RunState::Exited(end);
        (self.started, self.readiness_passed) = (false, false);
    }

    /// Waits because its last run ended too soon.
    pub(super) fn set_backing_off(&mut self, pod: &str) {
        if let RunState::Exited(end) = &self.state {
            self.last_exit = Some(end.clone());
        }
        let message = format!("restarting failed container={} pod={pod}", self.spec.name);
        self.set_waiting("CrashLoopBackOff", message);
    }

    pub(super) fn set_waiting(&mut self, reason: &'static str, message: String) {
        self.state = RunState::Waiting { reason, message };
    }

    pub(super) fn restarts(&self) -> u32 {
        self.runs.saturating_sub(1)
    }

    /// The status as a kubelet reports it.
    pub(super) fn status(&self, uid: &str) -> ContainerStatus {
        let id = |run: u32| format!("podrunner://{uid}/{}/{run}", self.spec.name);
        let terminated = |end: &ContainerExit, run: u32| ContainerState {
            terminated: Some(ContainerStateTerminated {
                container_id: Some(id(run)),
                exit_code: end.code,
                signal: end.signal,
                reason: Some(end.reason.to_owned()),
                message: Some(end.message.clone()).filter(|message| !message.is_empty()),
                started_at: end.started_at.map(Time),
                finished_at: Some(Time(end.finished_at)),
            }),
            ..ContainerState::default()
        };
        let (state, last_run) = match &self.state {
            RunState::Waiting { reason, message } => {
                let waiting = ContainerStateWaiting {
                    reason: Some((*reason).to_owned()),
                    message: Some(message.clone()).filter(|message| !message.is_empty()),
                };
                (ContainerState { waiting: Some(waiting), ..ContainerState::default() }, self.runs)
            }
            RunState::Running(run) => {
                let running = ContainerStateRunning { started_at: Some(Time(run.started_at)) };
                (ContainerState { running: Some(running), ..ContainerState::default() }, self.runs - 1)
            }
            RunState::Exited(end) => (terminated(end, self.runs), self.runs.saturating_sub(1)),
        };
        let image = self.spec.image.clone().unwrap_or_default();
        ContainerStatus {
            name: self.spec.name.clone(),
            image_id: format!("podrunner://{image}"),
            image,
            container_id: (self.runs > 0).then(|| id(self.runs)),
            ready: self.is_ready(),
            started: Some(self.started && self.running().is_some()),
            restart_count: i32::try_from(self.restarts()).unwrap_or(i32::MAX),
            last_state: Some(
                self.last_exit.as_ref().map(|end| terminated(end, last_run)).unwrap_or_default(),
            ),
            state: Some(state),
            ..ContainerStatus::default()
        }
    }
}

/// Supervises a container's process until it and all its descendants have ended. Forwards signals to it.
///
/// SIGTERM goes to the first process only, like a container runtime's; the processes that it leaves behind are killed,
/// as they would be with the container. If all signal senders are dropped, everything is killed.
pub(super) async fn supervise(
    process: ProcessGroup,
    mut signals: mpsc::Receiver<Signal>,
) -> (i32, Option<i32>) {
    loop {
        tokio::select! {
            () = process.leader_exited() => break,
            signal = signals.recv() => match signal {
                None | Some(Signal::SIGKILL) => break,
                // The next iteration sees a process that has already ended.
                Some(signal) => {
                    signal::kill(Pid::from_raw(process.pid()), signal).ok();
                }
            },
        }
    }
    let status = process.kill_and_reap().await;
    use std::os::unix::process::ExitStatusExt as _;
    let signal = status.and_then(|status| status.signal());
    (status.and_then(|status| status.code()).unwrap_or_else(|| 128 + signal.unwrap_or(0)), signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i32) -> ContainerExit {
        ContainerExit {
            code,
            signal: None,
            reason: "Error",
            message: String::new(),
            started_at: None,
            finished_at: Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn the_first_restart_comes_at_once_and_then_pauses_double_up_to_the_longest() {
        let mut container = PodContainer::new(Spec::default(), ContainerRole::Main);
        let pauses = RestartBackoff { first: Duration::from_secs(10), longest: Duration::from_secs(35) };
        let now = Instant::now();
        let mut seen = Vec::new();
        for _ in 0..5 {
            container.record_exit(ended(1), pauses, now);
            seen.push((container.restart_at.unwrap() - now).as_secs());
        }
        assert_eq!(seen, [0, 10, 20, 35, 35]);
    }

    #[test]
    fn who_comes_back_is_up_to_role_policy_and_exit_code() {
        for (role, policy, after_success, after_failure) in [
            (ContainerRole::Main, "Always", true, true),
            (ContainerRole::Main, "OnFailure", false, true),
            (ContainerRole::Main, "Never", false, false),
            (ContainerRole::Sidecar, "Never", true, true),
            (ContainerRole::Init, "Always", false, true),
            (ContainerRole::Init, "Never", false, false),
        ] {
            let mut container = PodContainer::new(Spec::default(), role);
            container.state = RunState::Exited(ended(0));
            assert_eq!(container.should_restart(policy), after_success, "{role:?} {policy}");
            container.state = RunState::Exited(ended(3));
            assert_eq!(container.should_restart(policy), after_failure, "{role:?} {policy}");
        }
    }
}
