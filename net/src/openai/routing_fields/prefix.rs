//! Hashes the beginning of a conversation, to find the engine that has it in its cache.
//!
//! Each turn of a conversation sends all of it again, a little longer at the end. Its beginning stays the same: the
//! system prompt, and the first other message. These are hashed as they stand in the body. Only the first few KiB of
//! each text count. That distinguishes conversations, including two with the same long system prompt, since their first
//! messages differ.

use memchr::memchr2;

use crate::openai::hash::StableHasher;

/// Hashed bytes of the system prompt, and of each message.
const MAX_HASHED_BYTES: usize = 4 << 10;

/// Hashes a conversation's beginning. `system`: the system prompts apart from the messages, in a fixed order. All
/// arguments are valid JSON.
pub(super) fn hash(system: [Option<&[u8]>; 2], messages: Option<&[u8]>) -> Option<u64> {
    let mut hasher = StableHasher::default();
    let mut any = false;
    for text in system.into_iter().flatten() {
        any = true;
        hasher.write(cut(text));
    }
    let messages = messages.unwrap_or_default();
    if messages.first() != Some(&b'[') {
        any |= !messages.is_empty();
        hasher.write(cut(messages));
    } else {
        let mut rest = messages;
        while let Some(begin) = rest.iter().position(|byte| *byte == b'{') {
            any = true;
            let (_, found) = rest.split_at(begin);
            let message = PrefixMessage::parse_first(found);
            hasher.write(cut(message.text));
            if !message.is_system {
                break;
            }
            rest = found.get(message.text.len()..).unwrap_or_default();
        }
        // An array of texts or tokens has no roles.
        if !any && messages.len() > "[]".len() {
            any = true;
            hasher.write(cut(messages));
        }
    }
    any.then(|| hasher.finish())
}

fn cut(text: &[u8]) -> &[u8] {
    text.get(..MAX_HASHED_BYTES).unwrap_or(text)
}

struct PrefixMessage<'a> {
    text: &'a [u8],
    is_system: bool,
}

impl<'a> PrefixMessage<'a> {
    /// Parses the object that `text` begins with.
    fn parse_first(text: &'a [u8]) -> Self {
        let (mut depth, mut at) = (0_u32, 0);
        let (mut key, mut in_value, mut is_system): (&[u8], _, _) = (b"", false, false);
        while let Some(byte) = text.get(at) {
            match byte {
                b'"' => {
                    let end = end_of_string(text, at + 1);
                    let string = text.get(at + 1..end).unwrap_or_default();
                    match (depth, in_value) {
                        (1, false) => key = string,
                        (1, true) if key == b"role" => is_system = matches!(string, b"system" | b"developer"),
                        _ => {}
                    }
                    at = end;
                }
                b':' if depth == 1 => in_value = true,
                b',' if depth == 1 => in_value = false,
                b'{' | b'[' => depth += 1,
                b'}' | b']' if depth == 1 => {
                    return Self { text: text.get(..=at).unwrap_or(text), is_system };
                }
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            at += 1;
        }
        Self { text, is_system: false }
    }
}

/// Returns the position of the closing quote of the string that continues at `at`.
fn end_of_string(text: &[u8], mut at: usize) -> usize {
    while let Some(rest) = text.get(at..) {
        match memchr2(b'"', b'\\', rest) {
            Some(found) if rest.get(found) == Some(&b'"') => return at + found,
            Some(found) => at += found + 2,
            None => break,
        }
    }
    text.len()
}
