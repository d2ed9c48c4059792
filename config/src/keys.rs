//! Reads `keys`: who may use the API.
//!
//! Model access is resolved here against the models of the same file, so that no request waits for pattern matching.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::model::{ModelName, ModelSpec};

use super::{
    ConfigProblem, SourceLocation,
    reader::{ConfigReader, ConfigSection},
    yaml::{YamlNode, YamlValue},
};

/// The SHA-256 of a key.
pub type KeyHash = [u8; 32];

/// All keys of a file; empty if anybody may use the API.
pub type KeyConfigs = Arc<[KeyConfig]>;

/// Limits per minute. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    pub requests: Option<u64>,
    pub tokens: Option<u64>,
}

/// One key as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyConfig {
    /// Name in logs and metrics. The counters belong to it.
    pub name: Arc<str>,
    pub hash: KeyHash,
    pub models: ModelAccess,
    pub limits: RateLimits,
    pub priority: i32,
    /// Its streams get heartbeats while they wait.
    pub heartbeat: bool,
}

/// Models that a key may use, under any of their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelAccess {
    All,
    Only(BTreeSet<ModelName>),
}

/// Content of `keys`.
#[derive(Default)]
pub(super) struct ParsedKeys {
    pub(super) keys: KeyConfigs,
    /// `keys: none`.
    pub(super) explicitly_none: bool,
    /// Legal settings that are hardly intended.
    pub(super) warnings: Vec<ConfigProblem>,
}

/// Reads `none` or the list.
pub(super) fn keys(reader: &mut ConfigReader, root: &mut ConfigSection, models: &[ModelSpec]) -> ParsedKeys {
    let mut found = ParsedKeys::default();
    root.read(reader, "keys", |reader, node| {
        match &node.value {
            YamlValue::List(list) if list.is_empty() => {
                reader.note(
                    node.at,
                    "an empty list would reject every request: remove it, or set 'none', to allow requests without a key",
                );
            }
            YamlValue::List(_) => {
                let mut taken = TakenKeys::default();
                let read = reader.list(node, |reader, node| {
                    if let YamlValue::Scalar(_) = &node.value {
                        // The message omits the text, which may be the key itself.
                        let expected = "expected {name: NAME, sha256: HASH}, found a single value";
                        reader.note(node.at, format_args!("{expected}: {KEY_COMMAND_HINT}"));
                        return None;
                    }
                    let mut section = reader.section(node);
                    let key = read_key(reader, &mut section, models, &mut taken, &mut found.warnings);
                    section.close(reader);
                    key
                });
                found.keys = read.unwrap_or_default().into();
            }
            YamlValue::Scalar(written) => {
                found.explicitly_none = reader.text(node)? == "none";
                if !found.explicitly_none {
                    // The text may be a key here too; only a reference to an environment variable is shown.
                    let shown = if written.contains("${env:") { written.as_str() } else { "a single value" };
                    reader.note(
                        node.at,
                        format_args!("expected 'none' or a list of keys, found {shown}: {KEY_COMMAND_HINT}"),
                    );
                }
            }
            _ => reader.note(node.at, "expected 'none' or a list of keys"),
        }
        Some(())
    });
    found
}

/// Advice for a key that is in the file as plain text.
const KEY_COMMAND_HINT: &str = "run 'rouse-gateway key NAME' to create a key and its line, or add --stdin to create the line of an existing key";

/// Names and hashes of earlier keys.
#[derive(Default)]
struct TakenKeys {
    names: BTreeMap<String, SourceLocation>,
    hashes: BTreeMap<KeyHash, SourceLocation>,
}

fn read_key(
    reader: &mut ConfigReader,
    section: &mut ConfigSection,
    specs: &[ModelSpec],
    taken: &mut TakenKeys,
    doubts: &mut Vec<ConfigProblem>,
) -> Option<KeyConfig> {
    let name = section.require(reader, "name", |reader, node| name(reader, node, taken));
    let is_plain = section.location_of("key").is_some();
    if is_plain {
        section.read(reader, "key", |reader, node| {
            reader.note(
                node.at,
                format_args!("the file must not contain a key, only its sha256: {KEY_COMMAND_HINT}"),
            );
            None::<()>
        });
    }
    let hash = if is_plain && section.location_of("sha256").is_none() {
        None
    } else {
        section.require(reader, "sha256", |reader, node| hash(reader, node, taken))
    };
    let models = section.read(reader, "models", |reader, node| models(reader, node, specs, doubts));
    let limits = RateLimits {
        requests: section.read(reader, "requestsPerMinute", positive_number),
        tokens: section.read(reader, "tokensPerMinute", positive_number),
    };
    let priority = section.read(reader, "priority", ConfigReader::number).unwrap_or(0);
    let heartbeat = section
        .read(reader, "heartbeat", |reader, node| reader.choice(node, &[("on", true), ("off", false)]))
        .unwrap_or(true);
    let models = models.unwrap_or(ModelAccess::All);
    Some(KeyConfig { name: name?.into(), hash: hash?, models, limits, priority, heartbeat })
}

fn name(reader: &mut ConfigReader, node: &YamlNode, taken: &mut TakenKeys) -> Option<String> {
    let name = reader.text(node)?;
    if name.is_empty() || name.len() > 128 || name.chars().any(char::is_control) {
        reader.note(node.at, "a key's name must have 1 to 128 bytes and no control characters");
        return None;
    }
    if let Some(at) = taken.names.get(&name) {
        reader.note(node.at, format_args!("the name '{name}' is already taken (line {})", at.line));
        return None;
    }
    taken.names.insert(name.clone(), node.at);
    Some(name)
}

fn hash(reader: &mut ConfigReader, node: &YamlNode, taken: &mut TakenKeys) -> Option<KeyHash> {
    let text = reader.text(node)?;
    let digits: Option<Vec<u32>> = text.chars().map(|c| c.to_digit(16)).collect();
    let Some(digits) = digits.filter(|digits| digits.len() == 64) else {
        // The message omits the text, which may be the key itself.
        reader.note(
            node.at,
            "expected a SHA-256 of 64 hexadecimal digits: run 'rouse-gateway key NAME' to create a key and its line",
        );
        return None;
    };
    let mut hash = KeyHash::default();
    for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
        *byte = pair.iter().fold(0, |byte, digit| byte << 4 | *digit as u8);
    }
    if let Some(at) = taken.hashes.get(&hash) {
        reader.note(node.at, format_args!("another key has the same hash (line {})", at.line));
        return None;
    }
    taken.hashes.insert(hash, node.at);
    Some(hash)
}

/// Reads a list of names, aliases, and prefixes of either that end with `*`.
fn models(
    reader: &mut ConfigReader,
    node: &YamlNode,
    specs: &[ModelSpec],
    doubts: &mut Vec<ConfigProblem>,
) -> Option<ModelAccess> {
    let patterns = reader.list(node, |reader, node| {
        let text = reader.text(node)?;
        let stars = text.matches('*').count();
        if text.is_empty() || stars > 1 || (stars == 1 && !text.ends_with('*')) {
            reader.note(node.at, "expected a model's name, an alias, or a prefix followed by '*'");
            return None;
        }
        Some((node.at, text))
    })?;
    if patterns.is_empty() {
        reader.note(node.at, "an empty list allows no model: remove 'models' to allow all models");
        return None;
    }
    let mut models = BTreeSet::new();
    for (at, pattern) in &patterns {
        if pattern == "*" {
            return Some(ModelAccess::All);
        }
        let known = specs.iter().filter(|spec| names_and_aliases(spec).any(|name| matches(pattern, name)));
        let known: Vec<_> = known.map(|spec| spec.name.clone()).collect();
        if known.is_empty() {
            doubts.push(ConfigProblem::new(*at, format!("keys: no model matches '{pattern}'")));
        }
        models.extend(known);
    }
    Some(ModelAccess::Only(models))
}

fn names_and_aliases(spec: &ModelSpec) -> impl Iterator<Item = &str> {
    std::iter::once(spec.name.as_str()).chain(spec.aliases.iter().map(String::as_str))
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |beginning| name.starts_with(beginning))
}

fn positive_number(reader: &mut ConfigReader, node: &YamlNode) -> Option<u64> {
    let number = reader.number::<u64>(node)?;
    if number == 0 {
        reader.note(node.at, "must be at least 1");
        return None;
    }
    Some(number)
}
