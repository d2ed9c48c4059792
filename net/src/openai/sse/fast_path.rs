//! Tells, without following its structure, that an event's JSON has nothing that matters.
//!
//! What matters is a key or a `type` of a few names, and each stands in the bytes as its name between quotes. So where
//! the first letters behind a quote occur nowhere, neither does what matters, be it structure or text. The other way
//! round nothing is said: text may have them too.
//!
//! One pass without a branch, so that the compiler makes it one of sixteen bytes at a time.

/// What begins in some place, as bits.
const MATTERS: u8 = 1;
const TYPE: u8 = 2;

/// `json` is one line, without its line end. Nothing of it would become known but that it came; `has_id`: an id would
/// not.
pub(super) fn has_nothing_of_interest(json: &[u8], has_id: bool) -> bool {
    let found = if has_id { begins::<false>(json) } else { begins::<true>(json) };
    found & MATTERS == 0 && (found & TYPE == 0 || !may_end(json))
}

/// The first letters of `usage` and `error`, and of `id` where that matters; of `type`.
fn begins<const ID: bool>(json: &[u8]) -> u8 {
    any_three_bytes(json, |a, b, c| {
        let matters = all(b == b'u') & all(c == b's') | all(b == b'e') & all(c == b'r');
        let id = if ID { all(b == b'i') & all(c == b'd') } else { 0 };
        let kind = all(b == b't') & all(c == b'y');
        all(a == b'"') & ((matters | id) & MATTERS | kind & TYPE)
    })
}

/// A string ends as the types do that end a stream: in `completed`, `failed`, `incomplete`, `stop` or `done`.
fn may_end(json: &[u8]) -> bool {
    let found = any_three_bytes(json, |a, b, c| {
        let ed = all(a == b'e') & all(b == b'd');
        let te = all(a == b't') & all(b == b'e');
        let op = all(a == b'o') & all(b == b'p');
        let ne = all(a == b'n') & all(b == b'e');
        (ed | te | op | ne) & all(c == b'"')
    });
    found != 0
}

/// What `look` says of any three bytes in a row. In this form the compiler looks at sixteen places at a time; with an
/// iterator or a branch it does not.
#[inline(always)]
#[expect(
    clippy::indexing_slicing,
    reason = "each of the three has `places` bytes, which the compiler sees as well"
)]
fn any_three_bytes(json: &[u8], look: impl Fn(u8, u8, u8) -> u8) -> u8 {
    let places = json.len().saturating_sub(2);
    let [Some(first), Some(second), Some(third)] = [0, 1, 2].map(|from| json.get(from..from + places)) else {
        return 0;
    };
    let mut found = 0;
    for place in 0..places {
        found |= look(first[place], second[place], third[place]);
    }
    found
}

#[inline(always)]
const fn all(is: bool) -> u8 {
    if is { u8::MAX } else { 0 }
}
