//! Reads what applies to all models.

use aws_lc_rs::digest::{SHA256, digest};
use rouse::units::Millis;

use super::{LlamaSwapImporter, MacroTable, entries, find, scalar};
use crate::yaml::{YamlEntry, YamlNode, YamlValue};

/// llama-swap's own minimum of `healthCheckTimeout`.
const MIN_START_SECONDS: i64 = 15;

/// Keys without a counterpart, and what to do instead.
const WITHOUT_COUNTERPART: [(&str, &str); 15] = [
    ("logLevel", "set the environment variable ROUSE_LOG, such as ROUSE_LOG=debug"),
    ("logTimeFormat", "log lines have the time in UTC"),
    ("logToStdout", "engines' output is in their logs: rouse-gateway logs MODEL"),
    ("logRequests", "set logs.access for a line for each request"),
    ("metricsMaxInMemory", "metrics are at /metrics of the admin API"),
    ("captureBuffer", "requests are not captured"),
    ("store", "activity is not stored: use --journal for decisions, and logs.access for requests"),
    ("ui", "the page of the admin API has no such settings"),
    ("performance", "metrics are read when they are asked for"),
    ("startPort", "the gateway chooses a free port at each start"),
    ("sendLoadingState", "a waiting stream gets comments, see stream.heartbeat"),
    ("includeAliasesInList", "the list of models shows aliases as stated in docs/api.md"),
    ("upstream", "pages of an engine are at /engines/MODEL, which wakes no model"),
    ("profiles", "names are not switched at runtime: use aliases"),
    ("selectors", "a request names one model: use aliases, or replicas of a model"),
];

impl LlamaSwapImporter<'_> {
    pub(super) fn read_settings(&mut self, document: &YamlNode) {
        // Macros may stand below their use.
        if let Some(entry) = find(document, "macros") {
            self.macros = MacroTable::read(&entry.value);
        }
        for entry in entries(document) {
            self.setting(entry);
        }
    }

    fn setting(&mut self, entry: &YamlEntry) {
        let YamlEntry { key, at, value } = entry;
        match key.as_str() {
            "models" | "macros" => {}
            "healthCheckTimeout" => {
                let seconds = self.number(key, value).map(|seconds| seconds.max(MIN_START_SECONDS));
                self.start_timeout = seconds.and_then(seconds_of);
            }
            "globalTTL" => {
                let seconds = self.number(key, value).and_then(|seconds| u64::try_from(seconds).ok());
                self.global_ttl = seconds.unwrap_or_default();
            }
            "unloadTimeout" => self.stop_grace = self.number(key, value).and_then(seconds_of),
            "apiKeys" => self.api_keys(entry),
            "groups" => self.groups(value),
            "matrix" => self.matrix(value),
            "routing" => self.routing(value),
            "hooks" => self.hooks(value),
            "peers" => self.peers(value),
            other => {
                let known = WITHOUT_COUNTERPART.iter().find(|(known, _)| *known == other);
                let text = known.map_or("this key is unknown, left out", |(_, text)| *text);
                self.note(*at, format!("{other}: {text}"));
            }
        }
    }

    /// Keeps the keys' hashes: our files hold no keys.
    fn api_keys(&mut self, entry: &YamlEntry) {
        let YamlValue::List(items) = &entry.value.value else { return };
        for item in items {
            let Some(text) = scalar(item) else { continue };
            let key = match text.strip_prefix("${env.").and_then(|name| name.strip_suffix('}')) {
                None => Some(text.to_owned()),
                Some(name) => (self.machine.environment)(name),
            };
            match key {
                Some(key) => self.key_hashes.push(hex_sha256(key.as_bytes())),
                None => self.note(
                    item.at,
                    format!(
                        "the key {text} is not known here: add its line with rouse-gateway key NAME --stdin"
                    ),
                ),
            }
        }
        if !self.key_hashes.is_empty() {
            self.note(
                entry.at,
                "apiKeys: only the keys' hashes are written; give each key a name of its own",
            );
        }
    }

    fn routing(&mut self, routing: &YamlNode) {
        for entry in entries(routing) {
            match entry.key.as_str() {
                "router" => self.router(&entry.value),
                "scheduler" => self.scheduler(&entry.value),
                other => self.note(entry.at, format!("routing.{other}: unknown, left out")),
            }
        }
    }

    fn router(&mut self, router: &YamlNode) {
        let uses_matrix = find(router, "use").is_some_and(|entry| scalar(&entry.value) == Some("matrix"));
        let settings = find(router, "settings").map(|entry| entries(&entry.value)).unwrap_or_default();
        for entry in settings {
            // llama-swap ignores the settings of the router that it does not use.
            match entry.key.as_str() {
                "groups" if !uses_matrix => self.groups(&entry.value),
                "matrix" if uses_matrix => self.matrix(&entry.value),
                other => {
                    self.note(entry.at, format!("routing.router.settings.{other}: not in use, left out"))
                }
            }
        }
    }

    fn scheduler(&mut self, scheduler: &YamlNode) {
        let fifo = find(scheduler, "settings").and_then(|entry| find(&entry.value, "fifo"));
        let Some(priority) = fifo.and_then(|entry| find(&entry.value, "priority")) else { return };
        for entry in entries(&priority.value) {
            let number = self.number(&entry.key, &entry.value);
            if let Some(number) = number.and_then(|number| i32::try_from(number).ok()) {
                self.priorities.insert(entry.key.clone(), number);
            }
        }
    }

    fn hooks(&mut self, hooks: &YamlNode) {
        let preload = find(hooks, "on_startup").and_then(|entry| find(&entry.value, "preload"));
        let Some(preload) = preload else { return };
        let names = self.texts(preload, &MacroTable::default(), "");
        self.preload = names.into_iter().map(|(_, name)| name.trim().to_owned()).collect();
    }

    fn peers(&mut self, peers: &YamlNode) {
        for peer in entries(peers) {
            let models =
                find(&peer.value, "models").map(|entry| self.texts(entry, &MacroTable::default(), ""));
            let names: Vec<_> = models.unwrap_or_default().into_iter().map(|(_, name)| name).collect();
            self.note(
                peer.at,
                format!(
                    "the peer '{}' ({}) is on another machine: a gateway on one machine serves only its own engines; in a \
                     cluster, an InferenceModel with mode external forwards requests",
                    peer.key,
                    names.join(", ")
                ),
            );
        }
    }
}

/// Converts llama-swap's seconds; 0 stands for its default.
pub(super) fn seconds_of(seconds: i64) -> Option<Millis> {
    u64::try_from(seconds).ok().filter(|seconds| *seconds > 0).map(Millis::secs)
}

fn hex_sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
