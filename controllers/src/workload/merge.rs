//! Merges Rouse's own settings into a Pod. Users' changes to a Pod use a strategic merge
//! ([`crate::strategic_merge`]).

use serde_json::Value;

/// Applies the patch: objects merge key by key, `null` removes a key, and lists and scalars are replaced.
pub(crate) fn into(value: &mut Value, patch: &Value) {
    match (value, patch) {
        (Value::Object(value), Value::Object(patch)) => {
            for (key, patch) in patch {
                if patch.is_null() {
                    value.remove(key);
                } else {
                    into(value.entry(key).or_insert(Value::Null), patch);
                }
            }
        }
        (value, Value::Object(_)) => {
            // The target was not an object. Start from an empty one, so that nulls in the patch are dropped here too.
            *value = Value::Object(serde_json::Map::new());
            into(value, patch);
        }
        (value, patch) => *value = patch.clone(),
    }
}

/// Whether this container or variable has this name.
pub(crate) fn is_named(it: &Value, name: &str) -> bool {
    it.get("name").and_then(Value::as_str) == Some(name)
}

/// Returns the value at this key, creating it if needed. Replaces a non-object first, since indexing it would panic.
pub(crate) fn under<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Value> {
    if !value.is_object() {
        *value = Value::Object(serde_json::Map::new());
    }
    Some(value.as_object_mut()?.entry(key).or_insert(Value::Null))
}

/// Adds fields that only `other` has, and matches list items by position.
///
/// `value` was read from `other` as a Pod and then extended, so it lacks the fields that Pods do not have.
pub(crate) fn fill(value: &mut Value, other: &Value) {
    match (value, other) {
        (Value::Object(value), Value::Object(other)) => {
            for (key, other) in other.iter().filter(|(_, other)| !other.is_null()) {
                match value.get_mut(key) {
                    Some(known) => fill(known, other),
                    None => drop(value.insert(key.clone(), other.clone())),
                }
            }
        }
        (Value::Array(value), Value::Array(other)) => {
            value.iter_mut().zip(other).for_each(|(value, other)| fill(value, other));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_are_set_and_taken_out_and_lists_replaced() {
        let mut pod =
            json!({"labels": {"a": "1", "b": "2"}, "args": ["x", "y"], "hostNetwork": true, "name": "n"});
        let patch = json!({
            "labels": {"b": null, "c": "3"}, "args": ["z"], "hostNetwork": null,
            "securityContext": {"runAsUser": 7, "fsGroup": null}, "name": {"of": "n"},
        });
        into(&mut pod, &patch);
        let want = json!({
            "labels": {"a": "1", "c": "3"}, "args": ["z"],
            "securityContext": {"runAsUser": 7}, "name": {"of": "n"},
        });
        assert_eq!(pod, want);
    }

    /// Two mounts of one volume share a name, and two ports with one number may have two protocols.
    #[test]
    fn what_was_not_understood_is_added_in_its_place() {
        let mounts = json!([
            {"name": "models", "mountPath": "/models", "ofTomorrow": 1},
            {"name": "models", "mountPath": "/cache", "ofTomorrow": 2},
        ]);
        let made =
            json!({"env": [{"name": "A"}], "volumeMounts": mounts, "x": {"y": null, "z": 1}, "gone": null});
        let mut granted = json!({
            "env": [{"name": "A"}, {"name": "B"}], "runtimeClassName": "nvidia", "x": {},
            "volumeMounts": [{"name": "models", "mountPath": "/models"}, {"name": "models", "mountPath": "/cache"}],
        });
        fill(&mut granted, &made);
        let want = json!({
            "env": [{"name": "A"}, {"name": "B"}], "runtimeClassName": "nvidia", "x": {"z": 1},
            "volumeMounts": mounts,
        });
        assert_eq!(granted, want);
    }
}
