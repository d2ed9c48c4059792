//! Merges the lists of a strategic merge patch.

use serde_json::Value;

use super::{
    DELETE_FROM, Error, JsonObject, ListStrategy, ORDER, PATCH, PodPart, new_items, object, place, unknown,
    without_directives,
};

pub(super) fn merge(
    before: Vec<Value>,
    patch: Vec<Value>,
    how: ListStrategy,
    items: PodPart,
    at: &str,
) -> Result<Vec<Value>, Error> {
    match how {
        ListStrategy::Atomic => Ok(new_items(patch)),
        ListStrategy::Set => union(before, patch, at),
        ListStrategy::Keyed(key) => by_key(before, patch, key, items, at),
    }
}

fn union(before: Vec<Value>, patch: Vec<Value>, at: &str) -> Result<Vec<Value>, Error> {
    if let Some(found) = patch.iter().find(|item| item.is_object() || item.is_array()) {
        return Err(item(at, "plain values", found));
    }
    let known = before.clone();
    let mut all: Vec<Value> = Vec::with_capacity(before.len() + patch.len());
    for item in before.into_iter().chain(patch.iter().cloned()) {
        if !all.contains(&item) {
            all.push(item);
        }
    }
    Ok(arranged(all, &patch, &known, None))
}

fn by_key(
    mut all: Vec<Value>,
    patch: Vec<Value>,
    key: &'static str,
    items: PodPart,
    at: &str,
) -> Result<Vec<Value>, Error> {
    let mut given = Vec::with_capacity(patch.len());
    let mut replace = false;
    for found in patch {
        let Value::Object(mut fields) = found else { return Err(item(at, "objects", &found)) };
        let directive = fields.remove(PATCH);
        match directive.as_ref().map(Value::as_str) {
            None | Some(Some("merge")) => given.push((named(&fields, key, at)?, fields)),
            Some(Some("delete")) => {
                let name = named(&fields, key, at)?;
                all.retain(|item| item.get(key) != Some(&name));
            }
            Some(Some("replace")) => replace = true,
            Some(_) => return Err(unknown(at, directive.unwrap_or_default())),
        }
    }
    if replace {
        return Ok(given
            .into_iter()
            .filter_map(|(_, fields)| without_directives(Value::Object(fields)))
            .collect());
    }
    let known = names(&all, key);
    let order: Vec<Value> = given.iter().map(|(name, _)| name.clone()).collect();
    for (name, fields) in given {
        match all.iter_mut().find(|item| item.get(key) == Some(&name)) {
            Some(Value::Object(found)) => *found = object(std::mem::take(found), fields, items, at)?,
            _ => all.extend(without_directives(Value::Object(fields))),
        }
    }
    Ok(arranged(all, &order, &known, Some(key)))
}

fn item(at: &str, wanted: &'static str, found: &Value) -> Error {
    Error::Item { at: at.to_owned(), wanted, found: found.clone() }
}

fn named(fields: &JsonObject, key: &'static str, at: &str) -> Result<Value, Error> {
    fields.get(key).cloned().ok_or_else(|| Error::NoKey { at: at.to_owned(), key })
}

fn names(items: &[Value], key: &str) -> Vec<Value> {
    items.iter().filter_map(|item| item.get(key)).cloned().collect()
}

/// Arranges items: those in `order` follow it, and the others keep their order from `before`.
///
/// One of the others precedes an ordered item only if it did so in `before`.
fn arranged(items: Vec<Value>, order: &[Value], before: &[Value], key: Option<&str>) -> Vec<Value> {
    let position = |list: &[Value], item: &Value| {
        let name = key.map_or(Some(item), |key| item.get(key));
        list.iter().position(|known| Some(known) == name)
    };
    let (mut ordered, mut rest): (Vec<_>, Vec<_>) =
        items.into_iter().partition(|item| position(order, item).is_some());
    ordered.sort_by_key(|item| position(order, item));
    rest.sort_by_key(|item| position(before, item).unwrap_or(usize::MAX));
    let mut all = Vec::with_capacity(ordered.len() + rest.len());
    let mut ordered = ordered.into_iter().peekable();
    for item in rest {
        let position_before = position(before, &item);
        let stood_before = |other: &Value| {
            position_before.zip(position(before, other)).is_some_and(|(item_at, other_at)| item_at < other_at)
        };
        while let Some(other) = ordered.next_if(|other| !stood_before(other)) {
            all.push(other);
        }
        all.push(item);
    }
    all.extend(ordered);
    all
}

/// Applies `$deleteFromPrimitiveList`.
pub(super) fn delete(
    into: &mut JsonObject,
    list: &str,
    values: Value,
    shape: PodPart,
    at: &str,
) -> Result<(), Error> {
    let directive = || format!("{DELETE_FROM}{list}");
    let ListStrategy::Set = shape.list(list) else {
        return Err(Error::NotMerged { at: place(at), directive: directive() });
    };
    let Value::Array(values) = values else {
        let wanted = "a list of values";
        return Err(Error::Directive { at: place(at), directive: directive(), found: values, wanted });
    };
    if let Some(Value::Array(items)) = into.get_mut(list) {
        items.retain(|item| !values.contains(item));
    }
    Ok(())
}

/// Applies `$setElementOrder`: merges the lists that it orders and removes them from the patch.
pub(super) fn ordered(
    into: &mut JsonObject,
    patch: &mut JsonObject,
    shape: PodPart,
    at: &str,
) -> Result<(), Error> {
    let directives: Vec<_> = patch.keys().filter(|key| key.starts_with(ORDER)).cloned().collect();
    for directive in directives {
        let list = directive.strip_prefix(ORDER).unwrap_or_default();
        let path = if at.is_empty() { list.to_owned() } else { format!("{at}.{list}") };
        let how = shape.list(list);
        let key = match how {
            ListStrategy::Atomic => return Err(Error::NotMerged { at: place(at), directive }),
            ListStrategy::Set => None,
            ListStrategy::Keyed(key) => Some(key),
        };
        let order = order(patch.remove(&directive), key, &path)?;
        let given = patch.remove(list).map(|found| array(found, &path)).transpose()?;
        if given.as_ref().is_some_and(|given| !agree(given, &order, key)) {
            return Err(Error::Order { at: path });
        }
        let before = into.remove(list).map(|found| array(found, &path)).transpose()?;
        let known = before
            .as_deref()
            .map_or_else(Vec::new, |items| key.map_or_else(|| items.to_vec(), |key| names(items, key)));
        let merged = match (before, given) {
            (None, None) => continue,
            (Some(before), None) => before,
            (before, Some(given)) => merge(before.unwrap_or_default(), given, how, shape.under(list), &path)?,
        };
        into.insert(list.to_owned(), Value::Array(arranged(merged, &order, &known, key)));
    }
    Ok(())
}

/// Reads the wanted order: names for keyed lists, else values.
fn order(found: Option<Value>, key: Option<&'static str>, at: &str) -> Result<Vec<Value>, Error> {
    let items = array(found.unwrap_or_default(), at)?;
    let Some(key) = key else { return Ok(items) };
    items
        .iter()
        .map(|found| found.get(key).cloned().ok_or_else(|| Error::NoKey { at: at.to_owned(), key }))
        .collect()
}

fn array(found: Value, at: &str) -> Result<Vec<Value>, Error> {
    match found {
        Value::Array(items) => Ok(items),
        found => {
            Err(Error::Directive { at: at.to_owned(), directive: ORDER.to_owned(), found, wanted: "a list" })
        }
    }
}

/// Whether all given items are in the order, in the same sequence. An empty order accepts any.
fn agree(given: &[Value], order: &[Value], key: Option<&str>) -> bool {
    if order.is_empty() {
        return true;
    }
    let mut order = order.iter();
    let mut given = given.iter().filter(|item| item.get(PATCH).is_none());
    given.all(|item| {
        let name = key.map_or(Some(item), |key| item.get(key));
        order.any(|known| Some(known) == name)
    })
}
