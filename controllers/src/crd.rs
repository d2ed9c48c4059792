//! The kinds of `rouse.dev/v1alpha1`, as Rust types that generate their schemas.
//!
//! [`fma`] has the foreign kinds that Rouse reads.
//!
//! Two rules hold for all of them. An unset field is absent, never `null`: the schemas have no `nullable`, so an API
//! server drops a `null` in favour of the default or of nothing, and no validation rule sees one. A text that needs
//! parsing stays a text in these types ([`scalar`]): one object that slipped past its schema must not make a whole list
//! unreadable.

pub mod fma;
pub mod inference_model;
pub mod ledger;
pub mod node;
pub mod pool;
pub mod replica;
pub mod scalar;
pub mod template;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;
use serde_json::{Value, json};

pub use self::{
    inference_model::{InferenceModel, InferenceModelSpec, InferenceModelStatus},
    node::{AcceleratorNode, AcceleratorNodeSpec, AcceleratorNodeStatus},
    pool::{AcceleratorPool, AcceleratorPoolSpec, AcceleratorPoolStatus},
    replica::{GatewayReplica, GatewayReplicaSpec, GatewayReplicaStatus},
    scalar::{Quantity, Span, SpanOrNever},
    template::PodTemplateJson,
};

use super::condition::{ACCEPTED, READY};

/// API group of every kind here.
pub const GROUP: &str = "rouse.dev";
const HEADER: &str = "# Made of the gateway's types by `rouse-gateway crds`: a change belongs there.\n";

/// Returns the definitions of all four kinds, in print order.
#[must_use]
pub fn all() -> [CustomResourceDefinition; 4] {
    let mut all = tidied([
        InferenceModel::crd(),
        AcceleratorPool::crd(),
        AcceleratorNode::crd(),
        GatewayReplica::crd(),
    ]);
    if let Some(status) =
        schemas(&mut all).next().and_then(|model| model.properties.as_mut()?.get_mut("status"))
    {
        status.default = Some(JSON(default_model_status()));
    }
    all
}

/// Builds the default status of a model that no gateway has reported on.
///
/// No gateway may write objects outside its namespaces, so this default explains to their owners why nothing happens.
fn default_model_status() -> Value {
    let condition = |kind: &str| {
        json!({
            "type": kind, "status": "Unknown", "reason": "Pending", "lastTransitionTime": "1970-01-01T00:00:00Z",
            "message": "no gateway has looked at it: one has to run, with this namespace in its kubernetes.namespaces",
        })
    };
    json!({"conditions": [condition(ACCEPTED), condition(READY)]})
}

fn tidied<const N: usize>(mut all: [CustomResourceDefinition; N]) -> [CustomResourceDefinition; N] {
    schemas(&mut all).for_each(|schema| for_each_schema(schema, &mut tidy));
    all
}

/// Iterates over the schemas of all versions, in order.
fn schemas(all: &mut [CustomResourceDefinition]) -> impl Iterator<Item = &mut JSONSchemaProps> {
    let versions = all.iter_mut().flat_map(|crd| &mut crd.spec.versions);
    versions.filter_map(|version| version.schema.as_mut()?.open_api_v3_schema.as_mut())
}

/// One definition as a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrdDocument {
    /// File name, such as `inferencemodels.yaml`.
    pub file: String,
    pub text: String,
}

/// Renders the definitions as YAML.
///
/// # Errors
/// Only the YAML writer can fail, and it does not for these types.
pub fn documents() -> Result<Vec<CrdDocument>, serde_saphyr::ser::Error> {
    to_documents(&all())
}

fn to_documents(all: &[CustomResourceDefinition]) -> Result<Vec<CrdDocument>, serde_saphyr::ser::Error> {
    let document = |crd: &CustomResourceDefinition| {
        let text = format!("{HEADER}{}", serde_saphyr::to_string(crd)?);
        Ok(CrdDocument { file: format!("{}.yaml", crd.spec.names.plural), text })
    };
    all.iter().map(document).collect()
}

/// Removes generator output that an API server cannot use.
///
/// That is `nullable` (see the module), Rust-only number formats, which an API server warns about, and source line
/// breaks in descriptions.
fn tidy(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    schema.enum_.iter_mut().for_each(|values| values.retain(|value| !value.0.is_null()));
    if let Some(text) = &mut schema.description {
        *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    }
    if schema.format.as_deref().is_some_and(|format| format.starts_with("uint")) {
        schema.format = None;
    }
}

/// Applies `change` to a schema and all its subschemas.
fn for_each_schema(schema: &mut JSONSchemaProps, change: &mut impl FnMut(&mut JSONSchemaProps)) {
    change(schema);
    schema.properties.iter_mut().flatten().for_each(|(_, below)| for_each_schema(below, change));
    if let Some(JSONSchemaPropsOrBool::Schema(below)) = &mut schema.additional_properties {
        for_each_schema(below, change);
    }
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(below)) => for_each_schema(below, change),
        Some(JSONSchemaPropsOrArray::Schemas(list)) => {
            list.iter_mut().for_each(|below| for_each_schema(below, change))
        }
        None => {}
    }
}
