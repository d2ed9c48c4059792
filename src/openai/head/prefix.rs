//! The beginning of a conversation, for finding the engine that has it in its cache.
//!
//! Each turn of a conversation sends all of it again, a little longer at the end. What stays is its beginning: what the
//! system says, and the first message of somebody else. That is hashed as it stands in the body, up to a limit, so that
//! a long first message costs no more than a short one.

use memchr::memchr2;

use crate::openai::hash::Hasher;

/// So many bytes tell conversations apart well enough.
const MOST: usize = 4 << 10;

/// `values`: of the keys that hold a conversation's beginning, valid JSON each, in one fixed order.
pub(super) fn hash(values: [Option<&str>; 3]) -> Option<u64> {
    let mut hasher = Hasher::default();
    let mut room = MOST;
    let mut any = false;
    for value in values.into_iter().flatten() {
        let beginning = beginning(value.as_bytes(), room);
        any |= beginning.len() > "[]".len();
        room -= beginning.len();
        hasher.write(beginning);
    }
    any.then(|| hasher.finish())
}

/// Of a list of messages, those up to the first that is not the system's; of anything else, all. At most `most` bytes.
fn beginning(value: &[u8], most: usize) -> &[u8] {
    let cut = value.get(..most).unwrap_or(value);
    if !cut.starts_with(b"[") {
        return cut;
    }
    end_of_first(cut).map_or(cut, |end| &cut[..end])
}

/// Where the first message of `list` ends that is not the system's. `None` when it does not end here.
fn end_of_first(list: &[u8]) -> Option<usize> {
    let (mut depth, mut at) = (0_u32, 0);
    let mut key: &[u8] = b"";
    let (mut in_value, mut system) = (false, false);
    while let Some(byte) = list.get(at) {
        match byte {
            b'"' => {
                let end = end_of_text(list, at + 1)?;
                let text = &list[at + 1..end];
                match (depth, in_value) {
                    (2, false) => key = text,
                    (2, true) if key == b"role" => system = matches!(text, b"system" | b"developer"),
                    _ => {}
                }
                at = end;
            }
            b':' if depth == 2 => in_value = true,
            b',' if depth == 2 => in_value = false,
            b'{' | b'[' => {
                depth += 1;
                if depth == 2 {
                    (in_value, system) = (false, false);
                }
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 || depth == 1 && !system {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Where the quote stands that ends the text at `at`.
fn end_of_text(list: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += memchr2(b'"', b'\\', list.get(at..)?)?;
        if list[at] == b'"' {
            return Some(at);
        }
        at += 2;
    }
}
