//! Fences writes to objects that others write, too: Pods, whose kubelets and users also change them.
//!
//! A write carries the version that its decision saw, and leaves its leader's epoch on the object. So the API server
//! refuses a write that a replaced leader sent before and that arrives after its successor's. A kubelet's status also
//! changes the version. A refused writer therefore reads the object again, and repeats the write only if nothing that
//! Rouse writes has changed, or if this leader itself has changed it.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Preconditions};
use serde_json::{Value, json};

use crate::{
    dual_pods::{keys, launcher_engines},
    workload::{DELETION_COST, EPOCH, merge},
};

/// A version that no object has: the API server refuses a write with it, and the writer reads the object.
const NO_VERSION: &str = "1";

/// What a decision saw of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenObject {
    uid: String,
    version: String,
    /// Epoch of the leader that wrote the object last; 0 if none did.
    epoch: u64,
    /// Hash of the labels, annotations and finalizers that Rouse writes.
    content: u64,
}

/// What a write rests on: the object as the decision saw it, and the epoch in which the decision was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    pub(super) seen: SeenObject,
    pub(super) epoch: u64,
    exact: bool,
}

impl SeenObject {
    #[must_use]
    pub fn of(metadata: &ObjectMeta) -> Self {
        let epoch = metadata.annotations.as_ref().and_then(|all| all.get(EPOCH));
        Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            version: metadata.resource_version.clone().unwrap_or_else(|| NO_VERSION.to_owned()),
            epoch: epoch.and_then(|epoch| epoch.parse().ok()).unwrap_or_default(),
            content: content(metadata),
        }
    }

    /// Whether a leader of a newer epoch seems to have written the object.
    pub(super) const fn is_newer_than(&self, epoch: u64) -> bool {
        self.epoch > epoch
    }

    /// Whether both are the same object, in any version.
    pub(super) fn is_same_object(&self, other: &Self) -> bool {
        self.uid == other.uid
    }

    /// Builds the parameters that delete this object in this version only.
    pub(super) fn delete_params(&self) -> DeleteParams {
        let preconditions =
            Preconditions { uid: Some(self.uid.clone()), resource_version: Some(self.version.clone()) };
        DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() }
    }
}

impl Fence {
    /// Fences a write of fields that only the leader changes.
    #[must_use]
    pub const fn new(seen: SeenObject, epoch: u64) -> Self {
        Self { seen, epoch, exact: false }
    }

    /// Fences a write that was computed from the object's content: this leader's other writes stop it, too.
    #[must_use]
    pub const fn exact(seen: SeenObject, epoch: u64) -> Self {
        Self { seen, epoch, exact: true }
    }

    /// Whether the write still stands now that the object's version is another.
    ///
    /// Changes of former leaders and of users count. This leader's do not, unless the fence is exact: its decisions
    /// already know of them.
    pub(super) fn allows(&self, now: &SeenObject) -> bool {
        self.seen.is_same_object(now)
            && (self.seen.content == now.content || (!self.exact && now.epoch == self.epoch))
    }

    /// Adds to a patch the version that it is for, and this leader's epoch.
    pub(super) fn stamped(&self, patch: &Value, seen: &SeenObject) -> Value {
        let mut stamped = patch.clone();
        let stamp = json!({"metadata": {
            "uid": seen.uid,
            "resourceVersion": seen.version,
            "annotations": {EPOCH: self.epoch.to_string()},
        }});
        merge::into(&mut stamped, &stamp);
        stamped
    }
}

/// Hashes what Rouse writes on an object, without the epoch.
fn content(metadata: &ObjectMeta) -> u64 {
    let mut hasher = DefaultHasher::new();
    for all in [&metadata.labels, &metadata.annotations] {
        let ours = all.iter().flatten().filter(|(key, _)| is_ours(key));
        ours.for_each(|entry| entry.hash(&mut hasher));
        // Keeps a label apart from an annotation of the same key.
        hasher.write_u8(0);
    }
    let finalizers = metadata.finalizers.iter().flatten().filter(|finalizer| is_ours(finalizer));
    finalizers.for_each(|finalizer| finalizer.hash(&mut hasher));
    hasher.finish()
}

/// Whether Rouse writes labels, annotations or finalizers of this key.
///
/// Engines' routing metadata has any keys, and is repeated in the engines' records.
fn is_ours(key: &str) -> bool {
    key != EPOCH && (keys::is_reserved(key) || launcher_engines::is_engine_key(key) || key == DELETION_COST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(version: &str, epoch: &str, change: &Value) -> SeenObject {
        let mut metadata = json!({
            "uid": "u",
            "resourceVersion": version,
            "labels": {"app": "one", keys::DUAL: "one-x"},
            "annotations": {EPOCH: epoch, keys::REQUESTER: "r one-x", "example.com/ip": "10.0.0.1"},
            "finalizers": [keys::PROVIDER_FINALIZER],
        });
        merge::into(&mut metadata, change);
        SeenObject::of(&serde_json::from_value(metadata).unwrap())
    }

    #[test]
    fn a_change_of_what_others_write_leaves_a_decision_as_it_is() {
        let fence = Fence::new(seen("7", "4", &json!({})), 5);
        for change in [
            json!({}),
            json!({"labels": {"app": "two"}}),
            json!({"annotations": {"example.com/ip": null}}),
            json!({"finalizers": ["example.com/other", keys::PROVIDER_FINALIZER]}),
            json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        ] {
            assert!(fence.allows(&seen("8", "4", &change)), "{change}");
            assert!(
                fence.allows(&seen("8", "3", &change)),
                "the same content, whichever epoch wrote it: {change}"
            );
        }
    }

    #[test]
    fn a_change_of_what_rouse_writes_counts_unless_this_leader_made_it() {
        let before = seen("7", "4", &json!({}));
        let (fence, exact) = (Fence::new(before.clone(), 5), Fence::exact(before, 5));
        for change in [
            json!({"labels": {keys::DUAL: "two-x"}}),
            json!({"annotations": {keys::REQUESTER: "r two-x"}}),
            json!({"annotations": {"engines.rouse.dev/one": "{}"}}),
            json!({"annotations": {DELETION_COST: "100"}}),
            json!({"finalizers": []}),
        ] {
            assert!(!fence.allows(&seen("8", "4", &change)), "a late write of a former leader: {change}");
            assert!(!fence.allows(&seen("8", "6", &change)), "a newer leader's: {change}");
            assert!(fence.allows(&seen("8", "5", &change)), "its own: {change}");
            assert!(!exact.allows(&seen("8", "5", &change)), "what was read has changed: {change}");
        }
        let other = seen("8", "5", &json!({"uid": "another"}));
        assert!(!fence.allows(&other) && !fence.seen.is_same_object(&other));
    }

    #[test]
    fn a_label_is_no_annotation_of_the_same_key() {
        let of = |field: &str| {
            let metadata = json!({field: {keys::ACCELERATORS: "a"}});
            SeenObject::of(&serde_json::from_value(metadata).unwrap())
        };
        assert_ne!(of("labels").content, of("annotations").content);
    }

    #[test]
    fn a_patch_keeps_what_it_removes_and_names_its_version_and_its_leader() {
        let before = seen("7", "4", &json!({}));
        let remove = "$deleteFromPrimitiveList/finalizers";
        let patch = json!({"metadata": {
            remove: [keys::PROVIDER_FINALIZER],
            "labels": {keys::DUAL: null},
            "annotations": {keys::REQUESTER: null},
        }});
        assert_eq!(
            Fence::new(before.clone(), 5).stamped(&patch, &before),
            json!({"metadata": {
                "uid": "u",
                "resourceVersion": "7",
                remove: [keys::PROVIDER_FINALIZER],
                "labels": {keys::DUAL: null},
                "annotations": {keys::REQUESTER: null, EPOCH: "5"},
            }})
        );
        let deletes = before.delete_params().preconditions.unwrap();
        assert_eq!((deletes.uid.as_deref(), deletes.resource_version.as_deref()), (Some("u"), Some("7")));
        let bare = SeenObject::of(&ObjectMeta::default());
        assert_eq!(
            Fence::new(bare.clone(), 5).stamped(&json!({}), &bare)["metadata"]["resourceVersion"],
            "1"
        );
    }

    #[test]
    fn an_epoch_is_read_from_the_annotation() {
        assert!(seen("7", "6", &json!({})).is_newer_than(5));
        assert!(!seen("7", "5", &json!({})).is_newer_than(5));
        for none in [json!({"annotations": {EPOCH: null}}), json!({"annotations": {EPOCH: "many"}})] {
            assert!(!seen("7", "6", &none).is_newer_than(0), "{none}");
        }
    }
}
