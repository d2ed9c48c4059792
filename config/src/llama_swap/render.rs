//! Writes the converted configuration.

use std::fmt::Write as _;

use rouse::units::{Bytes, Millis};

use super::{LlamaSwapImporter, model::ImportedModel};
use crate::{
    engine::kind_name,
    yaml_text::{yaml_quoted, yaml_scalar},
};

/// Memory of a model of which nothing is known.
const UNKNOWN_MEMORY: Bytes = Bytes::gib(8);
/// Longest wait in the queue without a setting: our own default.
const DEFAULT_MAX_WAIT: Millis = Millis::secs(540);

/// Returns the text of the file. `origin` is the name of llama-swap's file.
pub(super) fn render(importer: &LlamaSwapImporter<'_>, models: &[ImportedModel], origin: &str) -> String {
    let mut out =
        format!("# Made from llama-swap's {} by `rouse-gateway import llama-swap`.\n", plain(origin));
    out.push_str("# The memory of each model is a guess until `rouse-gateway measure MODEL --write` has measured it.\n");
    if !importer.notes.is_empty() {
        out.push_str("#\n# What has no counterpart, or is different here, by the line in that file:\n");
        for note in &importer.notes {
            push(&mut out, format_args!("#   {}: {}\n", note.at.line, plain(&note.text)));
        }
    }
    out.push('\n');
    if !importer.key_hashes.is_empty() {
        out.push_str("keys:\n");
        for (number, hash) in importer.key_hashes.iter().enumerate() {
            push(&mut out, format_args!("  - {{name: key-{}, sha256: \"{hash}\"}}\n", number + 1));
        }
        out.push('\n');
    }
    if let Some(start) = importer.start_timeout.filter(|start| *start > DEFAULT_MAX_WAIT) {
        push(
            &mut out,
            format_args!("# A request waits for the slowest start.\nqueue: {{maxWait: {start}}}\n\n"),
        );
    }
    if let Some(grace) = importer.stop_grace {
        push(&mut out, format_args!("timeouts: {{stop: {grace}}}\n\n"));
    }
    if models.is_empty() {
        out.push_str("models: []\n");
        return out;
    }
    out.push_str("models:\n");
    for model in models {
        model.render(&mut out);
    }
    out
}

impl ImportedModel {
    fn render(&self, out: &mut String) {
        push(out, format_args!("  - name: {}\n", yaml_scalar(&self.name)));
        for line in self.comments.iter().flat_map(|text| text.lines()) {
            push(out, format_args!("    # {}\n", plain(line.trim())));
        }
        if !self.aliases.is_empty() {
            push(out, format_args!("    aliases: [{}]\n", list(&self.aliases)));
        }
        push(out, format_args!("    engine:\n      kind: {}\n", kind_name(self.kind)));
        self.render_command(out);
        if !self.env.is_empty() {
            out.push_str("      env:\n");
            for (name, value) in &self.env {
                push(out, format_args!("        {}: {}\n", yaml_scalar(name), yaml_quoted(value)));
            }
        }
        if let Some(name) = &self.served_name {
            push(out, format_args!("      servedName: {}\n", yaml_scalar(name)));
        }
        if let Some(limit) = self.start_timeout {
            push(out, format_args!("      startTimeout: {limit}\n"));
        }
        if self.accelerators > 1 {
            push(out, format_args!("    accelerators: {}\n", self.accelerators));
        }
        let memory = self.memory.unwrap_or(UNKNOWN_MEMORY).to_exact_text();
        let guess = if self.memory.is_some() { "by the size of its file" } else { "a guess" };
        push(out, format_args!("    memory: {{awake: {memory}}} # {guess}\n"));
        self.render_policy(out);
    }

    /// Writes the command, with each option and its value on one line.
    fn render_command(&self, out: &mut String) {
        out.push_str("      command: [\n");
        let mut words = self.command.iter().peekable();
        while let Some(word) = words.next() {
            push(out, format_args!("        {},", yaml_scalar(word)));
            let is_value =
                |next: &&String| word.starts_with('-') && !word.contains('=') && !next.starts_with('-');
            if let Some(value) = words.next_if(is_value) {
                push(out, format_args!(" {},", yaml_scalar(value)));
            }
            out.push('\n');
        }
        out.push_str("      ]\n");
    }

    fn render_policy(&self, out: &mut String) {
        match self.idle {
            None => out.push_str("    idle: {sleepAfter: never, stopAfter: never}\n"),
            Some(idle) if self.can_sleep => push(out, format_args!("    idle: {{sleepAfter: {idle}}}\n")),
            Some(idle) => push(out, format_args!("    idle: {{sleepAfter: {idle}, stopAfter: {idle}}}\n")),
        }
        if self.pinned {
            out.push_str("    pinned: true\n");
        }
        if self.never_evicted {
            out.push_str("    eviction: never\n");
        }
        if self.priority != 0 {
            push(out, format_args!("    priority: {}\n", self.priority));
        }
        if let Some(limit) = self.max_concurrency {
            push(out, format_args!("    maxConcurrency: {limit}\n"));
        }
    }
}

/// Writing into a text does not fail.
fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).unwrap_or_default();
}

/// Makes a text fit into a comment.
fn plain(text: &str) -> String {
    text.replace(char::is_control, " ")
}

fn list(texts: &[String]) -> String {
    texts.iter().map(|text| yaml_scalar(text)).collect::<Vec<_>>().join(", ")
}
