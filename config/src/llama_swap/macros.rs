//! Expands llama-swap's macros: `${name}`, also inside other macros.

use std::collections::BTreeMap;

use super::{entries, scalar};
use crate::yaml::YamlNode;

/// Macros that use each other deeper than this use themselves.
const MAX_DEPTH: u32 = 16;

/// Macros by name, with their unexpanded values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MacroTable(BTreeMap<String, String>);

/// A text without macros. Our placeholders are in it, as our files have them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ExpandedText {
    pub(super) text: String,
    /// Names that are no macros.
    pub(super) unknown: Vec<String>,
    /// Environment variables.
    pub(super) variables: Vec<String>,
}

impl MacroTable {
    pub(super) fn read(node: &YamlNode) -> Self {
        let values = entries(node).iter().filter_map(|entry| {
            // A value of one line has no line end, and a folded one has one too many.
            Some((entry.key.clone(), scalar(&entry.value)?.trim_end().to_owned()))
        });
        Self(values.collect())
    }

    /// Returns these macros, with a model's own ones in front of them.
    pub(super) fn with(&self, own: &Self) -> Self {
        let mut all = self.0.clone();
        all.extend(own.0.clone());
        Self(all)
    }

    pub(super) fn expand(&self, text: &str, model: &str) -> ExpandedText {
        let mut expanded = ExpandedText::default();
        self.expand_into(text, model, MAX_DEPTH, &mut expanded);
        expanded
    }

    fn expand_into(&self, text: &str, model: &str, depth: u32, out: &mut ExpandedText) {
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            out.text.push_str(before);
            let Some((name, tail)) = after.split_once('}') else {
                out.text.push_str("$${");
                rest = after;
                continue;
            };
            rest = tail;
            match (name, self.0.get(name).filter(|_| depth > 0)) {
                ("PORT", _) => out.text.push_str("${PORT}"),
                ("MODEL_ID", _) => out.text.push_str(model),
                (_, Some(value)) => self.expand_into(value, model, depth - 1, out),
                (_, None) => match name.strip_prefix("env.") {
                    Some(variable) => {
                        out.text.push_str(&format!("${{env:{variable}}}"));
                        out.variables.push(variable.to_owned());
                    }
                    None => {
                        out.text.push_str(&format!("$${{{name}}}"));
                        out.unknown.push(name.to_owned());
                    }
                },
            }
        }
        out.text.push_str(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(values: &[(&str, &str)]) -> MacroTable {
        MacroTable(values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn macros_are_expanded_in_each_other_and_a_models_own_ones_come_first() {
        let global = table(&[("bin", "${dir}/server --port ${PORT}"), ("dir", "/opt"), ("ctx", "4096")]);
        let all = global.with(&table(&[("ctx", "8192")]));
        let expanded = all.expand("${bin} -c ${ctx} --alias ${MODEL_ID} -m ${env.HOME}/m.gguf", "qwen");
        assert_eq!(expanded.text, "/opt/server --port ${PORT} -c 8192 --alias qwen -m ${env:HOME}/m.gguf");
        assert_eq!((expanded.unknown, expanded.variables), (vec![], vec!["HOME".to_owned()]));
    }

    #[test]
    fn what_is_no_macro_stays_and_one_that_uses_itself_ends() {
        let expanded = table(&[("a", "x${a}")]).expand("${b} ${", "m");
        assert_eq!((expanded.text.as_str(), expanded.unknown), ("$${b} $${", vec!["b".to_owned()]));
        let endless = table(&[("a", "x${a}")]).expand("${a}", "m");
        assert!(endless.text.ends_with("x$${a}"), "{}", endless.text);
    }
}
