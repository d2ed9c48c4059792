//! The fault for an unknown model, with similar names as suggestions.

use rouse::{fault::Fault, model::ModelNameIndex};

use super::client_text;
use crate::keys::ApiKey;

/// The most names that a fault suggests.
const MAX_SUGGESTIONS: usize = 3;
/// Shorter names are similar to everything.
const MIN_NAME_BYTES: usize = 3;

/// Makes the fault for an unknown name. Suggests only names that the key may use: a refusal must not reveal others.
pub(super) fn model_not_found(
    registry: &ModelNameIndex,
    key: Option<&ApiKey>,
    requested_model: &str,
) -> Fault {
    let model = client_text::sanitize(requested_model);
    let wanted = normalize(&model);
    let usable = registry.iter().filter(|(_, model)| key.is_none_or(|key| key.may_use(model)));
    let near =
        usable.filter(|(name, _)| is_similar(&wanted, &normalize(name))).map(|(name, _)| name.to_owned());
    let near = near.take(MAX_SUGGESTIONS).collect();
    Fault::ModelNotFound { model, suggestions: near }
}

/// Keeps only letters and digits, in lower case: owners, versions and spellings use many separators.
fn normalize(name: &str) -> Vec<u8> {
    name.bytes().filter(u8::is_ascii_alphanumeric).map(|byte| byte.to_ascii_lowercase()).collect()
}

/// Whether one name contains the other, or they differ in at most two characters at one place.
fn is_similar(a: &[u8], b: &[u8]) -> bool {
    let (short, long) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    if short.len() < MIN_NAME_BYTES {
        return false;
    }
    let before = short.iter().zip(long).take_while(|(a, b)| a == b).count();
    let behind = short.iter().rev().zip(long.iter().rev()).take_while(|(a, b)| a == b).count();
    let same = (before + behind).min(short.len());
    long.len() - same <= 2 || long.windows(short.len()).any(|part| part == short)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rouse_config::ModelAccess;

    #[test]
    fn only_names_that_the_key_may_use_are_offered() {
        let model = |name: &str| {
            format!(
                "\n  - name: {name}\n    memory: {{awake: 1Gi}}\n    engine: {{kind: custom, command: [e, '${{PORT}}']}}"
            )
        };
        let text = format!(
            "accelerators: [{{id: a, memory: 8Gi}}]\nmodels:{}{}",
            model("llama-3"),
            model("llama-4")
        );
        let registry = ModelNameIndex::new(&rouse_config::parse(&text, "test").unwrap().core.models);
        let near = |key: Option<&ApiKey>| match model_not_found(&registry, key, "llama") {
            Fault::ModelNotFound { suggestions: near, .. } => near,
            other => panic!("{other}"),
        };
        assert_eq!(near(None), ["llama-3", "llama-4"]);
        let key = ApiKey::for_tests("k", ModelAccess::Only(["llama-4".into()].into()));
        assert_eq!(near(Some(&key)), ["llama-4"]);
    }

    #[test]
    fn names_are_near_that_a_person_would_take_for_each_other() {
        for (asked, name) in [
            ("qwen3-8b", "Qwen/Qwen3-8B"),
            ("Qwen/Qwen3-8B-Instruct", "qwen3-8b"),
            ("lama-3", "llama-3"),
            ("llama_3.1", "llama-3.1"),
            ("gpt-4o", "gpt-4"),
        ] {
            assert!(is_similar(&normalize(asked), &normalize(name)), "{asked} {name}");
        }
        for (asked, name) in [("gpt-4o", "qwen3-8b"), ("x", "x1"), ("", "llama"), ("mistral", "minstrel-7b")]
        {
            assert!(!is_similar(&normalize(asked), &normalize(name)), "{asked} {name}");
        }
    }
}
