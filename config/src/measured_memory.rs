//! Writes a model's measured memory into a file's text, and leaves everything else as it is.
//!
//! A YAML library would write the whole file anew and lose comments and style. So this module finds the locations in
//! the parsed tree and changes the text there.

use std::{fmt, ops::Range};

use rouse::units::Bytes;

use super::{
    error::SourceLocation,
    yaml::{YamlEntry, YamlNode, YamlValue},
};

/// Memory of one engine on each of its accelerators, as measured. `None`: not measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredMemory {
    pub awake: Bytes,
    pub asleep: Option<Bytes>,
    /// RAM of an engine asleep at level 1, for each accelerator.
    pub host: Option<Bytes>,
}

/// Why a text cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryEditError {
    #[error("the file is not valid YAML")]
    NotYaml,
    #[error("the file has no model '{0}'")]
    NoModel(String),
    #[error("{0}: the memory is shared by an anchor, an alias or a merge key: write it out for this model")]
    Shared(SourceLocation),
    #[error("{0}: the memory is written in a way that cannot be changed in place: write memory: {1} there")]
    Unusual(SourceLocation, MeasuredMemory),
}

/// Text that replaces a part of the file.
type TextEdit = (Range<usize>, String);

/// Returns the text with this memory of the model. Sizes that were not measured stay.
///
/// # Errors
/// The text does not have the model, or has its memory in a form that cannot be changed in place.
pub fn set_memory(text: &str, model: &str, memory: &MeasuredMemory) -> Result<String, MemoryEditError> {
    let (document, _) = YamlNode::parse(text).map_err(|_| MemoryEditError::NotYaml)?;
    let item = find_model(&document, model).ok_or_else(|| MemoryEditError::NoModel(model.to_owned()))?;
    let editor = MemoryEditor { text, memory };
    let mut edits = editor.edits(item)?;
    edits.sort_by_key(|(range, _)| range.start);
    let mut changed = text.to_owned();
    for (range, new) in edits.into_iter().rev() {
        changed.replace_range(range, &new);
    }
    // The text is the user's: a form that was misread must not spoil it.
    if is_set(&changed, model, memory) { Ok(changed) } else { Err(editor.unusual(item.at)) }
}

fn find_model<'n>(document: &'n YamlNode, model: &str) -> Option<&'n YamlNode> {
    let YamlValue::List(models) = &entry_of(document, "models")?.value.value else { return None };
    models.iter().find(|item| {
        let name = entry_of(item, "name").map(|entry| &entry.value.value);
        matches!(name, Some(YamlValue::Scalar(name)) if name == model)
    })
}

fn entry_of<'n>(node: &'n YamlNode, key: &str) -> Option<&'n YamlEntry> {
    let YamlValue::Map(entries) = &node.value else { return None };
    entries.iter().find(|entry| entry.key == key)
}

/// Whether the text has this memory, as a reader of the configuration sees it.
fn is_set(text: &str, model: &str, memory: &MeasuredMemory) -> bool {
    let Ok((document, problems)) = YamlNode::parse(text) else { return false };
    let entry = find_model(&document, model).and_then(|item| entry_of(item, "memory"));
    problems.is_empty()
        && entry.is_some_and(|entry| {
            memory.sizes().all(|(key, size)| {
                let value = entry_of(&entry.value, key).map(|entry| &entry.value.value);
                matches!(value, Some(YamlValue::Scalar(text)) if text.parse::<Bytes>() == Ok(size))
            })
        })
}

struct MemoryEditor<'t> {
    text: &'t str,
    memory: &'t MeasuredMemory,
}

impl MemoryEditor<'_> {
    fn edits(&self, item: &YamlNode) -> Result<Vec<TextEdit>, MemoryEditError> {
        let Some(entry) = entry_of(item, "memory") else { return Ok(vec![self.insert_memory(item)?]) };
        if entry.at < item.at {
            return Err(MemoryEditError::Shared(entry.at));
        }
        let key = self.offset(entry.at)?;
        match &entry.value.value {
            YamlValue::Null => {
                let colon = self.rest(key).find(':').ok_or_else(|| self.unusual(entry.at))?;
                let at = key + colon + 1;
                Ok(vec![(at..at, format!(" {}", self.memory))])
            }
            YamlValue::Map(entries) => {
                let value = self.offset(entry.value.at)?;
                // What is defined elsewhere is in front of its key, or far behind it.
                let between = self.text.get(key..value).unwrap_or("&");
                let mut code = between.lines().filter_map(|line| line.split('#').next());
                if code.any(|part| part.contains('&')) || self.rest(value).starts_with(['&', '*']) {
                    return Err(MemoryEditError::Shared(entry.at));
                }
                self.change_sizes(entry, entries, value)
            }
            YamlValue::Scalar(_) | YamlValue::List(_) => Err(self.unusual(entry.value.at)),
        }
    }

    /// Replaces the sizes of a mapping that starts at `start`, and adds those that it lacks.
    fn change_sizes(
        &self,
        memory: &YamlEntry,
        entries: &[YamlEntry],
        start: usize,
    ) -> Result<Vec<TextEdit>, MemoryEditError> {
        let is_flow = self.rest(start).starts_with('{');
        let (mut edits, mut added) = (Vec::new(), Vec::new());
        for (key, size) in self.memory.sizes() {
            match entry_of(&memory.value, key) {
                Some(entry) => edits.push((self.content(self.scalar(entry)?), size.to_exact_text())),
                None => added.push((key, size.to_exact_text())),
            }
        }
        if added.is_empty() {
            return Ok(edits);
        }
        let last = entries.last().ok_or_else(|| self.unusual(memory.at))?;
        let end = self.scalar(last)?.end;
        // A file may be JSON.
        let quote = if self.rest(self.offset(last.at)?).starts_with('"') { "\"" } else { "" };
        let (end, before) = if is_flow { (end, ", ".to_owned()) } else { self.new_line_behind(end, last.at) };
        let line =
            |(key, size): &(&str, String)| format!("{before}{quote}{key}{quote}: {quote}{size}{quote}");
        edits.push((end..end, added.iter().map(line).collect()));
        Ok(edits)
    }

    /// Adds the key `memory` to a model: behind its name, or at the front of a flow mapping.
    fn insert_memory(&self, item: &YamlNode) -> Result<TextEdit, MemoryEditError> {
        let start = self.offset(item.at)?;
        if let Some(inside) = self.rest(start).strip_prefix('{') {
            let quote = if inside.trim_start().starts_with('"') { "\"" } else { "" };
            let memory = format!("{quote}memory{quote}: {}, ", self.memory.in_flow_style(quote));
            return Ok((start + 1..start + 1, memory));
        }
        let name = entry_of(item, "name").filter(|name| name.at >= item.at);
        let name = name.ok_or_else(|| self.unusual(item.at))?;
        let (end, before) = self.new_line_behind(self.scalar(name)?.end, name.at);
        Ok((end..end, format!("{before}memory: {}", self.memory)))
    }

    /// Returns the place of an entry's value, which must be a plain or quoted text on the key's line.
    fn scalar(&self, entry: &YamlEntry) -> Result<Range<usize>, MemoryEditError> {
        let unusual = || self.unusual(entry.value.at);
        if entry.at.line != entry.value.at.line {
            return Err(unusual());
        }
        let start = self.offset(entry.value.at)?;
        let line = self.rest(start).lines().next().unwrap_or_default();
        let len = match line.chars().next() {
            Some(quote @ ('"' | '\'')) => line.get(1..).and_then(|rest| rest.find(quote)).map(|len| len + 2),
            None | Some('&' | '*' | '!' | '|' | '>' | '{' | '[') => None,
            Some(_) => {
                let comment = line.find(" #").unwrap_or(line.len());
                let end = line.find([',', '}', ']']).unwrap_or(line.len()).min(comment);
                line.get(..end).map(|text| text.trim_end().len())
            }
        };
        let len = len.filter(|len| *len > 0).ok_or_else(unusual)?;
        Ok(start..start + len)
    }

    /// Returns the place of a scalar's text without its quotes.
    fn content(&self, scalar: Range<usize>) -> Range<usize> {
        if self.rest(scalar.start).starts_with(['"', '\'']) {
            scalar.start + 1..scalar.end - 1
        } else {
            scalar
        }
    }

    /// Returns the end of the line of `from`, and what begins a new line there for a key below the one at `key`.
    fn new_line_behind(&self, from: usize, key: SourceLocation) -> (usize, String) {
        let line = self.rest(from).split('\n').next().unwrap_or_default();
        let end = from + line.trim_end_matches('\r').len();
        let line_break = if self.rest(end).starts_with("\r\n") { "\r\n" } else { "\n" };
        let indent = usize::try_from(key.column.saturating_sub(1)).unwrap_or_default();
        (end, format!("{line_break}{}", " ".repeat(indent)))
    }

    fn rest(&self, from: usize) -> &str {
        self.text.get(from..).unwrap_or_default()
    }

    /// Converts a line and column to the offset in the text.
    fn offset(&self, at: SourceLocation) -> Result<usize, MemoryEditError> {
        let number = |number: u64| usize::try_from(number).ok()?.checked_sub(1);
        let offset = || {
            let before = self.text.split_inclusive('\n').take(number(at.line)?).map(str::len).sum::<usize>();
            let line = self.text.get(before..)?;
            let (column, _) = line.char_indices().chain([(line.len(), ' ')]).nth(number(at.column)?)?;
            Some(before + column)
        };
        offset().ok_or_else(|| self.unusual(at))
    }

    const fn unusual(&self, at: SourceLocation) -> MemoryEditError {
        MemoryEditError::Unusual(at, *self.memory)
    }
}

impl MeasuredMemory {
    /// The measured sizes with their keys, in the order in which files have them.
    fn sizes(&self) -> impl Iterator<Item = (&'static str, Bytes)> + use<> {
        let all = [("awake", Some(self.awake)), ("asleep", self.asleep), ("host", self.host)];
        all.into_iter().filter_map(|(key, size)| Some((key, size?)))
    }

    /// Writes the sizes as a flow mapping, whose keys and values are in these quotes: a file may be JSON.
    fn in_flow_style(&self, quote: &str) -> String {
        let entry = |(key, size): (&str, Bytes)| {
            format!("{quote}{key}{quote}: {quote}{}{quote}", size.to_exact_text())
        };
        format!("{{{}}}", self.sizes().map(entry).collect::<Vec<_>>().join(", "))
    }
}

/// As in a file: `{awake: 9Gi, asleep: 1300Mi}`.
impl fmt::Display for MeasuredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.in_flow_style(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: MeasuredMemory =
        MeasuredMemory { awake: Bytes::mib(9217), asleep: Some(Bytes::gib(1)), host: Some(Bytes::gib(8)) };

    fn written(text: &str) -> String {
        set_memory(text, "m", &MEASURED).unwrap_or_else(|error| panic!("{error} in\n{text}"))
    }

    #[test]
    fn sizes_are_replaced_in_place_and_missing_ones_are_added_in_the_style_of_the_file() {
        for (before, after) in [
            (
                "# top\nmodels:\n  - name: other\n    memory: {awake: 1Gi}\n  - name: m   # mine\n    memory: {awake: 1Gi, \
                 asleep: '2Gi'} # why\n    pinned: true\n",
                "# top\nmodels:\n  - name: other\n    memory: {awake: 1Gi}\n  - name: m   # mine\n    memory: {awake: \
                 9217Mi, asleep: '1Gi', host: 8Gi} # why\n    pinned: true\n",
            ),
            (
                "models:\n  - memory:\n      awake: 1.5Gi # guess\n      host: \"4Gi\"\n\n      # the end\n    name: m\n",
                "models:\n  - memory:\n      awake: 9217Mi # guess\n      host: \"8Gi\"\n      asleep: 1Gi\n\n      # the end\n    \
                 name: m\n",
            ),
            (
                "models: [{name: ä}, {name: m, memory: {awake: 1Gi }, pinned: true}]\n",
                "models: [{name: ä}, {name: m, memory: {awake: 9217Mi, asleep: 1Gi, host: 8Gi }, pinned: true}]\n",
            ),
            (
                r#"{"models": [{"name": "m", "memory": {"awake": "1Gi"}}]}"#,
                r#"{"models": [{"name": "m", "memory": {"awake": "9217Mi", "asleep": "1Gi", "host": "8Gi"}}]}"#,
            ),
            (
                "models:\r\n- name: m\r\n  memory:\r\n    awake: 1Gi\r\n",
                "models:\r\n- name: m\r\n  memory:\r\n    awake: 9217Mi\r\n    asleep: 1Gi\r\n    host: 8Gi\r\n",
            ),
        ] {
            assert_eq!(written(before), after);
        }
    }

    #[test]
    fn the_block_with_comments_that_init_writes_is_changed_in_place() {
        let file = |awake: &str, asleep: &str, host: &str| {
            format!(
                "models:\n  # Qwen/Qwen3-8B: Qwen3ForCausalLM & 15.26Gi\n  - name: m\n    engine:\n      kind: vllm\n      command: \
                 [/opt/vllm/bin/vllm, serve, Qwen/Qwen3-8B, --host, \"${{HOST}}\", --port, \"${{PORT}}\",\n        \
                 --enable-sleep-mode]\n      env: {{VLLM_SERVER_DEV_MODE: \"1\"}}\n    # Estimated until it is measured, from: \
                 weights 15Gi,\n    # buffers 2Gi.\n    memory:\n      awake: {awake}\n      # Estimated until it is \
                 measured: what a sleeping engine usually keeps.\n      asleep: {asleep}\n      # Estimated until it is \
                 measured: the weights.\n      host: {host}\n  # /m/tiny.gguf: llama\n  - name: tiny\n    memory:\n      awake: \
                 704Mi\n"
            )
        };
        assert_eq!(written(&file("19.50Gi", "2Gi", "16Gi")), file("9217Mi", "1Gi", "8Gi"));
        let before = file("19.50Gi", "2Gi", "16Gi");
        let alone = MeasuredMemory { awake: Bytes::mib(640), asleep: None, host: None };
        assert_eq!(set_memory(&before, "tiny", &alone).unwrap(), before.replace("704Mi", "640Mi"));
        // Engines of a gateway that rehearses sleeps have no measured `host`.
        let some = MeasuredMemory { host: None, ..MEASURED };
        assert_eq!(set_memory(&before, "m", &some).unwrap(), file("9217Mi", "1Gi", "16Gi"));
        let commented = "models:\n  - name: m\n    memory: # a & b\n      awake: 1Gi\n";
        let alone = set_memory(commented, "m", &alone).unwrap();
        assert_eq!(alone, commented.replace("1Gi", "640Mi"));
    }

    #[test]
    fn a_model_without_memory_gets_one() {
        let memory = "memory: {awake: 9217Mi, asleep: 1Gi, host: 8Gi}";
        for (before, after) in [
            (
                "models:\n  - name: m\n    pinned: true\n",
                format!("models:\n  - name: m\n    {memory}\n    pinned: true\n"),
            ),
            (
                "models:\n- pinned: true\n  name: 'm' # x",
                format!("models:\n- pinned: true\n  name: 'm' # x\n  {memory}"),
            ),
            ("models: [{name: m}]\n", format!("models: [{{{memory}, name: m}}]\n")),
            (
                r#"{"models": [{"name": "m"}]}"#,
                r#"{"models": [{"memory": {"awake": "9217Mi", "asleep": "1Gi", "host": "8Gi"}, "name": "m"}]}"#.to_owned(),
            ),
            ("models:\n  - name: m\n    memory:\n", format!("models:\n  - name: m\n    {memory}\n")),
        ] {
            assert_eq!(written(before), after);
        }
    }

    #[test]
    fn sizes_that_were_not_measured_stay() {
        let text = "models: [{name: m, memory: {awake: 1Gi, asleep: 2Gi, host: 3Gi}}]\n";
        let memory = MeasuredMemory { awake: Bytes::gib(5), asleep: None, host: None };
        assert_eq!(set_memory(text, "m", &memory).unwrap(), text.replace("awake: 1Gi", "awake: 5Gi"));
    }

    #[test]
    fn a_form_that_cannot_be_changed_in_place_is_refused_and_says_what_to_write() {
        let refused = |text: &str| set_memory(text, "m", &MEASURED).unwrap_err().to_string();
        assert_eq!(refused("models: [{name: x}]"), "the file has no model 'm'");
        assert_eq!(refused("models: [{name: m"), "the file is not valid YAML");
        for text in [
            "x: &x {awake: 1Gi}\nmodels:\n  - name: m\n    memory: *x\n",
            "models:\n  - name: m\n    memory: &x {awake: 1Gi}\n  - name: n\n    memory: *x\n",
        ] {
            assert!(refused(text).contains("is shared by"), "{}", refused(text));
        }
        let list = refused("models:\n  - name: m\n    memory: 30Gi\n");
        assert!(list.starts_with("3:13: ") && list.contains("write memory: {awake: 9217Mi"), "{list}");
    }
}
