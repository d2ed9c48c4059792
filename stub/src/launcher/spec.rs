//! An instance's spec: the validated body of a create request, kept as sent.
//!
//! Objects keep their key order, because responses show them like the public launcher.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

use super::rejection::{LauncherRejection, ValidationProblem};

/// The annotation in which our controller sends the engine's generation.
const GENERATION_ANNOTATION: &str = "rouse.dev/generation";

/// Name-value pairs in insertion order. A repeated name replaces the value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OrderedPairs<T = String>(Vec<(String, T)>);

/// A request to run an engine, and the part of an instance that its creator chose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct InstanceSpec {
    pub(crate) options: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu_uuids: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) env_vars: Option<OrderedPairs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) annotations: Option<OrderedPairs>,
}

impl InstanceSpec {
    /// Parses a body. Unknown fields are ignored, and `null` equals an absent field; `options` must be a string.
    ///
    /// # Errors
    /// All problems of the body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, LauncherRejection> {
        if body.is_empty() {
            return Err(ValidationProblem::new("missing", &["body"], "Field required", Value::Null).into());
        }
        let body: &RawValue = serde_json::from_slice(body).map_err(|error| {
            let input = Value::Object(serde_json::Map::new());
            LauncherRejection::from(ValidationProblem::new(
                "json_invalid",
                &["body"],
                format!("JSON decode error: {error}"),
                input,
            ))
        })?;
        let Ok(fields) = serde_json::from_str::<OrderedPairs<Box<RawValue>>>(body.get()) else {
            let msg = "Input should be a valid dictionary";
            return Err(ValidationProblem::new("model_attributes_type", &["body"], msg, value(body)).into());
        };
        let mut problems = Vec::new();
        let options = match fields.get("options") {
            Some(raw) => parse_string(raw, &["body", "options"], &mut problems),
            None => {
                problems.push(ValidationProblem::new(
                    "missing",
                    &["body", "options"],
                    "Field required",
                    value(body),
                ));
                None
            }
        };
        let given = |name| fields.get(name).filter(|raw| raw.get() != "null");
        let gpu_uuids = given("gpu_uuids").and_then(|raw| parse_uuids(raw, &mut problems));
        let env_vars = given("env_vars").and_then(|raw| parse_pairs(raw, "env_vars", &mut problems));
        let annotations = given("annotations").and_then(|raw| parse_pairs(raw, "annotations", &mut problems));
        match options {
            Some(options) if problems.is_empty() => Ok(Self { options, gpu_uuids, env_vars, annotations }),
            _ => Err(LauncherRejection::Invalid(problems)),
        }
    }

    /// The engine's generation, if the caller sent one.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.annotations.as_ref()?.get(GENERATION_ANNOTATION)?.parse().ok()
    }

    /// Limits the engine to these accelerators and overrides its environment.
    pub(crate) fn set_visible_devices(&mut self, accelerators: String) {
        self.env_vars.get_or_insert_default().set("CUDA_VISIBLE_DEVICES".to_owned(), accelerators);
    }
}

fn value(raw: &RawValue) -> Value {
    serde_json::from_str(raw.get()).unwrap_or_default()
}

fn parse_string(raw: &RawValue, loc: &[&str], problems: &mut Vec<ValidationProblem>) -> Option<String> {
    let text = serde_json::from_str(raw.get()).ok();
    if text.is_none() {
        problems.push(ValidationProblem::new(
            "string_type",
            loc,
            "Input should be a valid string",
            value(raw),
        ));
    }
    text
}

fn parse_uuids(raw: &RawValue, problems: &mut Vec<ValidationProblem>) -> Option<Vec<String>> {
    let loc = ["body", "gpu_uuids"];
    let Ok(items) = serde_json::from_str::<Vec<Box<RawValue>>>(raw.get()) else {
        problems.push(ValidationProblem::new("list_type", &loc, "Input should be a valid list", value(raw)));
        return None;
    };
    let mut uuids = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let before = problems.len();
        uuids.extend(parse_string(item, &loc, problems));
        // A position in a list is a number.
        problems.iter_mut().skip(before).for_each(|problem| problem.loc.push(at.into()));
    }
    Some(uuids)
}

fn parse_pairs(raw: &RawValue, name: &str, problems: &mut Vec<ValidationProblem>) -> Option<OrderedPairs> {
    let Ok(OrderedPairs(entries)) = serde_json::from_str::<OrderedPairs<Box<RawValue>>>(raw.get()) else {
        let msg = "Input should be a valid dictionary";
        problems.push(ValidationProblem::new("dict_type", &["body", name], msg, value(raw)));
        return None;
    };
    let text = |(key, raw): (String, Box<RawValue>)| {
        let text = parse_string(&raw, &["body", name, &key], problems);
        text.map(|text| (key, text))
    };
    Some(OrderedPairs(entries.into_iter().filter_map(text).collect()))
}

impl<T> OrderedPairs<T> {
    pub(crate) fn get(&self, name: &str) -> Option<&T> {
        self.0.iter().find_map(|(key, value)| (key == name).then_some(value))
    }

    pub(crate) fn set(&mut self, name: String, value: T) {
        match self.0.iter_mut().find(|(key, _)| *key == name) {
            Some((_, place)) => *place = value,
            None => self.0.push((name, value)),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }
}

impl<T: Serialize> Serialize for OrderedPairs<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OrderedPairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OrderedPairsVisitor<T>(OrderedPairs<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OrderedPairsVisitor<T> {
            type Value = OrderedPairs<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
                while let Some((name, value)) = map.next_entry()? {
                    self.0.set(name, value);
                }
                Ok(self.0)
            }
        }
        deserializer.deserialize_map(OrderedPairsVisitor(Self(Vec::new())))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(body: &str) -> Value {
        match InstanceSpec::parse(body.as_bytes()) {
            Err(LauncherRejection::Invalid(problems)) => json!(problems),
            other => panic!("{body}: {other:?}"),
        }
    }

    #[test]
    fn vllm_config_with_env_vars() {
        let body = r#"{"env_vars":{"KEY2":"2","KEY1":"1","KEY2":"3"},"options":"--model test --port 8000","gpu_uuids":["u1","u2"],"more":1}"#;
        let spec = InstanceSpec::parse(body.as_bytes()).unwrap();
        let shown = r#"{"options":"--model test --port 8000","gpu_uuids":["u1","u2"],"env_vars":{"KEY2":"3","KEY1":"1"}}"#;
        assert_eq!(serde_json::to_string(&spec).unwrap(), shown);
    }

    #[test]
    fn vllm_config_without_env_vars() {
        let spec =
            InstanceSpec::parse(br#"{"options":"--model test","gpu_uuids":null,"env_vars":null}"#).unwrap();
        assert_eq!((&spec.gpu_uuids, &spec.env_vars, &spec.annotations), (&None, &None, &None));
        assert_eq!(serde_json::to_string(&spec).unwrap(), r#"{"options":"--model test"}"#);
    }

    #[test]
    fn instance_uuid_translation_creates_env_vars_if_none() {
        let mut spec = InstanceSpec::default();
        spec.set_visible_devices("1,3".into());
        assert_eq!(serde_json::to_string(&spec.env_vars).unwrap(), r#"{"CUDA_VISIBLE_DEVICES":"1,3"}"#);
    }

    #[test]
    fn instance_uuid_translation_preserves_existing_env_vars() {
        let body = br#"{"options":"","env_vars":{"B":"b","CUDA_VISIBLE_DEVICES":"7","A":"123"}}"#;
        let mut spec = InstanceSpec::parse(body).unwrap();
        spec.set_visible_devices("0".into());
        let shown = serde_json::to_string(&spec.env_vars).unwrap();
        assert_eq!(shown, r#"{"B":"b","CUDA_VISIBLE_DEVICES":"0","A":"123"}"#);
    }

    #[test]
    fn everything_wrong_with_a_body_is_said_with_its_place() {
        assert_eq!(problems("")[0]["loc"], json!(["body"]));
        assert_eq!(problems("{")[0]["type"], "json_invalid");
        assert_eq!(problems("[]")[0]["type"], "model_attributes_type");
        let missing = problems(r#"{"gpu_uuids":[]}"#);
        assert_eq!(missing[0]["type"], "missing");
        assert_eq!(missing[0]["loc"], json!(["body", "options"]));
        assert_eq!(missing[0]["msg"], "Field required");
        let several =
            problems(r#"{"options":1,"gpu_uuids":["a",2],"env_vars":{"A":null,"B":"b"},"annotations":[]}"#);
        let places: Vec<&Value> = several.as_array().unwrap().iter().map(|problem| &problem["loc"]).collect();
        assert_eq!(
            json!(places),
            json!([
                ["body", "options"],
                ["body", "gpu_uuids", 1],
                ["body", "env_vars", "A"],
                ["body", "annotations"]
            ])
        );
    }
}
