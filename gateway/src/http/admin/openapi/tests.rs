//! Compares the OpenAPI document with the code.

use std::collections::BTreeSet;

use rouse::{
    fault::{BlockingModel, WaitDetails},
    fleet::quote::WaitRange,
    units::{Bytes, Millis},
};
use serde_json::{Value, json};

use super::{DOCUMENT, PATH};
use crate::http::{
    admin::{
        ORDER_SUBRESOURCES, READ_SUBRESOURCES, fixed_routes,
        tests::{ask, start},
    },
    testing::{InProcessGateway, MODEL, RawHttpResponse},
};

fn document() -> Value {
    serde_json::from_str(DOCUMENT).unwrap()
}

/// Every documented operation, as `GET /path`.
fn documented() -> BTreeSet<String> {
    let document = document();
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.iter().flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().keys().filter(|key| *key != "parameters");
        methods.map(move |method| format!("{} {path}", method.to_uppercase()))
    });
    operations.collect()
}

#[test]
fn the_document_has_every_route_and_no_other() {
    let of_models = |method: &'static str, whats: &'static [&str]| {
        whats.iter().map(move |what| format!("{method} /admin/v1/models/{{model}}/{what}"))
    };
    let routes = fixed_routes().into_iter().map(|(path, _)| format!("GET {path}"));
    let routes = routes.chain(["POST /admin/v1/chat".to_owned()]);
    let routes =
        routes.chain(of_models("GET", &READ_SUBRESOURCES)).chain(of_models("POST", &ORDER_SUBRESOURCES));
    assert_eq!(documented(), routes.collect());
}

#[tokio::test]
async fn answers_of_every_operation_are_as_the_document_says() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let gateway = InProcessGateway::start(|_| {});
    let at = start(&gateway, Some(file.path().to_owned())).await;
    for line in documented() {
        // The streams of events have no end.
        if line.ends_with("/events") || line.ends_with("/live") {
            continue;
        }
        for model in [MODEL, "nobody"] {
            let asked = line.replace("{model}", model).replace("{id}", "1");
            assert_matches_schema(&line, &ask(at, &asked, "").await);
        }
    }
    for (line, asked) in [
        ("GET /admin/v1/operations/{id}", "GET /admin/v1/operations/3"),
        ("GET /admin/v1/operations/{id}", "GET /admin/v1/operations/99"),
        ("POST /admin/v1/models/{model}/sleep", "POST /admin/v1/models/org/m/sleep?level=9"),
        ("POST /admin/v1/models/{model}/sleep", "POST /admin/v1/models/org/m/sleep?level=1&level=2"),
        ("GET /admin/v1/models/{model}/logs", "GET /admin/v1/models/org/m/logs?follow=perhaps"),
        ("GET /admin/v1/models/{model}/logs", "GET /admin/v1/models/org/m/logs?replica=first"),
        ("GET /admin/v1/models/{model}/explain", "GET /admin/v1/models/org/m/explain?level=1&level=2"),
        ("POST /admin/v1/models/{model}/wake", "POST /admin/v1/models/org/m/wake?level=1&level=2"),
        ("POST /admin/v1/models/{model}/stop", "POST /admin/v1/models/org/m/stop?level=1&level=2"),
        ("POST /admin/v1/models/{model}/pin", "POST /admin/v1/models/org/m/pin?level=1&level=2"),
        ("POST /admin/v1/models/{model}/unpin", "POST /admin/v1/models/org/m/unpin?level=1&level=2"),
    ] {
        assert_matches_schema(line, &ask(at, asked, "").await);
    }
    let closed = InProcessGateway::start(|config| config.admin.token = Some("t".into()));
    let at = start(&closed, None).await;
    assert_matches_schema("GET /admin/v1/fleet", &ask(at, "GET /admin/v1/fleet", "").await);
    let served = ask(at, &format!("GET {PATH}"), "authorization: Bearer t\r\n").await;
    assert_eq!(served.body, DOCUMENT.as_bytes());
}

/// A waiting model with every field set: most of them are rare in a running gateway.
#[test]
fn the_schema_of_a_wait_has_each_of_its_fields_and_no_other() {
    // Without `..`, so that a new field does not compile until it is here.
    let wait = WaitDetails {
        waited_for: "holder holds the memory".to_owned(),
        named_models: ["holder".into()].into(),
        waited: Millis(1),
        position: 1,
        holders: vec![BlockingModel {
            model: "holder".into(),
            memory: Bytes(1),
            idle_for: Millis(1),
            leases: 1,
            pinned: true,
        }],
        unlisted_holders: 1,
        retry_after: Some(Millis(1)),
        expected_wait: Some(Box::new(WaitRange::exactly(Millis(1)))),
        // Only the refusal of a request has one. The admin API shows models that wait.
        expired_limit: None,
    };
    let document = document();
    let value = serde_json::to_value(&wait).unwrap();
    let schema = json!({"$ref": "#/components/schemas/Wait"});
    assert_eq!(check(&document, &schema, &value), Ok(()));
    for (schema, value) in [("Wait", &value), ("Holder", &value["holders"][0])] {
        let properties = document["components"]["schemas"][schema]["properties"].as_object().unwrap();
        let sent = value.as_object().unwrap();
        let names = |fields: &serde_json::Map<String, Value>| fields.keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(names(properties), names(sent), "{schema}");
    }
    let least = serde_json::to_value(WaitDetails::default()).unwrap();
    assert_eq!(check(&document, &schema, &least), Ok(()), "the required fields are always sent");
}

/// Checks that the operation documents the response's status, and that the content matches its schema.
pub(in crate::http::admin) fn assert_matches_schema(operation: &str, answer: &RawHttpResponse) {
    let document = document();
    let (method, path) = operation.split_once(' ').unwrap();
    let responses = &document["paths"][path][method.to_lowercase()]["responses"];
    let response = resolved(&document, &responses[answer.status.to_string()]);
    let content = response["content"].as_object();
    let content = content.unwrap_or_else(|| panic!("{operation}: {} is not described", answer.status));
    let (kind, described) = content.iter().next().unwrap();
    assert!(answer.header("content-type").unwrap_or_default().starts_with(kind), "{operation}: {kind}");
    if kind == "application/json" {
        let body = serde_json::from_slice(&answer.body).unwrap();
        if let Err(what) = check(&document, &described["schema"], &body) {
            panic!("{operation}: {what} in {body}");
        }
    }
}

fn resolved<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    match schema["$ref"].as_str() {
        Some(to) => resolved(document, document.pointer(to.trim_start_matches('#')).unwrap()),
        None => schema,
    }
}

/// Checks the part of JSON Schema that the document uses.
fn check(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let schema = resolved(document, schema);
    if let Some(choices) = schema["oneOf"].as_array() {
        let fitting = choices.iter().filter(|choice| check(document, choice, value).is_ok()).count();
        return if fitting == 1 { Ok(()) } else { Err(format!("{fitting} of the choices fit {value}")) };
    }
    let types = match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        one => vec![one.as_str().unwrap()],
    };
    if !types.iter().any(|kind| is_a(value, kind)) {
        return Err(format!("{value} is no {types:?}"));
    }
    if schema["enum"].as_array().is_some_and(|values| !values.contains(value)) {
        return Err(format!("{value} is none of {}", schema["enum"]));
    }
    for item in value.as_array().into_iter().flatten() {
        check(document, &schema["items"], item)?;
    }
    let Some(fields) = value.as_object() else { return Ok(()) };
    for required in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(required.as_str().unwrap()) {
            return Err(format!("{required} is missing"));
        }
    }
    for (name, field) in fields {
        match schema["properties"].get(name) {
            Some(schema) => check(document, schema, field).map_err(|what| format!("{name}: {what}"))?,
            None if schema["additionalProperties"] == false => {
                return Err(format!("{name} is not described"));
            }
            None => {}
        }
    }
    Ok(())
}

fn is_a(value: &Value, kind: &str) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64(),
        "null" => value.is_null(),
        _ => false,
    }
}
