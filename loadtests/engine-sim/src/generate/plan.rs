//! A request as the engine carries it out.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    api::Api,
    ask::Ask,
    content, document,
    engine::Engine,
    frames::Name,
    http1::Head,
    reply::{self, Reply},
    voice::Voice,
};

use super::at_once::{self, Whole};

/// What a request wants, in the engine's terms.
pub(super) struct Plan {
    pub(super) api: Api,
    pub(super) model: String,
    /// What is generated, none where the answer is made at once.
    pub(super) voices: Vec<Voice>,
    pub(super) stream: bool,
    pub(super) usage: bool,
    /// Of the longest voice.
    pub(super) tokens: u64,
    pub(super) prompt_tokens: u64,
    /// What the answer repeats of the request.
    pub(super) echo: Value,
    /// The text alone is wanted, without an envelope.
    pub(super) bare: bool,
    /// The answer, where nothing is generated.
    pub(super) whole: Whole,
}

impl Plan {
    pub(super) fn read(
        engine: &Engine,
        api: Api,
        head: &Head,
        body: &Bytes,
        name: &Name,
    ) -> Result<Self, Reply> {
        let bad = |message: &str, param| reply::refusal(api, 400, "BadRequestError", message, param);
        let content_type = head.header("content-type").unwrap_or_default();
        let ask = Ask::read(api, content_type, body).map_err(|error| bad(&error, None))?;
        let names = engine.names();
        let model = names.first().cloned().unwrap_or_default();
        let asked = ask.model.as_deref().unwrap_or(&model);
        if !names.iter().any(|name| name == asked) {
            let message = format!("The model `{asked}` does not exist.");
            return Err(reply::refusal(api, 404, "NotFoundError", &message, Some("model")));
        }
        let prompts = ask.prompts(api).ok_or_else(|| bad("the request has no prompt", None))?;
        if ask.dimensions.is_some_and(|dimensions| dimensions > content::MOST_DIMENSIONS) {
            let message = format!("dimensions must be at most {}.", content::MOST_DIMENSIONS);
            return Err(bad(&message, Some("dimensions")));
        }
        if ask.tokens() == Some(0) {
            return Err(bad("max_tokens must be at least 1, got 0.", Some("max_tokens")));
        }
        if api == Api::Messages && ask.tokens().is_none() {
            return Err(bad("max_tokens: Field required", Some("max_tokens")));
        }
        let voices = if api.generates() { voices(engine, api, &ask, &model, &prompts) } else { Vec::new() };
        let prompt_tokens = ask.prompt_tokens(&prompts);
        let whole = at_once::answer(api, &ask, &model, &prompts, prompt_tokens, name);
        let format = ask.upload.as_ref().map(|upload| upload.format.as_str());
        Ok(Self {
            api,
            stream: ask.stream.unwrap_or(false) && api.generates(),
            usage: ask.include_usage(),
            tokens: voices.iter().map(|voice| voice.tokens).max().unwrap_or(0),
            prompt_tokens,
            echo: if api == Api::Responses { echo(&ask) } else { Value::Null },
            bare: format == Some("text"),
            whole: whole.ok_or_else(|| bad("the request has no query", None))?,
            voices,
            model,
        })
    }
}

fn voices(engine: &Engine, api: Api, ask: &Ask<'_>, model: &str, prompts: &[String]) -> Vec<Voice> {
    let (n, asked, corrupt) = (ask.n.unwrap_or(1).clamp(1, 128), ask.tokens(), engine.view().corrupt);
    let tools = if corrupt || api.hears() { Vec::new() } else { ask.calls() };
    let schema = ask.schema().filter(|_| !corrupt && !api.hears());
    let voice = |prompt: &String, i: u64| {
        let key = content::key(model, prompt, ask.seed().wrapping_add(i));
        if !tools.is_empty() {
            Voice::calls(&tools, key, asked)
        } else if let Some(schema) = &schema {
            Voice::text(&document::fitting(schema, key).to_string(), asked)
        } else if api.hears() && !corrupt {
            Voice::text(prompt, asked)
        } else {
            Voice::plain(key, corrupt, asked, engine.args.tokens)
        }
    };
    prompts
        .iter()
        .flat_map(|prompt| (0..n).map(move |i| (prompt, i)))
        .map(|(prompt, i)| voice(prompt, i))
        .collect()
}

/// The fields that a response has of its request.
fn echo(ask: &Ask<'_>) -> Value {
    let or = |value: &Option<Value>, default: Value| value.clone().unwrap_or(default);
    json!({
        "previous_response_id": ask.previous_response_id, "instructions": ask.instructions,
        "metadata": ask.metadata, "tools": or(&ask.tools, json!([])),
        "tool_choice": or(&ask.tool_choice, json!("auto")), "text": ask.text, "max_output_tokens": ask.tokens(),
    })
}
