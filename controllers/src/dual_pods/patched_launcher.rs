//! Runs the engine of a server patch in a launcher that is made from the same patch.
//!
//! The patched Pod is split in two. What belongs to one process (command, arguments, plain variables) becomes an engine
//! of the launcher, and the rest (image, volumes, resources) is the launcher's own Pod. Requesters whose rest is the
//! same share a launcher.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod};
use rouse::{
    pairing::ids::{EngineFingerprint, NodeName},
    shell_words,
    units::Bytes,
};
use rouse_config::{has_lora_by_command, kv_cache_by_command};
use serde_json::{Map, Value};

use super::{keys, launcher_engines, provider};
use crate::{
    crd::{PodTemplateJson, fma::ModelServerConfig},
    platform::launcher::{
        self,
        pod::{COMPONENT, LauncherRevision},
    },
    workload::MANAGED,
};

/// Path of the launcher's program in the engine's image.
const PROGRAM: &str = "/rouse-stub";
/// Variable with the address that the launcher listens on.
const POD_IP: &str = "POD_IP";
const PORT_FLAG: &str = "--port";
const SHELLS: [&str; 5] = ["ash", "bash", "dash", "sh", "zsh"];

/// The two parts of a patched Pod: the engine and its launcher.
#[derive(Clone, Debug, PartialEq)]
pub struct PatchedLauncher {
    /// How the launcher starts the engine.
    pub server: ModelServerConfig,
    pub fingerprint: EngineFingerprint,
    /// Pod template of the launcher.
    pub template: PodTemplateJson,
    pub revision: LauncherRevision,
    /// Bytes on each accelerator, if the command sets them.
    pub kv_cache: Option<Bytes>,
    /// Whether the command loads LoRA adapters, which level 2 loses.
    pub adapters: bool,
}

/// An error that the user must correct. The user sees this text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Patch(#[from] provider::Error),
    #[error(
        "the engine's command is a script for {0}, to which a launcher cannot add the engine's port: name the \
         engine's program and its arguments in the server patch, or set the annotation {key} to sleep",
        key = keys::MODE
    )]
    Script(String),
}

impl PatchedLauncher {
    /// Reads the engine and the launcher that a requester on this node asks for.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn of(requester: &Pod, node: &NodeName) -> Result<Self, Error> {
        let mut pod = provider::patched_pod(requester, node)?;
        let labels = routing(pod.metadata.labels.take());
        let annotations = routing(pod.metadata.annotations.take());
        let spec = pod.spec.as_mut().ok_or(provider::Error::NoContainer)?;
        let container = spec.containers.iter_mut().find(|container| container.name == keys::CONTAINER);
        let container = container.ok_or(provider::Error::NoContainer)?;
        let EngineCommand { program, options } = EngineCommand::take(container)?;
        let env_vars = take_variables(container);
        make_launcher(container, program.as_deref());
        let quoted: Vec<String> = options.iter().map(|word| shell_words::quote(word)).collect();
        let options_text = quoted.join(" ");
        let server = ModelServerConfig { port: None, options: options_text, env_vars, labels, annotations };
        let spec = serde_json::to_value(&*spec).map_err(|error| provider::Error::NoPod(error.to_string()))?;
        let template: PodTemplateJson =
            Map::from_iter([("metadata".to_owned(), Value::Object(Map::new())), ("spec".to_owned(), spec)])
                .into();
        Ok(Self {
            fingerprint: launcher::patched_fingerprint(&server),
            revision: LauncherRevision::of_patch(
                requester.metadata.namespace.as_deref().unwrap_or_default(),
                &template,
            ),
            kv_cache: kv_cache_by_command(&options),
            adapters: has_lora_by_command(&options),
            server,
            template,
        })
    }
}

/// An engine's command line, without its port: the launcher gives each engine another.
struct EngineCommand {
    /// `None` if the image defines the program.
    program: Option<String>,
    options: Vec<String>,
}

impl EngineCommand {
    /// Takes the command line out of the engine's container.
    fn take(container: &mut Container) -> Result<Self, Error> {
        let mut command = container.command.take().unwrap_or_default().into_iter();
        let program = command.next();
        let words = command.chain(container.args.take().unwrap_or_default());
        let options = without_port(words);
        let name = program.as_deref().and_then(|program| program.rsplit('/').next());
        if let Some(shell) = name.filter(|name| SHELLS.contains(name))
            && options
                .iter()
                .take_while(|option| option.starts_with('-'))
                .any(|option| is_script_flag(option))
        {
            return Err(Error::Script(shell.to_owned()));
        }
        Ok(Self { program, options })
    }
}

fn without_port(mut words: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if word == PORT_FLAG {
            drop(words.next());
        } else if word.strip_prefix(PORT_FLAG).is_none_or(|rest| !rest.starts_with('=')) {
            kept.push(word);
        }
    }
    kept
}

/// Whether this is a shell's flag `-c`, alone or among others.
fn is_script_flag(option: &str) -> bool {
    !option.starts_with("--") && option.contains('c')
}

/// Takes the variables out of the container whose values the patch states.
///
/// The others stay, and engines inherit them from the launcher. A `$` may refer to another variable, which kubelets
/// resolve by the order of the list, so then all stay.
fn take_variables(container: &mut Container) -> BTreeMap<String, String> {
    let all = container.env.take().unwrap_or_default();
    if all.iter().any(|env| env.value.as_ref().is_some_and(|value| value.contains('$'))) {
        container.env = Some(all);
        return BTreeMap::new();
    }
    let (kept, stated): (Vec<EnvVar>, Vec<EnvVar>) =
        all.into_iter().partition(|env| env.value_from.is_some());
    container.env = Some(kept);
    stated.into_iter().map(|env| (env.name, env.value.unwrap_or_default())).collect()
}

/// Turns the engine's container into the launcher's. [`launcher::pod`] adds its probes.
fn make_launcher(container: &mut Container, program: Option<&str>) {
    let port = launcher::PORT;
    let mut command = vec![
        PROGRAM.to_owned(),
        "launcher".to_owned(),
        format!("--host=$({POD_IP})"),
        format!("--port={port}"),
        "--expand-variables".to_owned(),
    ];
    command.extend(program.map(|program| format!("--command={}", shell_words::quote(program))));
    container.command = Some(command);
    let env = container.env.get_or_insert_default();
    if env.iter().all(|known| known.name != POD_IP) {
        let field =
            ObjectFieldSelector { field_path: "status.podIP".to_owned(), ..ObjectFieldSelector::default() };
        let source = EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() };
        env.push(EnvVar { name: POD_IP.to_owned(), value_from: Some(source), ..EnvVar::default() });
    }
    // These concern the one engine that the container would have run.
    (container.ports, container.lifecycle) = (None, None);
    (container.readiness_probe, container.liveness_probe, container.startup_probe) = (None, None, None);
}

/// Keeps labels or annotations that route requests to the engine, without those that identify the launcher's Pod.
fn routing(all: Option<BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let identifies = |key: &str| {
        keys::is_reserved(key) || launcher_engines::is_engine_key(key) || [COMPONENT, MANAGED].contains(&key)
    };
    all.into_iter().flatten().filter(|(key, _)| !identifies(key)).collect()
}

#[cfg(test)]
mod tests;
