//! Sanitizes text from clients for logs and messages.

/// The longest client text that the gateway repeats anywhere, in bytes.
pub(crate) const MAX_CLIENT_TEXT_BYTES: usize = 256;

/// Escapes control characters and cuts the text at [`MAX_CLIENT_TEXT_BYTES`] bytes.
pub(crate) fn sanitize(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(MAX_CLIENT_TEXT_BYTES + 3));
    for c in text.chars() {
        let before = out.len();
        if c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
        if out.len() > MAX_CLIENT_TEXT_BYTES {
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
        assert_eq!(sanitize("a\r\nb\u{1b}[31m"), "a\\r\\nb\\u{1b}[31m");
        let long = sanitize(&"é".repeat(500));
        assert!(long.len() <= MAX_CLIENT_TEXT_BYTES + 3 && long.ends_with('…'));
    }
}
