//! Reads a JSON document that arrived whole, as nearly every response of known length does.
//!
//! A pass over the whole document is faster than one that may be cut at each byte. Where the two might differ, this
//! pass returns `None`, and the general scanner decides.

use super::json::JsonScanner;
use crate::openai::{hash::stable_hash, json_members};

/// The scanner's state after all of `bytes`; `None` unless they are one plain document.
pub(super) fn read(bytes: &[u8]) -> Option<JsonScanner> {
    let (mut id, mut error, mut usage) = (None, None, None);
    let mut plain = true;
    json_members::for_each_member(bytes, |key, value| {
        let slot = match key {
            b"id" => &mut id,
            b"error" => &mut error,
            b"usage" => &mut usage,
            // Members of these objects count as well.
            b"response" | b"message" => return plain &= is_null(value),
            _ => return,
        };
        // With duplicates, the general scanner decides which one counts.
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

/// Token counts of the prompt and of the completion.
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

/// `None`: the value is not a plain number.
fn number(value: Option<&[u8]>) -> Option<Option<u64>> {
    let Some(digits) = value.filter(|value| !is_null(value)) else { return Some(None) };
    let plain = digits.iter().all(u8::is_ascii_digit);
    plain.then(|| str::from_utf8(digits).ok()?.parse().ok()).flatten().map(Some)
}

fn is_null(value: &[u8]) -> bool {
    value == b"null"
}
