//! The answers' text, as vLLM writes it: server-sent events one by one, and whole bodies.

mod chat;
mod messages;
mod responses;
mod transcript;

use serde_json::{Value, json};

use crate::{
    api::Api,
    clock, content,
    engine::Engine,
    voice::{Piece, Voice},
};

#[derive(Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) prompt: u64,
    pub(crate) completion: u64,
}

impl Usage {
    /// As chat counts.
    pub(crate) fn json(self) -> Value {
        let Self { prompt, completion } = self;
        json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion})
    }
}

/// What tells one answer from another that says the same.
pub(crate) struct Name {
    pub(crate) id: String,
    /// Seconds since the epoch.
    pub(crate) created: u64,
}

impl Name {
    pub(crate) fn new(engine: &Engine, api: Api, serial: u64, body: &[u8]) -> Self {
        let prefix = api.prefix();
        if engine.args.fixed_ids {
            let id = format!("{prefix}-{:016x}", content::hash(body));
            return Self { id, created: 1_700_000_000 };
        }
        let (now, pid) = (clock::wall_us(), std::process::id());
        Self { id: format!("{prefix}-{now:016x}{pid:08x}{serial:08x}"), created: now / 1_000_000 }
    }
}

/// Writes one answer's events and bodies.
pub(crate) struct Frames {
    api: Api,
    name: Name,
    model: String,
    /// Ready for a JSON string.
    escaped: String,
    /// Events so far, where an API counts them.
    sequence: u64,
    prompt_tokens: u64,
    /// What an answer repeats of its request.
    echo: Value,
}

impl Frames {
    pub(crate) fn new(api: Api, name: Name, model: &str, prompt_tokens: u64, echo: Value) -> Self {
        let escaped = Value::from(model).to_string();
        Self { api, name, model: model.to_owned(), escaped, sequence: 0, prompt_tokens, echo }
    }

    /// What precedes the first token.
    pub(crate) fn opening(&mut self, voices: &[Voice]) -> Vec<String> {
        match self.api {
            Api::Chat => self.chat_opening(voices.len() as u64),
            Api::Responses => self.responses_opening(voices),
            Api::Messages => self.messages_opening(voices),
            _ => Vec::new(),
        }
    }

    /// One token of choice `n`; `finish` is the reason when it is the last one.
    pub(crate) fn token(&mut self, n: u64, piece: &Piece<'_>, finish: Option<&str>) -> Vec<String> {
        match self.api {
            Api::Chat => self.chat_token(n, piece, finish),
            Api::Responses => self.responses_token(piece),
            Api::Messages => self.messages_token(piece),
            Api::Transcriptions | Api::Translations => vec![transcript::token(&piece.text)],
            _ => vec![self.completions_token(n, &piece.text, finish)],
        }
    }

    /// What follows the last token, of which there were `made`; `finish` when something else than the voices decides.
    pub(crate) fn closing(
        &mut self,
        voices: &[Voice],
        made: u64,
        show_usage: bool,
        finish: Option<&str>,
    ) -> Vec<String> {
        let usage = self.usage(voices, made);
        match self.api {
            Api::Responses => self.responses_closing(voices, made, finish),
            Api::Messages => self.messages_closing(voices, made, finish),
            Api::Transcriptions | Api::Translations => transcript::closing(&said(voices, made), usage),
            _ => self.chat_closing(show_usage.then_some(usage)),
        }
    }

    /// The body of an answer that is no stream.
    pub(crate) fn whole(&self, voices: &[Voice], made: u64, finish: Option<&str>) -> Value {
        match self.api {
            Api::Responses => self.responses_whole(voices, made, finish),
            Api::Messages => self.messages_whole(voices, made, finish),
            Api::Transcriptions | Api::Translations => {
                transcript::whole(&said(voices, made), self.usage(voices, made))
            }
            _ => self.chat_whole(voices, made, finish),
        }
    }

    fn usage(&self, voices: &[Voice], made: u64) -> Usage {
        let completion = voices.iter().map(|voice| voice.tokens.min(made)).sum();
        Usage { prompt: self.prompt_tokens, completion }
    }

    /// The id of another thing in this answer: its own with another beginning.
    fn id_of(&self, prefix: &str) -> String {
        let rest = self.name.id.split_once('-').map_or("", |(_, rest)| rest);
        format!("{prefix}_{rest}")
    }
}

fn said(voices: &[Voice], made: u64) -> String {
    voices.iter().map(|voice| voice.said(made)).collect()
}

fn is_calling(voices: &[Voice]) -> bool {
    voices.iter().any(Voice::is_calling)
}

/// Why the answer as a whole ended.
fn ended<'a>(voices: &[Voice], finish: Option<&'a str>) -> &'a str {
    finish.unwrap_or_else(|| voices.first().map_or("stop", |voice| voice.finish))
}

/// An event that says its type twice, as Anthropic's and the responses API do.
fn named(name: &str, body: &Value) -> String {
    format!("event: {name}\ndata: {body}\n\n")
}

/// `text` as a JSON string; tokens need no escape, and this is done for each of them.
fn quoted(text: &str) -> String {
    let is_plain = text.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\');
    if is_plain { format!("\"{text}\"") } else { Value::from(text).to_string() }
}

fn merge(mut into: Value, from: Value) -> Value {
    if let (Value::Object(into), Value::Object(from)) = (&mut into, from) {
        into.extend(from);
    }
    into
}
