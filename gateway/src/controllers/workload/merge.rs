//! What is changed of a Pod's template: by a variant, or by whoever makes a Pod of it.

use serde_json::Value;

/// Merges as `kubectl patch` does with Pods: objects by their keys, where `null` takes one out; lists whose items have
/// names, item by item; other lists and values as a whole.
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
        (Value::Array(value), Value::Array(patch)) if named(value) && named(patch) => {
            for item in patch {
                match value.iter_mut().find(|known| known.get("name") == item.get("name")) {
                    Some(known) => into(known, item),
                    None => value.push(item.clone()),
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

fn named(list: &[Value]) -> bool {
    !list.is_empty() && list.iter().all(|item| item.get("name").is_some_and(Value::is_string))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn named_items_are_changed_and_other_lists_replaced() {
        let mut pod = json!({
            "containers": [
                {"name": "engine", "image": "a", "args": ["x", "y"], "env": [{"name": "A", "value": "1"}]},
                {"name": "helper"},
            ],
            "hostNetwork": true,
        });
        let patch = json!({
            "containers": [
                {"name": "engine", "args": ["z"], "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]},
                {"name": "another"},
            ],
            "hostNetwork": null,
            "securityContext": {"runAsUser": 7, "fsGroup": null},
        });
        into(&mut pod, &patch);
        let want = json!({
            "containers": [
                {
                    "name": "engine", "image": "a", "args": ["z"],
                    "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}],
                },
                {"name": "helper"},
                {"name": "another"},
            ],
            "securityContext": {"runAsUser": 7},
        });
        assert_eq!(pod, want);
    }
}
