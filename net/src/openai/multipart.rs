//! Reads the model that an upload names from `multipart/form-data`, strictly and in place.
//!
//! The engine reads the same bytes with a parser of its own. Where two parsers disagree about a body, a client can show
//! one model to the gateway and another one to the engine. Parsers differ in dozens of corners: whether a bare LF ends
//! a line, whether a backslash escapes, which of two names counts, what follows the last boundary. So this parser does
//! not cover every form that the RFCs allow. It accepts the one form that all clients write and all servers read alike,
//! and refuses the rest with a message that names the corner.
//!
//! The file is neither copied nor inspected: parts are ranges of the body, found by their boundary.

use std::{borrow::Cow, ops::Range};

use bytes::Bytes;
use http::HeaderValue;
use memchr::memmem;

use super::routing_fields::{ConversationPrefix, RoutingFields};
use rouse::fault::Fault;

mod part;

use part::FormPart;

/// Starlette's limit on fields, and more than any API has.
const MAX_PARTS: usize = 1000;
/// All header fields of one part together.
const MAX_PART_HEADER_BYTES: usize = 16 << 10;
/// No model has a longer name.
const MAX_MODEL_NAME_BYTES: usize = 256;

/// Why an upload cannot be routed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("Content-Type must be 'multipart/form-data' with one boundary of 1 to 70 characters: {0}")]
    ContentType(&'static str),
    #[error("the multipart body is malformed: {0}")]
    Malformed(&'static str),
    #[error("'{0}' appears more than once")]
    Duplicate(&'static str),
    #[error("'model' is required")]
    MissingModel,
    #[error("'model' {0}")]
    Model(&'static str),
    #[error("'stream' must be true or false")]
    StreamNotBool,
}

/// Returns the boundary that a request's `Content-Type` names.
pub fn boundary(content_type: &HeaderValue) -> Result<&[u8], Error> {
    let value = content_type.as_bytes();
    let mut pieces = value.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    if !pieces.next().is_some_and(|kind| kind.eq_ignore_ascii_case(b"multipart/form-data")) {
        return Err(Error::ContentType("the media type is not multipart/form-data"));
    }
    let mut boundary = None;
    for piece in pieces {
        let Some((name, value)) = split_once(piece, b'=') else {
            return Err(Error::ContentType("a parameter has no value"));
        };
        // In lower case, as all clients write it: some servers accept nothing else.
        if name == b"boundary" {
            if boundary.replace(unquoted(value)?).is_some() {
                return Err(Error::ContentType("it has two boundaries"));
            }
        } else if !(name == b"charset" && is_utf8(value)) {
            // Some servers decode the names of parts by the charset, and some find `boundary=` inside any other
            // parameter.
            return Err(Error::ContentType("the only other parameter allowed is charset=utf-8"));
        }
    }
    boundary.ok_or(Error::ContentType("it has no boundary"))
}

/// Reads the parts `model` and `stream` of an upload. `boundary` comes from [`boundary`].
pub fn peek<'a>(body: &'a [u8], boundary: &[u8]) -> Result<RoutingFields<'a>, Error> {
    let head = peek_any(body, boundary)?;
    if head.model_range.is_empty() { Err(Error::MissingModel) } else { Ok(head) }
}

/// As [`peek`], for an upload that may name no model: its name and range are empty then.
pub fn peek_any<'a>(body: &'a [u8], boundary: &[u8]) -> Result<RoutingFields<'a>, Error> {
    let mut model = None;
    let mut stream = None;
    for part in parts(body, boundary)? {
        let FormPart { name, content, .. } = &part;
        let field = match *name {
            b"model" => &mut model,
            b"stream" => &mut stream,
            // A form may set the charset of its other fields with this part.
            b"_charset_" => return Err(Error::Malformed("a part '_charset_' is not supported")),
            _ => continue,
        };
        if field.is_some() {
            return Err(Error::Duplicate(if *name == b"model" { "model" } else { "stream" }));
        }
        part.check_text().map_err(|wrong| match *name {
            b"model" => Error::Model(wrong),
            _ => Error::Malformed("the part 'stream' is not a plain field"),
        })?;
        *field = Some(content.clone());
    }
    let name = match &model {
        Some(range) => model_name(slice_of(body, range))?,
        None => "",
    };
    let range: Range<usize> = model.unwrap_or_default();
    let stream = stream.map_or(Ok(false), |range| parse_stream(slice_of(body, &range)))?;
    Ok(RoutingFields {
        model: Cow::Borrowed(name),
        stream,
        model_range: range,
        background: false,
        session_hash: None,
        user_hash: None,
        prefix: ConversationPrefix::NONE,
        previous_response_hash: None,
        max_tokens: None,
    })
}

/// Replaces the value at `range` by `name`; returns the body in pieces to send in order.
#[must_use]
pub fn splice(body: &Bytes, range: &Range<usize>, name: &str) -> [Bytes; 3] {
    [body.slice(..range.start), Bytes::copy_from_slice(name.as_bytes()), body.slice(range.end..)]
}

/// Splits the body into its parts, in order. The body must contain nothing else.
fn parts<'a>(body: &'a [u8], boundary: &[u8]) -> Result<Vec<FormPart<'a>>, Error> {
    let delimiter = [b"--", boundary].concat();
    let mut found = memmem::find_iter(body, &delimiter);
    if found.next() != Some(0) {
        return Err(Error::Malformed("it does not start with the boundary"));
    }
    let mut parts = Vec::new();
    let mut begin = delimiter.len();
    loop {
        match body.get(begin..).unwrap_or_default() {
            b"--" | b"--\r\n" if !parts.is_empty() => return Ok(parts),
            [b'\r', b'\n', ..] => begin += 2,
            [b'-', b'-', ..] => {
                return Err(Error::Malformed("data follows the last boundary, or no part precedes it"));
            }
            _ => return Err(Error::Malformed("a boundary is followed by something other than CRLF")),
        }
        let Some(next) = found.next() else {
            return Err(Error::Malformed("the last boundary is missing"));
        };
        // Some parsers take a boundary inside a line for a real one.
        let end = next.checked_sub(2).filter(|end| *end >= begin && slice_of(body, &(*end..next)) == b"\r\n");
        let Some(end) = end else {
            return Err(Error::Malformed("a boundary appears inside a part"));
        };
        if parts.len() == MAX_PARTS {
            return Err(Error::Malformed("it has more than 1000 parts"));
        }
        parts.push(FormPart::read(body, begin..end)?);
        begin = next + delimiter.len();
    }
}

/// A range of the body that its boundaries delimit.
fn slice_of<'a>(body: &'a [u8], range: &Range<usize>) -> &'a [u8] {
    body.get(range.clone()).unwrap_or_default()
}

/// Splits at the first `byte`, which neither half includes.
fn split_once(text: &[u8], byte: u8) -> Option<(&[u8], &[u8])> {
    let at = memchr::memchr(byte, text)?;
    Some((text.get(..at)?, text.get(at + 1..)?))
}

/// Parses a boolean as clients write it into forms. Engines accept more words, and differ in which ones.
fn parse_stream(value: &[u8]) -> Result<bool, Error> {
    let is = |word: &[u8]| value.eq_ignore_ascii_case(word);
    match (is(b"true") || is(b"1"), is(b"false") || is(b"0")) {
        (true, _) => Ok(true),
        (_, true) => Ok(false),
        _ => Err(Error::StreamNotBool),
    }
}

fn model_name(value: &[u8]) -> Result<&str, Error> {
    let name = std::str::from_utf8(value).map_err(|_| Error::Model("is not UTF-8"))?;
    match name {
        "" => Err(Error::Model("must not be empty")),
        _ if name.len() > MAX_MODEL_NAME_BYTES => Err(Error::Model("is longer than 256 bytes")),
        // Some parsers cut a value at a line end or at a NUL.
        _ if name.contains(|char: char| char.is_control()) => {
            Err(Error::Model("contains a control character"))
        }
        // Some parsers trim it.
        _ if name.trim() != name => Err(Error::Model("has leading or trailing white space")),
        _ => Ok(name),
    }
}

fn unquoted(value: &[u8]) -> Result<&[u8], Error> {
    let quoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    let marks: &[u8] = if quoted.is_some() { b"'+_-.(),/:=?" } else { b"'+_-." };
    let inner = quoted.unwrap_or(value);
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || marks.contains(byte);
    if !matches!(inner.len(), 1..=70) || !inner.iter().all(allowed) {
        return Err(Error::ContentType("the boundary has an invalid length or invalid characters"));
    }
    Ok(inner)
}

fn is_utf8(charset: &[u8]) -> bool {
    charset.eq_ignore_ascii_case(b"utf-8") || charset.eq_ignore_ascii_case(b"\"utf-8\"")
}

impl Error {
    /// The invalid field, for the envelope's `param`.
    #[must_use]
    pub const fn param(&self) -> Option<&'static str> {
        match self {
            Self::ContentType(_) | Self::Malformed(_) => None,
            Self::Duplicate(name) => Some(name),
            Self::MissingModel | Self::Model(_) => Some("model"),
            Self::StreamNotBool => Some("stream"),
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::InvalidRequest { param: error.param().map(str::to_owned), message: error.to_string() }
    }
}

#[cfg(test)]
mod tests;
