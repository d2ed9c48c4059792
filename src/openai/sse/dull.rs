//! Tells, without following its structure, that an event's JSON has nothing that matters.
//!
//! What matters is a key or a `type` of a few names, and each stands in the bytes as its name between quotes. So where
//! the first letters behind a quote occur nowhere, neither does what matters, be it structure or text. The other way
//! round nothing is said: text may have them too.
//!
//! One pass without a branch, so that the compiler makes it one of sixteen bytes at a time.

/// What begins in some place, as bits.
const MATTERS: u8 = 1;
const ID: u8 = 2;
const TYPE: u8 = 4;

/// `json` is one line, without its line end. Nothing of it would become known but that it came; `has_id`: an id would
/// not.
pub(super) fn is_dull(json: &[u8], has_id: bool) -> bool {
    let found = begins(json);
    found & MATTERS == 0 && (has_id || found & ID == 0) && (found & TYPE == 0 || !may_end(json))
}

fn begins(json: &[u8]) -> u8 {
    let [Some(second), Some(third)] = [json.get(1..), json.get(2..)] else {
        return MATTERS;
    };
    let mut found = 0;
    for ((&a, &b), &c) in json.iter().zip(second).zip(third) {
        let matters = (b == b'u') & (c == b's') | (b == b'e') & (c == b'r');
        let id = (b == b'i') & (c == b'd');
        let kind = (b == b't') & (c == b'y');
        let here = u8::from(matters) * MATTERS | u8::from(id) * ID | u8::from(kind) * TYPE;
        found |= if a == b'"' { here } else { 0 };
        // Then this is no line, but two.
        found |= if c == b'\r' { MATTERS } else { 0 };
    }
    found | if json[..2].contains(&b'\r') { MATTERS } else { 0 }
}

/// A string ends as the types do that end a stream: in `completed`, `failed`, `incomplete`, `stop` or `done`.
fn may_end(json: &[u8]) -> bool {
    let [Some(second), Some(third)] = [json.get(1..), json.get(2..)] else {
        return true;
    };
    let mut found = false;
    for ((&a, &b), &c) in json.iter().zip(second).zip(third) {
        let ends = (a == b'e') & (b == b'd')
            | (a == b't') & (b == b'e')
            | (a == b'o') & (b == b'p')
            | (a == b'n') & (b == b'e');
        found |= ends & (c == b'"');
    }
    found
}
