//! What a whole JSON document says, when it arrived in one piece, as nearly every answer of known length does: a parser that
//! sees all of it is faster than one that must be ready to be cut at each byte. Where the two might differ this one says
//! nothing, and the other decides.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::Json;
use crate::openai::hash::Hasher;

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    /// What these hold counts as well, and is left to the other one.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Usage<'a> {
    /// One of the two names; both in one object are a duplicate, and so an error.
    #[serde(borrow, alias = "input_tokens")]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow, alias = "output_tokens")]
    completion_tokens: Option<&'a RawValue>,
}

/// The state after all of `bytes`; `None` when they are not one plain document.
pub(super) fn read(bytes: &[u8]) -> Option<Json> {
    // A key may be spelled with these, and only this parser would take it for what it means.
    if memchr::memmem::find(bytes, b"\\u").is_some() {
        return None;
    }
    let Document { id, error, usage, response, message } = serde_json::from_slice(bytes).ok()?;
    if response.or(message).is_some() {
        return None;
    }
    let id = id.and_then(|id| id.get().strip_prefix('"')?.strip_suffix('"'));
    let (mut prompt, mut completion) = (None, None);
    if let Some(usage) = usage.map(RawValue::get).filter(|usage| usage.starts_with('{')) {
        let usage: Usage<'_> = serde_json::from_str(usage).ok()?;
        prompt = number(usage.prompt_tokens)?;
        completion = number(usage.completion_tokens)?;
    }
    let id = id.map(|id| {
        let mut hasher = Hasher::default();
        hasher.write(id.as_bytes());
        hasher.finish()
    });
    Some(Json::of(id, error.is_some(), prompt, completion))
}

/// `None`: it is something, and no plain number.
fn number(value: Option<&RawValue>) -> Option<Option<u64>> {
    let Some(digits) = value.map(RawValue::get) else { return Some(None) };
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten().map(Some)
}
