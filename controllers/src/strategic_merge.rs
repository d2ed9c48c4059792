//! Strategic merge patch, for Pods.
//!
//! It follows the API server (`k8s.io/apimachinery`, `strategicpatch`). Objects merge key by key, and `null` removes a
//! key. Some lists merge item by item, matched by a merge key; all other lists are replaced. In a merged list, items
//! that the patch names follow the patch's order and other items keep theirs; where the two orders do not relate, the
//! patch's items come first. Directives: `$patch` (`replace`, `delete`), `$retainKeys`,
//! `$deleteFromPrimitiveList/LIST`, `$setElementOrder/LIST`.
//!
//! It differs from the API server in three cases where the server's result cannot be intended: `$patch: merge`, which
//! names the default, is no error; `$patch: replace` in a new object does not drop the object; a directive for a list
//! that is not merged is an error instead of being taken for the list.

mod list;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

const PATCH: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";

type JsonObject = Map<String, Value>;

/// Why a patch cannot be applied. `at` is the path in the Pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{at} has an item without '{key}', the merge key of this list: add it to every item")]
    NoKey { at: String, key: &'static str },
    #[error("{at} has the item {found}: all items of this list must be {wanted}")]
    Item { at: String, wanted: &'static str, found: Value },
    #[error("{at} has '{directive}: {found}': use {wanted}")]
    Directive { at: String, directive: String, found: Value, wanted: &'static str },
    #[error(
        "{at} has '{directive}', but that list is not merged item by item: set the whole list, which replaces the \
         existing one"
    )]
    NotMerged { at: String, directive: String },
    #[error("{at} has '{key}', which its own $retainKeys does not list: add the key there, or remove it")]
    NotRetained { at: String, key: String },
    #[error(
        "{at} lists its items in another order than $setElementOrder, or has an item that $setElementOrder lacks: \
         make both agree"
    )]
    Order { at: String },
}

/// How a list is merged.
#[derive(Clone, Copy)]
enum ListStrategy {
    /// Item by item, matched by this key: the `patchMergeKey` of the Kubernetes API.
    Keyed(&'static str),
    /// As a set of scalars.
    Set,
    Atomic,
}

/// The part of a Pod that an object is, which determines how its lists merge.
#[derive(Clone, Copy)]
enum PodPart {
    Pod,
    Metadata,
    Spec,
    Container,
    Other,
}

impl PodPart {
    /// Returns the part of the objects at this key, or in the list at this key.
    fn under(self, key: &str) -> Self {
        match (self, key) {
            // This includes the metadata of a volume's claim template.
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
            // The API ignores the protocol here, though a Pod may use one port number with two protocols.
            (Self::Container, "ports") => ListStrategy::Keyed("containerPort"),
            (Self::Container, "volumeMounts") => ListStrategy::Keyed("mountPath"),
            (Self::Container, "volumeDevices") => ListStrategy::Keyed("devicePath"),
            _ => ListStrategy::Atomic,
        }
    }
}

/// Applies the patch to the Pod.
///
/// Both are JSON objects with the shape of a Pod. Decoding the result shows whether it is a valid Pod.
///
/// # Errors
/// The patch contradicts itself or has an unknown directive.
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
        let path = || if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        let merged = match (before, value) {
            (_, Value::Null) => None,
            (Some(Value::Object(before)), Value::Object(value)) => {
                Some(Value::Object(object(before, value, shape.under(&key), &path())?))
            }
            (Some(Value::Array(before)), Value::Array(value)) => {
                let merged = list::merge(before, value, shape.list(&key), shape.under(&key), &path())?;
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

/// Removes the fields that `$retainKeys` does not list.
fn retain(into: &mut JsonObject, patch: &mut JsonObject, at: &str) -> Result<(), Error> {
    let keep = match patch.remove(RETAIN) {
        None => return Ok(()),
        Some(Value::Array(keep)) => keep,
        Some(found) => {
            let wanted = "a list of keys";
            return Err(Error::Directive { at: place(at), directive: RETAIN.to_owned(), found, wanted });
        }
    };
    let is_kept = |key: &str| keep.iter().any(|known| known == key);
    let given = patch.iter().filter(|(key, value)| !value.is_null() && !is_directive(key));
    if let Some((key, _)) = given.into_iter().find(|(key, _)| !is_kept(key)) {
        return Err(Error::NotRetained { at: place(at), key: key.clone() });
    }
    into.retain(|key, _| is_kept(key));
    Ok(())
}

fn is_directive(key: &str) -> bool {
    key == PATCH || key == RETAIN || key.starts_with(DELETE_FROM) || key.starts_with(ORDER)
}

/// Returns a new value without nulls and directives; `None` if its directive is `delete`.
fn without_directives(value: Value) -> Option<Value> {
    match value {
        Value::Object(fields) if fields.get(PATCH).is_some_and(|directive| directive == "delete") => None,
        Value::Object(fields) => Some(Value::Object(new_fields(fields))),
        Value::Array(items) => Some(Value::Array(new_items(items))),
        plain => Some(plain),
    }
}

fn new_fields(fields: JsonObject) -> JsonObject {
    let fields_left = fields.into_iter().filter(|(key, value)| !value.is_null() && !is_directive(key));
    fields_left.filter_map(|(key, value)| Some((key, without_directives(value)?))).collect()
}

/// Returns a new list. An item with a directive other than `merge` is only a directive, so it is dropped.
fn new_items(items: Vec<Value>) -> Vec<Value> {
    let is_item = |item: &Value| item.get(PATCH).is_none_or(|directive| directive == "merge");
    items.into_iter().filter(is_item).filter_map(without_directives).collect()
}
