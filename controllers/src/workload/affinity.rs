//! Preferences of a Pod for nodes, added to those of the user's template.

use serde_json::{Map, Value, json};

use super::merge;
use crate::{convert::warmup::model_set, crd::ledger::ObjectName, label};

/// Weight of the preference for warm nodes, beside the user's own preferences for nodes.
///
/// The scheduler scales the sums of all nodes to the same range, so the weight matters only beside other terms. Half of
/// the range lets a user put a term above it or below it.
const WARM_NODE_WEIGHT: u32 = 50;

/// Prefers nodes that have the model's images.
///
/// The term is the same whatever is warm, because a changed template makes another Deployment.
pub(super) fn prefer_warm_nodes(spec: &mut Map<String, Value>, model: &ObjectName) {
    let is_warm = json!({"key": label::warm_key(&model_set(model)), "operator": "Exists"});
    let preference = json!({"matchExpressions": [is_warm]});
    add_preference(spec, "nodeAffinity", json!({"weight": WARM_NODE_WEIGHT, "preference": preference}));
}

/// Adds a preferred term to this kind of affinity of a Pod's spec.
pub(super) fn add_preference(spec: &mut Map<String, Value>, kind: &str, term: Value) {
    let affinity = spec.entry("affinity").or_insert(Value::Null);
    let preferred = merge::under(affinity, kind)
        .and_then(|affinity| merge::under(affinity, "preferredDuringSchedulingIgnoredDuringExecution"));
    let Some(preferred) = preferred else { return };
    if !preferred.is_array() {
        *preferred = json!([]);
    }
    if let Some(preferred) = preferred.as_array_mut() {
        preferred.push(term);
    }
}
