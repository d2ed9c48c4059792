//! Reads a request's model, its `stream` flag, and hints for choosing an engine. One pass over the bytes.
//!
//! The pass checks the whole document, although it uses only a few keys. It refuses a body that is not JSON, and a body
//! that names `model` twice, since the engine might use the other one. It skips other values without recursion, so no
//! depth of nesting can exhaust the stack.
//!
//! Keys are of two kinds. Keys that decide (`model`, `stream`, `background`) may appear only once, and `model` and
//! `stream` must be unambiguous. Keys that only hint (where the conversation was served before, how long the response
//! may get) are taken as they are and never refused: a wrong hint costs a cache miss. `null` counts as absent, as it
//! does to the engines.
//!
//! Nothing is serialized again. Where the engine knows the model by another name, [`splice`] puts the new name between
//! the bytes before and the bytes after, as three pieces that share the body's memory: a long prompt is not copied.

use std::{borrow::Cow, fmt, ops::Range};

use bytes::Bytes;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{json_members, stable_hash};
use rouse::fault::Fault;

mod prefix;

/// The byte order mark that some editors and Windows shells put before UTF-8 text. Engines skip it before JSON, as RFC
/// 8259 allows.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Larger bodies are read off the threads that carry streams: a pass takes about a millisecond per mebibyte.
pub const MAX_ON_CORE_BYTES: usize = 1 << 20;

/// The fields of a request that routing needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingFields<'a> {
    pub model: Cow<'a, str>,
    /// The client asked for a stream.
    pub stream: bool,
    /// Range of the value of `model` in the body: the JSON string with its quotes, or the part's content.
    pub model_range: Range<usize>,
    /// `background` is present, and neither `false` nor `null`: engines accept many values as true.
    pub background: bool,
    /// The hash of `prompt_cache_key`.
    pub session_hash: Option<u64>,
    /// The hash of `user`, or of `safety_identifier`, its name in newer clients.
    pub user_hash: Option<u64>,
    /// Where in the body the conversation begins.
    pub prefix: ConversationPrefix,
    /// The hash of `previous_response_id`.
    pub previous_response_hash: Option<u64>,
    /// The most tokens the response may have: `max_completion_tokens`, `max_output_tokens` or `max_tokens`.
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
    MissingModel,
    #[error("'model' must be a string")]
    ModelNotString,
    #[error("'model' must not be empty")]
    ModelEmpty,
    #[error("'stream' must be true or false")]
    StreamNotBool,
}

/// Reads the routing fields of a JSON request body.
pub fn peek(body: &[u8]) -> Result<RoutingFields<'_>, Error> {
    let head = peek_any(body)?;
    if head.model_range.is_empty() { Err(Error::MissingModel) } else { Ok(head) }
}

/// As [`peek`], for a body that may name no model: its name and range are empty then.
pub fn peek_any(body: &[u8]) -> Result<RoutingFields<'_>, Error> {
    let json = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    let found = match RawFields::parse_plain(json) {
        Some(found) => found,
        None => serde_json::from_slice(json).map_err(|error| {
            if error.is_data() { Error::NotAnObject } else { Error::Syntax(error.to_string()) }
        })?,
    };
    if let Some(key) = found.duplicate {
        return Err(Error::Duplicate(key));
    }
    let (model, range) = match found.get(BodyKey::Model) {
        None => (Cow::Borrowed(""), 0..0),
        Some(raw) => (parse_model(raw)?, range_in(raw, body)),
    };
    if model.is_empty() && !range.is_empty() {
        return Err(Error::ModelEmpty);
    }
    // Many engines accept `1` or `"yes"` as true. A request of unknown kind could get the limits and deadlines of the
    // other kind.
    let stream = match found.get_non_null(BodyKey::Stream) {
        None | Some(b"false") => false,
        Some(b"true") => true,
        Some(_) => return Err(Error::StreamNotBool),
    };
    Ok(RoutingFields {
        model,
        stream,
        model_range: range,
        background: found.get_non_null(BodyKey::Background).is_some_and(|raw| raw != b"false"),
        session_hash: found.get_non_null(BodyKey::Session).map(hash_string),
        user_hash: found.get_non_null(BodyKey::User).map(hash_string),
        prefix: ConversationPrefix(
            [BodyKey::System, BodyKey::Instructions, BodyKey::Messages]
                .map(|key| found.get_non_null(key).map(|raw| range_in(raw, body))),
        ),
        previous_response_hash: found.get_non_null(BodyKey::Previous).map(hash_string),
        max_tokens: [BodyKey::MaxCompletion, BodyKey::MaxOutput, BodyKey::MaxTokens]
            .into_iter()
            .find_map(|key| str::from_utf8(found.get_non_null(key)?).ok()?.parse::<u64>().ok())
            .map(|most| u32::try_from(most).unwrap_or(u32::MAX)),
    })
}

/// Replaces the string at `range` by `name`; returns the body in pieces to send in order.
#[must_use]
pub fn splice(body: &Bytes, range: &Range<usize>, name: &str) -> [Bytes; 3] {
    let name = serde_json::Value::from(name).to_string();
    [body.slice(..range.start), name.into(), body.slice(range.end..)]
}

/// Ranges of a conversation's beginning in the body: the two system prompts apart from the messages, and the messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationPrefix([Option<Range<usize>>; 3]);

impl ConversationPrefix {
    /// No conversation.
    pub const NONE: Self = Self([const { None }; 3]);

    /// Returns the conversation's key, which stays the same from turn to turn. It covers the system prompts and the
    /// first other message, the first 4 KiB of each as they stand in the body; while the system prompts are at least
    /// half of the conversation and not short, it covers them alone.
    #[must_use]
    pub fn key(&self, body: &[u8]) -> Option<ConversationKey> {
        let [system, instructions, messages] =
            self.0.each_ref().map(|range| range.clone().and_then(|range| body.get(range)));
        prefix::key([system, instructions], messages)
    }
}

/// Requests with the same key have a beginning in common, which the engine of one has in its cache for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConversationKey {
    pub hash: u64,
    /// The request is the first of its conversation, so that probably no cache has its beginning.
    pub is_new: bool,
}

impl RoutingFields<'_> {
    /// Detaches the fields from the body's lifetime.
    #[must_use]
    pub fn into_owned(self) -> RoutingFields<'static> {
        RoutingFields { model: Cow::Owned(self.model.into_owned()), ..self }
    }
}

impl Error {
    /// The invalid key, for the envelope's `param`.
    #[must_use]
    pub const fn param(&self) -> Option<&'static str> {
        match self {
            Self::Syntax(_) | Self::NotAnObject => None,
            Self::Duplicate(key) => Some(key),
            Self::MissingModel | Self::ModelNotString | Self::ModelEmpty => Some("model"),
            Self::StreamNotBool => Some("stream"),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::InvalidRequest { param: error.param().map(str::to_owned), message: error.to_string() }
    }
}

/// Returns the range of a part of the body, from the distance of the two addresses.
fn range_in(part: &[u8], body: &[u8]) -> Range<usize> {
    let start = part.as_ptr().addr() - body.as_ptr().addr();
    start..start + part.len()
}

fn parse_model(raw: &[u8]) -> Result<Cow<'_, str>, Error> {
    let raw = str::from_utf8(raw).map_err(|error| Error::Syntax(error.to_string()))?;
    let inner = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).ok_or(Error::ModelNotString)?;
    if inner.contains('\\') {
        serde_json::from_str(raw).map(Cow::Owned).map_err(|error| Error::Syntax(error.to_string()))
    } else {
        Ok(Cow::Borrowed(inner))
    }
}

/// Hashes the bytes between the quotes, as they stand. A stream with the same id yields the same hash.
fn hash_string(raw: &[u8]) -> u64 {
    let inner = raw.strip_prefix(b"\"").unwrap_or(raw);
    stable_hash(inner.strip_suffix(b"\"").unwrap_or(inner))
}

/// The raw values, and the first deciding key that appeared twice. A duplicate does not end the pass: that the body is
/// not JSON is the more useful error.
#[derive(Default)]
struct RawFields<'a> {
    values: [Option<&'a [u8]>; KEY_NAMES.len()],
    duplicate: Option<&'static str>,
}

impl<'a> RawFields<'a> {
    /// Parses nearly every body; `None` leaves the body to the general parser, which reports the error.
    fn parse_plain(body: &'a [u8]) -> Option<Self> {
        let mut found = Self::default();
        json_members::for_each_member(body, |key, value| {
            if let Some(key) = BodyKey::from_name(key) {
                found.insert(key, value);
            }
        })?;
        Some(found)
    }

    fn insert(&mut self, key: BodyKey, value: &'a [u8]) {
        let before = self.values.get_mut(key as usize).and_then(|slot| slot.replace(value));
        if before.is_some() && key <= LAST_UNIQUE_KEY {
            self.duplicate = self.duplicate.or_else(|| KEY_NAMES.get(key as usize).copied());
        }
    }

    fn get(&self, key: BodyKey) -> Option<&'a [u8]> {
        self.values.get(key as usize).copied().flatten()
    }

    /// Returns the value unless it is `null`.
    fn get_non_null(&self, key: BodyKey) -> Option<&'a [u8]> {
        self.get(key).filter(|raw| *raw != b"null")
    }
}

impl<'de> Deserialize<'de> for RawFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawFieldsVisitor;

        impl<'de> Visitor<'de> for RawFieldsVisitor {
            type Value = RawFields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawFields<'de>, A::Error> {
                let mut found = RawFields::default();
                while let Some(DecodedKey(key)) = map.next_key()? {
                    let Some(key) = key else {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    };
                    let value: &RawValue = map.next_value()?;
                    found.insert(key, value.get().as_bytes());
                }
                Ok(found)
            }
        }

        deserializer.deserialize_map(RawFieldsVisitor)
    }
}

/// The keys whose values are kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum BodyKey {
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
    /// Also `input` or `prompt`: no API has two of them.
    Messages,
    User,
}

impl BodyKey {
    fn from_name(name: &[u8]) -> Option<Self> {
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

/// The names, in the order of [`BodyKey`].
const KEY_NAMES: [&str; 12] = [
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

/// The last key that must be unique: with a second value, it would be unknown which one the engine uses.
const LAST_UNIQUE_KEY: BodyKey = BodyKey::Background;

/// A key after its escapes are resolved, as the engine compares it.
struct DecodedKey(Option<BodyKey>);

impl<'de> Deserialize<'de> for DecodedKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BodyKeyVisitor;

        impl Visitor<'_> for BodyKeyVisitor {
            type Value = DecodedKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_str<E>(self, name: &str) -> Result<DecodedKey, E> {
                Ok(DecodedKey(BodyKey::from_name(name.as_bytes())))
            }
        }

        deserializer.deserialize_identifier(BodyKeyVisitor)
    }
}

#[cfg(test)]
mod tests;
