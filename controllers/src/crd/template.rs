//! Pod templates.
//!
//! They stay JSON. The typed form knows the fields of one version of Kubernetes and loses all others on the way from an
//! object to a Deployment; its schema is hundreds of kilobytes, twice, where an API server stores a definition in one
//! entry of 1.5 MiB. The API server validates a template when a Deployment is created from it.
//!
//! A template is kept as shared text: few of thousands are ever parsed, and a tree of maps takes six times the memory.

use std::{borrow::Cow, sync::Arc};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// A PodTemplateSpec, or a part of one, as the object has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTemplateJson(Arc<str>);

impl PodTemplateJson {
    /// Parses the template.
    #[must_use]
    pub fn value(&self) -> Map<String, Value> {
        // The text was serialized from a map.
        serde_json::from_str(&self.0).unwrap_or_default()
    }

    /// The JSON text, with the keys in the API server's order.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The Pods' containers; empty if the template has another shape.
    #[must_use]
    pub fn containers(&self) -> Vec<Map<String, Value>> {
        let mut value = self.value();
        let list = value.get_mut("spec").and_then(|spec| spec.get_mut("containers")).map(Value::take);
        let Some(Value::Array(list)) = list else { return Vec::new() };
        let map = |container| match container {
            Value::Object(container) => Some(container),
            _ => None,
        };
        list.into_iter().filter_map(map).collect()
    }
}

impl From<Map<String, Value>> for PodTemplateJson {
    fn from(map: Map<String, Value>) -> Self {
        Self(Value::Object(map).to_string().into())
    }
}

impl Default for PodTemplateJson {
    fn default() -> Self {
        Map::new().into()
    }
}

impl Serialize for PodTemplateJson {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PodTemplateJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::from)
    }
}

impl JsonSchema for PodTemplateJson {
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

/// Schema of a whole template: the fields whose absence would only fail when Pods are created.
pub(super) fn whole(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "required": ["spec"],
        "properties": {"spec": pods(generator)},
    })
}

/// Schema of a template's `spec`.
pub(super) fn pods(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
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
    })
}
