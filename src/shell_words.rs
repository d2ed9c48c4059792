//! Splits options as a shell does, so that a value may hold spaces: `--x '{"level": 3}'`.
//!
//! Only quotes and backslashes count: nothing is expanded, and `#` begins no comment. The common crate for this drops
//! what follows a `#`, which would silently cut the end of a command line.

use std::{iter::Peekable, str::Chars};

/// A quotation that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a quotation begun with {0} does not end")]
pub struct UnclosedQuote(char);

/// Splits a POSIX command line into words.
///
/// # Errors
/// A quote is not closed, or the text ends with a backslash.
pub fn split(text: &str) -> Result<Vec<String>, UnclosedQuote> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c.is_ascii_whitespace() {
            words.extend(word.take());
            continue;
        }
        if c == '\\' && rest.next_if_eq(&'\n').is_some() {
            continue;
        }
        let word = word.get_or_insert_default();
        match c {
            '\'' => single(&mut rest, word)?,
            '"' => double(&mut rest, word)?,
            '\\' => word.push(rest.next().ok_or(UnclosedQuote('\\'))?),
            c => word.push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

/// Quotes one word of a command line, so that [`split`] returns it unchanged.
#[must_use]
pub fn quote(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.:=@%+,".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn single(rest: &mut Peekable<Chars<'_>>, word: &mut String) -> Result<(), UnclosedQuote> {
    loop {
        match rest.next().ok_or(UnclosedQuote('\''))? {
            '\'' => return Ok(()),
            c => word.push(c),
        }
    }
}

/// Parses a double-quoted part, where a backslash stays unless it escapes a special character.
fn double(rest: &mut Peekable<Chars<'_>>, word: &mut String) -> Result<(), UnclosedQuote> {
    loop {
        match rest.next().ok_or(UnclosedQuote('"'))? {
            '"' => return Ok(()),
            '\\' => match rest.next().ok_or(UnclosedQuote('"'))? {
                '\n' => {}
                c @ ('"' | '\\' | '$' | '`') => word.push(c),
                c => word.extend(['\\', c]),
            },
            c => word.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_word_is_one_word_and_plain_ones_stay_as_they_are() {
        for word in ["", "a b", "it's", r#"'"\$"#, "org/Qwen3-8B:latest", "ä"] {
            assert_eq!(split(&quote(word)).unwrap(), [word]);
        }
        assert_eq!(quote("org/Qwen3-8B:latest"), "org/Qwen3-8B:latest");
    }

    #[test]
    fn words_are_those_of_a_shell() {
        let cases: [(&str, &[&str]); 9] = [
            ("", &[]),
            ("  --model  m\t--port 8000\n", &["--model", "m", "--port", "8000"]),
            (r#"--x '{"level": 3}'"#, &["--x", r#"{"level": 3}"#]),
            (r#"--x="a b"c"#, &["--x=a bc"]),
            (r#""a\"b\n" '\'"#, &[r#"a"b\n"#, r"\"]),
            (r"a\ b \\", &["a b", r"\"]),
            ("--a \\\n  --b", &["--a", "--b"]),
            ("'' x", &["", "x"]),
            ("--tag #1 $HOME *", &["--tag", "#1", "$HOME", "*"]),
        ];
        for (text, words) in cases {
            assert_eq!(split(text).unwrap(), words, "{text}");
        }
    }

    #[test]
    fn a_quotation_without_an_end_is_an_error() {
        for (text, mark) in [("--x 'a", '\''), ("--x \"a", '"'), ("--x \"a\\", '"'), ("a\\", '\\')] {
            assert_eq!(split(text), Err(UnclosedQuote(mark)), "{text}");
        }
    }
}
