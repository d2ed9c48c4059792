//! Pod templates.
//!
//! They stay JSON. The typed form knows the fields of one version of Kubernetes and loses all others on the way from an
//! object to a Deployment; its schema is hundreds of kilobytes, twice, where an API server stores a definition in one
//! entry of 1.5 MiB. Whether a template is a good one, the API server says when a Deployment is made of it.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A PodTemplateSpec, or a part of one, as the object has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Template(pub Map<String, Value>);

impl Template {
    /// The containers of its Pods; none where it is not of that shape.
    pub fn containers(&self) -> impl Iterator<Item = &Map<String, Value>> {
        let spec = self.0.get("spec").and_then(Value::as_object);
        let list = spec.and_then(|spec| spec.get("containers")).and_then(Value::as_array);
        list.into_iter().flatten().filter_map(Value::as_object)
    }
}

impl JsonSchema for Template {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Template".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
    }
}

/// Of a whole template, what would go wrong only much later without it.
pub(super) fn whole(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "required": ["spec"],
        "properties": {
            "spec": {
                "type": "object",
                "description": "The Pods' spec, as in a Deployment. Every field is passed on as it is.",
                "x-kubernetes-preserve-unknown-fields": true,
                "required": ["containers"],
                "properties": {
                    "containers": {
                        "type": "array",
                        "description": "The engine's container and its helpers.",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "x-kubernetes-preserve-unknown-fields": true,
                            "required": ["name"],
                            "properties": {
                                "name": {"type": "string", "description": "The container's name."},
                            },
                        },
                    },
                },
            },
        },
    })
}
