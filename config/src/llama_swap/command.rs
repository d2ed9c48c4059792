//! Converts llama-swap's command into a list of words with our placeholders.

use rouse::shell_words;
use rouse_net::adapter::EngineKind;

use crate::command_options;

const PORT: &str = "${PORT}";
const HOST: &str = "${HOST}";

/// A converted command, and what was changed in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConvertedCommand {
    pub(super) kind: EngineKind,
    pub(super) words: Vec<String>,
    /// The engine's own name for the model, if the command says it.
    pub(super) served_name: Option<String>,
    pub(super) changes: Vec<String>,
}

/// Why a command cannot be converted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CommandLineError {
    #[error("the command is empty")]
    Empty,
    #[error("{0}")]
    Quote(#[from] shell_words::UnclosedQuote),
    #[error("the command does not say where the engine's port is: write ${{PORT}} there, and import again")]
    NoPort,
}

/// Converts a command whose macros are expanded. `port` is the one that llama-swap would call, if it is fixed.
pub(super) fn convert(text: &str, port: Option<u16>) -> Result<ConvertedCommand, CommandLineError> {
    let mut changes = Vec::new();
    let mut words = split(text, &mut changes)?;
    if words.is_empty() {
        return Err(CommandLineError::Empty);
    }
    let container = is_container(&words);
    let kind = if container { kind_of_image(&words) } else { kind_of_program(&words) };
    if container {
        publish_on_loopback(&mut words, port, &mut changes);
        changes.push(
            "the engine runs in a container: the gateway ends the container's client, which passes the signal on, and \
             cannot see whose memory the container's is"
                .to_owned(),
        );
    } else if kind != EngineKind::Custom && !is_script(&words) {
        set_option(&mut words, "--port", PORT, &mut changes);
        set_option(&mut words, "--host", HOST, &mut changes);
    }
    if !uses_port(&words)
        && let Some(port) = port
    {
        replace_number(&mut words, port, &mut changes);
    }
    if !uses_port(&words) {
        return Err(CommandLineError::NoPort);
    }
    let served_name = served_name(kind, &words);
    Ok(ConvertedCommand { kind, words, served_name, changes })
}

/// Splits as llama-swap does: lines that begin with `#` are comments, and a line may end with a backslash.
fn split(text: &str, changes: &mut Vec<String>) -> Result<Vec<String>, CommandLineError> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let lines = lines.map(|line| line.trim_end().strip_suffix('\\').unwrap_or(line));
    let mut text = lines.collect::<Vec<_>>().join("\n");
    if is_windows_path(&text) {
        changes.push("the command has paths of Windows: write those of this machine".to_owned());
        text = text.replace('\\', "\\\\");
    }
    Ok(shell_words::split(&text)?)
}

/// Whether the text has a path with a drive's letter.
fn is_windows_path(text: &str) -> bool {
    let mut letters = text.as_bytes().windows(3);
    letters.any(|window| matches!(window, [letter, b':', b'\\'] if letter.is_ascii_alphabetic()))
}

/// Returns the last part of a path, without `.exe`.
fn base_name(word: &str) -> &str {
    let name = word.rsplit(['/', '\\']).next().unwrap_or(word);
    name.strip_suffix(".exe").unwrap_or(name)
}

fn is_container(words: &[String]) -> bool {
    let mut programs = words.iter().map(|word| base_name(word));
    programs.find(|name| !matches!(*name, "sudo" | "exec" | "env")).is_some_and(|name| {
        matches!(name, "docker" | "podman" | "nerdctl") && words.iter().any(|word| word == "run")
    })
}

/// Whether a shell reads the words of the command from one argument.
fn is_script(words: &[String]) -> bool {
    let shell = words.first().is_some_and(|word| matches!(base_name(word), "sh" | "bash" | "dash" | "zsh"));
    shell && words.iter().any(|word| word == "-c")
}

/// A program may stand behind others: `numactl -N 0 llama-server`, `sh -c "exec llama-server"`.
fn kind_of_program(words: &[String]) -> EngineKind {
    let all = words.iter().flat_map(|word| word.split_whitespace());
    for word in all {
        let name = base_name(word);
        if name == "llama-server" || name.starts_with("llama-server-") || word == "llama_cpp.server" {
            return EngineKind::LlamaCpp;
        }
        if name == "vllm" || word.starts_with("vllm.entrypoints.") {
            return EngineKind::Vllm;
        }
        if name == "sglang" || word == "sglang.launch_server" {
            return EngineKind::Sglang;
        }
    }
    EngineKind::Custom
}

fn kind_of_image(words: &[String]) -> EngineKind {
    let image = |part: &str| words.iter().any(|word| !word.starts_with('-') && word.contains(part));
    if image("llama.cpp:") || image("/llama.cpp") {
        EngineKind::LlamaCpp
    } else if image("vllm-openai") || image("/vllm:") {
        EngineKind::Vllm
    } else if image("lmsysorg/sglang") {
        EngineKind::Sglang
    } else {
        EngineKind::Custom
    }
}

/// Makes a container's port reachable from this machine alone: `-p 9000:8000` becomes `-p ${HOST}:${PORT}:8000`.
fn publish_on_loopback(words: &mut [String], port: Option<u16>, changes: &mut Vec<String>) {
    let is_option = |word: &str| matches!(word, "-p" | "--publish");
    let mut follows = false;
    for word in words {
        let (option, published) = match word.split_once('=') {
            Some((option, published)) if is_option(option) => (format!("{option}="), published.to_owned()),
            _ if follows => (String::new(), word.clone()),
            _ => {
                follows = is_option(word.as_str());
                continue;
            }
        };
        follows = false;
        let parts: Vec<&str> = published.split(':').collect();
        let ([host, inside] | [_, host, inside]) = *parts.as_slice() else { continue };
        let is_ours = host == PORT || port.is_some_and(|port| host == port.to_string());
        if is_ours {
            let replaced = format!("{option}{HOST}:{PORT}:{inside}");
            if *word != replaced {
                changes.push(format!(
                    "the container's port is published as {HOST}:{PORT} instead of {published}"
                ));
            }
            *word = replaced;
        }
    }
}

/// Sets an option to our placeholder, or adds it.
fn set_option(words: &mut Vec<String>, option: &str, value: &str, changes: &mut Vec<String>) {
    let joined = format!("{option}=");
    let mut found = false;
    let mut follows = false;
    for word in words.iter_mut() {
        let new = if std::mem::take(&mut follows) {
            value.to_owned()
        } else if word.as_str() == option {
            (found, follows) = (true, true);
            continue;
        } else if word.starts_with(&joined) {
            found = true;
            format!("{joined}{value}")
        } else {
            continue;
        };
        if *word != new {
            let old = word.strip_prefix(&joined).unwrap_or(word.as_str());
            changes.push(format!("{option} {old} becomes {option} {value}"));
            *word = new;
        }
    }
    if !found {
        words.extend([option.to_owned(), value.to_owned()]);
        // Every engine gets a host, but one without a port may have been meant for another.
        if value == PORT {
            changes.push(format!("the command has no port, so {option} {value} is added"));
        }
    }
}

fn uses_port(words: &[String]) -> bool {
    words.iter().any(|word| word.contains(PORT))
}

/// Replaces a port by our placeholder wherever it stands as a number of its own.
fn replace_number(words: &mut [String], port: u16, changes: &mut Vec<String>) {
    let number = port.to_string();
    let mut replaced = false;
    for word in words {
        let mut parts = Vec::new();
        let mut rest = word.as_str();
        while let Some((before, after)) = rest.split_once(number.as_str()) {
            let alone = !before.ends_with(|c: char| c.is_ascii_digit())
                && !after.starts_with(|c: char| c.is_ascii_digit());
            parts.extend([before, if alone { PORT } else { number.as_str() }]);
            replaced |= alone;
            rest = after;
        }
        parts.push(rest);
        let new = parts.concat();
        *word = new;
    }
    if replaced {
        changes.push(format!("port {number} becomes {PORT}"));
    }
}

fn served_name(kind: EngineKind, words: &[String]) -> Option<String> {
    match kind {
        // Its name in requests does not matter.
        EngineKind::LlamaCpp | EngineKind::Custom => None,
        EngineKind::Vllm | EngineKind::Sglang => {
            let positional = || words.iter().skip_while(|word| *word != "serve").nth(1).cloned();
            command_options::value(words, "--served-model-name")
                .or_else(|| command_options::value(words, "--model"))
                .or_else(|| command_options::value(words, "--model-path"))
                .or_else(positional)
                .filter(|name| !name.starts_with('-'))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str, port: Option<u16>) -> (EngineKind, String, Vec<String>) {
        let command = convert(text, port).unwrap();
        (command.kind, command.words.join(" "), command.changes)
    }

    #[test]
    fn a_command_of_several_lines_loses_its_comments_and_listens_where_the_gateway_says() {
        let text = "# the fast build\nllama-server --port ${PORT} \\\n  # -c 1\n  -m '/m/a b.gguf'\n  --host=0.0.0.0\n";
        let (kind, words, changes) = converted(text, None);
        assert_eq!(kind, EngineKind::LlamaCpp);
        assert_eq!(words, "llama-server --port ${PORT} -m /m/a b.gguf --host=${HOST}");
        assert_eq!(changes, ["--host 0.0.0.0 becomes --host ${HOST}"]);
        let (_, words, _) = converted("/app/llama-server-ec9e -m m.gguf --port 9999", Some(9999));
        assert_eq!(words, "/app/llama-server-ec9e -m m.gguf --port ${PORT} --host ${HOST}");
        let (kind, words, changes) =
            converted(r"C:\llama\llama-server.exe -m D:\m.gguf --port ${PORT}", None);
        assert_eq!(kind, EngineKind::LlamaCpp);
        assert_eq!(words, r"C:\llama\llama-server.exe -m D:\m.gguf --port ${PORT} --host ${HOST}");
        assert!(changes[0].contains("paths of Windows"), "{changes:?}");
    }

    #[test]
    fn a_container_publishes_its_port_on_loopback_and_its_image_tells_its_kind() {
        let text = "docker run --rm -p ${PORT}:8080 ghcr.io/ggml-org/llama.cpp:server -m /m.gguf";
        let (kind, words, _) = converted(text, None);
        assert_eq!(kind, EngineKind::LlamaCpp);
        assert!(words.starts_with("docker run --rm -p ${HOST}:${PORT}:8080 ghcr"), "{words}");
        let text = "podman run --publish=127.0.0.1:9797:8000 docker.io/vllm/vllm-openai:v1 --model m";
        let command = convert(text, Some(9797)).unwrap();
        assert_eq!(command.kind, EngineKind::Vllm);
        assert!(command.words.contains(&"--publish=${HOST}:${PORT}:8000".to_owned()), "{:?}", command.words);
        assert_eq!(command.served_name.as_deref(), Some("m"));
        assert_eq!(converted("docker run -p 9000:80 example.com/tts", Some(9000)).0, EngineKind::Custom);
    }

    #[test]
    fn a_fixed_port_of_a_custom_program_is_found_by_its_number_and_none_is_an_error() {
        let (kind, words, changes) = converted("tts-server --listen 0.0.0.0:9100 --seed 91001", Some(9100));
        assert_eq!(
            (kind, words.as_str()),
            (EngineKind::Custom, "tts-server --listen 0.0.0.0:${PORT} --seed 91001")
        );
        assert_eq!(changes, ["port 9100 becomes ${PORT}"]);
        assert_eq!(convert("tts-server", Some(9100)), Err(CommandLineError::NoPort));
        assert_eq!(convert("  # nothing\n", None), Err(CommandLineError::Empty));
        assert!(matches!(convert("llama-server 'x", None), Err(CommandLineError::Quote(_))));
    }

    #[test]
    fn the_engines_own_name_comes_from_its_command() {
        let name = |text: &str| convert(text, None).unwrap().served_name;
        assert_eq!(name("vllm serve org/m --port ${PORT}").as_deref(), Some("org/m"));
        assert_eq!(name("vllm serve org/m --served-model-name a b --port ${PORT}").as_deref(), Some("a"));
        assert_eq!(
            name("python3 -m sglang.launch_server --model-path /m --port ${PORT}").as_deref(),
            Some("/m")
        );
        assert_eq!(name("llama-server -m x --port ${PORT}"), None);
    }
}
