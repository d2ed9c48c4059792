//! Decides which models the configuration has, and with which engines.

mod llama_cpp;
mod snapshot;

use std::collections::BTreeSet;

use rouse::units::Bytes;
use serde::Serialize;

use super::{FoundMachine, accelerator_choice::AcceleratorChoice, estimate::MemoryEstimate};
use crate::cli::detect::{LeftOut, programs::FoundProgram};

/// The longest name that is proposed.
const MAX_NAME: usize = 80;
/// Stands for the model's name in a command until that is known.
const ALIAS: &str = "${ALIAS}";
const HOST: &str = "${HOST}";
const PORT: &str = "${PORT}";
const MEMORY_FRACTION: &str = "${MEMORY_FRACTION}";

/// A whole configuration, before it is written.
#[derive(Debug)]
pub(super) struct ConfigProposal {
    pub(super) accelerators: AcceleratorChoice,
    pub(super) programs: Vec<FoundProgram>,
    pub(super) models: Vec<ProposedModel>,
    pub(super) left_out: Vec<LeftOut>,
    pub(super) searched: Vec<String>,
    /// Whether engines go on while the gateway restarts. `init` keeps that of a file that it replaces.
    pub(super) leaves_engines: bool,
}

/// One entry of `models`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ProposedModel {
    pub(super) name: String,
    /// Where it was found, and what it is.
    pub(super) source: String,
    pub(super) engine: &'static str,
    pub(super) command: Vec<String>,
    /// Why the command is as it is.
    pub(super) notes: Vec<String>,
    pub(super) env: Vec<(&'static str, String)>,
    pub(super) served_name: Option<String>,
    pub(super) task: Option<&'static str>,
    pub(super) start_timeout: Option<String>,
    pub(super) awake: Bytes,
    pub(super) awake_why: String,
    /// Memory of a sleeping engine on the accelerator and in RAM; `None` if it cannot sleep.
    pub(super) asleep: Option<(Bytes, Bytes)>,
    pub(super) accelerators: u32,
    pub(super) max_concurrency: Option<u32>,
    pub(super) idle_level: Option<u32>,
}

impl ConfigProposal {
    pub(super) fn new(accelerators: AcceleratorChoice, machine: FoundMachine) -> Self {
        let FoundMachine { programs, gguf, snapshots, mut left_out, searched } = machine;
        let mut names = BTreeSet::new();
        let mut models: Vec<ProposedModel> = Vec::new();
        let mut add = |what: String, proposed: Result<ProposedModel, String>| match proposed {
            Ok(model) => models.push(model.with_unique_name(&mut names)),
            Err(why) => left_out.push(LeftOut { what, why }),
        };
        for model in &gguf {
            add(model.path.display().to_string(), llama_cpp::propose(model, &accelerators, &programs));
        }
        for model in &snapshots {
            add(model.id.clone(), snapshot::propose(model, &accelerators, &programs));
        }
        Self { accelerators, programs, models, left_out, searched, leaves_engines: false }
    }
}

impl ProposedModel {
    /// Changes the name if another model has it. llama.cpp's engines use it as an argument, too.
    fn with_unique_name(mut self, taken: &mut BTreeSet<String>) -> Self {
        let base = self.name.clone();
        let mut number = 1_u32;
        while !taken.insert(self.name.clone()) {
            number += 1;
            self.name = format!("{base}-{number}");
        }
        if let Some(alias) = self.command.iter_mut().find(|word| word.as_str() == ALIAS) {
            alias.clone_from(&self.name);
        }
        self
    }
}

/// What requests ask of a model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ModelTask {
    Generate,
    Embed,
    Score,
    Transcribe,
}

impl ModelTask {
    /// The value of `engine.task`, unless it is the default.
    const fn key(self) -> Option<&'static str> {
        match self {
            Self::Generate => None,
            Self::Embed => Some("embed"),
            Self::Score => Some("score"),
            Self::Transcribe => Some("transcribe"),
        }
    }
}

fn arguments(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Escapes what the gateway would substitute, except for the placeholders that this module writes.
fn escape(word: &str) -> String {
    if [HOST, PORT, ALIAS, MEMORY_FRACTION].contains(&word) {
        return word.to_owned();
    }
    word.replace("${", "$${")
}

fn context_note(estimated: &MemoryEstimate, trained: Option<u64>) -> String {
    let context = estimated.context;
    match trained {
        Some(trained) if trained > context => {
            format!("A context of {context} keeps the KV cache small; the model can do {trained}.")
        }
        _ => format!("A context of {context}."),
    }
}

/// Makes a name that is fine in a URL and on a command line.
fn plain_name(text: &str) -> String {
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c.to_ascii_lowercase() } else { '-' };
    let name: String = text.chars().map(plain).take(MAX_NAME).collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() { "model".to_owned() } else { name.to_owned() }
}

/// Explains the program's path. A service has another PATH than a terminal.
fn program_note(program: &FoundProgram) -> String {
    format!("{}, with its full path, since a service has another PATH.", program.title())
}
