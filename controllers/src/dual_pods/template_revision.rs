//! Identifies which revision of which template a requester comes from.
//!
//! An engine that only requesters of older revisions ask for is outdated: a new request for it is unlikely.

use aws_lc_rs::digest;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::{base::TEMPLATE_HASH, keys};
use crate::label;

/// The template revision of a requester, and of the provider that was made for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TemplateRevision {
    /// Groups requesters that replace each other: those of a model, or of a ReplicaSet or its Deployment. Unique within
    /// a namespace.
    pub origin: String,
    /// Hash of the server patch's text.
    pub version: u64,
}

impl TemplateRevision {
    /// Returns the revision; `None` without a server patch, or without a model or controller that owns the Pod.
    #[must_use]
    pub fn of(requester: &Pod) -> Option<Self> {
        let patch = keys::read(requester, keys::SERVER_PATCH)?;
        let labels = requester.labels();
        let model = labels.get(label::MODEL).map(|model| format!("model/{model}"));
        let owners = requester.owner_references().iter();
        let set = || owners.clone().find(|owner| owner.controller == Some(true));
        let origin = model.or_else(|| {
            let name = set()?.name.as_str();
            // A Deployment's ReplicaSet is named after the Deployment plus a hash for each revision.
            let hash = labels.get(TEMPLATE_HASH);
            let whole = hash.and_then(|hash| name.strip_suffix(hash.as_str())?.strip_suffix('-'));
            Some(format!("set/{}", whole.unwrap_or(name)))
        })?;
        let hash = digest::digest(&digest::SHA256, patch.as_bytes());
        let version = hash.as_ref().iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Some(Self { origin, version })
    }

    /// Reads the revision that [`Self::text`] wrote on a provider.
    #[must_use]
    pub fn read(provider: &Pod) -> Option<Self> {
        let (origin, version) = provider.annotations().get(keys::TEMPLATE_REVISION)?.split_once(' ')?;
        Some(Self { origin: origin.to_owned(), version: u64::from_str_radix(version, 16).ok()? })
    }

    #[must_use]
    pub fn text(&self) -> String {
        format!("{} {:016x}", self.origin, self.version)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn requester(labels: Value, owner: Option<&str>, patch: Option<&str>) -> Pod {
        let owners = owner.map(|name| {
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": "u", "controller": true}])
        });
        let annotations = patch.map(|patch| json!({keys::SERVER_PATCH: patch}));
        let metadata = json!({"labels": labels, "ownerReferences": owners, "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn requesters_that_replace_each_other_have_one_origin_and_a_version_each() {
        let of = |hash: &str, patch: &str| {
            TemplateRevision::of(&requester(
                json!({TEMPLATE_HASH: hash}),
                Some(&format!("chat-{hash}")),
                Some(patch),
            ))
            .unwrap()
        };
        let (one, two, again) = (of("5d", "a"), of("7f", "b"), of("9c", "a"));
        assert_eq!((one.origin.as_str(), two.origin.as_str()), ("set/chat", "set/chat"));
        assert!(one.version != two.version && one == again, "rolled back");
        let set = TemplateRevision::of(&requester(json!({}), Some("chat"), Some("a"))).unwrap();
        assert_eq!(set, one, "the set of a Deployment's name is its own");
        let model = TemplateRevision::of(&requester(json!({label::MODEL: "0a"}), Some("chat-5d"), Some("a")))
            .unwrap();
        assert_eq!(model.origin, "model/0a");
    }

    #[test]
    fn what_is_written_is_read_and_who_is_alone_has_none() {
        let one = TemplateRevision::of(&requester(json!({}), Some("chat"), Some("a"))).unwrap();
        let mut provider = Pod::default();
        provider.metadata.annotations = Some([(keys::TEMPLATE_REVISION.to_owned(), one.text())].into());
        assert_eq!(TemplateRevision::read(&provider), Some(one));
        assert_eq!(TemplateRevision::read(&Pod::default()), None);
        assert_eq!(TemplateRevision::of(&requester(json!({}), None, Some("a"))), None);
        assert_eq!(TemplateRevision::of(&requester(json!({}), Some("chat"), None)), None);
    }
}
