//! Engines of a launcher: start requests, reported instances, ids and fingerprints.

use std::{collections::BTreeMap, sync::Arc};

use aws_lc_rs::digest;
use rouse::{
    model::AcceleratorId,
    pairing::ids::{EngineFingerprint, PairingEngineId, ProviderMode, accelerator_list},
    shell_words,
    units::Generation,
};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;

use crate::{
    crd::fma::{InferenceServerConfig, ModelServerConfig},
    label,
};

/// Annotations of an instance, as the public controllers write them.
const CONFIG: &str = "isc-name";
const PORT: &str = "inference-port";
/// Annotation of ours: the engine's generation.
const GENERATION: &str = "rouse.dev/generation";

/// Options of vLLM.
const MODEL: &str = "--model";
const SERVED: &str = "--served-model-name";

/// Request to a launcher to start an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InstanceRequest {
    /// Options in one text, to be split as a shell does.
    pub options: String,
    /// In the order in which the engine numbers them.
    pub gpu_uuids: Vec<AcceleratorId>,
    pub env_vars: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

/// An engine as its launcher reports it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LauncherInstance {
    #[serde(rename = "instance_id")]
    pub id: String,
    /// Revision of the instance's last event.
    #[serde(default)]
    pub revision: u64,
    /// Whether its process runs.
    #[serde(rename = "status", deserialize_with = "deserialize_running")]
    pub running: bool,
    /// Whether the engine answers and is awake; `None` if this launcher does not report it.
    #[serde(default)]
    pub ready: Option<bool>,
    #[serde(default)]
    pub options: String,
    #[serde(default)]
    pub gpu_uuids: Vec<AcceleratorId>,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

fn deserialize_running<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    String::deserialize(deserializer).map(|status| status == "running")
}

impl InstanceRequest {
    /// Builds the request for an engine of this configuration.
    ///
    /// `served` is the name that the requester uses for the engine. `port` must be free in the launcher's Pod.
    #[must_use]
    pub fn new(
        config: &InferenceServerConfig,
        served: Option<&str>,
        accelerators: &[AcceleratorId],
        port: u16,
    ) -> Self {
        let server = &config.spec.model_server_config;
        let name = config.metadata.name.clone().unwrap_or_default();
        let names = named(server, served).map_or_else(String::new, |name| {
            // The name that vLLM would use by default stays valid.
            let own =
                model(server).filter(|own| own != name).map(|own| format!(" {}", shell_words::quote(&own)));
            format!(" {SERVED} {}{}", shell_words::quote(name), own.unwrap_or_default())
        });
        Self {
            // vLLM takes the last of two ports in a command line.
            options: format!("{}{names} --port {port}", server.options).trim_start().to_owned(),
            gpu_uuids: accelerators.to_vec(),
            env_vars: server.env_vars.clone(),
            annotations: [(CONFIG, name), (PORT, port.to_string())]
                .map(|(key, value)| (key.to_owned(), value))
                .into(),
        }
    }
}

impl InstanceRequest {
    /// Builds the request for the engine of a server patch.
    #[must_use]
    pub fn patched(server: &ModelServerConfig, accelerators: &[AcceleratorId], port: u16) -> Self {
        Self {
            options: format!("{} --port {port}", server.options).trim_start().to_owned(),
            gpu_uuids: accelerators.to_vec(),
            env_vars: server.env_vars.clone(),
            annotations: [(PORT.to_owned(), port.to_string())].into(),
        }
    }

    /// Adds the engine's generation. The launcher reports it back, so late events of an earlier generation stay
    /// distinct.
    #[must_use]
    pub fn with_generation(mut self, generation: Generation) -> Self {
        self.annotations.insert(GENERATION.to_owned(), generation.0.to_string());
        self
    }
}

impl LauncherInstance {
    /// Returns the engine's generation, if we started it.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        self.annotations.get(GENERATION)?.parse().ok().map(Generation)
    }

    /// Returns the engine's port, as annotated at its start.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.annotations.get(PORT)?.parse().ok()
    }

    /// Returns the InferenceServerConfig that the engine was started from.
    #[must_use]
    pub fn config(&self) -> Option<&str> {
        self.annotations.get(CONFIG).map(String::as_str)
    }
}

/// Returns the identity of an engine: a hash of its options, its environment and its served name.
///
/// Routing labels and the port are not part of it, so a change of labels does not make another engine.
#[must_use]
pub fn fingerprint(server: &ModelServerConfig, served: Option<&str>) -> EngineFingerprint {
    let name = named(server, served).map_or(0, |name| hash64(name) & NAME_MASK);
    EngineFingerprint(unnamed(server) ^ name)
}

/// Returns the identity of a server patch's engine, which differs from those of InferenceServerConfigs.
#[must_use]
pub fn patched_fingerprint(server: &ModelServerConfig) -> EngineFingerprint {
    let patched = json!({"options": server.options, "env_vars": server.env_vars});
    EngineFingerprint(hash64(&json!({"patched": patched}).to_string()))
}

/// Whether an engine with this fingerprint, under any served name, comes from this configuration.
#[must_use]
pub fn matches_server(server: &ModelServerConfig, fingerprint: EngineFingerprint) -> bool {
    same_server(EngineFingerprint(unnamed(server)), fingerprint)
}

/// Whether two fingerprints differ in the served name at most.
pub(crate) const fn same_server(one: EngineFingerprint, other: EngineFingerprint) -> bool {
    (one.0 ^ other.0) & !NAME_MASK == 0
}

/// Bits of a fingerprint that distinguish the served names of one configuration's engines.
const NAME_MASK: u64 = (1 << 24) - 1;

fn unnamed(server: &ModelServerConfig) -> u64 {
    // The keys of a JSON object are sorted.
    hash64(&json!({"options": server.options, "env_vars": server.env_vars}).to_string())
}

/// Returns the name to set at the engine's start: the requested one, unless the options already set one.
fn named<'a>(server: &ModelServerConfig, served: Option<&'a str>) -> Option<&'a str> {
    served.filter(|_| !server.options.contains(SERVED))
}

/// Returns the name that vLLM uses if no option sets one.
fn model(server: &ModelServerConfig) -> Option<String> {
    let options = shell_words::split(&server.options).ok()?;
    let given = options.iter().rposition(|word| word == MODEL || word.starts_with(&format!("{MODEL}=")))?;
    match options.get(given)?.split_once('=') {
        Some((_, name)) => Some(name.to_owned()),
        None => options.get(given + 1).cloned(),
    }
}

/// Returns the first eight bytes of the text's SHA-256.
pub(super) fn hash64(text: &str) -> u64 {
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    hash.as_ref().iter().take(8).fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Returns the id under which a launcher holds this engine.
///
/// Each engine has one id, so no launcher starts it twice. The id fits into a path segment and a label value.
#[must_use]
pub fn instance_id(fingerprint: EngineFingerprint, accelerators: &[AcceleratorId]) -> String {
    format!("{:016x}-{}", fingerprint.0, label::value(&accelerator_list(accelerators)))
}

/// Returns the engine of an instance; `None` if its id does not match its contents, so it is not ours.
#[must_use]
pub fn engine_id(instance: &LauncherInstance) -> Option<PairingEngineId> {
    let hash = instance.id.split('-').next().and_then(|text| u64::from_str_radix(text, 16).ok());
    let mut accelerators = instance.gpu_uuids.clone();
    accelerators.sort_unstable();
    let accelerators: Arc<[AcceleratorId]> = accelerators.into();
    let engine =
        PairingEngineId { mode: ProviderMode::Launcher, accelerators, fingerprint: EngineFingerprint(hash?) };
    (instance_id(engine.fingerprint, &engine.accelerators) == instance.id).then_some(engine)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn config(server: Value) -> InferenceServerConfig {
        let object = json!({
            "apiVersion": "fma.llm-d.ai/v1alpha1",
            "kind": "InferenceServerConfig",
            "metadata": {"name": "qwen", "namespace": "chat"},
            "spec": {"launcherConfigName": "l", "modelServerConfig": server},
        });
        serde_json::from_value(object).unwrap()
    }

    fn shown(instance: Value) -> LauncherInstance {
        serde_json::from_value(instance).unwrap()
    }

    #[test]
    fn an_engine_is_asked_for_with_a_port_of_its_own() {
        let config = config(json!({"port": 8005, "options": "--model m --port 1", "env_vars": {"A": "1"}}));
        let wanted = InstanceRequest::new(&config, None, &["GPU-1".into(), "GPU-0".into()], 40_123);
        assert_eq!(
            serde_json::to_value(&wanted).unwrap(),
            json!({
                "options": "--model m --port 1 --port 40123",
                "gpu_uuids": ["GPU-1", "GPU-0"],
                "env_vars": {"A": "1"},
                "annotations": {"isc-name": "qwen", "inference-port": "40123"},
            })
        );
        assert_eq!(InstanceRequest::new(&self::config(json!({})), None, &[], 7).options, "--port 7");
    }

    #[test]
    fn an_engine_of_a_server_patch_has_no_configuration() {
        let server = config(json!({"options": "serve m", "env_vars": {"A": "1"}})).spec.model_server_config;
        assert_eq!(
            serde_json::to_value(InstanceRequest::patched(&server, &["GPU-1".into()], 7)).unwrap(),
            json!({
                "options": "serve m --port 7",
                "gpu_uuids": ["GPU-1"],
                "env_vars": {"A": "1"},
                "annotations": {"inference-port": "7"},
            })
        );
        assert_ne!(patched_fingerprint(&server), fingerprint(&server, None));
        let other = ModelServerConfig { env_vars: BTreeMap::new(), ..server.clone() };
        assert_ne!(patched_fingerprint(&other), patched_fingerprint(&server));
    }

    #[test]
    fn an_engine_is_called_as_it_is_asked_for_and_keeps_its_own_name() {
        for (options, started) in [
            ("--model /models/a", "--model /models/a --served-model-name 'a b' /models/a --port 7"),
            ("--model=m -x 1", "--model=m -x 1 --served-model-name 'a b' m --port 7"),
            ("--model 'a b'", "--model 'a b' --served-model-name 'a b' --port 7"),
            ("-x 1", "-x 1 --served-model-name 'a b' --port 7"),
            ("--model m --served-model-name own", "--model m --served-model-name own --port 7"),
        ] {
            let config = config(json!({"options": options}));
            let server = &config.spec.model_server_config;
            assert_eq!(InstanceRequest::new(&config, Some("a b"), &[], 7).options, started);
            let [named, other, unnamed] =
                [Some("a b"), Some("c"), None].map(|name| fingerprint(server, name));
            let distinct = named != unnamed && named != other;
            assert_eq!(distinct, !options.contains("--served"), "{options}: {named} {other} {unnamed}");
            for one in [named, other, unnamed] {
                assert!(matches_server(server, one), "{options}");
            }
        }
        let other = config(json!({"options": "--model b"})).spec.model_server_config;
        assert!(!matches_server(
            &other,
            fingerprint(&config(json!({"options": "--model a"})).spec.model_server_config, None)
        ));
    }

    #[test]
    fn only_what_the_engine_is_changes_its_fingerprint() {
        let of = |server: Value| fingerprint(&config(server).spec.model_server_config, None);
        let base = of(json!({"options": "--model m", "env_vars": {"A": "1", "B": "2"}}));
        // Ids of running engines contain the fingerprint, so it must not change between versions.
        assert_eq!(base.to_string(), "90c9612bdd5a512c");
        let same = json!({
            "env_vars": {"B": "2", "A": "1"}, "options": "--model m", "port": 1,
            "labels": {"a": "b"}, "annotations": {"a": "b"},
        });
        assert_eq!(of(same), base);
        for other in [
            json!({"options": "--model n", "env_vars": {"A": "1", "B": "2"}}),
            json!({"options": "--model m", "env_vars": {"A": "2", "B": "1"}}),
            json!({"options": "--model m", "env_vars": {"A": "1"}}),
            json!({"options": "--model m"}),
            json!({}),
        ] {
            assert_ne!(of(other.clone()), base, "{other}");
        }
    }

    #[test]
    fn an_id_is_its_engines_alone_and_says_which_it_is() {
        let sets: [&[&str]; 4] = [&["GPU-0"], &["GPU-1"], &["GPU-0", "GPU-1"], &["GPU-0+GPU-1", "x"]];
        let mut ids = std::collections::BTreeSet::new();
        for fingerprint in [EngineFingerprint(0), EngineFingerprint(7), EngineFingerprint(u64::MAX)] {
            for set in sets {
                let set: Vec<AcceleratorId> = set.iter().map(|id| AcceleratorId::from(*id)).collect();
                let id = instance_id(fingerprint, &set);
                assert!(id.len() <= 63 && !id.starts_with('-') && !id.ends_with('-'), "{id}");
                assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'), "{id}");
                // A launcher may have been given another order.
                let uuids: Vec<_> = set.iter().rev().collect();
                let instance = shown(json!({"instance_id": id, "status": "running", "gpu_uuids": uuids}));
                let engine = engine_id(&instance).unwrap();
                assert_eq!(
                    (engine.fingerprint, &*engine.accelerators, engine.mode),
                    (fingerprint, &*set, ProviderMode::Launcher)
                );
                let other = LauncherInstance { gpu_uuids: vec!["GPU-9".into()], ..instance };
                assert_eq!(self::engine_id(&other), None);
                assert!(ids.insert(id));
            }
        }
        for foreign in ["", "a", "zz-00", "I_gx2fHk3i", "0000000000000007"] {
            let instance = shown(json!({"instance_id": foreign, "status": "running"}));
            assert_eq!(engine_id(&instance), None, "{foreign}");
        }
    }

    #[test]
    fn what_a_launcher_shows_is_read_whoever_made_it() {
        let public = shown(json!({
            "status": "stopped", "instance_id": "Iabci", "revision": 4, "options": "--model m",
            "annotations": {"isc-name": "qwen", "inference-port": "8005"},
        }));
        assert_eq!((public.running, public.ready, public.revision), (false, None, 4));
        assert_eq!((public.port(), public.config()), (Some(8005), Some("qwen")));
        let ours = shown(json!({"status": "running", "instance_id": "a", "ready": true, "new": {}}));
        assert_eq!((ours.running, ours.ready, ours.port(), ours.config()), (true, Some(true), None, None));
    }
}
