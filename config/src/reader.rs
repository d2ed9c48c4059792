//! Reads the tree into types, and continues after an error.
//!
//! Every function here returns `None` once it has noted a problem, so the caller can use a default and continue. The
//! configuration is discarded in the end, but the errors behind the first one are found.

use std::str::FromStr;

use rouse::units::{Bytes, Millis};

use super::{
    error::{ConfigProblem, SourceLocation},
    substitute,
    yaml::{YamlEntry, YamlNode, YamlValue},
};

/// Looks up the values of `${env:NAME}`.
pub(super) type EnvLookup = fn(&str) -> Option<String>;

pub(super) struct ConfigReader {
    pub(super) problems: Vec<ConfigProblem>,
    environment: EnvLookup,
    /// Values after substitution of `${env:…}`, each with the file's own text.
    ///
    /// Errors show the file's text, since a variable that is named by mistake may hold a secret.
    substituted: Vec<(String, String)>,
    /// Path in the document, for messages: `["models[0]", "engine", "command"]`.
    path: Vec<String>,
}

/// A mapping being read. Keys that were never read are unknown when it is closed.
pub(super) struct ConfigSection {
    pub(super) at: SourceLocation,
    entries: Vec<YamlEntry>,
    known: Vec<&'static str>,
    /// The node is not a mapping, which was noted. Missing keys are only a consequence of that.
    not_a_mapping: bool,
}

impl ConfigReader {
    pub(super) const fn new(environment: EnvLookup) -> Self {
        Self { problems: Vec::new(), environment, substituted: Vec::new(), path: Vec::new() }
    }

    /// Notes a problem.
    ///
    /// The text may repeat a value of the file only in single quotes, so that a value from the environment is found and
    /// replaced.
    pub(super) fn note(&mut self, at: SourceLocation, text: impl std::fmt::Display) {
        let mut text = text.to_string();
        for (filled, written) in &self.substituted {
            for shown in [filled.clone(), filled.escape_debug().to_string()] {
                text = text.replace(&format!("'{shown}'"), &format!("'{written}'"));
            }
        }
        let text = if self.path.is_empty() { text } else { format!("{}: {text}", self.path.join(".")) };
        self.problems.push(ConfigProblem::new(at, text));
    }

    /// Reads a text with `${env:NAME}` filled in.
    pub(super) fn text(&mut self, node: &YamlNode) -> Option<String> {
        self.substituted(node, substitute::SubstitutionScope::Other)
    }

    /// Reads a text of an engine's `command` or `env`, which keeps its placeholders until the launch.
    pub(super) fn template(&mut self, node: &YamlNode) -> Option<String> {
        self.substituted(node, substitute::SubstitutionScope::Command)
    }

    fn substituted(&mut self, node: &YamlNode, scope: substitute::SubstitutionScope) -> Option<String> {
        let text = self.scalar(node)?.to_owned();
        match substitute::substitute_env(&text, scope, self.environment) {
            Ok(filled) => {
                if text.contains("${env:") {
                    self.substituted.push((filled.clone(), text));
                }
                Some(filled)
            }
            Err(errors) => {
                for error in errors {
                    self.note(node.at, error);
                }
                None
            }
        }
    }

    fn scalar<'n>(&mut self, node: &'n YamlNode) -> Option<&'n str> {
        if let YamlValue::Scalar(text) = &node.value {
            return Some(text);
        }
        self.note(node.at, format_args!("expected a single value, found {}", node.type_name()));
        None
    }

    /// Reads a credential for a header. No error repeats it.
    pub(super) fn credential(&mut self, node: &YamlNode) -> Option<String> {
        let text = self.text(node)?;
        if text.chars().any(|c| !c.is_ascii_graphic()) {
            self.note(
                node.at,
                "contains a space, a line end or another character that is not allowed in a header's credential: use \
                 visible ASCII, and remove a trailing line end",
            );
            return None;
        }
        Some(text)
    }

    pub(super) fn parse<T: FromStr<Err: std::fmt::Display>>(&mut self, node: &YamlNode) -> Option<T> {
        let text = self.text(node)?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                self.note(node.at, error);
                None
            }
        }
    }

    pub(super) fn size(&mut self, node: &YamlNode) -> Option<Bytes> {
        self.parse(node)
    }

    /// Reads a memory size. A number without a unit counts bytes, so a small one is a mistake.
    pub(super) fn memory(&mut self, node: &YamlNode) -> Option<Bytes> {
        let size = self.size(node)?;
        if size != Bytes::ZERO && size < Bytes::mib(1) {
            let bytes = size.0;
            self.note(
                node.at,
                format_args!("{bytes} bytes is too little memory: add a unit, like {bytes}Mi or 30Gi"),
            );
            return None;
        }
        Some(size)
    }

    pub(super) fn duration(&mut self, node: &YamlNode) -> Option<Millis> {
        self.parse(node)
    }

    /// Reads a duration that must not be zero.
    pub(super) fn positive_duration(&mut self, node: &YamlNode) -> Option<Millis> {
        let span = self.duration(node)?;
        if span == Millis::ZERO {
            self.note(node.at, "must be longer than 0");
            return None;
        }
        Some(span)
    }

    pub(super) fn number<T: FromStr>(&mut self, node: &YamlNode) -> Option<T> {
        let text = self.text(node)?;
        let number = text.parse().ok();
        if number.is_none() {
            self.note(node.at, format_args!("'{text}' is not a whole number in the allowed range"));
        }
        number
    }

    pub(super) fn flag(&mut self, node: &YamlNode) -> Option<bool> {
        self.choice(node, &[("true", true), ("false", false)])
    }

    pub(super) fn choice<T: Copy>(&mut self, node: &YamlNode, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(node)?;
        let found = choices.iter().find(|(name, _)| *name == text);
        if found.is_none() {
            let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
            self.note(node.at, format_args!("'{text}' is not one of: {}", names.join(", ")));
        }
        found.map(|(_, value)| *value)
    }

    /// Reads every item, even after a bad one; `None` if any was bad.
    pub(super) fn list<T>(
        &mut self,
        node: &YamlNode,
        mut item: impl FnMut(&mut Self, &YamlNode) -> Option<T>,
    ) -> Option<Vec<T>> {
        let YamlValue::List(items) = &node.value else {
            self.note(node.at, format_args!("expected a list, found {}", node.type_name()));
            return None;
        };
        let mut all = Some(Vec::with_capacity(items.len()));
        for (index, node) in items.iter().enumerate() {
            let value = self.at_index(index, |reader| item(reader, node));
            all = all.zip(value).map(|(mut all, value)| {
                all.push(value);
                all
            });
        }
        all
    }

    /// Opens a mapping. Any other node is noted and reads as an empty mapping.
    pub(super) fn section(&mut self, node: &YamlNode) -> ConfigSection {
        let (entries, broken) = match &node.value {
            YamlValue::Map(entries) => (entries.clone(), false),
            YamlValue::Null => (Vec::new(), false),
            _ => {
                self.note(node.at, format_args!("expected a mapping, found {}", node.type_name()));
                (Vec::new(), true)
            }
        };
        ConfigSection { at: node.at, entries, known: Vec::new(), not_a_mapping: broken }
    }

    fn within<T>(&mut self, name: String, read: impl FnOnce(&mut Self) -> T) -> T {
        self.path.push(name);
        let value = read(self);
        self.path.pop();
        value
    }

    fn at_index<T>(&mut self, index: usize, read: impl FnOnce(&mut Self) -> T) -> T {
        let base = self.path.pop().unwrap_or_default();
        let value = self.within(format!("{base}[{index}]"), read);
        self.path.push(base);
        value
    }
}

impl ConfigSection {
    /// Reads the value of `key`; `None` if it is missing, null, or bad.
    pub(super) fn read<T>(
        &mut self,
        reader: &mut ConfigReader,
        key: &'static str,
        read: impl FnOnce(&mut ConfigReader, &YamlNode) -> Option<T>,
    ) -> Option<T> {
        let node = self.take(key)?;
        if matches!(node.value, YamlValue::Null) {
            return None;
        }
        reader.within(key.to_owned(), |reader| read(reader, &node))
    }

    pub(super) fn require<T>(
        &mut self,
        reader: &mut ConfigReader,
        key: &'static str,
        read: impl FnOnce(&mut ConfigReader, &YamlNode) -> Option<T>,
    ) -> Option<T> {
        let missing = !self
            .entries
            .iter()
            .any(|entry| entry.key == key && !matches!(entry.value.value, YamlValue::Null));
        if missing {
            self.known.push(key);
            self.entries.retain(|entry| entry.key != key);
            if !self.not_a_mapping {
                reader.note(self.at, format_args!("'{key}' is missing"));
            }
            return None;
        }
        self.read(reader, key, read)
    }

    /// Reads a nested mapping with `read`, even if it is missing (all defaults).
    pub(super) fn sub<T>(
        &mut self,
        reader: &mut ConfigReader,
        key: &'static str,
        read: impl FnOnce(&mut ConfigReader, &mut Self) -> T,
    ) -> T {
        let node = self.take(key).unwrap_or(YamlNode { at: self.at, value: YamlValue::Null });
        reader.within(key.to_owned(), |reader| {
            let mut section = reader.section(&node);
            let value = read(reader, &mut section);
            section.close(reader);
            value
        })
    }

    /// Notes a key that earlier versions read. `advice` says what a file needs instead.
    pub(super) fn refuse_removed(&mut self, reader: &mut ConfigReader, key: &str, advice: &str) {
        if let Some(index) = self.entries.iter().position(|entry| entry.key == key) {
            let entry = self.entries.remove(index);
            reader.note(entry.at, format_args!("'{key}' was removed: {advice}"));
        }
    }

    /// Returns the location of this key, if it is present and not read yet.
    pub(super) fn location_of(&self, key: &str) -> Option<SourceLocation> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| entry.value.at)
    }

    /// Notes every key that was never read as unknown.
    pub(super) fn close(self, reader: &mut ConfigReader) {
        for entry in &self.entries {
            let hint = nearest(&entry.key, &self.known).map_or_else(
                || format!("known keys: {}", self.known.join(", ")),
                |near| format!("did you mean '{near}'?"),
            );
            reader.note(entry.at, format_args!("unknown key '{}' ({hint})", entry.key));
        }
    }

    fn take(&mut self, key: &'static str) -> Option<YamlNode> {
        self.known.push(key);
        let index = self.entries.iter().position(|entry| entry.key == key)?;
        Some(self.entries.remove(index).value)
    }
}

/// Returns the known key of which the unknown one is probably a misspelling.
fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    let key = key.to_lowercase().replace(['_', '-'], "");
    known
        .iter()
        .map(|candidate| (distance(&key, &candidate.to_lowercase()), *candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() + 1) / 3)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance.
#[expect(clippy::indexing_slicing, reason = "the row is one longer than `b`")]
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<_> = b.chars().collect();
    let mut row: Vec<_> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
