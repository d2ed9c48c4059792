//! InferenceServerConfig: what an engine is started with, wherever its launcher is.

use std::collections::BTreeMap;

use kube::CustomResource;
use rouse::shell_words;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::FmaStatus;

/// Keys that controllers write themselves.
const RESERVED: [&str; 3] = ["dual-pods.llm-d.ai/", "kubernetes.io/", "k8s.io/"];

/// An engine that launchers start.
#[derive(CustomResource, JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "fma.llm-d.ai",
    version = "v1alpha1",
    kind = "InferenceServerConfig",
    namespaced,
    shortname = "isc",
    status = "FmaStatus",
    derive = "PartialEq",
    doc = "How an engine is started inside a launcher."
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServerConfigSpec {
    /// How the engine is started.
    pub model_server_config: ModelServerConfig,
    /// Name of the LauncherConfig, in the same namespace, whose launchers may start the engine.
    pub launcher_config_name: String,
}

/// How an engine is started.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelServerConfig {
    /// Port on which the engine listens, for controllers that give all engines of a configuration the same port. Rouse
    /// gives each engine its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(required, extend("minimum" = 1, "maximum" = 65_535))]
    pub port: Option<i32>,
    /// Options of the engine, split as a shell splits them.
    #[serde(default)]
    pub options: String,
    /// Environment variables of the engine.
    #[serde(default, rename = "env_vars", skip_serializing_if = "BTreeMap::is_empty")]
    pub env_vars: BTreeMap<String, String>,
    /// Labels that the engine's Pod has while the engine serves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations that the engine's Pod has while the engine serves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl InferenceServerConfigSpec {
    /// Why no engine can be started from it; nothing, when one can.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let config = &self.model_server_config;
        let mut problems = Vec::new();
        if self.launcher_config_name.is_empty() {
            problems.push(
                "launcherConfigName is empty: name the LauncherConfig whose launchers may start the engine"
                    .to_owned(),
            );
        }
        if let Some(port) = config.port.filter(|port| !(1..=65_535).contains(port)) {
            problems.push(format!("modelServerConfig.port: {port} is not between 1 and 65535"));
        }
        if let Err(error) = shell_words::split(&config.options) {
            problems.push(format!("modelServerConfig.options: {error}"));
        }
        if config.options.contains('\0') {
            problems.push("modelServerConfig.options contains a zero byte: remove it".to_owned());
        }
        for (name, value) in &config.env_vars {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                problems.push(format!("modelServerConfig.env_vars: {name:?} cannot be set for a process"));
            }
        }
        for (what, keys) in [("labels", &config.labels), ("annotations", &config.annotations)] {
            let reserved = |key: &&String| RESERVED.iter().any(|prefix| key.starts_with(prefix));
            for key in keys.keys().filter(reserved) {
                problems.push(format!(
                    "modelServerConfig.{what}: '{key}' is reserved for controllers: remove it"
                ));
            }
        }
        problems
    }
}
