//! Reads the options of an engine's command.
//!
//! A command may be a script (`[sh, -c, "exec vllm serve m --port 1"]`), so every argument with spaces is split as a
//! shell would.
//!
//! vLLM treats underscores as dashes and uses the last of repeated options, and so does this module.

use rouse::shell_words;

/// Returns the option's value: the next word, or the text after its `=`.
pub(super) fn value(command: &[String], option: &str) -> Option<String> {
    let words = words(command);
    words.iter().enumerate().rev().find_map(|(at, word)| {
        let (name, value) = parts(word);
        (name == option).then(|| value.map(str::to_owned).or_else(|| words.get(at + 1).cloned()))?
    })
}

/// Returns whether this switch is on: `--no-…` turns it off.
pub(super) fn is_on(command: &[String], switch: &str) -> bool {
    let off = switch.replacen("--", "--no-", 1);
    let words = words(command);
    let mut names = words.iter().rev().map(|word| parts(word).0);
    names.find(|name| *name == switch || *name == off).is_some_and(|name| name == switch)
}

fn parts(word: &str) -> (String, Option<&str>) {
    let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
    (name.replace('_', "-"), value)
}

fn words(command: &[String]) -> Vec<String> {
    command.iter().flat_map(|text| split(text)).collect()
}

/// Splits a text into words, without the characters that end a command in a script.
fn split(text: &str) -> Vec<String> {
    if !text.contains(|c: char| c.is_ascii_whitespace()) {
        return vec![text.to_owned()];
    }
    let plain = || text.split_whitespace().map(str::to_owned).collect();
    let words: Vec<String> = shell_words::split(text).unwrap_or_else(|_| plain());
    // A quoted script contains words of its own.
    words.iter().flat_map(|word| split(word.trim_end_matches([';', '&', ')']))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_found_however_it_is_written() {
        let of = |command: &[&str]| {
            value(&command.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), "--a-b")
        };
        for command in [
            &["x", "--a-b", "1"][..],
            &["x", "--a-b=1"],
            &["x", "--a_b=1"],
            &["x", "--a-b 1"],
            &["sh", "-c", "exec x --a-b \"1\" --c"],
            &["sh", "-c", "x --c && exec x --a_b '1'; y"],
            &["sh", "-c", "(x --a-b=1)"],
            &["sh", "-c", "exec x --a-b=1;"],
            &["sh", "-c", "x it's --a-b 1"],
            &["x", "--a-b", "2", "--a-b", "1"],
        ] {
            assert_eq!(of(command).as_deref(), Some("1"), "{command:?}");
        }
        for command in [&["x", "--a-b"][..], &["x", "--a-bc=1"], &["x", "a-b", "1"], &[]] {
            assert_eq!(of(command), None, "{command:?}");
        }
    }

    #[test]
    fn the_last_of_a_switch_and_its_opposite_counts() {
        for (command, on) in [
            ("x --a-b", true),
            ("x --a_b --c", true),
            ("x --no-a-b", false),
            ("x --no-a-b --a-b", true),
            ("x --a-b --no-a-b", false),
            ("x --a-bc", false),
        ] {
            assert_eq!(is_on(&[command.to_owned()], "--a-b"), on, "{command}");
        }
    }
}
