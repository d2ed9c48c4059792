//! A request as the engine executes it.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    api::SimApi,
    choice::SimChoice,
    content, document,
    engine::SimEngine,
    frames::AnswerIdentity,
    http1::SimRequestHead,
    reply::{self, SimReply},
    request::SimRequest,
};

use super::immediate::{self, ImmediateAnswer};

/// A request in the engine's terms.
pub(super) struct InferencePlan {
    pub(super) api: SimApi,
    pub(super) model: String,
    /// The generated choices; empty for an immediate response.
    pub(super) choices: Vec<SimChoice>,
    pub(super) stream: bool,
    pub(super) usage: bool,
    /// Tokens of the longest choice.
    pub(super) tokens: u64,
    pub(super) prompt_tokens: u64,
    /// Request fields that the response repeats.
    pub(super) echo: Value,
    /// The client requests bare text without an envelope.
    pub(super) text_only: bool,
    /// The immediate response, if nothing is generated.
    pub(super) immediate: ImmediateAnswer,
}

impl InferencePlan {
    pub(super) fn read(
        engine: &SimEngine,
        api: SimApi,
        head: &SimRequestHead,
        body: &Bytes,
        name: &AnswerIdentity,
    ) -> Result<Self, SimReply> {
        let bad = |message: &str, param| reply::api_error(api, 400, "BadRequestError", message, param);
        let content_type = head.header("content-type").unwrap_or_default();
        let ask = SimRequest::parse(api, content_type, body).map_err(|error| bad(&error, None))?;
        let names = engine.names();
        let model = names.first().cloned().unwrap_or_default();
        let requested_model = ask.model.as_deref().unwrap_or(&model);
        if !names.iter().any(|name| name == requested_model) {
            let message = format!("The model `{requested_model}` does not exist.");
            return Err(reply::api_error(api, 404, "NotFoundError", &message, Some("model")));
        }
        let prompts = ask.prompts(api).ok_or_else(|| bad("the request has no prompt", None))?;
        if ask.dimensions.is_some_and(|dimensions| dimensions > content::MAX_DIMENSIONS) {
            let message = format!("dimensions must be at most {}.", content::MAX_DIMENSIONS);
            return Err(bad(&message, Some("dimensions")));
        }
        if ask.tokens() == Some(0) {
            return Err(bad("max_tokens must be at least 1, got 0.", Some("max_tokens")));
        }
        if api == SimApi::Messages && ask.tokens().is_none() {
            return Err(bad("max_tokens: Field required", Some("max_tokens")));
        }
        let sim_choices =
            if api.generates() { choices(engine, api, &ask, &model, &prompts) } else { Vec::new() };
        let prompt_tokens = ask.prompt_tokens(&prompts);
        let whole = immediate::answer(api, &ask, &model, &prompts, prompt_tokens, name);
        let format = ask.upload.as_ref().map(|upload| upload.format.as_str());
        Ok(Self {
            api,
            stream: ask.stream.unwrap_or(false) && api.generates(),
            usage: ask.include_usage(),
            tokens: sim_choices.iter().map(|choice| choice.tokens).max().unwrap_or(0),
            prompt_tokens,
            echo: if api == SimApi::Responses { echo(&ask) } else { Value::Null },
            text_only: format == Some("text"),
            immediate: whole.ok_or_else(|| bad("the request has no query", None))?,
            choices: sim_choices,
            model,
        })
    }
}

fn choices(
    engine: &SimEngine,
    api: SimApi,
    ask: &SimRequest<'_>,
    model: &str,
    prompts: &[String],
) -> Vec<SimChoice> {
    let (n, requested_tokens, corrupt) =
        (ask.n.unwrap_or(1).clamp(1, 128), ask.tokens(), engine.view().corrupt);
    let tools = if corrupt || api.takes_audio() { Vec::new() } else { ask.calls() };
    let schema = ask.schema().filter(|_| !corrupt && !api.takes_audio());
    let make_choice = |prompt: &String, i: u64| {
        let key = content::key(model, prompt, ask.seed().wrapping_add(i));
        if !tools.is_empty() {
            SimChoice::calls(&tools, key, requested_tokens)
        } else if let Some(schema) = &schema {
            SimChoice::text(&document::fit_schema(schema, key).to_string(), requested_tokens)
        } else if api.takes_audio() && !corrupt {
            SimChoice::text(prompt, requested_tokens)
        } else {
            SimChoice::plain(key, corrupt, requested_tokens, engine.args.tokens)
        }
    };
    prompts
        .iter()
        .flat_map(|prompt| (0..n).map(move |i| (prompt, i)))
        .map(|(prompt, i)| make_choice(prompt, i))
        .collect()
}

/// The request fields that a responses API response repeats.
fn echo(ask: &SimRequest<'_>) -> Value {
    let or = |value: &Option<Value>, default: Value| value.clone().unwrap_or(default);
    json!({
        "previous_response_id": ask.previous_response_id, "instructions": ask.instructions,
        "metadata": ask.metadata, "tools": or(&ask.tools, json!([])),
        "tool_choice": or(&ask.tool_choice, json!("auto")), "text": ask.text, "max_output_tokens": ask.tokens(),
    })
}
