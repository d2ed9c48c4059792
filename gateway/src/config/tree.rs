//! The file as a tree of spans and texts.
//!
//! Deserialising straight into structs stops at the first mistake, and a configuration with five mistakes would be
//! five rounds of editing. So the YAML becomes this tree first, in which everything knows its line and column, and
//! the reader above it collects what it dislikes and goes on. Scalars keep the text they were written in: `1.10` in
//! an engine's environment must not arrive there as `1.1`.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{Location, Spanned, options::DuplicateKeyPolicy};

use super::error::{At, Problem};

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) at: At,
    pub(super) value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) at: At,
    pub(super) value: Node,
}

impl Node {
    /// Parses a whole document. A syntax error leaves no tree; a key given twice is a problem of its own, and the
    /// rest is still read.
    pub(super) fn parse(text: &str) -> Result<(Self, Vec<Problem>), Vec<Problem>> {
        let (document, problems) = match read(text, DuplicateKeyPolicy::Error) {
            Ok(document) => (document, Vec::new()),
            Err(error) => {
                let problem = Problem::from_yaml(&error, text);
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

    fn from_raw(raw: Spanned<Raw>, source: &str) -> Self {
        let at = At::from(raw.referenced);
        let value = match raw.value {
            Raw::Null => Value::Null,
            Raw::Text(text) => Value::Scalar(text),
            Raw::Plain(fallback) => Value::Scalar(written(&raw.defined, source).unwrap_or(fallback)),
            Raw::List(items) => {
                Value::List(items.into_iter().map(|item| Self::from_raw(item, source)).collect())
            }
            Raw::Map(entries) => Value::Map(
                entries
                    .into_iter()
                    .map(|(key, value)| Entry {
                        at: At::from(key.referenced),
                        key: key.value,
                        value: Self::from_raw(value, source),
                    })
                    .collect(),
            ),
        };
        Self { at, value }
    }

    /// There is nothing in it, not even a key.
    pub(super) fn is_blank(&self) -> bool {
        match &self.value {
            Value::Null => true,
            Value::Map(entries) => entries.is_empty(),
            Value::Scalar(_) | Value::List(_) => false,
        }
    }

    /// What it is, for "expected X, found Y".
    pub(super) const fn what(&self) -> &'static str {
        match self.value {
            Value::Null => "nothing",
            Value::Scalar(_) => "a single value",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
        }
    }
}

fn read(text: &str, duplicate_keys: DuplicateKeyPolicy) -> Result<Spanned<Raw>, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        duplicate_keys: duplicate_keys,
    };
    serde_saphyr::from_str_with_options(text, options)
}

fn written(location: &Location, source: &str) -> Option<String> {
    let span = location.span();
    let start = usize::try_from(span.byte_offset()?).ok()?;
    let end = start.checked_add(usize::try_from(span.byte_len()?).ok()?)?;
    source.get(start..end).map(|text| text.trim().to_owned())
}

enum Raw {
    Null,
    Text(String),
    /// A number or boolean as inferred; what was written is looked up by its span.
    Plain(String),
    List(Vec<Spanned<Self>>),
    Map(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Plain(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Plain(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Plain(value.to_string()))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Raw, E> {
        Ok(Raw::Plain(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Plain(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Raw, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Raw::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Raw, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = entries.next_key()? {
            map.push((key, entries.next_value()?));
        }
        Ok(Raw::Map(map))
    }
}
