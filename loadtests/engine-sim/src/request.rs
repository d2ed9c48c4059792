//! Parses requests as far as the engine uses them: the model, the prompt's text, the length and form of the output.
//! Like vLLM with unknown fields, it accepts and ignores the rest.

mod form;
mod text;
mod tools;

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;

use crate::{api::SimApi, content};

pub(crate) use form::AudioUpload;
pub(crate) use tools::ToolDefinition;

use text::{PromptInput, SimMessage, TextContent};

#[derive(Debug, Default, Deserialize)]
pub(crate) struct SimRequest<'a> {
    #[serde(borrow)]
    pub(crate) model: Option<Cow<'a, str>>,
    #[serde(default)]
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    pub(crate) n: Option<u64>,
    seed: Option<i64>,
    messages: Option<Vec<SimMessage>>,
    system: Option<TextContent>,
    prompt: Option<PromptInput>,
    input: Option<PromptInput>,
    query: Option<PromptInput>,
    documents: Option<PromptInput>,
    text_1: Option<PromptInput>,
    text_2: Option<PromptInput>,
    pub(crate) top_n: Option<usize>,
    pub(crate) dimensions: Option<usize>,
    pub(crate) encoding_format: Option<String>,
    pub(crate) response_format: Option<Value>,
    pub(crate) text: Option<Value>,
    output_config: Option<Value>,
    pub(crate) tools: Option<Value>,
    pub(crate) tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    pub(crate) previous_response_id: Option<String>,
    pub(crate) instructions: Option<String>,
    pub(crate) metadata: Option<Value>,
    #[serde(skip)]
    pub(crate) upload: Option<AudioUpload>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct StreamOptions {
    #[serde(default)]
    pub(crate) include_usage: bool,
}

impl<'a> SimRequest<'a> {
    /// Parses a body of `api`. Errors are messages for the client.
    pub(crate) fn parse(api: SimApi, content_type: &str, body: &'a [u8]) -> Result<Self, String> {
        if api.takes_audio() {
            return form::read(content_type, body);
        }
        // Skip the byte order mark, like Python's parser, which detects the encoding.
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        serde_json::from_slice(body).map_err(|error| error.to_string())
    }

    /// The requested completion length.
    pub(crate) fn tokens(&self) -> Option<u64> {
        self.max_completion_tokens.or(self.max_tokens).or(self.max_output_tokens)
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or_default().cast_unsigned()
    }

    pub(crate) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    /// The texts to respond to, at least one; `None` if the request has none.
    pub(crate) fn prompts(&self, api: SimApi) -> Option<Vec<String>> {
        let texts = match api {
            SimApi::Chat | SimApi::Messages | SimApi::CountTokens => {
                vec![self.messages.as_deref().and_then(<[SimMessage]>::last)?.text()]
            }
            SimApi::Completions | SimApi::Images => self.prompt.as_ref()?.texts(),
            SimApi::Rerank => self.documents.as_ref()?.texts(),
            SimApi::Score => self.text_2.as_ref()?.texts(),
            SimApi::Responses => self.input.as_ref()?.last()?,
            SimApi::Embeddings | SimApi::Moderations | SimApi::Speech => self.input.as_ref()?.texts(),
            SimApi::Transcriptions | SimApi::Translations => vec![self.upload.as_ref()?.to_string()],
        };
        (!texts.is_empty()).then_some(texts)
    }

    /// The texts that `prompts` are compared with: one for all prompts or one for each.
    pub(crate) fn queries(&self) -> Option<Vec<String>> {
        self.query.as_ref().or(self.text_1.as_ref()).map(PromptInput::texts).filter(|texts| !texts.is_empty())
    }

    /// Number of tokens in the whole prompt: all messages, not only the last.
    pub(crate) fn prompt_tokens(&self, prompts: &[String]) -> u64 {
        let earlier = self.messages.iter().flatten().rev().skip(1).map(SimMessage::text);
        let earlier = earlier.chain(self.system.iter().map(TextContent::joined));
        let earlier: u64 = earlier.map(|text| content::count(&text)).sum();
        earlier + prompts.iter().map(|prompt| content::count(prompt)).sum::<u64>().max(1)
    }

    /// The JSON schema that the response must fit; an empty schema for "any object".
    pub(crate) fn schema(&self) -> Option<Value> {
        let nested = |value: &Option<Value>| value.as_ref()?.get("format").cloned();
        let format = self.response_format.clone().or_else(|| nested(&self.text));
        let format = format.or_else(|| nested(&self.output_config))?;
        match format.get("type")?.as_str()? {
            "json_schema" => format.pointer("/json_schema/schema").or_else(|| format.get("schema")).cloned(),
            "json_object" => Some(Value::Object(serde_json::Map::new())),
            _ => None,
        }
    }

    /// The tools to call now: the chosen one, or all. None if the last message holds their results.
    pub(crate) fn calls(&self) -> Vec<ToolDefinition> {
        let results =
            self.messages.as_deref().and_then(<[SimMessage]>::last).is_some_and(SimMessage::is_tool_result)
                || self.input.as_ref().is_some_and(PromptInput::ends_with_result);
        if results {
            return Vec::new();
        }
        let tools = self.tools.as_ref().map(tools::parse).unwrap_or_default();
        tools::select(tools, self.tool_choice.as_ref(), self.parallel_tool_calls)
    }
}
