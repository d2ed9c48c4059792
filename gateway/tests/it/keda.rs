//! The ScaledObjects that the pages show: KEDA knows their fields, their target is a model of the page, and what they
//! ask Prometheus for is what the gateway exports.
//!
//! KEDA's definitions are not at hand here, so the fields of `keda.sh/v1alpha1` are listed.

use std::path::Path;

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscalerBehavior;
use prometheus::{Registry, TextEncoder};
use rouse_controllers::{
    crd::InferenceModel,
    metrics::{ModelReplicas, SaturationMetrics, VariantReplicas},
};
use rouse_testing::page;
use serde_json::Value;

use crate::support::read;

/// Fields of one kind in one object.
#[derive(Clone, Copy)]
struct KedaFields {
    names: &'static [&'static str],
    are_required: bool,
    kind: FieldKind,
}

#[derive(Clone, Copy)]
enum FieldKind {
    Text,
    Number,
    Flag,
    /// One of these words.
    Word(&'static [&'static str]),
    Object(&'static [KedaFields]),
    List(&'static [KedaFields]),
    /// The behavior of a HorizontalPodAutoscaler.
    Behavior,
}

const fn required(names: &'static [&'static str], kind: FieldKind) -> KedaFields {
    KedaFields { names, are_required: true, kind }
}

const fn optional(names: &'static [&'static str], kind: FieldKind) -> KedaFields {
    KedaFields { names, are_required: false, kind }
}

const SCALED_OBJECT: &[KedaFields] = &[
    required(&["apiVersion"], FieldKind::Word(&["keda.sh/v1alpha1"])),
    required(&["kind"], FieldKind::Word(&["ScaledObject"])),
    required(&["metadata"], FieldKind::Object(&[required(&["name", "namespace"], FieldKind::Text)])),
    required(&["spec"], FieldKind::Object(SPEC)),
];
const SPEC: &[KedaFields] = &[
    required(&["scaleTargetRef"], FieldKind::Object(TARGET)),
    optional(&["pollingInterval", "initialCooldownPeriod", "cooldownPeriod"], FieldKind::Number),
    optional(&["idleReplicaCount", "minReplicaCount", "maxReplicaCount"], FieldKind::Number),
    optional(&["fallback"], FieldKind::Object(FALLBACK)),
    optional(&["advanced"], FieldKind::Object(ADVANCED)),
    required(&["triggers"], FieldKind::List(TRIGGER)),
];
const TARGET: &[KedaFields] = &[
    // Without these two KEDA looks for a Deployment.
    required(&["apiVersion"], FieldKind::Word(&["rouse.dev/v1alpha1"])),
    required(&["kind"], FieldKind::Word(&["InferenceModel"])),
    required(&["name"], FieldKind::Text),
];
const FALLBACK: &[KedaFields] = &[
    required(&["failureThreshold", "replicas"], FieldKind::Number),
    optional(
        &["behavior"],
        FieldKind::Word(&[
            "static",
            "currentReplicas",
            "currentReplicasIfHigher",
            "currentReplicasIfLower",
            "scalingModifiers",
        ]),
    ),
];
const ADVANCED: &[KedaFields] = &[
    optional(&["restoreToOriginalReplicaCount"], FieldKind::Flag),
    optional(
        &["horizontalPodAutoscalerConfig"],
        FieldKind::Object(&[
            optional(&["name"], FieldKind::Text),
            optional(&["behavior"], FieldKind::Behavior),
        ]),
    ),
];
const TRIGGER: &[KedaFields] = &[
    required(&["type"], FieldKind::Word(&["prometheus"])),
    optional(&["name"], FieldKind::Text),
    optional(&["useCachedMetrics"], FieldKind::Flag),
    optional(&["metricType"], FieldKind::Word(&["AverageValue", "Value"])),
    required(&["metadata"], FieldKind::Object(PROMETHEUS)),
];
/// The metadata of a trigger of the type `prometheus`. KEDA takes texts only.
const PROMETHEUS: &[KedaFields] = &[
    required(&["serverAddress", "query", "threshold"], FieldKind::Text),
    optional(
        &["activationThreshold", "namespace", "ignoreNullValues", "queryParameters", "unsafeSsl"],
        FieldKind::Text,
    ),
];

fn check_fields(path: &str, value: &Value, fields: &[KedaFields]) -> Result<(), String> {
    let object = value.as_object().ok_or_else(|| format!("{path} is no mapping"))?;
    for name in object.keys() {
        if fields.iter().all(|field| !field.names.contains(&name.as_str())) {
            return Err(format!("KEDA knows no field {path}.{name}"));
        }
    }
    for KedaFields { names, are_required, kind } in fields {
        for name in *names {
            match object.get(*name) {
                Some(value) => check_value(&format!("{path}.{name}"), value, *kind)?,
                None if *are_required => return Err(format!("{path}.{name} is missing")),
                None => {}
            }
        }
    }
    Ok(())
}

fn check_value(path: &str, value: &Value, kind: FieldKind) -> Result<(), String> {
    let is_valid = match kind {
        FieldKind::Object(fields) => return check_fields(path, value, fields),
        FieldKind::List(fields) => {
            let items = value.as_array().filter(|items| !items.is_empty());
            let items = items.ok_or_else(|| format!("{path} is no list, or an empty one"))?;
            return items.iter().try_for_each(|item| check_fields(&format!("{path}[]"), item, fields));
        }
        FieldKind::Text => value.as_str().is_some_and(|text| !text.is_empty()),
        FieldKind::Number => value.is_u64(),
        FieldKind::Flag => value.is_boolean(),
        FieldKind::Word(words) => value.as_str().is_some_and(|text| words.contains(&text)),
        // A field that the type does not know is lost on the way.
        FieldKind::Behavior => serde_json::from_value::<HorizontalPodAutoscalerBehavior>(value.clone())
            .is_ok_and(|behavior| serde_json::to_value(behavior).is_ok_and(|read| read == *value)),
    };
    if is_valid { Ok(()) } else { Err(format!("{path} is {value}, which KEDA does not take")) }
}

/// A metric in a query with its labels: `sum(metric{label="value",…})`.
struct Selection<'a> {
    metric: &'a str,
    labels: Vec<&'a str>,
}

impl<'a> Selection<'a> {
    fn of(query: &'a str) -> Result<Self, String> {
        let inner = query.strip_prefix("sum(").and_then(|rest| rest.strip_suffix("})"));
        let (metric, labels) =
            inner.and_then(|inner| inner.split_once('{')).ok_or_else(|| format!("{query} is no sum"))?;
        Ok(Self { metric, labels: labels.split(',').collect() })
    }
}

/// Returns what a gateway exports about this model of the page, in Prometheus' text format.
fn exported(namespace: &str, model: &str) -> String {
    let registry = Registry::new();
    let metrics = SaturationMetrics::new(&registry);
    let variant = VariantReplicas {
        variant: "default".to_owned(),
        public_name: "llama-70b".to_owned(),
        accelerator: None,
        current: 1,
        desired: 2,
    };
    let replicas = ModelReplicas { namespace: namespace.to_owned(), variants: vec![variant], decided: None };
    metrics.set_model(&model.into(), replicas);
    TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
}

fn saturation_page() -> String {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/saturation.md"))
}

/// Returns the models of the page about saturation.
fn models_on_page() -> Vec<InferenceModel> {
    let objects = page::tagged(&saturation_page(), "yaml object");
    objects.iter().map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Checks a ScaledObject of a page.
pub(crate) fn check(written: &str) -> Result<(), String> {
    let object: Value = serde_saphyr::from_str(written).map_err(|error| error.to_string())?;
    check_fields("", &object, SCALED_OBJECT)?;
    let (namespace, target) =
        (text(&object, "/metadata/namespace"), text(&object, "/spec/scaleTargetRef/name"));
    let models = models_on_page();
    let is_target = |model: &&InferenceModel| {
        let metadata = &model.metadata;
        metadata.name.as_deref() == Some(target) && metadata.namespace.as_deref() == Some(namespace)
    };
    let model = models.iter().find(is_target);
    let model = model.ok_or_else(|| format!("the page shows no InferenceModel {namespace}/{target}"))?;
    let exported = exported(namespace, &model.spec.model_name);
    for trigger in object["spec"]["triggers"].as_array().into_iter().flatten() {
        let Selection { metric, labels } = Selection::of(text(trigger, "/metadata/query"))?;
        let is_selected = |line: &str| {
            line.split_once('{').is_some_and(|(name, _)| name == metric)
                && labels.iter().all(|label| line.contains(label))
        };
        if !exported.lines().any(is_selected) {
            return Err(format!("no gateway exports {metric} with {labels:?}:\n{exported}"));
        }
    }
    Ok(())
}

#[test]
fn a_field_that_keda_does_not_know_and_a_metric_that_no_gateway_exports_are_found() {
    let blocks = page::tagged(&saturation_page(), "yaml keda");
    let [shown] = blocks.as_slice() else { panic!("one ScaledObject is shown: {blocks:?}") };
    check(shown).unwrap();
    for (right, wrong, found) in [
        ("minReplicaCount", "minReplicas", "no field .spec.minReplicas"),
        ("scaleTargetRef:", "scaleTarget:", "no field .spec.scaleTarget"),
        ("metricType:", "metrictype:", "no field .spec.triggers[].metrictype"),
        ("serverAddress:", "server:", "no field .spec.triggers[].metadata.server"),
        ("stabilizationWindowSeconds", "stabilisationWindowSeconds", "behavior is"),
        ("kind: InferenceModel", "kind: Deployment", "kind is"),
        ("threshold: \"1\"", "threshold: 1", "threshold is 1"),
        ("kind: InferenceModel, name: llama-70b", "kind: InferenceModel, name: llama", "no InferenceModel"),
        ("rouse_desired_replicas", "rouse_desired_engines", "no gateway exports rouse_desired_engines"),
        ("model=\"meta-llama", "name=\"meta-llama", "no gateway exports"),
    ] {
        let broken = shown.replace(right, wrong);
        assert_ne!(&broken, shown, "the page shows no {right}");
        let error = check(&broken).expect_err(wrong);
        assert!(error.contains(found), "{wrong}: {error}");
    }
}
