//! Detects that an event's JSON has nothing of interest, without following its structure.
//!
//! Only a few keys and values of `type` matter, and each stands in the bytes as its name between quotes. So when the
//! first letters after a quote occur nowhere, the name does not occur, neither as structure nor as text. A match proves
//! nothing, because text may contain it too.
//!
//! One pass without branches, so that the compiler vectorizes it, sixteen bytes at a time.

/// Bits for the names that may begin at a position.
const MATTERS: u8 = 1;
const TYPE: u8 = 2;

/// Reports whether reading `json` would change nothing but the event count. `json` is one line without its line end.
/// With `has_id` the id is known already, so another one does not matter.
pub(super) fn has_nothing_of_interest(json: &[u8], has_id: bool) -> bool {
    let found = if has_id { begins::<false>(json) } else { begins::<true>(json) };
    found & MATTERS == 0 && (found & TYPE == 0 || !may_end(json))
}

/// Finds the first letters of `usage`, `error` and `type`, and of `id` where that matters.
fn begins<const ID: bool>(json: &[u8]) -> u8 {
    any_three_bytes(json, |a, b, c| {
        let matters = all(b == b'u') & all(c == b's') | all(b == b'e') & all(c == b'r');
        let id = if ID { all(b == b'i') & all(c == b'd') } else { 0 };
        let kind = all(b == b't') & all(c == b'y');
        all(a == b'"') & ((matters | id) & MATTERS | kind & TYPE)
    })
}

/// Reports whether a string ends like one of the types that end a stream: `completed`, `failed`, `incomplete`, `stop`
/// or `done`.
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

/// Combines `classify` over every three adjacent bytes. The compiler vectorizes this form, sixteen positions at a time. It
/// does not vectorize an iterator or a branch.
#[inline(always)]
#[expect(
    clippy::indexing_slicing,
    reason = "each of the three has `places` bytes, which the compiler sees as well"
)]
fn any_three_bytes(json: &[u8], classify: impl Fn(u8, u8, u8) -> u8) -> u8 {
    let positions = json.len().saturating_sub(2);
    let [Some(first), Some(second), Some(third)] = [0, 1, 2].map(|from| json.get(from..from + positions))
    else {
        return 0;
    };
    let mut found = 0;
    for position in 0..positions {
        found |= classify(first[position], second[position], third[position]);
    }
    found
}

#[inline(always)]
const fn all(is: bool) -> u8 {
    if is { u8::MAX } else { 0 }
}
