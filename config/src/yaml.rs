//! Parses the file into a tree with locations and texts.
//!
//! Deserialising straight into structs stops at the first error, so a configuration with five errors would take five
//! rounds of editing. So the YAML becomes this tree first, in which every node knows its line and column, and the
//! reader on top collects all errors. Scalars keep their original text: `1.10` in an engine's environment must not
//! become `1.1`.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{Location, Spanned, options::DuplicateKeyPolicy};

use super::error::{ConfigProblem, SourceLocation};

#[derive(Clone, Debug)]
pub(super) struct YamlNode {
    pub(super) at: SourceLocation,
    pub(super) value: YamlValue,
}

#[derive(Clone, Debug)]
pub(super) enum YamlValue {
    Null,
    Scalar(String),
    List(Vec<YamlNode>),
    Map(Vec<YamlEntry>),
}

#[derive(Clone, Debug)]
pub(super) struct YamlEntry {
    pub(super) key: String,
    pub(super) at: SourceLocation,
    pub(super) value: YamlNode,
}

impl YamlNode {
    /// Parses a whole document.
    ///
    /// A syntax error yields no tree. A duplicate key is a problem of its own, and the rest is still read.
    pub(super) fn parse(text: &str) -> Result<(Self, Vec<ConfigProblem>), Vec<ConfigProblem>> {
        let (document, problems) = match read(text, DuplicateKeyPolicy::Error) {
            Ok(document) => (document, Vec::new()),
            Err(error) => {
                let problem = ConfigProblem::from_yaml(&error, text);
                let again = match error.without_snippet() {
                    serde_saphyr::Error::DuplicateMappingKey { .. } => {
                        read(text, DuplicateKeyPolicy::FirstWins).ok()
                    }
                    _ => None,
                };
                match again {
                    Some(document) => (document, vec![problem]),
                    None => return Err(vec![problem]),
                }
            }
        };
        Ok((Self::from_raw(document, text), problems))
    }

    fn from_raw(raw: Spanned<RawYaml>, source: &str) -> Self {
        let at = SourceLocation::from(raw.referenced);
        let value = match raw.value {
            RawYaml::Null => YamlValue::Null,
            RawYaml::Text(text) => YamlValue::Scalar(text),
            RawYaml::Plain(fallback) => {
                YamlValue::Scalar(source_text(&raw.defined, source).unwrap_or(fallback))
            }
            RawYaml::List(items) => {
                YamlValue::List(items.into_iter().map(|item| Self::from_raw(item, source)).collect())
            }
            RawYaml::Map(entries) => YamlValue::Map(
                entries
                    .into_iter()
                    .map(|(key, value)| YamlEntry {
                        at: SourceLocation::from(key.referenced),
                        key: key.value,
                        value: Self::from_raw(value, source),
                    })
                    .collect(),
            ),
        };
        Self { at, value }
    }

    /// Whether the document is empty, without even a key.
    pub(super) fn is_blank(&self) -> bool {
        match &self.value {
            YamlValue::Null => true,
            YamlValue::Map(entries) => entries.is_empty(),
            YamlValue::Scalar(_) | YamlValue::List(_) => false,
        }
    }

    /// Describes the node's type, for "expected X, found Y".
    pub(super) const fn type_name(&self) -> &'static str {
        match self.value {
            YamlValue::Null => "nothing",
            YamlValue::Scalar(_) => "a single value",
            YamlValue::List(_) => "a list",
            YamlValue::Map(_) => "a mapping",
        }
    }
}

fn read(text: &str, duplicate_keys: DuplicateKeyPolicy) -> Result<Spanned<RawYaml>, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        duplicate_keys: duplicate_keys,
    };
    serde_saphyr::from_str_with_options(text, options)
}

fn source_text(location: &Location, source: &str) -> Option<String> {
    let span = location.span();
    let start = usize::try_from(span.byte_offset()?).ok()?;
    let end = start.checked_add(usize::try_from(span.byte_len()?).ok()?)?;
    source.get(start..end).map(|text| text.trim().to_owned())
}

enum RawYaml {
    Null,
    Text(String),
    /// A number or boolean as inferred; its span yields the original text.
    Plain(String),
    List(Vec<Spanned<Self>>),
    Map(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl<'de> Deserialize<'de> for RawYaml {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawYamlVisitor)
    }
}

struct RawYamlVisitor;

impl<'de> Visitor<'de> for RawYamlVisitor {
    type Value = RawYaml;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_unit<E>(self) -> Result<RawYaml, E> {
        Ok(RawYaml::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<RawYaml, E> {
        Ok(RawYaml::Plain(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<RawYaml, E> {
        Ok(RawYaml::Plain(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<RawYaml, E> {
        Ok(RawYaml::Plain(value.to_string()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<RawYaml, E> {
        Ok(RawYaml::Plain(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<RawYaml, E> {
        Ok(RawYaml::Plain(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<RawYaml, E> {
        Ok(RawYaml::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<RawYaml, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(RawYaml::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawYaml, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = entries.next_key()? {
            map.push((key, entries.next_value()?));
        }
        Ok(RawYaml::Map(map))
    }
}
