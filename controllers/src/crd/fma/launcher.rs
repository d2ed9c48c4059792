//! LauncherConfig: the Pod that launchers are made from.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    super::template::{self, PodTemplateJson},
    FmaStatus,
};
use crate::workload::merge;

/// The container of a provider Pod, and of a requester Pod, that counts.
pub const CONTAINER: &str = "inference-server";

/// One kind of launcher.
#[derive(CustomResource, JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "fma.llm-d.ai",
    version = "v1alpha1",
    kind = "LauncherConfig",
    namespaced,
    shortname = "lcfg",
    status = "FmaStatus",
    derive = "PartialEq",
    doc = "The Pod template of launchers, and how many engines one launcher may have."
)]
#[serde(rename_all = "camelCase")]
pub struct LauncherConfigSpec {
    /// Pod template of the launchers.
    #[serde(default)]
    pub pod_template: PodTemplate,
    /// Maximum number of engines in one launcher, awake and asleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(required, extend("minimum" = 1))]
    pub max_instances: Option<i32>,
}

/// A Pod template, without a name.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodTemplate {
    /// Labels and annotations of the Pod.
    #[serde(default)]
    pub metadata: PodMetadata,
    /// The Pod's spec. Every field is passed on as it is.
    #[serde(default)]
    #[schemars(schema_with = "template::pods")]
    pub spec: PodTemplateJson,
}

/// Labels and annotations of a launcher's Pod.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodMetadata {
    /// Labels of the Pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the Pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl LauncherConfigSpec {
    /// Why no launcher can be made from it; nothing, when one can.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if let Some(most) = self.max_instances.filter(|most| *most < 1) {
            problems.push(format!(
                "maxInstances: a launcher with room for {most} starts no engine: set at least 1"
            ));
        }
        let spec = self.pod_template.spec.value();
        let containers = spec.get("containers").and_then(serde_json::Value::as_array);
        if !containers.is_some_and(|all| all.iter().any(|one| merge::is_named(one, CONTAINER))) {
            problems
                .push(format!("podTemplate.spec.containers: no container is named '{CONTAINER}': add it"));
        }
        problems
    }
}
