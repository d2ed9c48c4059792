//! An object of a list or a watch that does not fail the others if it cannot be read.
//!
//! The client library's `DeserializeGuard` does the same through a tree of values, which it clones: that took most of
//! the CPU time of a Pod event. Here the object's text is kept until it has been read.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, core::PartialObjectMeta};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};
use serde_json::value::RawValue;

/// An object, or its metadata and why the rest cannot be read.
///
/// Reads JSON alone, in an event whose type comes before its object, as the API server writes it. The metadata must be
/// readable in any case.
#[derive(Clone, Debug)]
pub(super) struct Guarded<K>(pub(super) Result<K, InvalidObject>);

#[derive(Clone, Debug)]
pub(super) struct InvalidObject {
    pub(super) metadata: Box<ObjectMeta>,
    pub(super) error: String,
}

impl<'de, K: Resource + DeserializeOwned> Deserialize<'de> for Guarded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let error = match serde_json::from_str(text.get()) {
            Ok(object) => return Ok(Self(Ok(object))),
            Err(error) => error.to_string(),
        };
        let PartialObjectMeta::<K> { metadata, .. } =
            serde_json::from_str(text.get()).map_err(D::Error::custom)?;
        Ok(Self(Err(InvalidObject { metadata: Box::new(metadata), error })))
    }
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
        self.0.as_ref().map_or_else(|invalid| &*invalid.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.as_mut().map_or_else(|invalid| &mut *invalid.metadata, K::meta_mut)
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

    #[test]
    fn an_unreadable_object_of_a_list_fails_no_other() {
        let text =
            format!(r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{}},"items":[{BAD},{GOOD}]}}"#);
        let list: ObjectList<Guarded<Pod>> = serde_json::from_str(&text).unwrap();
        let [bad, good] = &*list.items else { panic!("{:?}", list.items) };
        assert_eq!((name(bad), name(good)), (Some("bad"), Some("good")));
        assert!(good.0.is_ok());
        let error = &bad.0.as_ref().unwrap_err().error;
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
            assert_eq!((name(&pod).is_some(), pod.0.is_ok()), (true, readable));
        }
        for text in ["[]", "7", "null"] {
            assert!(event(text).is_err(), "{text}");
        }
    }
}
