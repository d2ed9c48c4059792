//! Which model a request names and whether it wants a stream: one pass over the bytes, and the bytes stay.
//!
//! The whole document is checked, although only two keys are looked at: a body that is not JSON is refused here, and
//! so is one that names `model` twice, since the engine might believe the other one. Values that are not looked at are
//! skipped without recursion, so no depth of nesting can exhaust the stack.
//!
//! Nothing is serialised again. Where the engine knows the model by another name, [`splice`] puts the new name between
//! the bytes before and the bytes after, as three pieces that share the body's memory: a long prompt is not copied.

use std::{borrow::Cow, fmt, ops::Range};

use bytes::Bytes;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::fault::Fault;

/// Larger bodies are read away from the threads that carry streams: a pass takes about a millisecond per mebibyte.
pub const OFF_CORE: usize = 1 << 20;

/// What routing needs of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head<'a> {
    pub model: Cow<'a, str>,
    /// `stream` is present and `true`.
    pub stream: bool,
    /// Where the JSON string of `model` stands in the body, quotes included.
    pub range: Range<usize>,
}

/// Why a body cannot be routed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the body is not valid JSON: {0}")]
    Syntax(String),
    #[error("the body must be a JSON object")]
    NotAnObject,
    #[error("'{0}' appears more than once")]
    Duplicate(&'static str),
    #[error("'model' is required")]
    NoModel,
    #[error("'model' must be a string")]
    ModelNotText,
    #[error("'model' must not be empty")]
    ModelEmpty,
}

/// Reads `model` and `stream` of a JSON request body.
pub fn peek(body: &[u8]) -> Result<Head<'_>, Error> {
    let head = peek_any(body)?;
    if head.range.is_empty() { Err(Error::NoModel) } else { Ok(head) }
}

/// As [`peek`], of a body that need not name a model: the name and its range are empty then.
pub fn peek_any(body: &[u8]) -> Result<Head<'_>, Error> {
    let found: Found<'_> = serde_json::from_slice(body).map_err(|error| {
        if error.is_data() { Error::NotAnObject } else { Error::Syntax(error.to_string()) }
    })?;
    if let Some(key) = found.twice {
        return Err(Error::Duplicate(key));
    }
    let stream = found.stream.is_some_and(|raw| raw.get() == "true");
    let Some(raw) = found.model.map(RawValue::get) else {
        return Ok(Head { model: Cow::Borrowed(""), stream, range: 0..0 });
    };
    let model = text(raw)?;
    if model.is_empty() {
        return Err(Error::ModelEmpty);
    }
    // The raw value is borrowed from the body, so the distance of the two addresses is its place.
    let start = raw.as_ptr().addr() - body.as_ptr().addr();
    Ok(Head { model, stream, range: start..start + raw.len() })
}

/// The body with the string at `range` replaced by `name`, in pieces to be sent one after the other.
#[must_use]
pub fn splice(body: &Bytes, range: &Range<usize>, name: &str) -> [Bytes; 3] {
    let name = serde_json::Value::from(name).to_string();
    [body.slice(..range.start), name.into(), body.slice(range.end..)]
}

impl Head<'_> {
    /// The same, free of the body's lifetime.
    #[must_use]
    pub fn into_owned(self) -> Head<'static> {
        Head { model: Cow::Owned(self.model.into_owned()), stream: self.stream, range: self.range }
    }
}

impl Error {
    /// The key that is wrong, for the envelope's `param`.
    #[must_use]
    pub const fn param(&self) -> Option<&'static str> {
        match self {
            Self::Syntax(_) | Self::NotAnObject => None,
            Self::Duplicate(key) => Some(key),
            Self::NoModel | Self::ModelNotText | Self::ModelEmpty => Some("model"),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::InvalidRequest { param: error.param().map(str::to_owned), message: error.to_string() }
    }
}

fn text(raw: &str) -> Result<Cow<'_, str>, Error> {
    let inner = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).ok_or(Error::ModelNotText)?;
    if inner.contains('\\') {
        serde_json::from_str(raw).map(Cow::Owned).map_err(|error| Error::Syntax(error.to_string()))
    } else {
        Ok(Cow::Borrowed(inner))
    }
}

/// The values as they stand, and the first key that came twice. A duplicate does not end the pass: that the body is
/// no JSON at all is the more useful thing to hear.
#[derive(Default)]
struct Found<'a> {
    model: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    twice: Option<&'static str>,
}

impl<'de> Deserialize<'de> for Found<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = Found<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found<'de>, A::Error> {
                let mut found = Found::default();
                while let Some(key) = map.next_key::<Key>()? {
                    let (name, place) = match key {
                        Key::Model => ("model", &mut found.model),
                        Key::Stream => ("stream", &mut found.stream),
                        Key::Other => {
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    let value = map.next_value()?;
                    if place.replace(value).is_some() {
                        found.twice.get_or_insert(name);
                    }
                }
                Ok(found)
            }
        }

        deserializer.deserialize_map(Keys)
    }
}

/// Keys are compared after their escapes are resolved, as the engine will.
enum Key {
    Model,
    Stream,
    Other,
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_str<E>(self, name: &str) -> Result<Key, E> {
                Ok(match name {
                    "model" => Key::Model,
                    "stream" => Key::Stream,
                    _ => Key::Other,
                })
            }
        }

        deserializer.deserialize_identifier(Name)
    }
}

#[cfg(test)]
mod tests;
