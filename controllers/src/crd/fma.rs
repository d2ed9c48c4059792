//! The kinds of `fma.llm-d.ai/v1alpha1`, llm-d's Fast Model Actuation, so that the objects of an existing installation work.
//!
//! They are that project's, not ours: read here, and leniently. A field that is not known is passed over, one that its later
//! versions may leave out may be absent, and Pods stay JSON. The schemas ask for what that project's ask for, so that an object that
//! one API server takes another takes too. An object with errors is read all the same: methods such as
//! [`InferenceServerConfigSpec::problems`] describe its errors in the words of its status.

pub(crate) mod amount;
mod launcher;
mod population;
mod server;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};
use kube::CustomResourceExt as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::{
    launcher::{CONTAINER, LauncherConfig, LauncherConfigSpec, PodMetadata, PodTemplate},
    population::{
        CountForLauncher, EnhancedNodeSelector, LauncherPopulationPolicy, LauncherPopulationPolicySpec,
        ResourceRange,
    },
    server::{InferenceServerConfig, InferenceServerConfigSpec, ModelServerConfig},
};

/// Their API group.
pub const GROUP: &str = "fma.llm-d.ai";

/// The definitions of the three kinds, for a cluster that has none: an existing installation owns them.
#[must_use]
pub fn all() -> [CustomResourceDefinition; 3] {
    let mut all =
        super::tidied([InferenceServerConfig::crd(), LauncherConfig::crd(), LauncherPopulationPolicy::crd()]);
    super::schemas(&mut all).for_each(match_public_schema);
    all
}

/// The public definitions fill nothing in, and ask for a list of launchers that is read here as empty where there is none.
fn match_public_schema(schema: &mut JSONSchemaProps) {
    super::for_each_schema(schema, &mut |below: &mut JSONSchemaProps| below.default = None);
    let spec = schema.properties.as_mut().and_then(|properties| properties.get_mut("spec"));
    let launchers = "countForLauncher";
    if let Some(spec) =
        spec.filter(|spec| spec.properties.iter().flatten().any(|(name, _)| name == launchers))
    {
        spec.required.get_or_insert_default().push(launchers.to_owned());
    }
}

/// The definitions as YAML.
///
/// # Errors
/// As [`super::documents`].
pub fn documents() -> Result<Vec<super::CrdDocument>, serde_saphyr::ser::Error> {
    super::to_documents(&all())
}

/// Status of an object, as a controller reports it.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FmaStatus {
    /// Generation of the object that the controller saw last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Errors in that generation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

#[cfg(test)]
mod tests;
