//! Kubernetes' strategic merge patch, for Pods.
//!
//! A patch is a piece of the object itself. Objects are merged field by field, `null` takes a field away, and a list is replaced
//! whole; but where the API says by which field the items of a list are told apart, an item is merged with its namesake. Fields
//! that begin with `$` say otherwise. What is here is what the API server does with such a patch, down to the order of lists.

use serde_json::{Map, Value};

/// Says what is done with the object or item that it is in: `replace`, `delete`, `merge`.
const PATCH: &str = "$patch";
/// All other fields of the object go.
const RETAIN: &str = "$retainKeys";
/// These go from a list of texts; in which order a list is to be.
const DELETED: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";

/// Why a patch cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("an item of {list} has no {key}, by which its items are told apart")]
    Nameless { list: String, key: &'static str },
    #[error("{PATCH} is {found} in {place}: it can be replace, delete or merge")]
    Directive { place: String, found: String },
    #[error("{place} is {found} in the patch, and {wanted} in the Pod")]
    Kind { place: String, found: &'static str, wanted: &'static str },
    #[error("{0} is no list")]
    NoList(String),
}

/// By which field items of the lists of this name are told apart, wherever it is in a Pod; a list without such a field is replaced.
fn key_of(list: &str) -> Option<&'static str> {
    Some(match list {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "volumes"
        | "env"
        | "imagePullSecrets"
        | "resourceClaims"
        | "schedulingGates" => "name",
        "ports" => "containerPort",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "hostAliases" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        "ownerReferences" => "uid",
        _ => return None,
    })
}

/// Lists of texts to which a patch adds.
fn is_set(list: &str) -> bool {
    list == "finalizers"
}

/// The Pod with the patch.
///
/// # Errors
/// As [`Error`] says.
pub fn merge(pod: &Value, patch: &Value) -> Result<Value, Error> {
    let (Value::Object(pod), Value::Object(patch)) = (pod, patch) else {
        return Err(Error::Kind { place: "the whole".into(), found: kind(patch), wanted: "an object" });
    };
    objects(pod, patch, "").map(Value::Object)
}

fn objects(
    base: &Map<String, Value>,
    patch: &Map<String, Value>,
    place: &str,
) -> Result<Map<String, Value>, Error> {
    let mut merged = match directive(patch, place)? {
        Some("replace") => Map::new(),
        Some("delete") => return Ok(Map::new()),
        _ => base.clone(),
    };
    if let Some(kept) = patch.get(RETAIN) {
        let kept = kept.as_array().ok_or_else(|| Error::NoList(path(place, RETAIN)))?;
        merged.retain(|field, _| kept.iter().any(|name| name == field));
    }
    for (field, new) in patch {
        let at = path(place, field);
        if let Some(list) = field.strip_prefix(DELETED) {
            remove(&mut merged, list, new, &at)?;
        } else if let Some(list) = field.strip_prefix(ORDER) {
            let order = new.as_array().ok_or_else(|| Error::NoList(at.clone()))?;
            if let (Some(Value::Array(items)), false) = (merged.get_mut(list), patch.contains_key(list)) {
                reorder(items, order, key_of(list));
            }
        } else if new.is_null() {
            merged.remove(field);
        } else if !field.starts_with('$') {
            let old = merged.get(field).filter(|old| !old.is_null());
            let order = patch.get(&format!("{ORDER}{field}")).and_then(Value::as_array);
            let value = value(field, old, new, order, &at)?;
            merged.insert(field.clone(), value);
        }
    }
    Ok(merged)
}

fn value(
    field: &str,
    old: Option<&Value>,
    new: &Value,
    order: Option<&Vec<Value>>,
    at: &str,
) -> Result<Value, Error> {
    match (old, new) {
        (None, Value::Object(new)) => objects(&Map::new(), new, at).map(Value::Object),
        (Some(Value::Object(old)), Value::Object(new)) => objects(old, new, at).map(Value::Object),
        (Some(Value::Array(_)) | None, Value::Array(new)) => {
            let old = old.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let mut merged = match key_of(field) {
                Some(key) => items(old, new, field, key, at)?,
                None if is_set(field) => {
                    let more = old.iter().filter(|item| !new.contains(item));
                    in_order(new.clone(), more.cloned().collect(), old, None)
                }
                None => new.clone(),
            };
            if let Some(order) = order {
                reorder(&mut merged, order, key_of(field));
            }
            Ok(Value::Array(merged))
        }
        (Some(old @ (Value::Object(_) | Value::Array(_))), new) => {
            Err(Error::Kind { place: at.to_owned(), found: kind(new), wanted: kind(old) })
        }
        (_, new) => Ok(new.clone()),
    }
}

/// Lists whose items are told apart by `key`.
fn items(old: &[Value], new: &[Value], list: &str, key: &'static str, at: &str) -> Result<Vec<Value>, Error> {
    let replaces = new
        .iter()
        .any(|item| item.get(key).is_none() && item.get(PATCH).and_then(Value::as_str) == Some("replace"));
    let old = if replaces { &[] } else { old };
    let mut rest: Vec<Value> = old.to_vec();
    let mut merged = Vec::new();
    for item in new {
        let Value::Object(item) = item else {
            return Err(Error::Kind { place: at.to_owned(), found: kind(item), wanted: "a list of objects" });
        };
        let Some(name) = item.get(key) else {
            if item.contains_key(PATCH) {
                continue;
            }
            return Err(Error::Nameless { list: list.to_owned(), key });
        };
        let place = format!("{at}[{key}={}]", name.as_str().map_or_else(|| name.to_string(), str::to_owned));
        // Ports of one number may differ by protocol; the API server merges the first of them as well.
        let found = rest.iter().position(|own| own.get(key) == Some(name));
        let own = found.map(|at| rest.remove(at));
        if directive(item, &place)? == Some("delete") {
            continue;
        }
        let empty = Map::new();
        let own = own.as_ref().and_then(Value::as_object).unwrap_or(&empty);
        merged.push(Value::Object(objects(own, item, &place)?));
    }
    Ok(in_order(merged, rest, old, Some(key)))
}

/// Items of the patch keep their order, and so do those that it does not name; each of these comes before the first of the patch that
/// was behind it.
fn in_order(patched: Vec<Value>, rest: Vec<Value>, old: &[Value], key: Option<&str>) -> Vec<Value> {
    let name = |item: &Value| key.map_or_else(|| Some(item.clone()), |key| item.get(key).cloned());
    let before = |item: &Value| old.iter().position(|own| name(own) == name(item));
    let mut all = Vec::with_capacity(patched.len() + rest.len());
    let mut rest = rest.into_iter().peekable();
    for item in patched {
        if let Some(place) = before(&item) {
            while let Some(own) = rest.next_if(|own| before(own).is_some_and(|own| own < place)) {
                all.push(own);
            }
        }
        all.push(item);
    }
    all.extend(rest);
    all
}

/// Those that `order` names come first, as it has them.
fn reorder(items: &mut [Value], order: &[Value], key: Option<&str>) {
    let name = |item: &Value| key.map_or_else(|| Some(item.clone()), |key| item.get(key).cloned());
    items.sort_by_key(|item| {
        let named = order.iter().position(|own| name(own) == name(item));
        named.unwrap_or(usize::MAX)
    });
}

fn remove(merged: &mut Map<String, Value>, list: &str, gone: &Value, at: &str) -> Result<(), Error> {
    let gone = gone.as_array().ok_or_else(|| Error::NoList(at.to_owned()))?;
    if let Some(Value::Array(items)) = merged.get_mut(list) {
        items.retain(|item| !gone.contains(item));
    }
    Ok(())
}

fn directive<'a>(patch: &'a Map<String, Value>, place: &str) -> Result<Option<&'a str>, Error> {
    let Some(found) = patch.get(PATCH) else { return Ok(None) };
    match found.as_str() {
        Some(known @ ("replace" | "delete" | "merge")) => Ok(Some(known)),
        _ => Err(Error::Directive { place: place.to_owned(), found: found.to_string() }),
    }
}

fn path(place: &str, field: &str) -> String {
    if place.is_empty() { field.to_owned() } else { format!("{place}.{field}") }
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
