//! Splits a complete JSON object into its members, in one pass over its bytes.
//!
//! This is a fast path around the general parser for nearly every body: plain UTF-8, keys without escapes, a few levels
//! of nesting. Long texts, which are nearly all of a body, are skipped many bytes at a time. Everything else, including
//! broken documents, yields `None`: then the general parser decides, and words the error. So this path accepts nothing
//! that the general parser would not, and refuses nothing.

use std::ops::Range;

use memchr::memchr2;

/// Most brackets that may be open at a time inside a member.
const MAX_DEPTH: u32 = u64::BITS;

/// The part of a string that is searched word by word, in words.
const SHORT_STRING_WORDS: usize = 3;

#[derive(Clone, Copy)]
struct JsonBytes<'a> {
    bytes: &'a [u8],
    /// All bytes are ASCII without control characters, except possibly DEL.
    is_printable_ascii: bool,
}

/// Calls `member` for each top-level member. It gets the key between its quotes and the value, both as written. `None`:
/// not a plain document, whatever members were reported before.
pub(super) fn for_each_member<'a>(
    document: &'a [u8],
    mut member: impl FnMut(&'a [u8], &'a [u8]),
) -> Option<()> {
    let is_clean = is_printable_ascii(document);
    if !is_clean && str::from_utf8(document).is_err() {
        return None;
    }
    let json = JsonBytes { bytes: document, is_printable_ascii: is_clean };
    let mut at = skip_whitespace(document, 0);
    if document.get(at) != Some(&b'{') {
        return None;
    }
    at = skip_whitespace(document, at + 1);
    if document.get(at) == Some(&b'}') {
        return expect_end(document, at + 1);
    }
    loop {
        let (name, begin) = key(json, at)?;
        let begin = skip_whitespace(document, begin);
        let end = value(json, begin)?;
        member(document.get(name)?, document.get(begin..end)?);
        at = skip_whitespace(document, end);
        match document.get(at)? {
            b',' => at = skip_whitespace(document, at + 1),
            b'}' => return expect_end(document, at + 1),
            _ => return None,
        }
    }
}

/// Checks that nothing follows.
fn expect_end(json: &[u8], at: usize) -> Option<()> {
    (skip_whitespace(json, at) == json.len()).then_some(())
}

fn skip_whitespace(json: &[u8], mut at: usize) -> usize {
    while let Some(b' ' | b'\n' | b'\r' | b'\t') = json.get(at) {
        at += 1;
    }
    at
}

/// Returns the range of the key at `at` without its quotes, and the position after its colon. `None` for a key with an
/// escape.
fn key(json: JsonBytes<'_>, at: usize) -> Option<(Range<usize>, usize)> {
    if json.bytes.get(at) != Some(&b'"') {
        return None;
    }
    let end = find_quote_or_backslash(json, at + 1)?;
    if json.bytes.get(end) != Some(&b'"') {
        return None;
    }
    let colon = skip_whitespace(json.bytes, end + 1);
    (json.bytes.get(colon) == Some(&b':')).then_some((at + 1..end, colon + 1))
}

/// Returns the end of the value that begins at `at`. Not recursive, because the sender determines the depth.
fn value(json: JsonBytes<'_>, mut at: usize) -> Option<usize> {
    let bytes = json.bytes;
    // A bit for each open bracket, the innermost lowest: whether it is an object's.
    let (mut objects, mut depth) = (0_u64, 0);
    loop {
        let opened = *bytes.get(at)?;
        at = match opened {
            b'"' => string(json, at + 1)?,
            b'{' | b'[' => {
                let inside = skip_whitespace(bytes, at + 1);
                // In ASCII, `}` and `]` come two after their counterparts.
                if bytes.get(inside) == Some(&(opened + 2)) {
                    inside + 1
                } else if depth == MAX_DEPTH {
                    return None;
                } else {
                    depth += 1;
                    objects = objects << 1 | u64::from(opened == b'{');
                    at = if opened == b'{' { skip_whitespace(bytes, key(json, inside)?.1) } else { inside };
                    continue;
                }
            }
            b't' => word(bytes, at, b"true")?,
            b'f' => word(bytes, at, b"false")?,
            b'n' => word(bytes, at, b"null")?,
            _ => number(bytes, at)?,
        };
        // A value ended. It may have been the last of one or more containers.
        loop {
            if depth == 0 {
                return Some(at);
            }
            at = skip_whitespace(bytes, at);
            let in_object = objects & 1 == 1;
            match bytes.get(at)? {
                b',' => {
                    at = skip_whitespace(bytes, at + 1);
                    if in_object {
                        at = skip_whitespace(bytes, key(json, at)?.1);
                    }
                    break;
                }
                b'}' if in_object => {}
                b']' if !in_object => {}
                _ => return None,
            }
            objects >>= 1;
            depth -= 1;
            at += 1;
        }
    }
}

fn word(json: &[u8], at: usize, word: &[u8]) -> Option<usize> {
    json.get(at..)?.starts_with(word).then_some(at + word.len())
}

fn number(json: &[u8], mut at: usize) -> Option<usize> {
    let digits = |from: usize| {
        let rest = json.get(from..)?;
        let length = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
        (length > 0).then_some(from + length)
    };
    if json.get(at) == Some(&b'-') {
        at += 1;
    }
    at = if json.get(at) == Some(&b'0') { at + 1 } else { digits(at)? };
    if json.get(at) == Some(&b'.') {
        at = digits(at + 1)?;
    }
    if let Some(b'e' | b'E') = json.get(at) {
        let sign = usize::from(matches!(json.get(at + 1), Some(b'+' | b'-')));
        at = digits(at + 1 + sign)?;
    }
    Some(at)
}

/// Returns the position after the closing quote of the string whose first character is at `at`.
fn string(json: JsonBytes<'_>, mut at: usize) -> Option<usize> {
    loop {
        at = find_quote_or_backslash(json, at)?;
        if json.bytes.get(at) == Some(&b'"') {
            return Some(at + 1);
        }
        match json.bytes.get(at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => at += 2,
            b'u' if json.bytes.get(at + 2..at + 6)?.iter().all(u8::is_ascii_hexdigit) => at += 6,
            _ => return None,
        }
    }
}

/// Returns the position of the next quote or backslash; `None` when a control character precedes it.
fn find_quote_or_backslash(json: JsonBytes<'_>, from: usize) -> Option<usize> {
    let bytes = json.bytes.get(from..)?;
    // Most strings are keys and other short words, for which starting the fast search takes longer.
    let (words, _) = bytes.as_chunks::<8>();
    let short = words.get(..SHORT_STRING_WORDS).unwrap_or(words);
    let near = short.iter().enumerate().find_map(|(at, word)| Some(8 * at + find_in_word(*word)?));
    let found = match near {
        Some(found) => found,
        None => 8 * short.len() + memchr2(b'"', b'\\', bytes.get(8 * short.len()..)?)?,
    };
    (json.is_printable_ascii || bytes.get(..found)?.iter().all(|byte| *byte >= b' ')).then_some(from + found)
}

/// Returns the position of the first quote or backslash among eight bytes.
#[inline(always)]
fn find_in_word(word: [u8; 8]) -> Option<usize> {
    let each = |byte: u8| u64::from_ne_bytes([byte; 8]);
    let word = u64::from_le_bytes(word);
    // Sets the highest bit of each zero byte. A wrongly set bit never precedes the first right one.
    let zero = |word: u64| word.wrapping_sub(each(1)) & !word;
    let found = (zero(word ^ each(b'"')) | zero(word ^ each(b'\\'))) & each(0x80);
    (found != 0).then(|| found.trailing_zeros() as usize / 8)
}

/// Reports whether all bytes are printable ASCII or DEL.
fn is_printable_ascii(bytes: &[u8]) -> bool {
    let mut others = 0;
    // The compiler vectorizes this form, sixteen bytes at a time.
    for byte in bytes {
        others |= byte.wrapping_sub(b' ') | byte;
    }
    others < 0x80
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::value::RawValue;

    use super::*;

    /// Keys and values as written, in order.
    fn found(json: &[u8]) -> Option<Vec<(String, String)>> {
        let mut members = Vec::new();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        for_each_member(json, |key, value| members.push((text(key), text(value))))?;
        Some(members)
    }

    /// Whatever this parser accepts, the general parser accepts too, with the same members.
    fn agrees(json: &[u8]) -> bool {
        let Some(members) = found(json) else { return false };
        let all: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(json).unwrap();
        let last: BTreeMap<String, String> = members.into_iter().collect();
        assert!(
            all.iter()
                .map(|(key, raw)| (key.as_str(), raw.get()))
                .eq(last.iter().map(|(k, v)| (k.as_str(), v.as_str())))
        );
        true
    }

    #[test]
    fn what_is_plain_is_taken_and_the_rest_left_to_the_general_parser() {
        for plain in [
            "{}",
            " { } \n",
            r#"{"a":1}"#,
            r#" {"a" : [ ] , "b":{ }, "c" :[{"d":[1,-0.5e+7,0,true,false,null,"x\n\u00e9"]},{"e":{}}]}"#,
            r#"{"äöü":"größer, and longer than sixteen bytes \" \\ \/ and on and on"}"#,
        ] {
            assert!(agrees(plain.as_bytes()), "{plain}");
        }
        for other in [
            "",
            "{",
            "[]",
            "1",
            "{} x",
            "{}{}",
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{"a":1,}"#,
            r#"{,"a":1}"#,
            r#"{"a":01}"#,
            r#"{"a":1.}"#,
            r#"{"a":-}"#,
            r#"{"a":1e}"#,
            r#"{"a":tru}"#,
            r#"{"a":[1,]}"#,
            r#"{"a":[1}"#,
            r#"{"a":{"b":1]}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":"\u12g4"}"#,
            r#"{"a":"b}"#,
            "{\"a\":\"\t\"}",
            r#"{"a":nul"#,
            r#"{"\u0061":1}"#,
            r#"{"a":{"b"}}"#,
            r#"{"a":{"b":1,}}"#,
            r#"{"a" 1}"#,
            "{\"a\":1\u{b}}",
        ] {
            assert_eq!(found(other.as_bytes()), None, "{other}");
        }
        assert_eq!(found(b"{\"a\":\"\xff\"}"), None);
        for (deep, taken) in [(64, true), (65, false), (100_000, false)] {
            let json = format!(r#"{{"a":{}1{}}}"#, "[".repeat(deep), "]".repeat(deep));
            assert_eq!(found(json.as_bytes()).is_some(), taken, "{deep}");
        }
    }

    #[test]
    fn a_text_ends_where_it_does_however_long_it_is() {
        for length in 0..70 {
            for end in ["\"", "\\\"\"", "\\u0041\""] {
                let json = format!(r#"{{"k":"{}{end}}}"#, "x".repeat(length));
                assert!(agrees(json.as_bytes()), "{json}");
            }
            let broken = format!("{{\"k\":\"{}\u{1f}\"}}", "x".repeat(length));
            assert_eq!(found(broken.as_bytes()), None);
        }
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_taken_by_the_general_parser(
            json in r#"\{("[ab\\]{0,2}" ?: ?([\[\]{}:,"tn0-9.eE+\\u -]{0,8}|null|"[^"]{0,9}"|\[[0-9,]{0,4}\]),?){0,3}\}"#,
        ) {
            agrees(json.as_bytes());
        }
    }
}
