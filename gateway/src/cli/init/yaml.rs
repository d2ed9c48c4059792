//! Writes a proposal as YAML, with the reason of each value.

use rouse_config::{yaml_quoted, yaml_scalar};

use super::{
    accelerator_choice::AcceleratorChoice,
    proposal::{ConfigProposal, ProposedModel},
};

/// Longest line of comments and commands.
const WIDTH: usize = 110;
/// Shown in a file without models: what an entry looks like.
const EXAMPLE: &str = "\
models: []
# An example. Remove the line above and the # below, and set the path of your file:
# models:
#   - name: my-model
#     engine:
#       kind: llama-cpp
#       command: [llama-server, -m, /models/my-model.gguf, -c, \"8192\", --host, \"${HOST}\", --port, \"${PORT}\"]
#       startTimeout: 2m
#     # The file's size, and 1Gi or more for the KV cache and buffers.
#     memory:
#       awake: 6Gi
";

/// Renders the whole file.
pub(super) fn render(proposal: &ConfigProposal) -> String {
    let mut text = YamlText::default();
    text.comment(
        0,
        "Written by `rouse-gateway init`. Each value says why it was chosen; change what you know better.",
    );
    text.comment(
        0,
        "Sizes under `memory` are estimates until they are measured: `rouse-gateway measure MODEL --config FILE --write` \
         writes the measured ones into this file. The page docs/configuration.md has all keys.",
    );
    text.blank();
    text.comment(
        0,
        "Both addresses are reachable from this machine only. Add `keys` before you open the first one.",
    );
    text.line(0, "listen: {api: 127.0.0.1:8080, admin: 127.0.0.1:8180}");
    if proposal.leaves_engines {
        text.comment(
            0,
            "Kept from the file that was here: engines go on while the gateway restarts, and the next one adopts them.",
        );
        text.line(0, "shutdown: {engines: leave}");
    }
    text.blank();
    render_accelerators(&mut text, proposal);
    render_sleep_memory(&mut text, proposal);
    for one in &proposal.left_out {
        text.comment(0, &format!("Left out: {}: {}", one.what, one.why));
    }
    if proposal.models.is_empty() {
        text.comment(0, "No model was found that an engine of this machine can serve. Looked for:");
        proposal.searched.iter().for_each(|line| text.comment(0, &format!("* {line}")));
        text.0.push_str(EXAMPLE);
        return text.0;
    }
    if !proposal.left_out.is_empty() {
        text.blank();
    }
    text.line(0, "models:");
    proposal.models.iter().for_each(|model| render_model(&mut text, model));
    text.0
}

fn render_accelerators(text: &mut YamlText, proposal: &ConfigProposal) {
    match &proposal.accelerators {
        AcceleratorChoice::Detected { names, .. } => {
            text.comment(
                0,
                &format!("NVIDIA's driver lists: {}. It is asked again at each start.", names.join(", ")),
            );
            text.line(0, "accelerators: auto");
            text.comment(0, "The gateway leaves this much of each GPU free: the default.");
            text.line(0, "headroom: 1Gi");
        }
        AcceleratorChoice::Cpu { memory, headroom, why, listed } => {
            text.comment(
                0,
                &format!(
                    "Engines compute on the CPU, because {why}. The accelerator stands for the RAM that they may use: \
                     three quarters of what this machine allows. Nothing measures it; each model's `memory` counts."
                ),
            );
            text.line(0, "accelerators:");
            text.line(2, &format!("- {{id: cpu, memory: {memory}}}"));
            for device in listed {
                text.comment(
                    0,
                    &format!(
                        "llama-server lists {device}. To use it, declare it in place of the CPU: docs/configuration.md, \
                         \"Other makers' GPUs\"."
                    ),
                );
            }
            text.comment(0, "The part of it that is kept free.");
            text.line(0, &format!("headroom: {headroom}"));
        }
    }
    text.blank();
}

fn render_sleep_memory(text: &mut YamlText, proposal: &ConfigProposal) {
    if proposal.models.iter().any(|model| model.asleep.is_some()) {
        text.comment(
            0,
            "RAM for the weights of all engines that sleep at level 1. Without this key it is half of the RAM. Less \
             lets more engines sleep at level 2, which reads weights from the disk again.",
        );
        text.line(0, "# host: {sleepMemory: 64Gi}");
        text.blank();
    }
}

fn render_model(text: &mut YamlText, model: &ProposedModel) {
    text.comment(2, &model.source);
    text.line(2, &format!("- name: {}", yaml_scalar(&model.name)));
    text.line(4, "engine:");
    text.line(6, &format!("kind: {}", model.engine));
    model.notes.iter().for_each(|note| text.comment(6, note));
    text.list(6, "command", &model.command);
    if !model.env.is_empty() {
        let comment = |name: &str| match name {
            "VLLM_SERVER_DEV_MODE" => Some("vLLM has its calls for sleep only with VLLM_SERVER_DEV_MODE."),
            "HF_HUB_OFFLINE" => Some("The snapshot is whole, so a start asks no server."),
            "HF_HUB_CACHE" => Some("The cache that has the snapshot: a service has another environment."),
            _ => None,
        };
        model.env.iter().filter_map(|(name, _)| comment(name)).for_each(|why| text.comment(6, why));
        let entries: Vec<String> =
            model.env.iter().map(|(name, value)| format!("{name}: {}", yaml_quoted(value))).collect();
        text.line(6, &format!("env: {{{}}}", entries.join(", ")));
    }
    if let Some(name) = &model.served_name {
        text.comment(6, "The engine's own name for the model.");
        text.line(6, &format!("servedName: {}", yaml_scalar(name)));
    }
    if let Some(task) = model.task {
        text.comment(6, "By what its metadata says. The gateway probes the engine with such a request.");
        text.line(6, &format!("task: {task}"));
    }
    if let Some(timeout) = &model.start_timeout {
        text.comment(6, "A minute, and the time to read the weights from a slow disk (100 MB/s).");
        text.line(6, &format!("startTimeout: {timeout}"));
    }
    if model.accelerators > 1 {
        text.comment(4, "One is too small for it.");
        text.line(4, &format!("accelerators: {}", model.accelerators));
    }
    render_memory(text, model);
    if let Some(number) = model.max_concurrency {
        text.comment(
            4,
            "The server answers one request at a time; others wait in the gateway, in a fair order.",
        );
        text.line(4, &format!("maxConcurrency: {number}"));
    }
    if let Some(level) = model.idle_level {
        text.line(4, &format!("idle: {{level: {level}}}"));
    }
}

fn render_memory(text: &mut YamlText, model: &ProposedModel) {
    text.comment(4, &format!("Estimated until it is measured, from: {}.", model.awake_why));
    text.line(4, "memory:");
    text.line(6, &format!("awake: {}", model.awake));
    if let Some((asleep, host)) = model.asleep {
        text.comment(6, "Estimated until it is measured: what a sleeping engine usually keeps of the GPU.");
        text.line(6, &format!("asleep: {asleep}"));
        text.comment(
            6,
            "Estimated until it is measured: the weights, which are in RAM while the engine sleeps.",
        );
        text.line(6, &format!("host: {host}"));
    }
}

/// A text in the making.
#[derive(Default)]
struct YamlText(String);

impl YamlText {
    fn blank(&mut self) {
        self.0.push('\n');
    }

    fn line(&mut self, indent: usize, text: &str) {
        self.0.push_str(&" ".repeat(indent));
        self.0.push_str(text);
        self.0.push('\n');
    }

    /// Writes a comment, wrapped between words. A control character cannot end it early.
    fn comment(&mut self, indent: usize, text: &str) {
        let text = text.replace(char::is_control, "\u{fffd}");
        let mut line = String::new();
        for word in text.split(' ') {
            if !line.is_empty() && indent + 2 + line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.line(indent, &format!("# {line}"));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.line(indent, &format!("# {line}"));
    }

    /// Writes a list in brackets, wrapped between elements.
    fn list(&mut self, indent: usize, key: &str, words: &[String]) {
        let mut line = format!("{key}: [");
        let mut indent_now = indent;
        for (number, word) in words.iter().enumerate() {
            let end = if number + 1 == words.len() { "]" } else { "," };
            let word = format!("{}{end}", yaml_scalar(word));
            let is_start = number == 0;
            if !is_start && indent_now + line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.line(indent_now, &line);
                (line, indent_now) = (String::new(), indent + 2);
            } else if !is_start {
                line.push(' ');
            }
            line.push_str(&word);
        }
        self.line(indent_now, &line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_between_words() {
        let mut text = YamlText::default();
        text.comment(2, &"word ".repeat(60));
        text.list(6, "command", &vec!["/some/long/path/to/a/file".to_owned(); 12]);
        assert!(text.0.lines().all(|line| line.chars().count() <= WIDTH), "{}", text.0);
        assert!(text.0.lines().count() > 5);
        let list = text.0.split_once("command: ").unwrap().1;
        assert_eq!(list.matches("/some/long").count(), 12);
        assert!(list.trim_end().ends_with(']'));
        let mut text = YamlText::default();
        text.comment(0, "a\nmodels: evil");
        assert_eq!(text.0, "# a\u{fffd}models: evil\n");
    }
}
