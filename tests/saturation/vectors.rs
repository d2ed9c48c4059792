//! The file of vectors, and the count that no vector escapes.

use std::sync::LazyLock;

use serde_json::Value;

/// Every section with the number of its vectors.
const SECTIONS: [(&str, usize); 11] = [
    ("analyze", 32),
    ("targets", 31),
    ("sequences", 4),
    ("roles", 14),
    ("config_validation", 25),
    ("config_resolution", 6),
    ("gpu_limiter", 9),
    ("gpu_pool", 8),
    ("gpu_capacity", 5),
    ("idle_enforcer", 8),
    ("token_capacity", 13),
];

static FILE: LazyLock<Value> =
    LazyLock::new(|| serde_saphyr::from_str(include_str!("vectors.yaml")).unwrap());

/// The vectors of a section. A test runs them all.
pub(crate) fn section(name: &str) -> &'static [Value] {
    let (_, count) = SECTIONS.iter().find(|(section, _)| *section == name).unwrap();
    let vectors = FILE[name].as_array().unwrap();
    assert_eq!(vectors.len(), *count, "{name}");
    vectors
}

pub(crate) fn id(vector: &Value) -> &str {
    text(&vector["id"])
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

pub(crate) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

pub(crate) fn count(value: &Value) -> u32 {
    value
        .as_u64()
        .and_then(|count| u32::try_from(count).ok())
        .unwrap_or_else(|| panic!("{value} is no count"))
}

/// The fields of a mapping, or nothing where it is absent.
pub(crate) fn fields(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}

pub(crate) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[test]
fn the_file_has_155_vectors_and_no_section_without_a_test() {
    let total: usize = SECTIONS.iter().map(|(name, _)| section(name).len()).sum();
    assert_eq!(total, 155);
    // `default_cfg` is the only list that is no section.
    let lists = fields(&FILE).filter(|(name, value)| value.is_array() && *name != "default_cfg");
    assert_eq!(lists.count(), SECTIONS.len());
}
