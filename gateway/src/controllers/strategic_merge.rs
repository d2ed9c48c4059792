//! Strategic merge patch, for Pods.
//!
//! As an API server applies one (`k8s.io/apimachinery`, `strategicpatch`): objects by their keys, where `null` takes one out;
//! some lists item by item, found by a key of theirs, and all others as a whole. What the patch names in a list comes in the
//! patch's order, what it does not name in its own, and where the two tell nothing of each other the patch's comes first.
//! Directives: `$patch` (`replace`, `delete`), `$retainKeys`, `$deleteFromPrimitiveList/LIST`, `$setElementOrder/LIST`.
//!
//! In three places an API server does what nobody can mean, and this does not: `$patch: merge`, which says what is done anyway,
//! is no error; `$patch: replace` in an object that is new does not lose the object; a directive about a list that is not
//! merged is an error, and not taken for the list itself.

mod list;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

const PATCH: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";

type JsonObject = Map<String, Value>;

/// Why a patch cannot be applied. `at` is where in the Pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "{at} has an item without '{key}', by which the items of this list are told apart: add it to each of them"
    )]
    NoKey { at: String, key: &'static str },
    #[error("{at} has an item that is {found}: all items of this list are {wanted}")]
    Item { at: String, wanted: &'static str, found: Value },
    #[error("{at} has '{directive}: {found}': write {wanted}")]
    Directive { at: String, directive: String, found: Value, wanted: &'static str },
    #[error(
        "{at} has '{directive}', but that list is not merged item by item: give the list itself, which replaces the \
         one that is there"
    )]
    NotMerged { at: String, directive: String },
    #[error("{at} has '{key}', which its own $retainKeys leaves out: name it there, or take it out")]
    NotRetained { at: String, key: String },
    #[error(
        "{at} gives its items in another order than $setElementOrder, or has one that is missing there: make both agree"
    )]
    Order { at: String },
}

/// How a list is merged.
#[derive(Clone, Copy)]
enum ListStrategy {
    /// Item by item, found by this key of theirs: `patchMergeKey` of the Kubernetes API.
    Keyed(&'static str),
    /// As a set of plain values.
    Set,
    Atomic,
}

/// What an object is, as far as lists in it go.
#[derive(Clone, Copy)]
enum PodPart {
    Pod,
    Metadata,
    Spec,
    Container,
    Other,
}

impl PodPart {
    /// Of the objects under this key, or in the list under it.
    fn under(self, key: &str) -> Self {
        match (self, key) {
            // That of a volume's claim template, too.
            (_, "metadata") => Self::Metadata,
            (Self::Pod, "spec") => Self::Spec,
            (Self::Spec, "containers" | "initContainers" | "ephemeralContainers") => Self::Container,
            _ => Self::Other,
        }
    }

    fn list(self, key: &str) -> ListStrategy {
        match (self, key) {
            (Self::Metadata, "finalizers") => ListStrategy::Set,
            (Self::Metadata, "ownerReferences") => ListStrategy::Keyed("uid"),
            (
                Self::Spec,
                "containers"
                | "initContainers"
                | "ephemeralContainers"
                | "volumes"
                | "imagePullSecrets"
                | "resourceClaims"
                | "schedulingGates",
            )
            | (Self::Container, "env") => ListStrategy::Keyed("name"),
            (Self::Spec, "hostAliases") => ListStrategy::Keyed("ip"),
            (Self::Spec, "topologySpreadConstraints") => ListStrategy::Keyed("topologyKey"),
            // Not by the protocol as well, though a Pod may have a port in two: so is the API.
            (Self::Container, "ports") => ListStrategy::Keyed("containerPort"),
            (Self::Container, "volumeMounts") => ListStrategy::Keyed("mountPath"),
            (Self::Container, "volumeDevices") => ListStrategy::Keyed("devicePath"),
            _ => ListStrategy::Atomic,
        }
    }
}

/// What the patch makes of the Pod. Both are JSON objects of a Pod's shape; that the result is a Pod is for
/// who decodes it to say.
///
/// # Errors
/// The patch contradicts itself, or has a directive that there is not.
pub fn merge(pod: JsonObject, patch: JsonObject) -> Result<JsonObject, Error> {
    object(pod, patch, PodPart::Pod, "")
}

fn object(
    mut into: JsonObject,
    mut patch: JsonObject,
    shape: PodPart,
    at: &str,
) -> Result<JsonObject, Error> {
    match patch.remove(PATCH) {
        None => {}
        Some(directive) => match directive.as_str() {
            Some("merge") => {}
            Some("replace") => return Ok(new_fields(patch)),
            Some("delete") => return Ok(JsonObject::new()),
            _ => return Err(unknown(at, directive)),
        },
    }
    retain(&mut into, &mut patch, at)?;
    list::ordered(&mut into, &mut patch, shape, at)?;
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix(DELETE_FROM) {
            list::delete(&mut into, list, value, shape, at)?;
            continue;
        }
        let before = into.remove(&key);
        let within = || if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        let merged = match (before, value) {
            (_, Value::Null) => None,
            (Some(Value::Object(before)), Value::Object(value)) => {
                Some(Value::Object(object(before, value, shape.under(&key), &within())?))
            }
            (Some(Value::Array(before)), Value::Array(value)) => {
                let merged = list::merge(before, value, shape.list(&key), shape.under(&key), &within())?;
                Some(Value::Array(merged))
            }
            (_, value) => without_directives(value),
        };
        if let Some(merged) = merged {
            into.insert(key, merged);
        }
    }
    Ok(into)
}

fn unknown(at: &str, found: Value) -> Error {
    let wanted = "replace, delete or merge";
    Error::Directive { at: place(at), directive: PATCH.to_owned(), found, wanted }
}

fn place(at: &str) -> String {
    if at.is_empty() { "the patch".to_owned() } else { at.to_owned() }
}

/// Takes out what the directive leaves out.
fn retain(into: &mut JsonObject, patch: &mut JsonObject, at: &str) -> Result<(), Error> {
    let keep = match patch.remove(RETAIN) {
        None => return Ok(()),
        Some(Value::Array(keep)) => keep,
        Some(found) => {
            let wanted = "a list of keys";
            return Err(Error::Directive { at: place(at), directive: RETAIN.to_owned(), found, wanted });
        }
    };
    let kept = |key: &str| keep.iter().any(|known| known == key);
    let given = patch.iter().filter(|(key, value)| !value.is_null() && !is_directive(key));
    if let Some((key, _)) = given.into_iter().find(|(key, _)| !kept(key)) {
        return Err(Error::NotRetained { at: place(at), key: key.clone() });
    }
    into.retain(|key, _| kept(key));
    Ok(())
}

fn is_directive(key: &str) -> bool {
    key == PATCH || key == RETAIN || key.starts_with(DELETE_FROM) || key.starts_with(ORDER)
}

/// What a value comes to where there was none: without what is null and what is a directive.
fn without_directives(value: Value) -> Option<Value> {
    match value {
        Value::Object(fields) if fields.get(PATCH).is_some_and(|directive| directive == "delete") => None,
        Value::Object(fields) => Some(Value::Object(new_fields(fields))),
        Value::Array(items) => Some(Value::Array(new_items(items))),
        plain => Some(plain),
    }
}

fn new_fields(fields: JsonObject) -> JsonObject {
    let kept = fields.into_iter().filter(|(key, value)| !value.is_null() && !is_directive(key));
    kept.filter_map(|(key, value)| Some((key, without_directives(value)?))).collect()
}

/// In a list an item with a directive is nothing but the directive.
fn new_items(items: Vec<Value>) -> Vec<Value> {
    let is_item = |item: &Value| item.get(PATCH).is_none_or(|directive| directive == "merge");
    items.into_iter().filter(is_item).filter_map(without_directives).collect()
}
