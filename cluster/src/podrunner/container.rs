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
use rouse::process::Process;
use tokio::{sync::mpsc, task::JoinHandle, time::Instant};

use super::probe::Kind as ProbeKind;

/// A container that has run longer than this begins its pauses anew, as in a kubelet: twice the longest pause.
const WELL: u32 = 2;
/// A pod's containers get few signals; one that finds no room is one too many.
pub(super) const SIGNALS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Runs to its end before the next begins.
    Init,
    /// Begins in line with those, and then runs beside the others.
    Sidecar,
    Main,
}

/// Pauses before a container is started again.
#[derive(Clone, Copy, Debug)]
pub struct Pauses {
    /// Before the second restart; the first comes at once. It doubles with each.
    pub first: Duration,
    pub longest: Duration,
}

impl Default for Pauses {
    /// A kubelet's.
    fn default() -> Self {
        Self { first: Duration::from_secs(10), longest: Duration::from_secs(300) }
    }
}

pub(super) struct Container {
    pub(super) spec: Spec,
    pub(super) role: Role,
    pub(super) state: State,
    pub(super) last: Option<End>,
    /// How often its process was started; the number of the run that counts.
    pub(super) runs: u32,
    /// Of the readiness probe, where there is one.
    pub(super) passes: bool,
    /// The startup probe passed, or there is none.
    pub(super) started: bool,
    pauses: u32,
    /// Not before then.
    pub(super) due: Option<Instant>,
}

pub(super) enum State {
    Waiting { reason: &'static str, message: String },
    Running(Run),
    Ended(End),
}

/// A process, as seen from its Pod.
pub(super) struct Run {
    pub(super) since: Timestamp,
    pub(super) began: Instant,
    pub(super) signals: mpsc::Sender<Signal>,
    pub(super) probes: Vec<Task>,
    /// When it is killed; `None` unless it was told to end.
    pub(super) killed_at: Option<Instant>,
    /// It was.
    pub(super) killed: bool,
}

/// A task that ends when this is dropped.
pub(super) struct Task(pub(super) JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) code: i32,
    pub(super) signal: Option<i32>,
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) since: Option<Timestamp>,
    pub(super) at: Timestamp,
}

impl End {
    /// Of a container that never ran, or of which nothing is known.
    pub(super) fn unknown(code: i32, reason: &'static str, message: String) -> Self {
        Self { code, signal: None, reason, message, since: None, at: Timestamp::now() }
    }
}

impl Container {
    pub(super) fn new(spec: Spec, role: Role) -> Self {
        let reason =
            if role == Role::Main || role == Role::Sidecar { "PodInitializing" } else { "ContainerCreating" };
        let state = State::Waiting { reason, message: String::new() };
        Self { spec, role, state, last: None, runs: 0, passes: false, started: false, pauses: 0, due: None }
    }

    pub(super) fn running(&self) -> Option<&Run> {
        match &self.state {
            State::Running(run) => Some(run),
            _ => None,
        }
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut Run> {
        match &mut self.state {
            State::Running(run) => Some(run),
            _ => None,
        }
    }

    /// How its last run ended, where none is under way.
    pub(super) fn end(&self) -> Option<&End> {
        match &self.state {
            State::Ended(end) => Some(end),
            State::Waiting { .. } => self.last.as_ref(),
            State::Running(_) => None,
        }
    }

    /// Whether a container that ended begins again.
    pub(super) fn comes_back(&self, policy: &str) -> bool {
        let failed = self.end().is_none_or(|end| end.code != 0);
        match self.role {
            Role::Sidecar => true,
            Role::Init => failed && policy != "Never",
            Role::Main => policy == "Always" || (failed && policy == "OnFailure"),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        match self.role {
            Role::Init => matches!(&self.state, State::Ended(end) if end.code == 0),
            _ if self.running().is_none() || !self.started => false,
            _ => self.passes || ProbeKind::Readiness.of(&self.spec).is_none(),
        }
    }

    /// A run begins.
    pub(super) fn begin(&mut self, run: Run) {
        if let State::Ended(end) = &self.state {
            self.last = Some(end.clone());
        }
        self.state = State::Running(run);
        self.started = ProbeKind::Startup.of(&self.spec).is_none();
        self.passes = false;
        self.due = None;
    }

    /// A run has ended. Says how long its successor has to wait.
    pub(super) fn ended(&mut self, end: End, pauses: Pauses, now: Instant) {
        let ran = self.running().map(|run| now - run.began);
        if ran.is_some_and(|ran| ran > pauses.longest * WELL) {
            self.pauses = 0;
        }
        let doubled = pauses.first.saturating_mul(1 << self.pauses.saturating_sub(1).min(16));
        let pause = if self.pauses == 0 { Duration::ZERO } else { doubled.min(pauses.longest) };
        self.pauses += 1;
        self.due = Some(now + pause);
        self.state = State::Ended(end);
        (self.started, self.passes) = (false, false);
    }

    /// It waits, since its last end was too soon before.
    pub(super) fn backs_off(&mut self, pod: &str) {
        if let State::Ended(end) = &self.state {
            self.last = Some(end.clone());
        }
        let message = format!("restarting failed container={} pod={pod}", self.spec.name);
        self.waits("CrashLoopBackOff", message);
    }

    pub(super) fn waits(&mut self, reason: &'static str, message: String) {
        self.state = State::Waiting { reason, message };
    }

    pub(super) fn restarts(&self) -> u32 {
        self.runs.saturating_sub(1)
    }

    /// As a kubelet reports it.
    pub(super) fn status(&self, uid: &str) -> ContainerStatus {
        let id = |run: u32| format!("podrunner://{uid}/{}/{run}", self.spec.name);
        let terminated = |end: &End, run: u32| ContainerState {
            terminated: Some(ContainerStateTerminated {
                container_id: Some(id(run)),
                exit_code: end.code,
                signal: end.signal,
                reason: Some(end.reason.to_owned()),
                message: Some(end.message.clone()).filter(|message| !message.is_empty()),
                started_at: end.since.map(Time),
                finished_at: Some(Time(end.at)),
            }),
            ..ContainerState::default()
        };
        let (state, last_run) = match &self.state {
            State::Waiting { reason, message } => {
                let waiting = ContainerStateWaiting {
                    reason: Some((*reason).to_owned()),
                    message: Some(message.clone()).filter(|message| !message.is_empty()),
                };
                (ContainerState { waiting: Some(waiting), ..ContainerState::default() }, self.runs)
            }
            State::Running(run) => {
                let running = ContainerStateRunning { started_at: Some(Time(run.since)) };
                (ContainerState { running: Some(running), ..ContainerState::default() }, self.runs - 1)
            }
            State::Ended(end) => (terminated(end, self.runs), self.runs.saturating_sub(1)),
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
            last_state: Some(self.last.as_ref().map(|end| terminated(end, last_run)).unwrap_or_default()),
            state: Some(state),
            ..ContainerStatus::default()
        }
    }
}

/// Watches over a container's process until it and all that it started are gone; passes signals on to it.
///
/// SIGTERM goes to the first process alone, as a container runtime sends it; what that leaves behind is killed, as it would be
/// with the container. So is everything when nobody is there any more to send signals.
pub(super) async fn watch_over(process: Process, mut signals: mpsc::Receiver<Signal>) -> (i32, Option<i32>) {
    loop {
        tokio::select! {
            () = process.exited() => break,
            signal = signals.recv() => match signal {
                None | Some(Signal::SIGKILL) => break,
                // One that is gone already is seen in the next turn.
                Some(signal) => {
                    signal::kill(Pid::from_raw(process.pid()), signal).ok();
                }
            },
        }
    }
    let status = process.end().await;
    use std::os::unix::process::ExitStatusExt as _;
    let signal = status.and_then(|status| status.signal());
    (status.and_then(|status| status.code()).unwrap_or_else(|| 128 + signal.unwrap_or(0)), signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i32) -> End {
        End {
            code,
            signal: None,
            reason: "Error",
            message: String::new(),
            since: None,
            at: Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn the_first_restart_comes_at_once_and_then_pauses_double_up_to_the_longest() {
        let mut container = Container::new(Spec::default(), Role::Main);
        let pauses = Pauses { first: Duration::from_secs(10), longest: Duration::from_secs(35) };
        let now = Instant::now();
        let mut seen = Vec::new();
        for _ in 0..5 {
            container.ended(ended(1), pauses, now);
            seen.push((container.due.unwrap() - now).as_secs());
        }
        assert_eq!(seen, [0, 10, 20, 35, 35]);
    }

    #[test]
    fn who_comes_back_is_up_to_role_policy_and_exit_code() {
        for (role, policy, after_success, after_failure) in [
            (Role::Main, "Always", true, true),
            (Role::Main, "OnFailure", false, true),
            (Role::Main, "Never", false, false),
            (Role::Sidecar, "Never", true, true),
            (Role::Init, "Always", false, true),
            (Role::Init, "Never", false, false),
        ] {
            let mut container = Container::new(Spec::default(), role);
            container.state = State::Ended(ended(0));
            assert_eq!(container.comes_back(policy), after_success, "{role:?} {policy}");
            container.state = State::Ended(ended(3));
            assert_eq!(container.comes_back(policy), after_failure, "{role:?} {policy}");
        }
    }
}
