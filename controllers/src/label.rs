//! Labels and annotations that tie Rouse's objects to their model.
//!
//! A label value has at most 63 characters and no `/`, and a model name may break both limits. So the label is a hash,
//! for selectors, and an annotation holds the name, for people.

use std::{collections::BTreeMap, fmt::Write as _};

use aws_lc_rs::digest;
use rouse::warmup::WarmSet;

/// Label: [`value`] of the model's name.
pub const MODEL: &str = "rouse.dev/model";
/// Label: the variant that a Pod runs. The default variant has no label, as Pods had none before there were variants.
pub const VARIANT: &str = "rouse.dev/variant";
/// Annotation: the unmodified name of the model.
pub const MODEL_NAME: &str = "rouse.dev/model-name";
/// Prefix of the label of a warm node. The rest of the key is the set, and the value the namespace of the gateways that
/// set the label.
pub const WARM_PREFIX: &str = "warm.rouse.dev/";

/// Half of a SHA-256: too long to construct two names that share it.
const HASH_BYTES: usize = 16;

/// Returns the label value of a model's name: 32 hexadecimal characters, equal on all gateways and versions.
#[must_use]
pub fn value(name: &str) -> String {
    let hash = digest::digest(&digest::SHA256, name.as_bytes());
    hash.as_ref().iter().take(HASH_BYTES).fold(String::with_capacity(2 * HASH_BYTES), |mut text, byte| {
        // Writing to a string cannot fail.
        write!(text, "{byte:02x}").unwrap_or_default();
        text
    })
}

/// Whether the labels have all pairs of the selector. An empty selector selects everything.
#[must_use]
pub(crate) fn has_all(labels: &BTreeMap<String, String>, selector: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Returns the key of the label that the warm nodes of this set have.
#[must_use]
pub fn warm_key(set: &WarmSet) -> String {
    format!("{WARM_PREFIX}{set}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_gets_a_value_that_is_its_own_and_stays() {
        assert_eq!(value("meta-llama/Llama-3.1-8B"), value("meta-llama/Llama-3.1-8B"));
        assert_ne!(value("meta-llama/Llama-3.1-8B"), value("meta-llama-Llama-3.1-8B"));
        // Selectors of running Deployments contain this value, so it must not change between versions.
        assert_eq!(value("a"), "ca978112ca1bbdcafac231b39a23dc4d");
        for name in ["", "a", "org/name", &"x".repeat(256), "größe"] {
            let value = value(name);
            assert!(value.len() == 32 && value.bytes().all(|b| b.is_ascii_hexdigit()), "{name}: {value}");
        }
    }
}
