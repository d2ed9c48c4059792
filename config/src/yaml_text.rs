//! Writes texts as YAML scalars that every reader of YAML takes for the same texts.

use std::fmt::Write as _;

/// Returns the text as it is where YAML reads it as a text anywhere, also in brackets, and in quotes otherwise.
#[must_use]
pub fn yaml_scalar(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._+=@-".contains(c);
    let word = text.strip_prefix("--").or_else(|| text.strip_prefix('-')).unwrap_or(text);
    let starts_plain = word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    // Other readers of YAML take these for truth values and the like.
    let is_keyword = ["true", "false", "yes", "no", "on", "off", "y", "n", "null"]
        .iter()
        .any(|keyword| text.eq_ignore_ascii_case(keyword));
    if starts_plain && !is_keyword && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        yaml_quoted(text)
    }
}

/// Returns the text in double quotes.
#[must_use]
pub fn yaml_quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            // Writing into a text does not fail. All control characters are below 256.
            c if c.is_control() => write!(out, "\\x{:02x}", u32::from(c)).unwrap_or_default(),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::yaml::{YamlNode, YamlValue};

    const PLAIN: [&str; 10] = [
        "llama-server",
        "-m",
        "--port",
        "--temp=0.7",
        "/a/b_c.gguf",
        "qwen3-1.7b",
        "a=b",
        "-c4",
        "user@host",
        "https",
    ];
    const QUOTED: [&str; 35] = [
        "",
        "8192",
        "0.7",
        "1e3",
        ".inf",
        "-.inf",
        "-1",
        "0x1f",
        "2026-01-01",
        "true",
        "No",
        "null",
        "~",
        "-",
        "--",
        "---",
        "---a",
        "- a",
        "a b",
        "a: b",
        "a #b",
        "# x",
        "x,y",
        "[a]",
        "{\"level\": 3}",
        "${PORT}",
        "*a",
        "&a",
        "!a",
        "@a",
        "%a",
        "it's",
        "C:\\m",
        "ä",
        "a\nb\tc\u{7f}\u{85}",
    ];

    #[test]
    fn a_text_is_read_back_as_it_was_written() {
        for text in PLAIN.iter().chain(&QUOTED) {
            let written = format!("[{}]", yaml_scalar(text));
            let (node, problems) = YamlNode::parse(&written).unwrap();
            let YamlValue::List(items) = &node.value else { panic!("{written}") };
            assert!(problems.is_empty());
            assert!(
                matches!(items.as_slice(), [YamlNode { value: YamlValue::Scalar(read), .. }] if read == text),
                "{text:?} was written as {written}: {items:?}"
            );
        }
    }

    #[test]
    fn only_texts_that_yaml_could_misread_are_quoted() {
        for text in PLAIN {
            assert_eq!(yaml_scalar(text), text);
        }
        for text in QUOTED {
            assert!(yaml_scalar(text).starts_with('"'), "{text}");
        }
        assert_eq!(yaml_scalar("a\"b\\"), r#""a\"b\\""#);
    }
}
