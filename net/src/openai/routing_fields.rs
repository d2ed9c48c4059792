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

use super::{json_members, stable_hash};
use rouse::fault::Fault;

mod prefix;

/// What some editors and Windows' shells put before a text in UTF-8. Engines skip it before JSON, as RFC 8259 lets them.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Larger bodies are read away from the threads that carry streams: a pass takes about a millisecond per mebibyte.
pub const MAX_ON_CORE_BYTES: usize = 1 << 20;

/// What routing needs of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingFields<'a> {
    pub model: Cow<'a, str>,
    /// It is asked for as a stream.
    pub stream: bool,
    /// Where the value of `model` stands in the body: the JSON string with its quotes, or the part's content.
    pub model_range: Range<usize>,
    /// `background` is present, and neither `false` nor `null`: engines take much for true.
    pub background: bool,
    /// The hash of `prompt_cache_key`.
    pub session_hash: Option<u64>,
    /// The hash of `user_hash`, or of `safety_identifier`, which goes by that name in newer clients.
    pub user_hash: Option<u64>,
    /// Where in the body the conversation begins.
    pub prefix: ConversationPrefix,
    /// The hash of `previous_response_id`.
    pub previous_response_hash: Option<u64>,
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
    MissingModel,
    #[error("'model' must be a string")]
    ModelNotString,
    #[error("'model' must not be empty")]
    ModelEmpty,
    #[error("'stream' must be true or false")]
    StreamNotBool,
}

/// Reads the head of a JSON request body.
pub fn peek(body: &[u8]) -> Result<RoutingFields<'_>, Error> {
    let head = peek_any(body)?;
    if head.model_range.is_empty() { Err(Error::MissingModel) } else { Ok(head) }
}

/// As [`peek`], of a body that need not name a model: the name and its range are empty then.
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
    // Many engines take `1` or `"yes"` for true. Not to know what such a request is would be to give it the limits and
    // the deadlines of another kind.
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

/// The body with the string at `range` replaced by `name`, in pieces to be sent one after the other.
#[must_use]
pub fn splice(body: &Bytes, range: &Range<usize>, name: &str) -> [Bytes; 3] {
    let name = serde_json::Value::from(name).to_string();
    [body.slice(..range.start), name.into(), body.slice(range.end..)]
}

/// Where in a body stands what a conversation begins with: what the system says apart from the messages, and these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationPrefix([Option<Range<usize>>; 3]);

impl ConversationPrefix {
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

impl RoutingFields<'_> {
    /// The same, free of the body's lifetime.
    #[must_use]
    pub fn into_owned(self) -> RoutingFields<'static> {
        RoutingFields { model: Cow::Owned(self.model.into_owned()), ..self }
    }
}

impl Error {
    /// The key that is wrong, for the envelope's `param`.
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

/// Where a part of the body stands in it, which is the distance of the two addresses.
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

/// The hash of a name: of what stands between the quotes, so that it is found again in a stream.
fn hash_string(raw: &[u8]) -> u64 {
    let inner = raw.strip_prefix(b"\"").unwrap_or(raw);
    stable_hash(inner.strip_suffix(b"\"").unwrap_or(inner))
}

/// The values as they stand, and the first key that decides something and came twice. A duplicate does not end the
/// pass: that the body is no JSON at all is the more useful thing to hear.
#[derive(Default)]
struct RawFields<'a> {
    values: [Option<&'a [u8]>; KEY_NAMES.len()],
    duplicate: Option<&'static str>,
}

impl<'a> RawFields<'a> {
    /// Of nearly every body; of any other the general parser has to say more.
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

    /// Unless it is `null`.
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

/// Whose values are kept.
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
    /// Or `input`, or `prompt`: no API has two of them.
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

/// A second value of these would leave open which one the engine believes.
const LAST_UNIQUE_KEY: BodyKey = BodyKey::Background;

/// Keys are compared after their escapes are resolved, as the engine will.
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
