//! Explains YAML syntax errors to the author of a configuration.
//!
//! The parser reports what it was parsing when it failed; the usual mistakes show in the text itself.

use super::error::SourceLocation;

/// Returns the mistake's location, and what to write instead; `None` if only the parser's `words` explain it.
///
/// `at` is where the parser failed.
pub(super) fn explain(text: &str, at: SourceLocation, words: &str) -> Option<(SourceLocation, String)> {
    let number = usize::try_from(at.line).ok()?;
    if let Some(found) = text.lines().take(number).zip(1..).find_map(|(line, number)| tab(line, number)) {
        return Some(found);
    }
    if let Some(found) = number.checked_sub(1).and_then(|before| unquoted(text.lines().nth(before)?, at.line))
    {
        return Some(found);
    }
    let has = |parts: &[&str]| parts.iter().any(|part| words.contains(part));
    let advice = if has(&["mapping values are not allowed"]) {
        "two keys on one line, or a line indented deeper than the lines above it: quote a value that contains ': '"
    } else if has(&["expected ',' or '}'", "EOF while parsing a flow mapping", "unclosed bracket '{'"]) {
        "a { is not closed, or a comma is missing: write {key: value, key: value}"
    } else if has(&["expected ',' or ']'", "EOF while parsing a flow sequence", "unclosed bracket '['"]) {
        "a [ is not closed, or a comma is missing: write [a, b], and quote words that contain , [ ] { }"
    } else if has(&[
        "did not find expected key",
        "expected '-' indicator",
        "invalid indentation",
        "simple key",
        "expected <document start>",
        "entries are not allowed",
        "mapping keys are not allowed",
    ]) {
        "this line's indentation does not match the lines above it: start the keys of one mapping in the same column, and also the dashes of one list"
    } else {
        return None;
    };
    Some((at, advice.to_owned()))
}

fn tab(line: &str, number: u64) -> Option<(SourceLocation, String)> {
    let column = line.chars().zip(1..).take_while(|(c, _)| c.is_whitespace()).find(|(c, _)| *c == '\t');
    let at = SourceLocation { line: number, column: column?.1 };
    Some((at, "a tab in the indentation: use spaces".to_owned()))
}

/// Finds an unquoted placeholder: within [ ] and { } a brace starts a mapping unless it is quoted.
fn unquoted(line: &str, number: u64) -> Option<(SourceLocation, String)> {
    let (mut quote, mut start) = (None, 0);
    for (at, c) in line.char_indices() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if matches!(c, '"' | '\'') => quote = Some(c),
            None if c.is_whitespace() || matches!(c, ',' | '[' | '{') && !line.get(..at)?.ends_with('$') => {
                start = at + c.len_utf8();
            }
            None if line.get(at..)?.starts_with("${") => {
                let rest = line.get(start..)?;
                let end =
                    rest.find(|c: char| c.is_whitespace() || matches!(c, ',' | ']')).unwrap_or(rest.len());
                let mut word = rest.get(..end)?;
                // These braces close the mapping around the word.
                while word.matches('}').count() > word.matches('{').count() {
                    word = word.strip_suffix('}')?;
                }
                let column = u64::try_from(line.get(..start)?.chars().count()).ok()? + 1;
                return Some((
                    SourceLocation { line: number, column },
                    format!("{word} needs quotes here: write \"{word}\""),
                ));
            }
            None => {}
        }
    }
    None
}
