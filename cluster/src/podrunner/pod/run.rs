//! Of a Pod's worker: the processes of its containers, begun, probed and ended.

use std::{collections::BTreeMap, fs::File, sync::Arc};

use k8s_openapi::{api::core::v1::LifecycleHandler, jiff::Timestamp};
use nix::sys::signal::Signal;
use rouse::process::Process;
use tokio::{process::Command, sync::mpsc, time::Instant};

use super::{Happening, Worker};
use crate::{
    ground::PART,
    podrunner::{
        container::{self, Container, End, Role, Run, State, Task},
        launch::{Launch, Refused},
        probe::{self, Action, Kind, Verdict},
        schedule,
    },
};

impl Worker {
    /// Starts the container's process. What prevents it is the container's state.
    pub(super) fn begin(&mut self, place: usize) {
        let Some(spec) = self.containers.get(place).map(|container| container.spec.clone()) else { return };
        let next = self.containers.get(place).map_or(0, |container| container.runs);
        let made = self.process(place, next);
        let complain = |reason: &str, message: &str| {
            self.shared.complain(&self.pod, reason, &format!("container {}: {message}", spec.name));
        };
        match made {
            Ok((process, log)) => self.begun(place, process, log),
            Err(refused) if refused.reason == "StartError" => {
                complain("Failed", &refused.message);
                let pauses = self.shared.pauses;
                let Some(container) = self.containers.get_mut(place) else { return };
                container.runs += 1;
                container.ended(End::unknown(128, refused.reason, refused.message), pauses, Instant::now());
            }
            Err(refused) => {
                complain("Failed", &refused.message);
                self.lacking |= refused.reason == "CreateContainerConfigError";
                let Some(container) = self.containers.get_mut(place) else { return };
                container.waits(refused.reason, refused.message);
                container.due = Some(Instant::now() + super::AGAIN);
            }
        }
    }

    fn process(&self, place: usize, run: u32) -> Result<(Process, File), Refused> {
        let said = |error: std::io::Error| Refused { reason: "StartError", message: error.to_string() };
        let Some(container) = self.containers.get(place) else {
            return Err(Refused { reason: "StartError", message: "no such container".to_owned() });
        };
        let log = self.log(&container.spec.name, run).map_err(said)?;
        let launch = self.launch(place, run, &log, |launch, log| launch.main(log))?;
        let (mut command, part) = launch;
        let child = command.spawn().map_err(|error| {
            let program = command.as_std().get_program().display();
            Refused { reason: "StartError", message: format!("exec {program}: {error}") }
        })?;
        Ok((Process::ours(child, format!("{PART}={part}")).map_err(said)?, log))
    }

    /// Makes a command of this container, with the value of its mark.
    fn launch(
        &self,
        place: usize,
        run: u32,
        log: &File,
        make: impl Fn(&Launch<'_>, &File) -> Result<Command, Refused>,
    ) -> Result<(Command, String), Refused> {
        let (Some(container), Some(prepared)) = (self.containers.get(place), &self.prepared) else {
            return Err(Refused { reason: "StartError", message: "its volumes are not there".to_owned() });
        };
        let part = self.shared.part(&self.uid, &container.spec.name, run);
        let image = container.spec.image.as_deref().and_then(|name| self.shared.image(name));
        let launch = Launch {
            pod: &self.pod,
            container: &container.spec,
            image: image.as_ref(),
            prepared,
            devices: &self.share(place),
            pod_ip: self.ip,
            host_ip: self.node.address(),
            api_server: self.shared.api_server(),
            mark: self.shared.mark(),
            part: part.clone(),
        };
        Ok((make(&launch, log)?, part))
    }

    /// Of the Pod's devices those that this container asked for. Init containers have theirs before the others.
    fn share(&self, place: usize) -> BTreeMap<String, Vec<String>> {
        let asked = |container: &Container, resource: &str| {
            let count = schedule::of_container(&container.spec).get(resource).copied();
            count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
        };
        let Some(container) = self.containers.get(place) else { return BTreeMap::new() };
        let before = self.containers.iter().take(place).filter(|other| other.role != Role::Init);
        let before: Vec<_> = before.filter(|_| container.role != Role::Init).collect();
        let of = |(resource, ids): (&String, &Vec<String>)| {
            let skipped = before.iter().map(|other| asked(other, resource)).sum();
            let own: Vec<_> = ids.iter().skip(skipped).take(asked(container, resource)).cloned().collect();
            (!own.is_empty()).then(|| (resource.clone(), own))
        };
        self.devices.iter().filter_map(of).collect()
    }

    fn begun(&mut self, place: usize, process: Process, log: File) {
        let Some(container) = self.containers.get_mut(place) else { return };
        container.runs += 1;
        let (run, since) = (container.runs, Timestamp::now());
        let (signals, received) = mpsc::channel(container::SIGNALS);
        let (began, probes) = (Instant::now(), Vec::new());
        container.begin(Run { since, began, signals, probes, killed_at: None, killed: false });
        let happens = self.happens.clone();
        tokio::spawn(async move {
            let (code, signal) = container::watch_over(process, received).await;
            let reason = if code == 0 { "Completed" } else { "Error" };
            let (message, since) = (String::new(), Some(since));
            let end = End { code, signal, reason, message, since, at: Timestamp::now() };
            // Nobody hears it when the Pod's worker is gone.
            happens.send((place, run, Happening::Exited(end))).await.ok();
        });
        let kinds: &[Kind] =
            if container.started { &[Kind::Liveness, Kind::Readiness] } else { &[Kind::Startup] };
        for kind in kinds {
            self.probe(place, *kind, &log);
        }
    }

    /// Begins to ask, where there is such a probe.
    fn probe(&mut self, place: usize, kind: Kind, log: &File) {
        let Some(container) = self.containers.get(place) else { return };
        let Some(asked) = kind.of(&container.spec).cloned() else { return };
        let action = Action::of_probe(&asked, self.ip, container.spec.ports.as_deref().unwrap_or_default());
        let (run, happens) = (container.runs, self.happens.clone());
        let beside = self.beside(place, run, log, &action);
        let (told, mut verdicts) = mpsc::channel::<Verdict>(1);
        let task = tokio::spawn(async move {
            let asking = probe::keep_asking(kind, asked, action, beside, told);
            let telling = async {
                while let Some(verdict) = verdicts.recv().await {
                    happens.send((place, run, Happening::Probed(verdict))).await.ok();
                }
            };
            tokio::join!(asking, telling);
        });
        if let Some(run) = self.containers.get_mut(place).and_then(|container| container.running_mut()) {
            run.probes.push(Task(task));
        }
    }

    /// What makes the command of a probe or hook that is one; its process is the container's.
    fn beside(
        &self,
        place: usize,
        run: u32,
        log: &File,
        action: &Action,
    ) -> impl Fn() -> Result<Command, String> + Send + Sync + 'static {
        let words = match action {
            Action::Exec(words) => words.clone(),
            _ => Vec::new(),
        };
        let made = self.launch(place, run, log, |launch, log| launch.beside(&words, log));
        // A command is made for each time it is run, of what the first one was.
        let made = made.map(|(command, _)| Arc::new(command)).map_err(|refused| refused.message);
        move || made.clone().map(|command| again(&command))
    }

    pub(super) fn probed(&mut self, place: usize, (kind, outcome): Verdict) {
        let grace = self.grace();
        let Some(container) = self.containers.get_mut(place) else { return };
        let name = container.spec.name.clone();
        if let Err(message) = &outcome {
            let message = format!("container {name}: {} probe failed: {message}", kind.name());
            self.shared.complain(&self.pod, "Unhealthy", &message);
        }
        match (kind, outcome.is_ok()) {
            (Kind::Readiness, passes) => container.passes = passes,
            (Kind::Startup, true) => {
                container.started = true;
                let run = container.restarts();
                if let Ok(log) = self.log(&name, run) {
                    self.probe(place, Kind::Liveness, &log);
                    self.probe(place, Kind::Readiness, &log);
                }
            }
            (Kind::Liveness, true) => {}
            // A Pod that ends already is left to that.
            (Kind::Startup | Kind::Liveness, false) if self.ending.is_some() => {}
            (Kind::Startup | Kind::Liveness, false) => self.tell_to_end(place, Instant::now() + grace),
        }
    }

    /// Runs the container's last hook, then sends SIGTERM; SIGKILL comes at the deadline. Once told, it is only told to be quicker.
    pub(super) fn tell_to_end(&mut self, place: usize, deadline: Instant) {
        let ip = self.ip;
        let Some(container) = self.containers.get_mut(place) else { return };
        let ports = container.spec.ports.clone().unwrap_or_default();
        let hook = container.spec.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.clone());
        let (name, run) = (container.spec.name.clone(), container.runs);
        let Some(running) = container.running_mut() else { return };
        if let Some(at) = running.killed_at {
            running.killed_at = Some(at.min(deadline));
            return;
        }
        running.killed_at = Some(deadline);
        let signals = running.signals.clone();
        let Some(action) = hook.map(|hook| action_of(&hook, ip, &ports)) else {
            // No room for one more means that it has been told already.
            signals.try_send(Signal::SIGTERM).ok();
            return;
        };
        let Ok(log) = self.log(&name, run.saturating_sub(1)) else { return };
        let beside = self.beside(place, run, &log, &action);
        let (shared, pod) = (Arc::clone(&self.shared), Arc::clone(&self.pod));
        tokio::spawn(async move {
            if let Err(message) = action.once(beside).await {
                shared.complain(&pod, "FailedPreStopHook", &format!("container {name}: {message}"));
            }
            // One that has gone meanwhile takes no signal.
            signals.send(Signal::SIGTERM).await.ok();
        });
    }

    /// Kills what was told to end and has not by its deadline.
    pub(super) fn kill_overdue(&mut self) {
        let now = Instant::now();
        for container in &mut self.containers {
            let State::Running(run) = &mut container.state else { continue };
            if !run.killed && run.killed_at.is_some_and(|at| at <= now) {
                run.killed = true;
                run.signals.try_send(Signal::SIGKILL).ok();
            }
        }
    }
}

fn action_of(
    hook: &LifecycleHandler,
    ip: std::net::Ipv4Addr,
    ports: &[k8s_openapi::api::core::v1::ContainerPort],
) -> Action {
    if let Some(http) = &hook.http_get {
        Action::http(http, ip, ports)
    } else if let Some(exec) = &hook.exec {
        Action::exec(exec)
    } else if let Some(sleep) = &hook.sleep {
        Action::Sleep(std::time::Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0)))
    } else {
        Action::Unsupported("this preStop hook")
    }
}

/// The same program, arguments, environment and folder once more.
fn again(command: &Command) -> Command {
    let first = command.as_std();
    let mut next = Command::new(first.get_program());
    next.args(first.get_args()).env_clear().process_group(0);
    next.envs(first.get_envs().filter_map(|(key, value)| Some((key, value?))));
    if let Some(folder) = first.get_current_dir() {
        next.current_dir(folder);
    }
    next
}
