//! Hashes the beginning of a conversation, to find the engine that has it in its cache.
//!
//! Each turn of a conversation sends all of it again, a little longer at the end. Its beginning stays the same: the
//! system prompt, and the first other message. These are hashed as they stand in the body. Only the first few KiB of
//! each text count. That distinguishes conversations, including two with the same system prompt, since their first
//! messages differ.
//!
//! Where the system prompt is most of the request, it is most of what a cache can save. So the hash then covers the
//! system prompt alone, and the conversations that share it share an engine. As a conversation grows longer than its
//! system prompt, it moves once.

use memchr::memchr2;

use super::ConversationKey;
use crate::openai::hash::StableHasher;

/// Hashed bytes of the system prompt, and of each message.
const MAX_HASHED_BYTES: usize = 4 << 10;
/// A shorter system prompt costs an engine less than an uneven spread of the requests would.
const MIN_SHARED_BYTES: usize = 2 << 10;

/// Hashes a conversation's beginning. `system`: the system prompts apart from the messages, in a fixed order. All
/// arguments are valid JSON.
pub(super) fn key(system: [Option<&[u8]>; 2], messages: Option<&[u8]>) -> Option<ConversationKey> {
    let mut beginning = Beginning::default();
    system.into_iter().flatten().for_each(|text| beginning.add_system(text));
    let messages = messages.unwrap_or_default();
    let separate_bytes = beginning.system_bytes;
    // A text has no roles, nor has an array of texts or tokens.
    let mut first = (messages.len() > "[]".len() || messages.first() != Some(&b'[')).then_some(messages);
    let mut is_last = true;
    if messages.first() == Some(&b'[') {
        let mut rest = messages;
        while let Some(begin) = rest.iter().position(|byte| *byte == b'{') {
            let (_, found) = rest.split_at(begin);
            let message = PrefixMessage::parse_first(found);
            rest = found.get(message.text.len()..).unwrap_or_default();
            if !message.is_system {
                first = Some(message.text);
                is_last = !rest.trim_ascii_start().starts_with(b",");
                break;
            }
            first = None;
            beginning.add_system(message.text);
        }
    }
    let own_bytes = (separate_bytes + messages.len()).saturating_sub(beginning.system_bytes);
    if beginning.system_bytes >= own_bytes.max(MIN_SHARED_BYTES) {
        return Some(ConversationKey { hash: beginning.hasher.finish(), is_new: false });
    }
    let first = first.filter(|text| !text.is_empty());
    if let Some(text) = first {
        beginning.hasher.write(cut(text));
    }
    let any = first.is_some() || beginning.system_bytes > 0;
    any.then(|| ConversationKey { hash: beginning.hasher.finish(), is_new: is_last })
}

/// The system prompts found so far.
#[derive(Default)]
struct Beginning {
    hasher: StableHasher,
    system_bytes: usize,
}

impl Beginning {
    fn add_system(&mut self, text: &[u8]) {
        self.hasher.write(cut(text));
        self.system_bytes += text.len();
    }
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
