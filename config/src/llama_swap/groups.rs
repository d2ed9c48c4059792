//! What llama-swap's groups mean here.

use std::collections::BTreeSet;

use super::{LlamaSwapImporter, entries, find, is_true, macros::MacroTable};
use crate::yaml::YamlNode;

/// Models that other models must not unload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupRules {
    pub(super) persistent: BTreeSet<String>,
}

impl LlamaSwapImporter<'_> {
    /// Reads `groups`, also of `routing.router.settings`.
    pub(super) fn groups(&mut self, groups: &YamlNode) {
        for group in entries(groups) {
            let members = find(&group.value, "members");
            let members = members.map(|entry| self.texts(entry, &MacroTable::default(), ""));
            let names: Vec<String> = members.unwrap_or_default().into_iter().map(|(_, name)| name).collect();
            let flag = |key: &str, default: bool| {
                find(&group.value, key).map_or(default, |entry| is_true(&entry.value))
            };
            let (swap, exclusive) = (flag("swap", true), flag("exclusive", true));
            let swaps = if swap { "swap with each other" } else { "run together" };
            let excludes = if exclusive { "make others leave" } else { "leave others alone" };
            self.note(
                group.at,
                format!(
                    "the group '{}' makes its models {swaps} and {excludes}: here models run together if their memory \
                     fits, and swap otherwise",
                    group.key
                ),
            );
            if find(&group.value, "persistent").is_some_and(|entry| is_true(&entry.value)) {
                self.note(
                    group.at,
                    format!("the group '{}' is persistent: its models get eviction: never", group.key),
                );
                self.groups.persistent.extend(names);
            }
            for entry in entries(&group.value) {
                if !["members", "swap", "exclusive", "persistent"].contains(&entry.key.as_str()) {
                    self.note(entry.at, format!("the group's key {} is unknown, left out", entry.key));
                }
            }
        }
    }

    /// Notes the parts of `matrix`, also of `routing.router.settings`.
    pub(super) fn matrix(&mut self, matrix: &YamlNode) {
        for entry in entries(matrix) {
            let what = match entry.key.as_str() {
                "vars" => "short names of models for sets, left out",
                "evict_costs" => {
                    "the order of eviction: here the engine that was idle longest leaves first, and what it takes to \
                     come back is learned"
                }
                "sets" => "models that may run together: here they run together if their memory fits",
                _ => "unknown, left out",
            };
            self.note(entry.at, format!("matrix.{}: {what}", entry.key));
        }
    }
}
