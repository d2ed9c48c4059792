//! Merges what the roles on one node ask for.
//!
//! The roles merge in the order of their names, so that every gateway makes the same Pod. Where two roles contradict
//! each other neither wins: the conflict is refused.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::{NodeActions, action::ActionTemplate};
use crate::workload::merge::is_named;

/// Lists of a Pod's spec whose items all roles may add to.
const UNIONS: [&str; 2] = ["imagePullSecrets", "tolerations"];
const MAX_CONTAINER_NAME_CHARS: usize = 63;

/// Returns what a node should have on which these roles run.
///
/// Equal images, Secrets, containers and volumes are merged. Roles without actions add nothing.
///
/// # Errors
/// Two roles contradict each other. The text names the roles and what to change.
pub fn merge_roles(
    roles: &BTreeMap<String, NodeActions>,
    on_node: &BTreeSet<String>,
) -> Result<NodeActions, String> {
    let mut merged = NodeActions::default();
    let mut pod: Option<Map<String, Value>> = None;
    let mut merged_roles: Vec<&str> = Vec::new();
    for (role, actions) in roles.iter().filter(|(role, _)| on_node.contains(*role)) {
        actions.images.iter().for_each(|image| merged.add_image(image.clone()));
        merged.pull_secrets.extend(actions.pull_secrets.iter().cloned());
        let Some(action) = &actions.action else { continue };
        match &mut pod {
            None => pod = Some(action.template.value()),
            Some(pod) => merge_template(pod, action.template.value()).map_err(|conflict| {
                format!(
                    "the roles {} and {role} run on one node, and their customizedActions have different {conflict}: \
                     make them equal, or warm the roles by separate Warmups",
                    merged_roles.join(", ")
                )
            })?,
        }
        merged_roles.push(role);
    }
    merged.action = pod.map(ActionTemplate::new);
    Ok(merged)
}

/// Merges a template into another. The error names what differs.
fn merge_template(into: &mut Map<String, Value>, from: Map<String, Value>) -> Result<(), String> {
    for (field, value) in from {
        let Value::Object(value) = value else { continue };
        let entry = into.entry(field.as_str()).or_insert_with(|| Value::Object(Map::new()));
        let Some(entry) = entry.as_object_mut() else { continue };
        if field == "spec" { merge_spec(entry, value)? } else { merge_metadata(entry, value)? }
    }
    Ok(())
}

fn merge_metadata(into: &mut Map<String, Value>, from: Map<String, Value>) -> Result<(), String> {
    for (field, values) in from {
        let Value::Object(values) = values else { continue };
        let entry = into.entry(field.as_str()).or_insert_with(|| Value::Object(Map::new()));
        let Some(entry) = entry.as_object_mut() else { continue };
        for (key, value) in values {
            if entry.get(&key).is_some_and(|known| *known != value) {
                return Err(format!("{field} '{key}'"));
            }
            entry.insert(key, value);
        }
    }
    Ok(())
}

fn merge_spec(into: &mut Map<String, Value>, mut from: Map<String, Value>) -> Result<(), String> {
    let mut names: BTreeSet<String> = ["initContainers", "containers"]
        .iter()
        .flat_map(|field| items(into.get(*field)))
        .filter_map(|container| container.get("name")?.as_str().map(str::to_owned))
        .collect();
    for field in ["initContainers", "containers"] {
        let Some(Value::Array(containers)) = from.remove(field) else { continue };
        let Some(known) = list(into, field) else { continue };
        for container in containers {
            add_container(known, container, &mut names);
        }
    }
    if let Some(Value::Array(volumes)) = from.remove("volumes")
        && let Some(known) = list(into, "volumes")
    {
        for volume in volumes {
            let name = volume.get("name").and_then(Value::as_str).unwrap_or_default();
            match known.iter().find(|known| is_named(known, name)) {
                Some(known) if *known != volume => return Err(format!("volumes '{name}'")),
                Some(_) => {}
                None => known.push(volume),
            }
        }
    }
    for field in UNIONS {
        let Some(Value::Array(more)) = from.remove(field) else { continue };
        let Some(known) = list(into, field) else { continue };
        for item in more {
            if !known.contains(&item) {
                known.push(item);
            }
        }
    }
    // A setting of one role alone would change the containers of the others.
    let is_merged =
        |field: &str| ["initContainers", "containers", "volumes"].contains(&field) || UNIONS.contains(&field);
    let differs = |(field, value): &(&String, &Value)| !is_merged(field) && from.get(*field) != Some(*value);
    let different = into.iter().find(differs).map(|(field, _)| field);
    let missing = from.keys().find(|field| !into.contains_key(*field));
    different.or(missing).map_or(Ok(()), |field| Err(field.clone()))
}

/// Adds a container, unless an equal one is there under any name. A name that is taken gets a number.
fn add_container(known: &mut Vec<Value>, mut container: Value, names: &mut BTreeSet<String>) {
    if known.iter().any(|known| without_name(known) == without_name(&container)) {
        return;
    }
    let name = container.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    let numbered = |number: u32| {
        let number = format!("-{number}");
        let stem = name.chars().take(MAX_CONTAINER_NAME_CHARS - number.len());
        stem.chain(number.chars()).collect::<String>()
    };
    let mut candidates = std::iter::once(name.clone()).chain((2..).map(numbered));
    let free = candidates.find(|name| !names.contains(name)).unwrap_or_default();
    if let Some(container) = container.as_object_mut() {
        container.insert("name".to_owned(), Value::from(free.as_str()));
    }
    names.insert(free);
    known.push(container);
}

fn without_name(container: &Value) -> Value {
    let mut container = container.clone();
    if let Some(container) = container.as_object_mut() {
        container.remove("name");
    }
    container
}

/// Returns the list at this field, creating it if needed.
fn list<'a>(spec: &'a mut Map<String, Value>, field: &str) -> Option<&'a mut Vec<Value>> {
    spec.entry(field).or_insert_with(|| Value::Array(Vec::new())).as_array_mut()
}

fn items(list: Option<&Value>) -> &[Value] {
    list.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}
