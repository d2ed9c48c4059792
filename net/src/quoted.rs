//! Quoted strings in which a backslash escapes the next byte: labels of metrics and parameters of headers.

/// Returns the position of the closing quote. `text` begins after the opening one.
#[must_use]
pub fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut escaped = false;
    text.iter().position(|byte| {
        let is_end = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        is_end
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_escaped_quote_does_not_close_and_an_escaped_backslash_escapes_nothing() {
        assert_eq!(closing_quote(br#"a"b"#), Some(1));
        assert_eq!(closing_quote(br#"a\"b"c"#), Some(4));
        assert_eq!(closing_quote(br#"a\\"b"#), Some(3));
        assert_eq!(closing_quote(br#"a\""#), None);
    }
}
