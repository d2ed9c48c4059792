//! Which model a request names, whether it wants a stream, and what helps to choose an engine: one pass over the bytes,
//! and the bytes stay.
//!
//! The whole document is checked, although only a few keys are looked at: a body that is not JSON is refused here, and
//! so is one that names `model` twice, since the engine might believe the other one. Values that are not looked at are
//! skipped without recursion, so no depth of nesting can exhaust the stack.
//!
//! Two kinds of keys are looked at. What decides (`model`, `stream`, `background`) must be there once and be clear. What
//! only hints (where the conversation was served before, how long the answer may get) is taken as it comes, and never
//! refused: a wrong hint costs a cache miss. `null` is as absent, as it is to the engines.
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

use super::{hash, members};
use crate::fault::Fault;

mod prefix;

/// What some editors and Windows' shells put before a text in UTF-8. Engines skip it before JSON, as RFC 8259 lets them.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Larger bodies are read away from the threads that carry streams: a pass takes about a millisecond per mebibyte.
pub const OFF_CORE: usize = 1 << 20;

/// What routing needs of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head<'a> {
    pub model: Cow<'a, str>,
    /// It is asked for as a stream.
    pub stream: bool,
    /// Where the value of `model` stands in the body: the JSON string with its quotes, or the part's content.
    pub range: Range<usize>,
    /// `background` is present, and neither `false` nor `null`: engines take much for true.
    pub background: bool,
    /// The hash of `prompt_cache_key`.
    pub session: Option<u64>,
    /// The hash of `user`, or of `safety_identifier`, which goes by that name in newer clients.
    pub user: Option<u64>,
    /// Where in the body the conversation begins.
    pub beginning: Beginning,
    /// The hash of `previous_response_id`.
    pub previous: Option<u64>,
    /// The most tokens the answer may have: `max_completion_tokens`, `max_output_tokens` or `max_tokens`.
    pub max_tokens: Option<u32>,
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
    #[error("'stream' must be true or false")]
    StreamUnclear,
}

/// Reads the head of a JSON request body.
pub fn peek(body: &[u8]) -> Result<Head<'_>, Error> {
    let head = peek_any(body)?;
    if head.range.is_empty() { Err(Error::NoModel) } else { Ok(head) }
}

/// As [`peek`], of a body that need not name a model: the name and its range are empty then.
pub fn peek_any(body: &[u8]) -> Result<Head<'_>, Error> {
    let json = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    let found = match Found::plainly(json) {
        Some(found) => found,
        None => serde_json::from_slice(json).map_err(|error| {
            if error.is_data() { Error::NotAnObject } else { Error::Syntax(error.to_string()) }
        })?,
    };
    if let Some(key) = found.twice {
        return Err(Error::Duplicate(key));
    }
    let (model, range) = match found.get(Key::Model) {
        None => (Cow::Borrowed(""), 0..0),
        Some(raw) => (text(raw)?, place(raw, body)),
    };
    if model.is_empty() && !range.is_empty() {
        return Err(Error::ModelEmpty);
    }
    // Many engines take `1` or `"yes"` for true. Not to know what such a request is would be to give it the limits and
    // the deadlines of another kind.
    let stream = match found.given(Key::Stream) {
        None | Some(b"false") => false,
        Some(b"true") => true,
        Some(_) => return Err(Error::StreamUnclear),
    };
    Ok(Head {
        model,
        stream,
        range,
        background: found.given(Key::Background).is_some_and(|raw| raw != b"false"),
        session: found.given(Key::Session).map(name),
        user: found.given(Key::User).map(name),
        beginning: Beginning(
            [Key::System, Key::Instructions, Key::Messages]
                .map(|key| found.given(key).map(|raw| place(raw, body))),
        ),
        previous: found.given(Key::Previous).map(name),
        max_tokens: [Key::MaxCompletion, Key::MaxOutput, Key::MaxTokens]
            .into_iter()
            .find_map(|key| str::from_utf8(found.given(key)?).ok()?.parse::<u64>().ok())
            .map(|most| u32::try_from(most).unwrap_or(u32::MAX)),
    })
}

/// The body with the string at `range` replaced by `name`, in pieces to be sent one after the other.
#[must_use]
pub fn splice(body: &Bytes, range: &Range<usize>, name: &str) -> [Bytes; 3] {
    let name = serde_json::Value::from(name).to_string();
    [body.slice(..range.start), name.into(), body.slice(range.end..)]
}

/// Where in a body stands what a conversation begins with: what the system says apart from the messages, and these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning([Option<Range<usize>>; 3]);

impl Beginning {
    /// There is no conversation.
    pub const NONE: Self = Self([const { None }; 3]);

    /// Its hash, which is the same on the conversation's every turn: of what the system says and of the first message of
    /// somebody else, the first 4 KiB of each as they stand in the body.
    #[must_use]
    pub fn hash(&self, body: &[u8]) -> Option<u64> {
        let [system, instructions, messages] =
            self.0.each_ref().map(|range| range.clone().and_then(|range| body.get(range)));
        prefix::hash([system, instructions], messages)
    }
}

impl Head<'_> {
    /// The same, free of the body's lifetime.
    #[must_use]
    pub fn into_owned(self) -> Head<'static> {
        Head { model: Cow::Owned(self.model.into_owned()), ..self }
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
            Self::StreamUnclear => Some("stream"),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::InvalidRequest { param: error.param().map(str::to_owned), message: error.to_string() }
    }
}

/// Where a part of the body stands in it, which is the distance of the two addresses.
fn place(part: &[u8], body: &[u8]) -> Range<usize> {
    let start = part.as_ptr().addr() - body.as_ptr().addr();
    start..start + part.len()
}

fn text(raw: &[u8]) -> Result<Cow<'_, str>, Error> {
    let raw = str::from_utf8(raw).map_err(|error| Error::Syntax(error.to_string()))?;
    let inner = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).ok_or(Error::ModelNotText)?;
    if inner.contains('\\') {
        serde_json::from_str(raw).map(Cow::Owned).map_err(|error| Error::Syntax(error.to_string()))
    } else {
        Ok(Cow::Borrowed(inner))
    }
}

/// The hash of a name: of what stands between the quotes, so that it is found again in a stream.
fn name(raw: &[u8]) -> u64 {
    let inner = raw.strip_prefix(b"\"").unwrap_or(raw);
    hash(inner.strip_suffix(b"\"").unwrap_or(inner))
}

/// The values as they stand, and the first key that decides something and came twice. A duplicate does not end the
/// pass: that the body is no JSON at all is the more useful thing to hear.
#[derive(Default)]
struct Found<'a> {
    values: [Option<&'a [u8]>; KEYS.len()],
    twice: Option<&'static str>,
}

impl<'a> Found<'a> {
    /// Of nearly every body; of any other the general parser has to say more.
    fn plainly(body: &'a [u8]) -> Option<Self> {
        let mut found = Self::default();
        members::each(body, |key, value| {
            if let Some(key) = Key::named(key) {
                found.sees(key, value);
            }
        })?;
        Some(found)
    }

    fn sees(&mut self, key: Key, value: &'a [u8]) {
        let before = self.values.get_mut(key as usize).and_then(|slot| slot.replace(value));
        if before.is_some() && key <= LAST_TO_DECIDE {
            self.twice = self.twice.or_else(|| KEYS.get(key as usize).copied());
        }
    }

    fn get(&self, key: Key) -> Option<&'a [u8]> {
        self.values.get(key as usize).copied().flatten()
    }

    /// Unless it is `null`.
    fn given(&self, key: Key) -> Option<&'a [u8]> {
        self.get(key).filter(|raw| *raw != b"null")
    }
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
                while let Some(Named(key)) = map.next_key()? {
                    let Some(key) = key else {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    };
                    let value: &RawValue = map.next_value()?;
                    found.sees(key, value.get().as_bytes());
                }
                Ok(found)
            }
        }

        deserializer.deserialize_map(Keys)
    }
}

/// Whose values are kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Model,
    Stream,
    Background,
    Session,
    Previous,
    MaxCompletion,
    MaxOutput,
    MaxTokens,
    System,
    Instructions,
    /// Or `input`, or `prompt`: no API has two of them.
    Messages,
    User,
}

impl Key {
    fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"model" => Self::Model,
            b"stream" => Self::Stream,
            b"background" => Self::Background,
            b"prompt_cache_key" => Self::Session,
            b"previous_response_id" => Self::Previous,
            b"max_completion_tokens" => Self::MaxCompletion,
            b"max_output_tokens" => Self::MaxOutput,
            b"max_tokens" => Self::MaxTokens,
            b"system" => Self::System,
            b"instructions" => Self::Instructions,
            b"messages" | b"input" | b"prompt" => Self::Messages,
            b"user" | b"safety_identifier" => Self::User,
            _ => return None,
        })
    }
}

/// The names, in the order of [`Key`].
const KEYS: [&str; 12] = [
    "model",
    "stream",
    "background",
    "prompt_cache_key",
    "previous_response_id",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "system",
    "instructions",
    "messages",
    "user",
];

/// A second value of these would leave open which one the engine believes.
const LAST_TO_DECIDE: Key = Key::Background;

/// Keys are compared after their escapes are resolved, as the engine will.
struct Named(Option<Key>);

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = Named;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_str<E>(self, name: &str) -> Result<Named, E> {
                Ok(Named(Key::named(name.as_bytes())))
            }
        }

        deserializer.deserialize_identifier(Name)
    }
}

#[cfg(test)]
mod tests;
