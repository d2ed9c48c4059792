//! Converts one model.

use std::collections::BTreeMap;

use rouse::units::{Bytes, Millis};
use rouse_net::adapter::{EngineKind, SleepApi};

use super::{LlamaSwapImporter, command, entries, is_true, macros::MacroTable, scalar, settings::seconds_of};
use crate::{
    SourceLocation, command_options,
    engine::sleep_api_by_command,
    model::invalid_name_reason,
    yaml::{YamlEntry, YamlNode},
};

/// Part of a model's size that caches and buffers take as well, by experience with llama.cpp.
const OVERHEAD_DIVISOR: u64 = 5;
const MIN_OVERHEAD: Bytes = Bytes::gib(1);
/// llama-swap's value of `ttl` for the global one.
const GLOBAL_TTL: i64 = -1;

/// A model as our file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImportedModel {
    pub(super) name: String,
    /// Lines for people.
    pub(super) comments: Vec<String>,
    pub(super) aliases: Vec<String>,
    pub(super) kind: EngineKind,
    pub(super) command: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) served_name: Option<String>,
    pub(super) start_timeout: Option<Millis>,
    pub(super) accelerators: u32,
    /// An estimate by the model's file, if that is there.
    pub(super) memory: Option<Bytes>,
    /// Unused for so long, the engine leaves; `None`: it stays.
    pub(super) idle: Option<Millis>,
    pub(super) can_sleep: bool,
    pub(super) pinned: bool,
    pub(super) never_evicted: bool,
    pub(super) priority: i32,
    pub(super) max_concurrency: Option<u32>,
}

/// The keys of a model that are read before the model is built.
#[derive(Default)]
struct ModelKeys {
    command: Option<(SourceLocation, String)>,
    proxy: Option<(SourceLocation, String)>,
    comments: Vec<String>,
    aliases: Vec<(SourceLocation, String)>,
    env: Vec<(SourceLocation, String)>,
    use_model_name: Option<String>,
    ttl: Option<i64>,
    max_concurrency: Option<u32>,
}

impl LlamaSwapImporter<'_> {
    pub(super) fn models(&mut self, models: &[YamlEntry]) -> Vec<ImportedModel> {
        // A name wins over an alias, wherever both stand.
        for entry in models {
            let name = self.name(entry);
            self.names.insert(entry.key.clone(), name);
        }
        models.iter().filter_map(|entry| self.model(entry)).collect()
    }

    /// Notes what other parts of the file say of models that it does not have.
    pub(super) fn check_references(&mut self, models: &[YamlEntry]) {
        let at = models.first().map(|entry| entry.at).unwrap_or_default();
        let mentioned = self.preload.iter().chain(&self.groups.persistent).chain(self.priorities.keys());
        let unknown: Vec<_> = mentioned.filter(|name| !self.names.contains_key(*name)).cloned().collect();
        for name in unknown {
            self.note(
                at,
                format!("'{name}' is named by a group, hook or priority, and is no model's own name"),
            );
        }
    }

    /// Returns a name that our files allow, and takes it.
    fn name(&mut self, entry: &YamlEntry) -> String {
        let mut name: String = entry
            .key
            .chars()
            .map(|c| if c.is_whitespace() || "%?#;\\\"".contains(c) { '-' } else { c })
            .collect();
        if invalid_name_reason(&name).is_some() {
            name = name
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '-' })
                .collect();
            name.truncate(256);
        }
        if invalid_name_reason(&name).is_some() {
            name = format!("model-{}", self.names.len());
        }
        while name.is_empty() || !self.taken.insert(name.clone()) {
            name.push('2');
        }
        if name != entry.key {
            self.note(
                entry.at,
                format!("the model '{}' is named '{name}': clients must use that name", entry.key),
            );
        }
        name
    }

    fn model(&mut self, entry: &YamlEntry) -> Option<ImportedModel> {
        let name = self.names.get(&entry.key)?.clone();
        let own = entries(&entry.value).iter().find(|key| key.key == "macros");
        let own = own.map(|macros| MacroTable::read(&macros.value)).unwrap_or_default();
        let keys = self.keys(entry, &own);
        let Some((at, text)) = &keys.command else {
            self.note(entry.at, format!("the model '{}' has no cmd, left out", entry.key));
            return None;
        };
        let port = match keys.proxy.as_ref().map(|(at, proxy)| (*at, proxy_port(proxy))) {
            None => None,
            Some((_, Ok(port))) => port,
            Some((at, Err(why))) => {
                self.note(at, format!("the model '{}' is left out: {why}", entry.key));
                return None;
            }
        };
        let command = match command::convert(text, port) {
            Ok(command) => command,
            Err(error) => {
                self.note(*at, format!("the model '{}' is left out: {error}", entry.key));
                return None;
            }
        };
        for change in &command.changes {
            self.note(*at, format!("the model '{}': {change}", entry.key));
        }
        let (env, visible) = self.environment(&keys.env);
        let ttl = match keys.ttl {
            None | Some(GLOBAL_TTL) => self.global_ttl,
            Some(ttl) => u64::try_from(ttl).unwrap_or_default(),
        };
        let parallel = command_options::value(&command.words, "--tensor-parallel-size")
            .or_else(|| command_options::value(&command.words, "-tp"))
            .and_then(|number| number.parse().ok());
        let served_name = keys.use_model_name.or(command.served_name).filter(|served| *served != name);
        let persistent = self.groups.persistent.contains(&entry.key);
        let preloaded = self.preload.contains(&entry.key);
        if preloaded && !persistent {
            self.note(
                entry.at,
                format!("the model '{}' is preloaded: run `rouse-gateway wake {name}` after a start, or set pinned: true", entry.key),
            );
        }
        let can_sleep = sleep_api_by_command(command.kind, false, &command.words) != SleepApi::None;
        Some(ImportedModel {
            comments: keys.comments,
            aliases: self.aliases(entry, keys.aliases),
            kind: command.kind,
            memory: self.estimate(&command.words),
            command: command.words,
            env,
            served_name,
            start_timeout: self.start_timeout,
            accelerators: visible.or(parallel).unwrap_or(1).max(1),
            idle: (ttl > 0).then(|| Millis::secs(ttl)),
            can_sleep,
            pinned: persistent && preloaded,
            never_evicted: persistent && !preloaded,
            priority: self.priorities.get(&entry.key).copied().unwrap_or_default(),
            max_concurrency: keys.max_concurrency,
            name,
        })
    }

    fn keys(&mut self, model: &YamlEntry, own: &MacroTable) -> ModelKeys {
        let id = model.key.as_str();
        let mut keys = ModelKeys::default();
        for entry in entries(&model.value) {
            let YamlEntry { key, at, value } = entry;
            match key.as_str() {
                "macros" => {}
                "cmd" => keys.command = self.text(value, own, id).map(|text| (value.at, text)),
                "proxy" => keys.proxy = self.text(value, own, id).map(|text| (value.at, text)),
                "name" | "description" => {
                    let text = self.text(value, own, id);
                    keys.comments.extend(text.filter(|text| !text.is_empty()));
                }
                "aliases" => keys.aliases = self.texts(entry, own, id),
                "env" => keys.env = self.texts(entry, own, id),
                "useModelName" => {
                    keys.use_model_name = self.text(value, own, id).filter(|name| !name.is_empty());
                }
                "ttl" => keys.ttl = self.number(key, value),
                "concurrencyLimit" => {
                    let limit = self.number(key, value).and_then(|limit| u32::try_from(limit).ok());
                    keys.max_concurrency = limit.filter(|limit| *limit > 0);
                }
                _ => self.without_counterpart(key, *at, value),
            }
        }
        keys
    }

    /// Notes a key of a model that has no counterpart, unless its value is what happens anyway.
    fn without_counterpart(&mut self, key: &str, at: SourceLocation, value: &YamlNode) {
        let text = match key {
            "cmdStop" => {
                "the gateway ends an engine with SIGTERM, and with SIGKILL after timeouts.stop".to_owned()
            }
            "checkEndpoint" if scalar(value) == Some("/health") => return,
            "checkEndpoint" => "the gateway asks /health, or /v1/models where that is missing".to_owned(),
            "unlisted" if !is_true(value) => return,
            "unlisted" => "every model is listed; a key's models limit what a client sees".to_owned(),
            "unloadTimeout" => {
                let seconds = scalar(value).and_then(|text| text.parse().ok()).and_then(seconds_of);
                let grace = seconds.map_or_else(|| "a duration".to_owned(), |grace| grace.to_string());
                format!("timeouts.stop is for all models: set it to {grace} if this one needs that")
            }
            "filters" => {
                "requests are passed on unchanged: set such parameters in the engine or in the client"
                    .to_owned()
            }
            "metadata" => "the list of models has no such values".to_owned(),
            "capabilities" => "clients learn what a model can do from the engine".to_owned(),
            "sendLoadingState" => "a waiting stream gets comments, see stream.heartbeat".to_owned(),
            "timeouts" => "timeouts of requests are for all models, see timeouts".to_owned(),
            "compat" => "a websocket wakes no model".to_owned(),
            _ => "this key is unknown, left out".to_owned(),
        };
        self.note(at, format!("{key}: {text}"));
    }

    /// Splits `NAME=value`. Also returns how many accelerators the variables show, which the gateway sets itself.
    fn environment(&mut self, lines: &[(SourceLocation, String)]) -> (BTreeMap<String, String>, Option<u32>) {
        let (mut env, mut visible) = (BTreeMap::new(), None);
        for (at, line) in lines {
            let Some((name, value)) = line.split_once('=') else {
                // It may be a secret.
                self.note(*at, "env: an entry is not NAME=value, left out");
                continue;
            };
            if name == "CUDA_VISIBLE_DEVICES" {
                let count = value.split(',').filter(|id| !id.trim().is_empty()).count();
                visible = u32::try_from(count).ok();
                self.note(*at, "CUDA_VISIBLE_DEVICES is left out: the gateway chooses the accelerators, as many as before");
            } else {
                env.insert(name.trim().to_owned(), value.to_owned());
            }
        }
        (env, visible)
    }

    /// Keeps the aliases that are valid and not taken.
    fn aliases(&mut self, model: &YamlEntry, aliases: Vec<(SourceLocation, String)>) -> Vec<String> {
        let mut kept = Vec::new();
        for (at, alias) in aliases {
            if let Some(why) = invalid_name_reason(&alias) {
                self.note(at, format!("the alias '{alias}' of '{}' is left out: {why}", model.key));
            } else if self.taken.insert(alias.clone()) {
                kept.push(alias);
            } else {
                self.note(
                    at,
                    format!("the alias '{alias}' of '{}' is left out: another model has it", model.key),
                );
            }
        }
        kept
    }

    /// Estimates the memory by the model's file.
    fn estimate(&self, words: &[String]) -> Option<Bytes> {
        let path = ["--model", "-m"].iter().find_map(|option| command_options::value(words, option))?;
        let size = (self.machine.file_size)(&path)?;
        let needed = size + Bytes(size.0 / OVERHEAD_DIVISOR).max(MIN_OVERHEAD);
        Some(Bytes::mib(needed.0.div_ceil(1 << 20)))
    }
}

/// Returns the port that llama-swap calls; `None` if it is the one that it chooses itself.
fn proxy_port(proxy: &str) -> Result<Option<u16>, String> {
    let (_, authority) = proxy.split_once("://").unwrap_or(("", proxy));
    let authority = authority.split('/').next().unwrap_or_default();
    let address = authority.rsplit_once('@').map_or(authority, |(_, address)| address);
    let (host, port) = address.rsplit_once(':').unwrap_or((address, "80"));
    if !matches!(
        host,
        "localhost" | "127.0.0.1" | "[::1]" | "0.0.0.0" | "172.17.0.1" | "host.docker.internal"
    ) {
        return Err(format!(
            "its proxy {address} is on another machine, and a gateway on one machine serves only its own engines"
        ));
    }
    Ok(port.parse().ok())
}
