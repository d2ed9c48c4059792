//! What a whole JSON document says, when it arrived in one piece, as nearly every answer of known length does: a pass that
//! sees all of it is faster than one that must be ready to be cut at each byte. Where the two might differ this one says
//! nothing, and the other decides.

use super::json::JsonScanner;
use crate::openai::{hash::stable_hash, json_members};

/// The state after all of `bytes`; `None` when they are not one plain document.
pub(super) fn read(bytes: &[u8]) -> Option<JsonScanner> {
    let (mut id, mut error, mut usage) = (None, None, None);
    let mut plain = true;
    json_members::for_each_member(bytes, |key, value| {
        let slot = match key {
            b"id" => &mut id,
            b"error" => &mut error,
            b"usage" => &mut usage,
            // What these hold counts as well.
            b"response" | b"message" => return plain &= is_null(value),
            _ => return,
        };
        // Of two the other one knows which counts.
        plain &= slot.replace(value).is_none();
    })?;
    if !plain {
        return None;
    }
    let id = id.and_then(|id| id.strip_prefix(b"\"")?.strip_suffix(b"\"")).map(stable_hash);
    let error = error.is_some_and(|error| !is_null(error));
    let (prompt, completion) = match usage.filter(|usage| usage.starts_with(b"{")) {
        Some(usage) => token_counts(usage)?,
        None => (None, None),
    };
    Some(JsonScanner::from_document(id, error, prompt, completion))
}

/// Tokens of the prompt and of the answer.
fn token_counts(usage: &[u8]) -> Option<(Option<u64>, Option<u64>)> {
    let (mut prompt, mut completion) = (None, None);
    let mut plain = true;
    json_members::for_each_member(usage, |key, value| {
        let slot = match key {
            b"prompt_tokens" | b"input_tokens" => &mut prompt,
            b"completion_tokens" | b"output_tokens" => &mut completion,
            _ => return,
        };
        plain &= slot.replace(value).is_none();
    })?;
    if !plain {
        return None;
    }
    Some((number(prompt)?, number(completion)?))
}

/// `None`: it is something, and no plain number.
fn number(value: Option<&[u8]>) -> Option<Option<u64>> {
    let Some(digits) = value.filter(|value| !is_null(value)) else { return Some(None) };
    let plain = digits.iter().all(u8::is_ascii_digit);
    plain.then(|| str::from_utf8(digits).ok()?.parse().ok()).flatten().map(Some)
}

fn is_null(value: &[u8]) -> bool {
    value == b"null"
}
