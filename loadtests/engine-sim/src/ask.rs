//! Requests as far as the engine reads them: the model, the prompt's text, how much to say. All else is accepted and
//! ignored, as an unknown field is by vLLM.

use std::borrow::Cow;

use serde::Deserialize;

use crate::content;

/// The inference routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
    Responses,
    Embeddings,
}

impl Api {
    pub(crate) fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            "/v1/responses" => Some(Self::Responses),
            "/v1/embeddings" => Some(Self::Embeddings),
            _ => None,
        }
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Ask<'a> {
    #[serde(borrow)]
    pub(crate) model: Option<Cow<'a, str>>,
    #[serde(default)]
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    pub(crate) n: Option<u64>,
    seed: Option<i64>,
    messages: Option<Vec<Message>>,
    prompt: Option<Input>,
    input: Option<Input>,
    pub(crate) dimensions: Option<usize>,
    pub(crate) encoding_format: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct StreamOptions {
    #[serde(default)]
    pub(crate) include_usage: bool,
}

#[derive(Debug, Deserialize)]
struct Message {
    content: Option<Text>,
}

/// Text as one string or as parts, of which those that are no text count nothing.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Text {
    Whole(String),
    Parts(Vec<TextPart>),
}

#[derive(Debug, Deserialize)]
struct TextPart {
    #[serde(default)]
    text: String,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Whole(String),
    Tokens(Vec<u32>),
    Many(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
    Items(Vec<Message>),
}

impl Ask<'_> {
    /// The completion length that the request asks for.
    pub(crate) fn tokens(&self) -> Option<u64> {
        self.max_completion_tokens.or(self.max_tokens).or(self.max_output_tokens)
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or_default().cast_unsigned()
    }

    pub(crate) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    /// The texts to answer to, at least one; `None` when the request has none.
    pub(crate) fn prompts(&self, api: Api) -> Option<Vec<String>> {
        if api == Api::Chat {
            return self.messages.as_deref().and_then(last).map(|text| vec![text]);
        }
        let input = if api == Api::Completions { &self.prompt } else { &self.input };
        let texts = match input.as_ref()? {
            Input::Whole(text) => vec![text.clone()],
            Input::Tokens(ids) => vec![join(ids)],
            Input::Many(texts) => texts.clone(),
            Input::ManyTokens(many) => many.iter().map(|ids| join(ids)).collect(),
            Input::Items(items) => vec![last(items)?],
        };
        (!texts.is_empty()).then_some(texts)
    }

    /// Tokens that the whole prompt counts as: all messages, not only the one that is answered.
    pub(crate) fn prompt_tokens(&self, prompts: &[String]) -> u64 {
        let earlier = self.messages.iter().flatten().rev().skip(1);
        let earlier: u64 = earlier.map(|message| content::count(&message.text())).sum();
        earlier + prompts.iter().map(|prompt| content::count(prompt)).sum::<u64>().max(1)
    }
}

impl Message {
    fn text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Text::Whole(text)) => text.clone(),
            Some(Text::Parts(parts)) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

fn last(messages: &[Message]) -> Option<String> {
    messages.last().map(Message::text)
}

fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}
