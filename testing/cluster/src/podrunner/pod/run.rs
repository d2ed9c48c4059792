//! Starts, probes and ends the processes of a Pod's containers.

use std::{collections::BTreeMap, fs::File, sync::Arc};

use k8s_openapi::{api::core::v1::LifecycleHandler, jiff::Timestamp};
use nix::sys::signal::Signal;
use rouse_net::process::ProcessGroup;
use tokio::{process::Command, sync::mpsc, time::Instant};

use super::{ContainerEventKind, PodWorker};
use crate::{
    podrunner::{
        container::{self, AbortingTask, ContainerExit, ContainerRole, ContainerRun, PodContainer, RunState},
        launch::{ContainerLaunch, ContainerStartError},
        probe::{self, HandlerAction, ProbeKind, ProbeVerdict},
        schedule,
    },
    resources::PART_MARK_ENV,
};

impl PodWorker {
    /// Starts the container's process. A failure becomes the container's state.
    pub(super) fn start_container(&mut self, index: usize) {
        let Some(spec) = self.containers.get(index).map(|container| container.spec.clone()) else { return };
        let next = self.containers.get(index).map_or(0, |container| container.runs);
        let spawned = self.spawn_process(index, next);
        let complain = |reason: &str, message: &str| {
            self.context.emit_warning(&self.pod, reason, &format!("container {}: {message}", spec.name));
        };
        match spawned {
            Ok((process, log)) => self.record_started(index, process, log),
            Err(refused) if refused.reason == "StartError" => {
                complain("Failed", &refused.message);
                let pauses = self.context.restart_backoff;
                let Some(container) = self.containers.get_mut(index) else { return };
                container.runs += 1;
                container.record_exit(
                    ContainerExit::unknown(128, refused.reason, refused.message),
                    pauses,
                    Instant::now(),
                );
            }
            Err(refused) => {
                complain("Failed", &refused.message);
                self.missing_config |= refused.reason == "CreateContainerConfigError";
                let Some(container) = self.containers.get_mut(index) else { return };
                container.set_waiting(refused.reason, refused.message);
                container.restart_at = Some(Instant::now() + super::RETRY_DELAY);
            }
        }
    }

    fn spawn_process(&self, index: usize, run: u32) -> Result<(ProcessGroup, File), ContainerStartError> {
        let start_error =
            |error: std::io::Error| ContainerStartError { reason: "StartError", message: error.to_string() };
        let Some(container) = self.containers.get(index) else {
            return Err(ContainerStartError {
                reason: "StartError",
                message: "no such container".to_owned(),
            });
        };
        let log = self.open_log(&container.spec.name, run).map_err(start_error)?;
        let launch = self.build_command(index, run, &log, |launch, log| launch.main_command(log))?;
        let (mut command, part) = launch;
        let child = command.spawn().map_err(|error| {
            let program = command.as_std().get_program().display();
            ContainerStartError { reason: "StartError", message: format!("exec {program}: {error}") }
        })?;
        Ok((ProcessGroup::from_child(child, format!("{PART_MARK_ENV}={part}")).map_err(start_error)?, log))
    }

    /// Builds a command of this container, with the value of its mark.
    fn build_command(
        &self,
        index: usize,
        run: u32,
        log: &File,
        make: impl Fn(&ContainerLaunch<'_>, &File) -> Result<Command, ContainerStartError>,
    ) -> Result<(Command, String), ContainerStartError> {
        let (Some(container), Some(prepared)) = (self.containers.get(index), &self.prepared) else {
            return Err(ContainerStartError {
                reason: "StartError",
                message: "the container's volumes do not exist".to_owned(),
            });
        };
        let part = self.context.part_mark(&self.uid, &container.spec.name, run);
        let image = container.spec.image.as_deref().and_then(|name| self.context.image(name));
        let devices = self.container_devices(index);
        let device_env = devices.keys().filter_map(|resource| self.device_env.get(resource)).flatten();
        let device_env = device_env.map(|(name, value)| (name.clone(), value.clone())).collect();
        let launch = ContainerLaunch {
            pod: &self.pod,
            container: &container.spec,
            image: image.as_ref(),
            prepared,
            devices: &devices,
            device_env: &device_env,
            pod_ip: self.ip,
            host_ip: self.node.address(),
            api_server: self.context.api_server(),
            mark: self.context.mark(),
            part_mark: part.clone(),
        };
        Ok((make(&launch, log)?, part))
    }

    /// Returns the part of the Pod's devices that this container requested. Init containers take theirs before the
    /// others.
    fn container_devices(&self, index: usize) -> BTreeMap<String, Vec<String>> {
        let requested_count = |container: &PodContainer, resource: &str| {
            let count = schedule::container_demand(&container.spec).get(resource).copied();
            count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
        };
        let Some(container) = self.containers.get(index) else { return BTreeMap::new() };
        let before = self.containers.iter().take(index).filter(|other| other.role != ContainerRole::Init);
        let before: Vec<_> = before.filter(|_| container.role != ContainerRole::Init).collect();
        let of = |(resource, ids): (&String, &Vec<String>)| {
            let skipped = before.iter().map(|other| requested_count(other, resource)).sum();
            let device_ids: Vec<_> =
                ids.iter().skip(skipped).take(requested_count(container, resource)).cloned().collect();
            (!device_ids.is_empty()).then(|| (resource.clone(), device_ids))
        };
        self.devices.iter().filter_map(of).collect()
    }

    fn record_started(&mut self, index: usize, process: ProcessGroup, log: File) {
        let Some(container) = self.containers.get_mut(index) else { return };
        container.runs += 1;
        let (run, since) = (container.runs, Timestamp::now());
        let (signals, received) = mpsc::channel(container::SIGNAL_QUEUE_LENGTH);
        let (began, probes) = (Instant::now(), Vec::new());
        container.begin(ContainerRun {
            started_at: since,
            started_instant: began,
            signals,
            probes,
            kill_at: None,
            kill_sent: false,
        });
        let event_tx = self.event_tx.clone();
        tokio::spawn(async move {
            let (code, signal) = container::supervise(process, received).await;
            let reason = if code == 0 { "Completed" } else { "Error" };
            let (message, since) = (String::new(), Some(since));
            let end = ContainerExit {
                code,
                signal,
                reason,
                message,
                started_at: since,
                finished_at: Timestamp::now(),
            };
            // The Pod's worker may have ended.
            event_tx.send((index, run, ContainerEventKind::Exited(end))).await.ok();
        });
        let kinds: &[ProbeKind] = if container.started {
            &[ProbeKind::Liveness, ProbeKind::Readiness]
        } else {
            &[ProbeKind::Startup]
        };
        for kind in kinds {
            self.start_probe(index, *kind, &log);
        }
    }

    /// Starts probing if the container has such a probe.
    fn start_probe(&mut self, index: usize, kind: ProbeKind, log: &File) {
        let Some(container) = self.containers.get(index) else { return };
        let Some(probe_spec) = kind.spec_of(&container.spec).cloned() else { return };
        let action = HandlerAction::from_probe(
            &probe_spec,
            self.ip,
            container.spec.ports.as_deref().unwrap_or_default(),
        );
        let (run, event_tx) = (container.runs, self.event_tx.clone());
        let hook_command = self.hook_command_factory(index, run, log, &action);
        let (verdict_tx, mut verdicts) = mpsc::channel::<ProbeVerdict>(1);
        let task = tokio::spawn(async move {
            let probing = probe::run_probe(kind, probe_spec, action, hook_command, verdict_tx);
            let forwarding = async {
                while let Some(verdict) = verdicts.recv().await {
                    event_tx.send((index, run, ContainerEventKind::Probed(verdict))).await.ok();
                }
            };
            tokio::join!(probing, forwarding);
        });
        if let Some(run) = self.containers.get_mut(index).and_then(|container| container.running_mut()) {
            run.probes.push(AbortingTask(task));
        }
    }

    /// Returns a factory for the command of a probe or hook. Its process belongs to the container.
    fn hook_command_factory(
        &self,
        index: usize,
        run: u32,
        log: &File,
        action: &HandlerAction,
    ) -> impl Fn() -> Result<Command, String> + Send + Sync + 'static {
        let command = match action {
            HandlerAction::Exec(words) => words.clone(),
            _ => Vec::new(),
        };
        let hook_command =
            self.build_command(index, run, log, |launch, log| launch.hook_command(&command, log));
        // Each run gets a new command, cloned from the first.
        let hook_command =
            hook_command.map(|(command, _)| Arc::new(command)).map_err(|refused| refused.message);
        move || hook_command.clone().map(|command| clone_command(&command))
    }

    pub(super) fn handle_verdict(&mut self, index: usize, (kind, outcome): ProbeVerdict) {
        let grace = self.grace();
        let Some(container) = self.containers.get_mut(index) else { return };
        let name = container.spec.name.clone();
        if let Err(message) = &outcome {
            let message = format!("container {name}: {} probe failed: {message}", kind.name());
            self.context.emit_warning(&self.pod, "Unhealthy", &message);
        }
        match (kind, outcome.is_ok()) {
            (ProbeKind::Readiness, passes) => container.readiness_passed = passes,
            (ProbeKind::Startup, true) => {
                container.started = true;
                let run = container.restarts();
                if let Ok(log) = self.open_log(&name, run) {
                    self.start_probe(index, ProbeKind::Liveness, &log);
                    self.start_probe(index, ProbeKind::Readiness, &log);
                }
            }
            (ProbeKind::Liveness, true) => {}
            // A terminating Pod is already ending its containers.
            (ProbeKind::Startup | ProbeKind::Liveness, false) if self.termination.is_some() => {}
            (ProbeKind::Startup | ProbeKind::Liveness, false) => {
                self.stop_container(index, Instant::now() + grace)
            }
        }
    }

    /// Runs the preStop hook, then sends SIGTERM; SIGKILL follows at the deadline. A repeated call can only bring the
    /// deadline forward.
    pub(super) fn stop_container(&mut self, index: usize, deadline: Instant) {
        let ip = self.ip;
        let Some(container) = self.containers.get_mut(index) else { return };
        let ports = container.spec.ports.clone().unwrap_or_default();
        let hook = container.spec.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.clone());
        let (name, run) = (container.spec.name.clone(), container.runs);
        let Some(running) = container.running_mut() else { return };
        if let Some(at) = running.kill_at {
            running.kill_at = Some(at.min(deadline));
            return;
        }
        running.kill_at = Some(deadline);
        let signals = running.signals.clone();
        let Some(action) = hook.map(|hook| hook_action(&hook, ip, &ports)) else {
            // A full queue means that a signal is already pending.
            signals.try_send(Signal::SIGTERM).ok();
            return;
        };
        let Ok(log) = self.open_log(&name, run.saturating_sub(1)) else { return };
        let beside = self.hook_command_factory(index, run, &log, &action);
        let (shared, pod) = (Arc::clone(&self.context), Arc::clone(&self.pod));
        tokio::spawn(async move {
            if let Err(message) = action.run(beside).await {
                shared.emit_warning(&pod, "FailedPreStopHook", &format!("container {name}: {message}"));
            }
            // The process may have ended meanwhile.
            signals.send(Signal::SIGTERM).await.ok();
        });
    }

    /// Kills processes past their deadline.
    pub(super) fn kill_overdue(&mut self) {
        let now = Instant::now();
        for container in &mut self.containers {
            let RunState::Running(run) = &mut container.state else { continue };
            if !run.kill_sent && run.kill_at.is_some_and(|at| at <= now) {
                run.kill_sent = true;
                run.signals.try_send(Signal::SIGKILL).ok();
            }
        }
    }
}

fn hook_action(
    hook: &LifecycleHandler,
    ip: std::net::Ipv4Addr,
    ports: &[k8s_openapi::api::core::v1::ContainerPort],
) -> HandlerAction {
    if let Some(http) = &hook.http_get {
        HandlerAction::http(http, ip, ports)
    } else if let Some(exec) = &hook.exec {
        HandlerAction::exec(exec)
    } else if let Some(sleep) = &hook.sleep {
        HandlerAction::Sleep(std::time::Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0)))
    } else {
        HandlerAction::Unsupported("this preStop hook")
    }
}

/// Clones a command's program, arguments, environment and folder.
fn clone_command(command: &Command) -> Command {
    let first = command.as_std();
    let mut next = Command::new(first.get_program());
    next.args(first.get_args()).env_clear().process_group(0);
    next.envs(first.get_envs().filter_map(|(key, value)| Some((key, value?))));
    if let Some(folder) = first.get_current_dir() {
        next.current_dir(folder);
    }
    next
}
