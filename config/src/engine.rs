//! Reads a model's `engine`: how to run and call it.

use std::collections::BTreeMap;

use rouse::{
    model::{EngineMemory, ModelName},
    saturation::EngineTokenLimits,
    units::{Bytes, Millis},
};

use super::{
    EngineConfig, EngineKind, OnDisconnect, PassthroughPath, ProbeTask, SleepApi, command_options,
    reader::{ConfigReader, ConfigSection},
    yaml::{YamlNode, YamlValue},
};

pub(super) struct ParsedEngine {
    pub(super) model: EngineConfig,
    pub(super) start_timeout: Millis,
}

/// Reads the keys of `engine` for the model `name`.
pub(super) fn engine(
    reader: &mut ConfigReader,
    section: &mut ConfigSection,
    name: ModelName,
) -> Option<ParsedEngine> {
    let kind = section.require(reader, "kind", |reader, node| {
        reader.choice(
            node,
            &[
                ("vllm", EngineKind::Vllm),
                ("sglang", EngineKind::Sglang),
                ("llama-cpp", EngineKind::LlamaCpp),
                ("custom", EngineKind::Custom),
            ],
        )
    });
    let at = section.at;
    let command = section.require(reader, "command", command);
    let env = section.read(reader, "env", |reader, node| variables(reader, node, ConfigReader::template));
    let served_name = section.read(reader, "servedName", ConfigReader::text);
    let task = section.read(reader, "task", task).unwrap_or(ProbeTask::Generate);
    let start_timeout =
        section.read(reader, "startTimeout", ConfigReader::positive_duration).unwrap_or(Millis::secs(480));
    let on_disconnect = section.read(reader, "onDisconnect", |reader, node| {
        reader.choice(node, &[("abort", OnDisconnect::Abort), ("drain", OnDisconnect::Drain)])
    });
    let api_key = section.read(reader, "apiKey", ConfigReader::credential);
    let allow_public = section.read(reader, "allowPublic", ConfigReader::flag).unwrap_or(false);
    let stub = section.read(reader, "stub", ConfigReader::flag).unwrap_or(false);
    let sleep = section.read(reader, "sleepMode", |reader, node| sleep_mode(reader, node, stub));
    let passthrough =
        section.read(reader, "passthrough", |reader, node| read_passthrough(reader, node, kind));

    let (kind, command) = (kind?, command?);
    let mut model = EngineConfig {
        served_name: served_name.unwrap_or_else(|| name.to_string()),
        name,
        kind,
        sleep: sleep.flatten().unwrap_or_else(|| sleep_api_by_command(kind, stub, &command)),
        command,
        env: env.unwrap_or_default(),
        task,
        on_disconnect: on_disconnect.unwrap_or(OnDisconnect::Abort),
        api_key: api_key.filter(|key| !key.is_empty()),
        stub,
        allow_public,
        passthrough: passthrough.unwrap_or_default(),
        fingerprint: 0,
        backend_origin: None,
    };
    model.fingerprint = fingerprint(&model);
    if !model.uses("PORT") {
        reader.note(
            at,
            "neither command nor env uses ${PORT}: the engine would not listen on the port that the gateway connects to",
        );
    }
    Some(ParsedEngine { model, start_timeout })
}

impl ParsedEngine {
    /// Whether the engine does not measure free memory when it starts.
    ///
    /// Either the command sets the KV cache's bytes, or the kind never measures it.
    pub(super) fn explicit_memory(&self) -> bool {
        matches!(self.model.kind, EngineKind::LlamaCpp | EngineKind::Custom)
            || self.model.uses("KV_CACHE_BYTES")
    }

    /// Has LoRA adapters in memory, besides the weights that a wake from level 2 reloads.
    pub(super) fn has_adapters(&self) -> bool {
        self.model.kind == EngineKind::Vllm && has_lora_by_command(&self.model.command)
    }
}

/// Stable hash: the same template yields the same value on every machine and in every build.
///
/// Adopted engines carry the value across restarts and upgrades. This is FNV-1a; a collision has no value to an
/// attacker.
pub struct FingerprintHasher(u64);

impl Default for FingerprintHasher {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl FingerprintHasher {
    pub fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Feeds a text and a terminator.
    pub fn feed_text(&mut self, text: &str) {
        self.feed(text.as_bytes());
        self.feed(&[0]);
    }

    pub const fn value(&self) -> u64 {
        self.0
    }
}

/// Returns the kind's name in configurations.
pub const fn kind_name(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Vllm => "vllm",
        EngineKind::Sglang => "sglang",
        EngineKind::LlamaCpp => "llama-cpp",
        EngineKind::Custom => "custom",
    }
}

impl EngineConfig {
    /// Adds the declared memory to the fingerprint if the engine gets it at its start: its size cannot change later.
    pub(super) fn add_memory_to_fingerprint(&mut self, memory: &EngineMemory) {
        let takes_its_share = self.uses("MEMORY_FRACTION");
        let takes_its_cache = self.uses("KV_CACHE_BYTES");
        if !takes_its_share && !takes_its_cache {
            return;
        }
        let mut hash = FingerprintHasher(self.fingerprint);
        hash.feed(&memory.awake.0.to_le_bytes());
        if takes_its_cache {
            hash.feed(&memory.host.0.to_le_bytes());
        }
        self.fingerprint = hash.value();
    }
}

fn fingerprint(model: &EngineConfig) -> u64 {
    let kind = kind_name(model.kind);
    let mut hash = FingerprintHasher::default();
    let commands = model.command.iter().map(String::as_str);
    for part in [kind, model.served_name.as_str()].into_iter().chain(commands) {
        hash.feed_text(part);
    }
    hash.feed(&[1]);
    for part in model.env.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]) {
        hash.feed_text(part);
    }
    if model.stub {
        hash.feed(&[2]);
    }
    hash.value()
}

fn command(reader: &mut ConfigReader, node: &YamlNode) -> Option<Vec<String>> {
    if let YamlValue::Scalar(text) = &node.value {
        reader.note(
            node.at,
            format_args!(
                "expected a list of program and arguments, found a single value: write {}",
                suggest_list(text)
            ),
        );
        return None;
    }
    let command = reader.list(node, ConfigReader::template)?;
    if command.first().is_none_or(|program| program.trim().is_empty()) {
        reader.note(node.at, "the command is empty");
        return None;
    }
    if command.iter().any(|text| text.contains('\0')) {
        reader.note(node.at, "an argument must not contain a NUL byte");
        return None;
    }
    Some(command)
}

/// Suggests the list to write instead of a command line; an example, if the line needs a shell.
fn suggest_list(line: &str) -> String {
    if line.contains(['\'', '"', '\\', '|', '&', ';', '<', '>', '(', '`', '*', '~']) {
        return "[sh, -c, 'exec …'] if the command needs a shell, otherwise [PROGRAM, ARGUMENT, …]"
            .to_owned();
    }
    let plain = |word: &str| word.chars().all(|c| c.is_alphanumeric() || "-_./=+".contains(c));
    let words =
        line.split_whitespace().map(|word| if plain(word) { word.to_owned() } else { format!("\"{word}\"") });
    format!("[{}]", words.collect::<Vec<_>>().join(", "))
}

/// Reads the variables of an engine's environment, with `read` for their values.
pub(super) fn variables(
    reader: &mut ConfigReader,
    node: &YamlNode,
    read: fn(&mut ConfigReader, &YamlNode) -> Option<String>,
) -> Option<BTreeMap<String, String>> {
    let YamlValue::Map(entries) = &node.value else {
        reader.note(node.at, format_args!("expected a mapping, found {}", node.type_name()));
        return None;
    };
    let mut env = BTreeMap::new();
    for entry in entries {
        if entry.key.is_empty() || entry.key.contains(['=', '\0']) {
            reader
                .note(entry.at, format_args!("'{}' is not a valid variable name", entry.key.escape_debug()));
        }
        if let Some(value) = read(reader, &entry.value) {
            env.insert(entry.key.clone(), value);
        }
    }
    Some(env)
}

fn read_passthrough(
    reader: &mut ConfigReader,
    node: &YamlNode,
    kind: Option<EngineKind>,
) -> Option<Vec<PassthroughPath>> {
    if kind.is_some_and(|kind| kind != EngineKind::Custom) {
        reader.note(
            node.at,
            "only custom engines have configurable paths: the paths of the other kinds are built in",
        );
        return None;
    }
    reader.list(node, |reader, node| {
        let text = reader.text(node)?;
        PassthroughPath::parse(&text)
            .map_err(|error| reader.note(node.at, format_args!("'{}': {error}", text.escape_debug())))
            .ok()
    })
}

fn task(reader: &mut ConfigReader, node: &YamlNode) -> Option<ProbeTask> {
    reader.choice(
        node,
        &[
            ("generate", ProbeTask::Generate),
            ("embed", ProbeTask::Embed),
            ("score", ProbeTask::Score),
            ("transcribe", ProbeTask::Transcribe),
            ("none", ProbeTask::None),
        ],
    )
}

/// Returns `Some(None)` for `auto`.
fn sleep_mode(reader: &mut ConfigReader, node: &YamlNode, stub: bool) -> Option<Option<SleepApi>> {
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
            "the gateway cannot put an engine behind a stub to sleep: the stub forwards no management path",
        );
    }
    Some(mode)
}

/// Returns the sleep calls that follow from the command.
pub fn sleep_api_by_command(kind: EngineKind, stub: bool, command: &[String]) -> SleepApi {
    match kind {
        _ if stub => SleepApi::None,
        EngineKind::Vllm if command_options::is_on(command, "--enable-sleep-mode") => SleepApi::Vllm,
        EngineKind::Sglang if command_options::is_on(command, "--enable-memory-saver") => SleepApi::Sglang,
        _ => SleepApi::None,
    }
}

/// Returns whether a vLLM with this command holds LoRA adapters in memory.
///
/// A wake from level 2 reloads only the model's own weights.
pub fn has_lora_by_command(command: &[String]) -> bool {
    command_options::is_on(command, "--enable-lora")
}

/// Error for level 2 on an engine with LoRA adapters.
pub const LORA_AT_LEVEL_2: &str = "--enable-lora rules out level 2: a wake from level 2 reloads only the model's own weights and loses the adapters; set 1 or never";

/// vLLM's flag for the bytes of its KV cache on each accelerator.
///
/// With the flag, an engine does not measure free memory when it starts.
const KV_CACHE_FLAG: &str = "--kv-cache-memory-bytes";

/// Returns the bytes of the KV cache on each accelerator, if the command sets them.
///
/// The engine's remaining memory is little more than weights.
pub fn kv_cache_by_command(command: &[String]) -> Option<Bytes> {
    command_options::value(command, KV_CACHE_FLAG)?.parse().ok()
}

/// Returns the batch limits of a vLLM with this command, with its defaults for those that the command leaves out.
pub fn batch_limits_by_command(command: &[String]) -> EngineTokenLimits {
    let number = |option: &str| -> Option<u32> { command_options::value(command, option)?.parse().ok() };
    let default = EngineTokenLimits::default();
    EngineTokenLimits {
        batched: number("--max-num-batched-tokens").unwrap_or(default.batched),
        sequences: number("--max-num-seqs").unwrap_or(default.sequences),
        total: None,
    }
}

/// Returns whether the command sets that size, in any form.
pub fn sets_kv_cache(command: &[String]) -> bool {
    command_options::value(command, KV_CACHE_FLAG).is_some()
}
