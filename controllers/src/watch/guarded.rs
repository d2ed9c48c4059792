//! An object of a list or a watch that does not fail the others if it cannot be read.
//!
//! The client library's `DeserializeGuard` does the same through a tree of values, which it clones: that took most of
//! the CPU time of a Pod event. Here the object's text is kept until it is read, which another thread may do.

use std::{borrow::Cow, marker::PhantomData};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, core::PartialObjectMeta};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};
use serde_json::value::RawValue;

/// An object that has arrived and is not read yet.
///
/// Takes JSON alone, in an event whose type comes before its object, as the API server writes it. Name, namespace and
/// version must be readable in any case.
#[derive(Clone, Debug)]
pub(super) struct Guarded<K> {
    /// Has only name, namespace and version, which are all that the client library reads.
    metadata: ObjectMeta,
    text: String,
    kind: PhantomData<K>,
}

#[derive(Clone, Debug)]
pub(super) struct InvalidObject {
    pub(super) metadata: Box<ObjectMeta>,
    pub(super) error: String,
}

/// The fields of an object that are read when it arrives.
#[derive(Deserialize)]
struct ObjectHead<'a> {
    #[serde(borrow, default)]
    metadata: MetadataHead<'a>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetadataHead<'a> {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
    #[serde(borrow)]
    managed_fields: Option<Vec<ManagedFieldsHead<'a>>>,
}

#[derive(Deserialize)]
struct ManagedFieldsHead<'a> {
    /// Names of the fields that one writer owns.
    #[serde(rename = "fieldsV1", borrow)]
    field_names: Option<&'a RawValue>,
}

impl<'de, K> Deserialize<'de> for Guarded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&'de RawValue>::deserialize(deserializer)?.get();
        if !text.starts_with('{') {
            return Err(D::Error::custom("no object"));
        }
        let ObjectHead { metadata } = serde_json::from_str(text).map_err(D::Error::custom)?;
        let MetadataHead { name, namespace, resource_version, managed_fields } = metadata;
        let field_names: Vec<&str> =
            managed_fields.iter().flatten().filter_map(|fields| Some(fields.field_names?.get())).collect();
        let text = with_nulls(text, &field_names).unwrap_or_else(|| text.to_owned());
        let metadata = ObjectMeta { name, namespace, resource_version, ..ObjectMeta::default() };
        Ok(Self { metadata, text, kind: PhantomData })
    }
}

impl<K: Resource + DeserializeOwned> Guarded<K> {
    /// Reads the object, without the field names in its managed fields.
    ///
    /// # Errors
    /// The object does not have the form of its kind.
    pub(super) fn read(self) -> Result<K, InvalidObject> {
        let error = match serde_json::from_str(&self.text) {
            Ok(object) => return Ok(object),
            Err(error) => error.to_string(),
        };
        let metadata = match serde_json::from_str::<PartialObjectMeta<K>>(&self.text) {
            Ok(partial) => partial.metadata,
            Err(_) => self.metadata,
        };
        Err(InvalidObject { metadata: Box::new(metadata), error })
    }
}

/// Returns the text with `null` in place of these parts of it, which are in order.
///
/// The field names in managed fields are half of a Pod's text, and as a tree of values they would take more time to
/// read, and more memory, than the rest of the Pod. No controller uses them.
fn with_nulls(text: &str, parts: &[&str]) -> Option<String> {
    const NULL: &str = "null";
    let cut: usize = parts.iter().map(|part| part.len()).sum();
    let mut rest = String::with_capacity((text.len() + parts.len() * NULL.len()).checked_sub(cut)?);
    let mut end = 0;
    for part in parts {
        let begin = part.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
        rest.push_str(text.get(end..begin)?);
        rest.push_str(NULL);
        end = begin + part.len();
    }
    rest.push_str(text.get(end..)?);
    Some(rest)
}

impl<K: Resource> Resource for Guarded<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &K::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &K::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &K::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &K::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::core::{ObjectList, WatchEvent};

    use super::*;

    const GOOD: &str =
        r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"good"},"spec":{"containers":[]}}"#;
    const BAD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"bad"},"spec":{"containers":7}}"#;

    fn name(pod: &Guarded<Pod>) -> Option<&str> {
        pod.meta().name.as_deref()
    }

    fn guarded(text: &str) -> Guarded<Pod> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn an_unreadable_object_of_a_list_fails_no_other() {
        let text =
            format!(r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{}},"items":[{BAD},{GOOD}]}}"#);
        let list: ObjectList<Guarded<Pod>> = serde_json::from_str(&text).unwrap();
        let [bad, good] = <[_; 2]>::try_from(list.items).unwrap();
        assert_eq!((name(&bad), name(&good)), (Some("bad"), Some("good")));
        assert!(good.read().is_ok());
        let InvalidObject { metadata, error } = bad.read().unwrap_err();
        assert_eq!(metadata.name.as_deref(), Some("bad"));
        assert!(error.contains("invalid type: integer `7`"), "{error}");
    }

    #[test]
    fn the_object_of_a_watch_event_is_read_and_what_is_no_object_is_an_error() {
        let event = |object: &str| {
            serde_json::from_str::<WatchEvent<Guarded<Pod>>>(&format!(
                r#"{{"type":"MODIFIED","object":{object}}}"#
            ))
        };
        for (text, readable) in [(GOOD, true), (BAD, false)] {
            let Ok(WatchEvent::Modified(pod)) = event(text) else { panic!("{text}") };
            assert_eq!((name(&pod).is_some(), pod.read().is_ok()), (true, readable));
        }
        for text in ["[]", "7", "null", r#"{"metadata":{"name":7}}"#] {
            assert!(event(text).is_err(), "{text}");
        }
    }

    #[test]
    fn of_an_unreadable_object_all_metadata_are_kept_that_can_be_read() {
        let metadata = |metadata: &str| {
            let invalid = guarded(&format!(r#"{{"metadata":{metadata},"spec":7}}"#)).read().unwrap_err();
            *invalid.metadata
        };
        let whole = metadata(r#"{"name":"bad","generation":4,"labels":{"a":"b"}}"#);
        assert_eq!((whole.generation, whole.labels.map(|labels| labels.len())), (Some(4), Some(1)));
        let part = metadata(r#"{"name":"bad","resourceVersion":"9","labels":7}"#);
        assert_eq!((part.name.as_deref(), part.resource_version.as_deref()), (Some("bad"), Some("9")));
        assert_eq!(part.labels, None);
    }

    #[test]
    fn field_names_are_left_out_of_managed_fields_and_nowhere_else() {
        let text = r#" {"apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "größer", "namespace": "here", "resourceVersion": "12",
                "annotations": {"fieldsV1": "{\"f:spec\":{}}", "managedFields": "é"},
                "managedFields": [
                    {"manager": "first", "time": "2026-11-22T08:05:00Z", "fieldsV1": {"f:spec": {"f:a": {}}}},
                    {"manager": "none"},
                    {"fieldsV1": {}, "manager": "second", "operation": "Update"}
                ],
                "labels": {"last": "of all"}
            },
            "spec": {"containers": [{"name": "{\"f:spec\":{}}"}]}}"#;
        let guarded = guarded(text);
        let kept = guarded.meta();
        let kept = [&kept.name, &kept.namespace, &kept.resource_version].map(Option::as_deref);
        assert_eq!(kept, [Some("größer"), Some("here"), Some("12")]);

        let mut whole: Pod = serde_json::from_str(text).unwrap();
        for entry in whole.metadata.managed_fields.iter_mut().flatten() {
            entry.fields_v1 = None;
        }
        assert_eq!(whole.metadata.managed_fields.as_ref().map(Vec::len), Some(3));
        assert_eq!(guarded.read().unwrap(), whole);
    }
}
