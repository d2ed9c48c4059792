//! One container of a Pod: what it is, what it was, and the process it is now.

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

/// A container that has run longer than this begins its pauses anew, as in a kubelet: twice the longest pause.
const BACKOFF_RESET_FACTOR: u32 = 2;
/// A pod's containers get few signals; one that finds no room is one too many.
pub(super) const SIGNAL_QUEUE_LENGTH: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContainerRole {
    /// Runs to its end before the next begins.
    Init,
    /// Begins in line with those, and then runs beside the others.
    Sidecar,
    Main,
}

/// Pauses before a container is started again.
#[derive(Clone, Copy, Debug)]
pub struct RestartBackoff {
    /// Before the second restart; the first comes at once. It doubles with each.
    pub first: Duration,
    pub longest: Duration,
}

impl Default for RestartBackoff {
    /// A kubelet's.
    fn default() -> Self {
        Self { first: Duration::from_secs(10), longest: Duration::from_secs(300) }
    }
}

pub(super) struct PodContainer {
    pub(super) spec: Spec,
    pub(super) role: ContainerRole,
    pub(super) state: RunState,
    pub(super) last_exit: Option<ContainerExit>,
    /// How often its process was started; the number of the run that counts.
    pub(super) runs: u32,
    /// Of the readiness probe, where there is one.
    pub(super) readiness_passed: bool,
    /// The startup probe passed, or there is none.
    pub(super) started: bool,
    backoff_count: u32,
    /// Not before then.
    pub(super) restart_at: Option<Instant>,
}

pub(super) enum RunState {
    Waiting { reason: &'static str, message: String },
    Running(ContainerRun),
    Exited(ContainerExit),
}

/// A process, as seen from its Pod.
pub(super) struct ContainerRun {
    pub(super) started_at: Timestamp,
    pub(super) started_instant: Instant,
    pub(super) signals: mpsc::Sender<Signal>,
    pub(super) probes: Vec<AbortingTask>,
    /// When it is killed; `None` unless it was told to end.
    pub(super) kill_at: Option<Instant>,
    /// It was.
    pub(super) kill_sent: bool,
}

/// A task that ends when this is dropped.
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
    /// Of a container that never ran, or of which nothing is known.
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

    /// How its last run ended, where none is under way.
    pub(super) fn last_exit(&self) -> Option<&ContainerExit> {
        match &self.state {
            RunState::Exited(end) => Some(end),
            RunState::Waiting { .. } => self.last_exit.as_ref(),
            RunState::Running(_) => None,
        }
    }

    /// Whether a container that ended begins again.
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

    /// A run begins.
    pub(super) fn begin(&mut self, run: ContainerRun) {
        if let RunState::Exited(end) = &self.state {
            self.last_exit = Some(end.clone());
        }
        self.state = RunState::Running(run);
        self.started = ProbeKind::Startup.spec_of(&self.spec).is_none();
        self.readiness_passed = false;
        self.restart_at = None;
    }

    /// A run has ended. Says how long its successor has to wait.
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

    /// It waits, since its last end was too soon before.
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

    /// As a kubelet reports it.
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

/// Watches over a container's process until it and all that it started are gone; passes signals on to it.
///
/// SIGTERM goes to the first process alone, as a container runtime sends it; what that leaves behind is killed, as it would be
/// with the container. So is everything when nobody is there any more to send signals.
pub(super) async fn supervise(
    process: ProcessGroup,
    mut signals: mpsc::Receiver<Signal>,
) -> (i32, Option<i32>) {
    loop {
        tokio::select! {
            () = process.leader_exited() => break,
            signal = signals.recv() => match signal {
                None | Some(Signal::SIGKILL) => break,
                // One that is gone already is seen in the next turn.
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
