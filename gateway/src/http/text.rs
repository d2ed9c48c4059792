//! Text that clients chose, made fit for logs and messages.

/// Longest text from a client that is repeated anywhere, in bytes.
pub(crate) const LONGEST: usize = 256;

/// The text with control characters escaped, cut at [`LONGEST`] bytes.
pub(crate) fn cut(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(LONGEST + 3));
    for c in text.chars() {
        let before = out.len();
        if c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
        if out.len() > LONGEST {
            out.truncate(before);
            out.push('…');
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_long_texts_cut_at_a_character() {
        assert_eq!(cut("a\r\nb\u{1b}[31m"), "a\\r\\nb\\u{1b}[31m");
        let long = cut(&"é".repeat(500));
        assert!(long.len() <= LONGEST + 3 && long.ends_with('…'));
    }
}
