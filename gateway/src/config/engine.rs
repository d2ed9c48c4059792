//! `engine` of a model: how it is run and spoken to.

use std::collections::BTreeMap;

use rouse::{
    model::ModelName,
    units::{Bytes, Millis},
};

use super::{
    Kind, Model, OnDisconnect, Passage, SleepApi, Task, options,
    reader::{Reader, Section},
    tree::{Node, Value},
};

pub(super) struct Engine {
    pub(super) model: Model,
    pub(super) start_timeout: Millis,
}

/// Reads the keys of `engine` for the model `name`.
pub(super) fn engine(reader: &mut Reader, section: &mut Section, name: ModelName) -> Option<Engine> {
    let kind = section.require(reader, "kind", |reader, node| {
        reader.choice(
            node,
            &[
                ("vllm", Kind::Vllm),
                ("sglang", Kind::Sglang),
                ("llama-cpp", Kind::LlamaCpp),
                ("custom", Kind::Custom),
            ],
        )
    });
    let at = section.at;
    let command = section.require(reader, "command", command);
    let env = section.read(reader, "env", |reader, node| variables(reader, node, Reader::template));
    let served_name = section.read(reader, "servedName", Reader::text);
    let task = section.read(reader, "task", task).unwrap_or(Task::Generate);
    let start_timeout =
        section.read(reader, "startTimeout", Reader::positive_span).unwrap_or(Millis::secs(480));
    let on_disconnect = section.read(reader, "onDisconnect", |reader, node| {
        reader.choice(node, &[("abort", OnDisconnect::Abort), ("drain", OnDisconnect::Drain)])
    });
    let api_key = section.read(reader, "apiKey", Reader::credential);
    let allow_public = section.read(reader, "allowPublic", Reader::flag).unwrap_or(false);
    let stub = section.read(reader, "stub", Reader::flag).unwrap_or(false);
    let sleep = section.read(reader, "sleepMode", |reader, node| sleep_mode(reader, node, stub));
    let passage = section.read(reader, "passage", |reader, node| passage(reader, node, kind));

    let (kind, command) = (kind?, command?);
    let mut model = Model {
        served_name: served_name.unwrap_or_else(|| name.to_string()),
        name,
        kind,
        sleep: sleep.flatten().unwrap_or_else(|| sleep_by_command(kind, stub, &command)),
        command,
        env: env.unwrap_or_default(),
        task,
        on_disconnect: on_disconnect.unwrap_or(OnDisconnect::Abort),
        api_key: api_key.filter(|key| !key.is_empty()),
        stub,
        allow_public,
        passage: passage.unwrap_or_default(),
        fingerprint: 0,
        origin: None,
    };
    model.fingerprint = fingerprint(&model);
    if !model.uses("PORT") {
        reader.note(
            at,
            "neither command nor env uses ${PORT}: the engine would not listen where it is looked for",
        );
    }
    Some(Engine { model, start_timeout })
}

impl Engine {
    /// It was told its KV-cache bytes, or is of a kind that does not measure free memory when it starts.
    pub(super) fn explicit_memory(&self) -> bool {
        matches!(self.model.kind, Kind::LlamaCpp | Kind::Custom) || self.model.uses("KV_CACHE_BYTES")
    }

    /// It has LoRA adapters in memory, beside the weights that it would read again.
    pub(super) fn has_adapters(&self) -> bool {
        self.model.kind == Kind::Vllm && adapters_by_command(&self.model.command)
    }
}

/// The same for the same template on every machine and in every build: adopted engines carry it across restarts
/// and upgrades. FNV-1a; nobody gains by a collision.
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// A text and its end.
    pub(crate) fn part(&mut self, text: &str) {
        self.feed(text.as_bytes());
        self.feed(&[0]);
    }

    pub(crate) const fn value(&self) -> u64 {
        self.0
    }
}

/// As configurations spell it.
pub(crate) const fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Vllm => "vllm",
        Kind::Sglang => "sglang",
        Kind::LlamaCpp => "llama-cpp",
        Kind::Custom => "custom",
    }
}

fn fingerprint(model: &Model) -> u64 {
    let kind = kind_name(model.kind);
    let mut hash = Fingerprint::new();
    let commands = model.command.iter().map(String::as_str);
    for part in [kind, model.served_name.as_str()].into_iter().chain(commands) {
        hash.part(part);
    }
    hash.feed(&[1]);
    for part in model.env.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]) {
        hash.part(part);
    }
    if model.stub {
        hash.feed(&[2]);
    }
    hash.value()
}

fn command(reader: &mut Reader, node: &Node) -> Option<Vec<String>> {
    if let Value::Scalar(text) = &node.value {
        reader.note(
            node.at,
            format_args!(
                "expected a list of program and arguments, found a single value: write {}",
                as_list(text)
            ),
        );
        return None;
    }
    let command = reader.list(node, Reader::template)?;
    if command.first().is_none_or(|program| program.trim().is_empty()) {
        reader.note(node.at, "the command is empty");
        return None;
    }
    if command.iter().any(|text| text.contains('\0')) {
        reader.note(node.at, "an argument cannot have a NUL in it");
        return None;
    }
    Some(command)
}

/// The list to write instead of a command line; an example, where the line needs a shell.
fn as_list(line: &str) -> String {
    if line.contains(['\'', '"', '\\', '|', '&', ';', '<', '>', '(', '`', '*', '~']) {
        return "[sh, -c, 'exec …'] for what needs a shell, else [PROGRAM, ARGUMENT, …]".to_owned();
    }
    let plain = |word: &str| word.chars().all(|c| c.is_alphanumeric() || "-_./=+".contains(c));
    let words =
        line.split_whitespace().map(|word| if plain(word) { word.to_owned() } else { format!("\"{word}\"") });
    format!("[{}]", words.collect::<Vec<_>>().join(", "))
}

/// Variables of an engine's environment, whose values `read` reads.
pub(super) fn variables(
    reader: &mut Reader,
    node: &Node,
    read: fn(&mut Reader, &Node) -> Option<String>,
) -> Option<BTreeMap<String, String>> {
    let Value::Map(entries) = &node.value else {
        reader.note(node.at, format_args!("expected a mapping, found {}", node.what()));
        return None;
    };
    let mut env = BTreeMap::new();
    for entry in entries {
        if entry.key.is_empty() || entry.key.contains(['=', '\0']) {
            reader.note(entry.at, format_args!("'{}' cannot be a variable's name", entry.key.escape_debug()));
        }
        if let Some(value) = read(reader, &entry.value) {
            env.insert(entry.key.clone(), value);
        }
    }
    Some(env)
}

fn passage(reader: &mut Reader, node: &Node, kind: Option<Kind>) -> Option<Vec<Passage>> {
    if kind.is_some_and(|kind| kind != Kind::Custom) {
        reader
            .note(node.at, "only a custom engine's paths are configured: those of the other kinds are known");
        return None;
    }
    reader.list(node, |reader, node| {
        let text = reader.text(node)?;
        Passage::parse(&text)
            .map_err(|error| reader.note(node.at, format_args!("'{}': {error}", text.escape_debug())))
            .ok()
    })
}

fn task(reader: &mut Reader, node: &Node) -> Option<Task> {
    reader.choice(
        node,
        &[
            ("generate", Task::Generate),
            ("embed", Task::Embed),
            ("score", Task::Score),
            ("transcribe", Task::Transcribe),
            ("none", Task::None),
        ],
    )
}

/// `auto` is `Some(None)`.
fn sleep_mode(reader: &mut Reader, node: &Node, stub: bool) -> Option<Option<SleepApi>> {
    let mode = reader.choice(
        node,
        &[
            ("auto", None),
            ("vllm", Some(SleepApi::Vllm)),
            ("sglang", Some(SleepApi::Sglang)),
            ("none", Some(SleepApi::None)),
        ],
    )?;
    if stub && matches!(mode, Some(SleepApi::Vllm | SleepApi::Sglang)) {
        reader.note(
            node.at,
            "an engine behind a stub is not put to sleep through it: no management path passes",
        );
    }
    Some(mode)
}

/// Which calls put an engine to sleep, by what its command says.
pub(crate) fn sleep_by_command(kind: Kind, stub: bool, command: &[String]) -> SleepApi {
    match kind {
        _ if stub => SleepApi::None,
        Kind::Vllm if options::is_on(command, "--enable-sleep-mode") => SleepApi::Vllm,
        Kind::Sglang if options::is_on(command, "--enable-memory-saver") => SleepApi::Sglang,
        _ => SleepApi::None,
    }
}

/// Whether a vLLM with this command holds LoRA adapters in memory. A wake from level 2 reloads only the model's own weights.
pub(crate) fn adapters_by_command(command: &[String]) -> bool {
    options::is_on(command, "--enable-lora")
}

/// The error where level 2 is configured for an engine with LoRA adapters.
pub(crate) const ADAPTERS_AT_LEVEL_2: &str = "with --enable-lora the adapters are lost at level 2, which reads only the model's own weights again: say 1 or never";

/// vLLM's flag for the bytes of its KV cache on each accelerator. With it an engine does not measure free memory when it starts.
const KV_CACHE_BYTES: &str = "--kv-cache-memory-bytes";

/// The bytes of its KV cache on each accelerator, where its command says them. What else it takes is little more than weights.
pub(crate) fn kv_cache_by_command(command: &[String]) -> Option<Bytes> {
    options::value(command, KV_CACHE_BYTES)?.parse().ok()
}

/// Whether the command says that number, in whatever form.
pub(crate) fn says_kv_cache(command: &[String]) -> bool {
    options::value(command, KV_CACHE_BYTES).is_some()
}
