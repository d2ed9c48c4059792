//! Renders responses like vLLM: server-sent events and complete bodies.

mod chat;
mod messages;
mod responses;
mod transcript;

use serde_json::{Value, json};

use crate::{
    api::SimApi,
    choice::{SimChoice, TokenPiece},
    clock, content,
    engine::SimEngine,
};

#[derive(Clone, Copy)]
pub(crate) struct FrameUsage {
    pub(crate) prompt: u64,
    pub(crate) completion: u64,
}

impl FrameUsage {
    /// The usage in chat's form.
    pub(crate) fn json(self) -> Value {
        let Self { prompt, completion } = self;
        json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion})
    }
}

/// Distinguishes responses with the same content.
pub(crate) struct AnswerIdentity {
    pub(crate) id: String,
    /// Seconds since the epoch.
    pub(crate) created: u64,
}

impl AnswerIdentity {
    pub(crate) fn new(engine: &SimEngine, api: SimApi, serial: u64, body: &[u8]) -> Self {
        let prefix = api.id_prefix();
        if engine.args.fixed_ids {
            let id = format!("{prefix}-{:016x}", content::hash(body));
            return Self { id, created: 1_700_000_000 };
        }
        let (now, pid) = (clock::wall_us(), std::process::id());
        Self { id: format!("{prefix}-{now:016x}{pid:08x}{serial:08x}"), created: now / 1_000_000 }
    }
}

/// Writes one response's events and bodies.
pub(crate) struct AnswerWriter {
    api: SimApi,
    identity: AnswerIdentity,
    model: String,
    /// Escaped for a JSON string.
    escaped: String,
    /// Events so far, for APIs that number them.
    sequence: u64,
    prompt_tokens: u64,
    /// Request fields that the response repeats.
    echoed_fields: Value,
}

impl AnswerWriter {
    pub(crate) fn new(
        api: SimApi,
        name: AnswerIdentity,
        model: &str,
        prompt_tokens: u64,
        echo: Value,
    ) -> Self {
        let escaped = Value::from(model).to_string();
        Self {
            api,
            identity: name,
            model: model.to_owned(),
            escaped,
            sequence: 0,
            prompt_tokens,
            echoed_fields: echo,
        }
    }

    /// The events before the first token.
    pub(crate) fn opening(&mut self, choices: &[SimChoice]) -> Vec<String> {
        match self.api {
            SimApi::Chat => self.chat_opening(choices.len() as u64),
            SimApi::Responses => self.responses_opening(choices),
            SimApi::Messages => self.messages_opening(choices),
            _ => Vec::new(),
        }
    }

    /// One token of choice `n`; `finish` is the reason if it is the last token.
    pub(crate) fn token(&mut self, n: u64, piece: &TokenPiece<'_>, finish: Option<&str>) -> Vec<String> {
        match self.api {
            SimApi::Chat => self.chat_token(n, piece, finish),
            SimApi::Responses => self.responses_token(piece),
            SimApi::Messages => self.messages_token(piece),
            SimApi::Transcriptions | SimApi::Translations => vec![transcript::token(&piece.text)],
            _ => vec![self.completions_token(n, &piece.text, finish)],
        }
    }

    /// The events after the last token, of which there were `token_count`. `finish` overrides the choices' own finish reason.
    pub(crate) fn closing(
        &mut self,
        choices: &[SimChoice],
        token_count: u64,
        show_usage: bool,
        finish: Option<&str>,
    ) -> Vec<String> {
        let usage = self.usage(choices, token_count);
        match self.api {
            SimApi::Responses => self.responses_closing(choices, token_count, finish),
            SimApi::Messages => self.messages_closing(choices, token_count, finish),
            SimApi::Transcriptions | SimApi::Translations => {
                transcript::closing(&text_of(choices, token_count), usage)
            }
            _ => self.chat_closing(show_usage.then_some(usage)),
        }
    }

    /// The body of a non-streaming response.
    pub(crate) fn whole(&self, choices: &[SimChoice], token_count: u64, finish: Option<&str>) -> Value {
        match self.api {
            SimApi::Responses => self.responses_whole(choices, token_count, finish),
            SimApi::Messages => self.messages_whole(choices, token_count, finish),
            SimApi::Transcriptions | SimApi::Translations => {
                transcript::whole(&text_of(choices, token_count), self.usage(choices, token_count))
            }
            _ => self.chat_whole(choices, token_count, finish),
        }
    }

    fn usage(&self, choices: &[SimChoice], token_count: u64) -> FrameUsage {
        let completion = choices.iter().map(|choice| choice.tokens.min(token_count)).sum();
        FrameUsage { prompt: self.prompt_tokens, completion }
    }

    /// The id of another object in this response: the same id with another prefix.
    fn id_of(&self, prefix: &str) -> String {
        let rest = self.identity.id.split_once('-').map_or("", |(_, rest)| rest);
        format!("{prefix}_{rest}")
    }
}

fn text_of(choices: &[SimChoice], token_count: u64) -> String {
    choices.iter().map(|choice| choice.text_so_far(token_count)).collect()
}

fn has_tool_calls(choices: &[SimChoice]) -> bool {
    choices.iter().any(SimChoice::is_tool_call)
}

/// The finish reason of the whole response.
fn finish_reason<'a>(choices: &[SimChoice], finish: Option<&'a str>) -> &'a str {
    finish.unwrap_or_else(|| choices.first().map_or("stop", |choice| choice.finish))
}

/// An event that names its type twice, as in Anthropic's messages and the responses API.
fn named_event(name: &str, body: &Value) -> String {
    format!("event: {name}\ndata: {body}\n\n")
}

/// Quotes `text` as a JSON string. Tokens need no escape, and this runs for each of them.
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
