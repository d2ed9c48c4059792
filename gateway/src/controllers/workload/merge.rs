//! What Rouse itself sets in a Pod. What users change of one is a strategic merge ([`crate::controllers::strategic_merge`]).

use serde_json::Value;

/// Sets what the patch says: objects by their keys, where `null` takes one out; lists and values as a whole.
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
            // What stood there was no object; what is null in the patch is nothing here either.
            *value = Value::Object(serde_json::Map::new());
            into(value, patch);
        }
        (value, patch) => *value = patch.clone(),
    }
}

/// It is a container or a variable of this name.
pub(crate) fn is_named(it: &Value, name: &str) -> bool {
    it.get("name").and_then(Value::as_str) == Some(name)
}

/// What stands under this key, of an object that is made where something else stands: an index would panic there.
pub(crate) fn under<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Value> {
    if !value.is_object() {
        *value = Value::Object(serde_json::Map::new());
    }
    Some(value.as_object_mut()?.entry(key).or_insert(Value::Null))
}

/// Adds what only the other one has, items of lists by their places: `value` is `other`, read as a Pod and added to, so that it
/// lacks the fields that Pods do not have.
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

    /// Two mounts of one volume have one name, and two ports of one number may have two protocols.
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
