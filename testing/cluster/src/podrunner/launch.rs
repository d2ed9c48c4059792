//! Turns a container's description into a process of this machine.
//!
//! There are no images and no separate file systems. An image's name stands for a program of this machine; without one
//! the command runs as given. A mounted volume's real folder replaces the mount path in the command, the arguments and
//! the environment, which is how programs learn paths. The environment starts empty, as in a container, except for
//! `PATH`. `POD_IP` is always set, because a program that binds to all addresses would conflict with its neighbours.

use std::{
    collections::BTreeMap,
    fs::File,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
};

use k8s_openapi::api::core::v1::{Container, EnvVarSource, ObjectFieldSelector, Pod};
use kube::ResourceExt as _;
use tokio::process::Command;

use super::volume::PreparedPod;
use crate::resources::{CLUSTER_MARK_ENV, PART_MARK_ENV};

/// Why a container cannot start; the reason is a kubelet's status reason.
#[derive(Debug)]
pub(super) struct ContainerStartError {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

fn start_error(reason: &'static str, message: String) -> ContainerStartError {
    ContainerStartError { reason, message }
}

/// The program behind an image's name.
#[derive(Clone, Debug)]
pub struct PodImage {
    program: PathBuf,
    names: Vec<String>,
}

impl PodImage {
    /// A program for containers without a command, or with a command of its file name.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), names: Vec::new() }
    }

    /// Adds another name of the program in container commands, such as `/proxy`.
    #[must_use]
    pub fn known_as(mut self, name: &str) -> Self {
        self.names.push(name.to_owned());
        self
    }

    fn matches(&self, word: &str) -> bool {
        self.names.iter().any(|name| name == word)
            || Path::new(word).file_name().is_some_and(|file| Some(file) == self.program.file_name())
    }
}

/// Inputs for a container's process.
pub(super) struct ContainerLaunch<'a> {
    pub(super) pod: &'a Pod,
    pub(super) container: &'a Container,
    pub(super) image: Option<&'a PodImage>,
    pub(super) prepared: &'a PreparedPod,
    /// Device ids by resource.
    pub(super) devices: &'a BTreeMap<String, Vec<String>>,
    /// Variables that device plugins set.
    pub(super) device_env: &'a BTreeMap<String, String>,
    pub(super) pod_ip: Ipv4Addr,
    pub(super) host_ip: Ipv4Addr,
    pub(super) api_server: SocketAddr,
    /// Values of the cluster's marks.
    pub(super) mark: String,
    pub(super) part_mark: String,
}

impl ContainerLaunch<'_> {
    /// The command of the container's process; its output goes to this log.
    pub(super) fn main_command(&self, log: &File) -> Result<Command, ContainerStartError> {
        let environment = self.environment()?;
        let container = self.container;
        let mut argv: Vec<_> = container.command.iter().chain(&container.args).flatten().cloned().collect();
        if container.command.as_ref().is_none_or(Vec::is_empty) {
            let image = self.image.ok_or_else(|| {
                let image = container.image.as_deref().unwrap_or_default();
                start_error(
                    "ErrImagePull",
                    format!("podrunner knows no image {image:?}, and there is no command"),
                )
            })?;
            argv.insert(0, image.program.display().to_string());
        }
        self.command(&argv, &environment, log)
    }

    /// A command beside the process: a probe or a preStop hook.
    pub(super) fn hook_command(&self, argv: &[String], log: &File) -> Result<Command, ContainerStartError> {
        self.command(argv, &self.environment()?, log)
    }

    fn command(
        &self,
        argv: &[String],
        env: &BTreeMap<String, String>,
        log: &File,
    ) -> Result<Command, ContainerStartError> {
        let argv: Vec<_> = argv.iter().map(|arg| self.resolve_paths(&expand(arg, env))).collect();
        let (program, args) = argv
            .split_first()
            .ok_or_else(|| start_error("CreateContainerConfigError", "the command is empty".to_owned()))?;
        let program = match self.image {
            Some(image) if image.matches(program) => image.program.as_os_str().to_owned(),
            _ => program.into(),
        };
        let copy = || log.try_clone().map_err(|error| start_error("RunContainerError", error.to_string()));
        let folder = self
            .container
            .working_dir
            .as_deref()
            .map_or_else(|| self.prepared.folder().to_owned(), |folder| self.resolve_paths(folder).into());
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .envs(env)
            .env(CLUSTER_MARK_ENV, &self.mark)
            .env(PART_MARK_ENV, &self.part_mark)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(copy()?)
            .stderr(copy()?)
            .process_group(0);
        Ok(command)
    }

    fn environment(&self) -> Result<BTreeMap<String, String>, ContainerStartError> {
        let mut env = self.base_environment();
        for source in self.container.env_from.iter().flatten() {
            let prefix = source.prefix.as_deref().unwrap_or_default();
            let missing = |message| start_error("CreateContainerConfigError", message);
            for (key, value) in self.prepared.env_from(source).map_err(missing)? {
                env.insert(format!("{prefix}{key}"), value);
            }
        }
        for variable in self.container.env.iter().flatten() {
            let value = match (&variable.value, &variable.value_from) {
                (Some(value), _) => Some(expand(value, &env)),
                (None, Some(source)) => self.value_from(source)?,
                (None, None) => Some(String::new()),
            };
            if let Some(value) = value {
                env.insert(variable.name.clone(), self.resolve_paths(&value));
            }
        }
        Ok(env)
    }

    /// The environment before the Pod's own variables.
    fn base_environment(&self) -> BTreeMap<String, String> {
        let mut env = BTreeMap::from([
            ("HOSTNAME".to_owned(), self.pod.name_any()),
            ("POD_IP".to_owned(), self.pod_ip.to_string()),
            ("KUBERNETES_SERVICE_HOST".to_owned(), self.api_server.ip().to_string()),
            ("KUBERNETES_SERVICE_PORT".to_owned(), self.api_server.port().to_string()),
        ]);
        if let Ok(path) = std::env::var("PATH") {
            env.insert("PATH".to_owned(), path);
        }
        // Containers have their token at a fixed path. Processes do not, so `KUBECONFIG` points every client to the
        // credentials.
        if let Some(kubeconfig) = self.prepared.kubeconfig() {
            env.insert("KUBECONFIG".to_owned(), kubeconfig.display().to_string());
        }
        // As NVIDIA's device plugin sets it.
        if let Some(ids) = self.devices.get("nvidia.com/gpu") {
            env.insert("NVIDIA_VISIBLE_DEVICES".to_owned(), ids.join(","));
        }
        env.extend(self.device_env.clone());
        env
    }

    fn value_from(&self, source: &EnvVarSource) -> Result<Option<String>, ContainerStartError> {
        if let Some(field) = &source.field_ref {
            return self.field(field).map(Some);
        }
        if source.resource_field_ref.is_some() {
            return Err(unsupported("resourceFieldRef"));
        }
        self.prepared.env_value(source).map_err(|missing| start_error("CreateContainerConfigError", missing))
    }

    fn field(&self, field: &ObjectFieldSelector) -> Result<String, ContainerStartError> {
        let spec = self.pod.spec.clone().unwrap_or_default();
        let value = match field.field_path.as_str() {
            "spec.nodeName" => spec.node_name.unwrap_or_default(),
            "spec.serviceAccountName" => spec.service_account_name.unwrap_or_default(),
            "status.hostIP" | "status.hostIPs" => self.host_ip.to_string(),
            "status.podIP" | "status.podIPs" => self.pod_ip.to_string(),
            path => metadata(self.pod, path).ok_or_else(|| unsupported(path))?,
        };
        Ok(value)
    }

    /// Replaces mount paths with real folders.
    fn resolve_paths(&self, text: &str) -> String {
        rewrite(text, &self.prepared.mounts(self.container))
    }
}

fn unsupported(what: &str) -> ContainerStartError {
    start_error("CreateContainerConfigError", format!("podrunner does not support {what}"))
}

/// Returns a metadata field as in the downward API: one label or annotation, or all of them, one a line.
pub(super) fn metadata(pod: &Pod, path: &str) -> Option<String> {
    let all = |map: &BTreeMap<String, String>| {
        let lines: Vec<_> = map.iter().map(|(key, value)| format!("{key}={value:?}")).collect();
        lines.join("\n")
    };
    let one = |map: &BTreeMap<String, String>, rest: &str| {
        let key = rest.strip_prefix("['")?.strip_suffix("']")?;
        Some(map.get(key).cloned().unwrap_or_default())
    };
    match path {
        "metadata.name" => Some(pod.name_any()),
        "metadata.namespace" => pod.namespace(),
        "metadata.uid" => pod.uid(),
        "metadata.labels" => Some(all(pod.labels())),
        "metadata.annotations" => Some(all(pod.annotations())),
        _ => path.strip_prefix("metadata.labels").and_then(|rest| one(pod.labels(), rest)).or_else(|| {
            path.strip_prefix("metadata.annotations").and_then(|rest| one(pod.annotations(), rest))
        }),
    }
}

/// Expands `$(NAME)` to the variable's value if it exists. `$$` is a literal `$`.
fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
            continue;
        }
        let reference = after.strip_prefix('(').and_then(|inside| inside.split_once(')'));
        match reference.and_then(|(name, end)| Some((env.get(name)?, end))) {
            Some((value, end)) => {
                out.push_str(value);
                rest = end;
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// Replaces each path of `mounts` in the text with its folder. A path matches as a whole or as the beginning of a
/// longer path.
fn rewrite(text: &str, mounts: &[(String, PathBuf)]) -> String {
    let part_of_a_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let (before, path) = rest.split_at(at);
        out.push_str(before);
        let begins = !out.chars().next_back().is_some_and(part_of_a_name);
        let found = mounts.iter().filter(|_| begins).find_map(|(mount, folder)| {
            let after = path.strip_prefix(mount.as_str())?;
            let ends = after.chars().next().is_none_or(|c| c == '/' || !part_of_a_name(c));
            ends.then_some((folder, after))
        });
        match found {
            Some((folder, after)) => {
                out.push_str(&folder.display().to_string());
                rest = after;
                // The rest belongs to this path.
                let end = rest.find(|c| !part_of_a_name(c)).unwrap_or(rest.len());
                let (tail, after) = rest.split_at(end);
                out.push_str(tail);
                rest = after;
            }
            None => {
                out.push('/');
                rest = path.strip_prefix('/').unwrap_or_default();
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_expanded_and_what_is_none_stays() {
        let env = BTreeMap::from([("A".to_owned(), "1".to_owned()), ("B".to_owned(), "$(A)".to_owned())]);
        for (text, expected) in [
            ("$(A)", "1"),
            ("x$(A)y$(B)z", "x1y$(A)z"),
            ("$(MISSING) $(A", "$(MISSING) $(A"),
            ("$$(A) $$$(A) $ $$", "$(A) $1 $ $"),
            ("sh $HOME ${A}", "sh $HOME ${A}"),
        ] {
            assert_eq!(expand(text, &env), expected, "{text}");
        }
    }

    #[test]
    fn mounted_paths_become_real_ones_and_others_stay() {
        let mounts = [
            ("/etc/rouse/deep".to_owned(), "/real/deep".into()),
            ("/etc/rouse".to_owned(), "/real/rouse".into()),
        ];
        for (text, expected) in [
            ("/etc/rouse", "/real/rouse"),
            ("--config=/etc/rouse/config.yaml", "--config=/real/rouse/config.yaml"),
            ("/etc/rouse/deep/x:/etc/rouse", "/real/deep/x:/real/rouse"),
            ("/etc/rouse-other /my/etc/rouse ./etc/rouse", "/etc/rouse-other /my/etc/rouse ./etc/rouse"),
            ("cat '/etc/rouse/a' > /tmp/b", "cat '/real/rouse/a' > /tmp/b"),
            ("http://etc/rouse", "http://etc/rouse"),
        ] {
            assert_eq!(rewrite(text, &mounts), expected, "{text}");
        }
    }
}
