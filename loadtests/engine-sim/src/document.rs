//! Generates a JSON document that fits a schema.
//!
//! A model would output such a document under structured output or for a tool call. It is a function of (schema, key),
//! so the same request gets the same document.

use serde_json::{Map, Value, json};

use crate::content;

/// Deeper or recursive schemas end in null.
const MAX_SCHEMA_DEPTH: u32 = 8;

/// A document with every property of `schema`.
pub(crate) fn fit_schema(schema: &Value, key: u64) -> Value {
    let mut writer = DocumentWriter { root: schema, key, made: 0 };
    // Tool arguments and "any JSON" responses are objects, whatever the schema leaves open.
    let is_open =
        schema.as_object().is_none_or(|schema| !schema.contains_key("properties") && schema.len() < 2);
    if is_open { json!({"answer": writer.word()}) } else { writer.value(schema, MAX_SCHEMA_DEPTH) }
}

struct DocumentWriter<'a> {
    root: &'a Value,
    key: u64,
    /// Values made so far, so that no two are alike.
    made: u64,
}

impl DocumentWriter<'_> {
    fn value(&mut self, schema: &Value, depth: u32) -> Value {
        if depth == 0 {
            return Value::Null;
        }
        if let Some(path) = schema.get("$ref").and_then(Value::as_str) {
            let target = path.strip_prefix('#').and_then(|path| self.root.pointer(path)).cloned();
            return target.map_or(Value::Null, |target| self.value(&target, depth - 1));
        }
        if let Some(value) = schema.get("const").or_else(|| schema.pointer("/enum/0")) {
            return value.clone();
        }
        let one_of = ["anyOf", "oneOf", "allOf"].iter().find_map(|name| schema.get(name)?.get(0));
        if let Some(one) = one_of {
            return self.value(one, depth - 1);
        }
        let kind = schema.get("type");
        match kind.and_then(|kind| kind.as_str().or_else(|| kind.get(0)?.as_str())) {
            Some("string") => self.word().into(),
            Some("integer") => self.number(schema).into(),
            Some("number") => (self.number(schema) as f64 + 0.5).into(),
            Some("boolean") => self.next().is_multiple_of(2).into(),
            Some("array") => match schema.get("items") {
                Some(items) => vec![self.value(items, depth - 1), self.value(items, depth - 1)].into(),
                None => Value::Array(Vec::new()),
            },
            Some("null") => Value::Null,
            _ => self.object(schema, depth),
        }
    }

    fn object(&mut self, schema: &Value, depth: u32) -> Value {
        let properties = schema.get("properties").and_then(Value::as_object);
        let members = properties
            .into_iter()
            .flatten()
            .map(|(name, schema)| (name.clone(), self.value(schema, depth - 1)));
        Value::Object(members.collect::<Map<_, _>>())
    }

    fn word(&mut self) -> String {
        let number = self.next();
        content::token(self.key, number).trim().to_owned()
    }

    /// A number from the schema's minimum to at most 99 above it.
    fn number(&mut self, schema: &Value) -> i64 {
        let bound = |name: &str| schema.get(name).and_then(Value::as_i64);
        let least = bound("minimum").or_else(|| bound("exclusiveMinimum").map(|n| n + 1)).unwrap_or(0);
        let most =
            bound("maximum").or_else(|| bound("exclusiveMaximum").map(|n| n - 1)).unwrap_or(least + 99);
        let span = most.saturating_sub(least).clamp(0, 99) + 1;
        least + (content::hash(self.word().as_bytes()) % span.unsigned_abs()).cast_signed()
    }

    fn next(&mut self) -> u64 {
        self.made += 1;
        self.made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_property_is_there_and_of_its_type() {
        let schema = json!({
            "type": "object", "required": ["name"], "additionalProperties": false,
            "properties": {
                "name": {"type": "string"}, "age": {"type": "integer", "minimum": 5, "maximum": 6},
                "share": {"type": "number"}, "color": {"enum": ["red", "blue"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"anyOf": [{"$ref": "#/$defs/More"}, {"type": "null"}]},
            },
            "$defs": {"More": {"type": "object", "properties": {"on": {"type": "boolean"}, "more": {"$ref": "#/$defs/More"}}}},
        });
        let made = fit_schema(&schema, 7);
        assert_eq!(made, fit_schema(&schema, 7));
        assert_ne!(made, fit_schema(&schema, 8));
        assert!(made["name"].is_string() && made["share"].is_f64() && made["more"]["on"].is_boolean());
        assert!(matches!(made["age"].as_i64(), Some(5 | 6)), "{made}");
        assert_eq!(made["color"], "red");
        assert_eq!(made["tags"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn where_the_schema_leaves_all_open_it_is_an_object_still() {
        assert!(fit_schema(&json!({}), 1)["answer"].is_string());
        assert!(fit_schema(&Value::Null, 1)["answer"].is_string());
        assert_eq!(fit_schema(&json!({"type": "object", "properties": {}}), 1), json!({}));
    }
}
