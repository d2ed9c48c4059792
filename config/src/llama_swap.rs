//! Converts a configuration of llama-swap into one of ours.
//!
//! llama-swap runs one command for a model and swaps by groups; we swap by memory. So most of a model has a
//! counterpart and most of the rest has none. Every key that is left out is noted with its line, since a user must
//! know what no longer applies.

mod command;
mod groups;
mod macros;
mod model;
mod render;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use rouse::units::{Bytes, Millis};

use self::{groups::GroupRules, macros::MacroTable, model::ImportedModel};
use super::{
    error::{ConfigErrors, ConfigProblem, SourceLocation},
    yaml::{YamlEntry, YamlNode, YamlValue},
};

/// What an import needs to know of this machine. A test supplies its own.
pub struct ImportMachine {
    pub environment: fn(&str) -> Option<String>,
    /// Returns the size of a model's file.
    pub file_size: fn(&str) -> Option<Bytes>,
}

/// A converted configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlamaSwapImport {
    /// The text of the configuration.
    pub yaml: String,
    pub models: usize,
    /// What has no counterpart or works differently, in the order of the file.
    pub notes: Vec<ConfigProblem>,
}

/// Converts the text of llama-swap's configuration, which errors call `origin`.
///
/// # Errors
/// The text is not YAML, or not a mapping with `models`.
pub fn import_llama_swap(
    text: &str,
    origin: &str,
    machine: &ImportMachine,
) -> Result<LlamaSwapImport, ConfigErrors> {
    let failed = |problems| ConfigErrors::new(origin, problems);
    let (document, duplicates) = YamlNode::parse(text).map_err(failed)?;
    let missing = || failed(vec![ConfigProblem::new(document.at, "there is no mapping 'models'")]);
    let models = find(&document, "models").map(|entry| &entry.value).ok_or_else(missing)?;
    let YamlValue::Map(models) = &models.value else { return Err(missing()) };
    let mut importer = LlamaSwapImporter::new(machine, duplicates);
    importer.read_settings(&document);
    let imported: Vec<ImportedModel> = importer.models(models);
    importer.check_references(models);
    importer.notes.sort();
    importer.notes.dedup();
    let yaml = render::render(&importer, &imported, origin);
    Ok(LlamaSwapImport { yaml, models: imported.len(), notes: importer.notes })
}

/// The state of one import.
struct LlamaSwapImporter<'m> {
    machine: &'m ImportMachine,
    notes: Vec<ConfigProblem>,
    macros: MacroTable,
    start_timeout: Option<Millis>,
    stop_grace: Option<Millis>,
    /// Seconds; 0 is never.
    global_ttl: u64,
    /// Hashes of the keys, in hexadecimal.
    key_hashes: Vec<String>,
    groups: GroupRules,
    priorities: BTreeMap<String, i32>,
    preload: BTreeSet<String>,
    /// Our names of llama-swap's models.
    names: BTreeMap<String, String>,
    /// Names and aliases that are taken.
    taken: BTreeSet<String>,
}

impl<'m> LlamaSwapImporter<'m> {
    fn new(machine: &'m ImportMachine, notes: Vec<ConfigProblem>) -> Self {
        Self {
            machine,
            notes,
            macros: MacroTable::default(),
            start_timeout: None,
            stop_grace: None,
            global_ttl: 0,
            key_hashes: Vec::new(),
            groups: GroupRules::default(),
            priorities: BTreeMap::new(),
            preload: BTreeSet::new(),
            names: BTreeMap::new(),
            taken: BTreeSet::new(),
        }
    }

    fn note(&mut self, at: SourceLocation, text: impl Into<String>) {
        self.notes.push(ConfigProblem::new(at, text));
    }

    /// Returns a number, and notes a value that is none.
    fn number(&mut self, key: &str, node: &YamlNode) -> Option<i64> {
        let number = scalar(node).and_then(|text| text.parse().ok());
        if number.is_none() {
            self.note(node.at, format!("{key}: not a whole number, left out"));
        }
        number
    }

    /// Returns a text with its macros expanded, and notes macros that are unknown.
    fn text(&mut self, node: &YamlNode, own: &MacroTable, model: &str) -> Option<String> {
        let text = scalar(node)?;
        let expanded = self.macros.with(own).expand(text, model);
        for name in expanded.unknown {
            self.note(node.at, format!("the macro ${{{name}}} is unknown, and stays as it is"));
        }
        for name in expanded.variables {
            if (self.machine.environment)(&name).is_none() {
                self.note(
                    node.at,
                    format!(
                        "the environment variable {name} is not set here: the gateway needs it at its start"
                    ),
                );
            }
        }
        Some(expanded.text)
    }

    /// Returns the texts of a list, and notes a value that is none.
    fn texts(&mut self, entry: &YamlEntry, own: &MacroTable, model: &str) -> Vec<(SourceLocation, String)> {
        let YamlValue::List(items) = &entry.value.value else {
            self.note(entry.at, format!("{}: not a list, left out", entry.key));
            return Vec::new();
        };
        items.iter().filter_map(|item| Some((item.at, self.text(item, own, model)?))).collect()
    }
}

fn find<'n>(node: &'n YamlNode, key: &str) -> Option<&'n YamlEntry> {
    entries(node).iter().find(|entry| entry.key == key)
}

/// Returns the entries of a mapping; none for any other node.
fn entries(node: &YamlNode) -> &[YamlEntry] {
    match &node.value {
        YamlValue::Map(entries) => entries,
        YamlValue::Null | YamlValue::Scalar(_) | YamlValue::List(_) => &[],
    }
}

fn scalar(node: &YamlNode) -> Option<&str> {
    match &node.value {
        YamlValue::Scalar(text) => Some(text),
        YamlValue::Null | YamlValue::Map(_) | YamlValue::List(_) => None,
    }
}

fn is_true(node: &YamlNode) -> bool {
    scalar(node) == Some("true")
}

#[cfg(test)]
mod tests;
