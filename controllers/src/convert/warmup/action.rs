//! Reads the Pod template of a custom action.

use std::collections::BTreeSet;

use rouse::warmup::ActionHash;
use serde_json::{Map, Value};

use super::{super::spec_reader::is_dns_label, problems::Problems};
use crate::{crd::PodTemplateJson, label};

/// Fields of a Pod's spec that place it. The Warmup places its Pods.
const PLACEMENT: [&str; 3] = ["nodeName", "nodeSelector", "affinity"];
/// Restart policies of Pods that may end.
const RESTART_POLICIES: [&str; 2] = ["Never", "OnFailure"];
/// Domain of the labels and annotations by which Rouse knows its own Pods.
const OWN_DOMAIN: &str = "rouse.dev/";

/// The Pod template of a custom action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionTemplate {
    /// Template with at most labels and annotations in `metadata`, and with `spec.restartPolicy`.
    pub template: PodTemplateJson,
    /// Hash of the template.
    pub hash: ActionHash,
}

impl ActionTemplate {
    pub(super) fn new(template: Map<String, Value>) -> Self {
        let template = PodTemplateJson::from(template);
        let hash = ActionHash::from(label::value(template.text()));
        Self { template, hash }
    }
}

/// Reads a template; `None` if it has no Pod. `at` is its path in the object.
pub(super) fn template(
    problems: &mut Problems,
    at: &str,
    written: &PodTemplateJson,
) -> Option<ActionTemplate> {
    let mut written = written.value();
    let Some(Value::Object(mut spec)) = written.remove("spec") else {
        problems.add(format!("{at}.spec is missing: set the spec of the Pod, with its containers"));
        return None;
    };
    check_containers(problems, &format!("{at}.spec"), &spec);
    check_volumes(problems, &format!("{at}.spec"), &spec);
    for field in PLACEMENT.iter().filter(|field| spec.get(**field).is_some_and(|value| !value.is_null())) {
        problems.add(format!(
            "{at}.spec.{field} is not allowed: remove it, because the target of the Warmup chooses the nodes"
        ));
    }
    let policy = restart_policy(problems, at, written.remove("restartPolicy"), spec.remove("restartPolicy"));
    spec.insert("restartPolicy".to_owned(), policy);
    let mut template = Map::from_iter([("spec".to_owned(), Value::Object(spec))]);
    let metadata = metadata(problems, &format!("{at}.metadata"), written.remove("metadata"));
    if !metadata.is_empty() {
        template.insert("metadata".to_owned(), Value::Object(metadata));
    }
    Some(ActionTemplate::new(template))
}

/// Returns the restart policy, which may stand beside the spec or in it.
fn restart_policy(
    problems: &mut Problems,
    at: &str,
    beside_spec: Option<Value>,
    in_spec: Option<Value>,
) -> Value {
    let [beside_spec, in_spec] =
        [beside_spec, in_spec].map(|policy| policy.filter(|policy| !policy.is_null()));
    for (at, policy) in [(at.to_owned(), &beside_spec), (format!("{at}.spec"), &in_spec)] {
        let Some(policy) = policy else { continue };
        if policy.as_str().is_none_or(|policy| !RESTART_POLICIES.contains(&policy)) {
            problems.add(format!(
                "{at}.restartPolicy ({policy}) must be Never or OnFailure: the Pod of an action may end"
            ));
        }
    }
    if let (Some(beside_spec), Some(in_spec)) = (&beside_spec, &in_spec)
        && beside_spec != in_spec
    {
        problems.add(format!(
            "{at} has two restart policies, {beside_spec} beside spec and {in_spec} in it: remove one"
        ));
    }
    beside_spec.or(in_spec).unwrap_or_else(|| Value::from("Never"))
}

/// Returns the labels and annotations. A template copied from elsewhere may have other metadata, which no Pod needs.
fn metadata(problems: &mut Problems, at: &str, written: Option<Value>) -> Map<String, Value> {
    let mut kept = Map::new();
    let Some(written) = written.filter(|written| !written.is_null()) else { return kept };
    for field in ["labels", "annotations"] {
        let Some(values) = written.get(field).filter(|values| !values.is_null()) else { continue };
        let at = format!("{at}.{field}");
        let Some(values) = values.as_object() else {
            problems.add(format!("{at} must be a mapping of texts"));
            continue;
        };
        for (key, value) in values {
            if key.starts_with(OWN_DOMAIN) {
                problems
                    .add(format!("{at}: '{key}' is not allowed: Rouse sets those of {OWN_DOMAIN} itself"));
            }
            match value.as_str() {
                Some(value) if field == "labels" => problems.check_label(&at, key, value),
                Some(_) => {}
                None => problems.add(format!("{at}: the value of '{}' must be a text", key.escape_debug())),
            }
        }
        if !values.is_empty() {
            kept.insert(field.to_owned(), Value::Object(values.clone()));
        }
    }
    kept
}

fn check_containers(problems: &mut Problems, at: &str, spec: &Map<String, Value>) {
    if spec.get("containers").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        problems.add(format!("{at}.containers is empty: list at least one container"));
    }
    let mut names = BTreeSet::new();
    for field in ["initContainers", "containers"] {
        let at = format!("{at}.{field}");
        for container in items(problems, &at, spec.get(field)) {
            let name = container.get("name").and_then(Value::as_str).unwrap_or_default();
            if !is_dns_label(name) {
                problems.add(format!(
                    "{at}: '{}' is not the name of a container: write at most 63 lower-case letters, digits and '-', \
                     with a letter or a digit at both ends",
                    name.escape_debug()
                ));
            } else if !names.insert(name) {
                problems.add(format!("{at}: two containers are named '{name}': rename one"));
            }
            problems.check_image(&at, container.get("image").and_then(Value::as_str).unwrap_or_default());
        }
    }
}

fn check_volumes(problems: &mut Problems, at: &str, spec: &Map<String, Value>) {
    let at = format!("{at}.volumes");
    let mut names = BTreeSet::new();
    for volume in items(problems, &at, spec.get("volumes")) {
        let name = volume.get("name").and_then(Value::as_str).unwrap_or_default();
        if !is_dns_label(name) {
            problems.add(format!("{at}: '{}' is not the name of a volume", name.escape_debug()));
        } else if !names.insert(name) {
            problems.add(format!("{at}: two volumes are named '{name}': rename one"));
        }
    }
}

/// Returns the items of a list, which may be absent.
fn items<'a>(problems: &mut Problems, at: &str, list: Option<&'a Value>) -> &'a [Value] {
    match list {
        None | Some(Value::Null) => &[],
        Some(Value::Array(items)) => items,
        Some(_) => {
            problems.add(format!("{at} must be a list"));
            &[]
        }
    }
}
